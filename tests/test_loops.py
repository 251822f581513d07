"""Loops: which have copies in towers, and which run once; both do as on one device."""

import pytest
import tensorflow.compat.v1 as tf

import towers
from estimator_mgpu import check_rule
from models import floats, of_all_modes, spec_of, step, ten_rows, weights

BOTH = pytest.mark.parametrize('static', [True, False], ids='static={}'.format)


@BOTH
def test_two_gradients(static, behavior):
    """Gradients add outputs to a loop, and a second one more of them."""

    def model_fn(features, labels, mode):
        kernel, lengths = weights('kernel', 3, 3), 1 + tf.cast(tf.abs(features[:, 2]) * 3, tf.int32)

        def body(time, state, outputs):
            state = tf.where(time < lengths, tf.tanh(state @ kernel + features), state)
            return time + 1, state, outputs.write(time, state)

        array = tf.TensorArray(tf.float32, 4, element_shape=[None, 3])
        loop = tf.while_loop(lambda time, *_: time < 4, body, (0, 0 * features, array))
        outputs = loop[2].stack()
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        first = tf.reduce_mean(tf.square(tf.reduce_mean(outputs, [0, 2]) - labels[:, 0]))
        second = tf.reduce_mean(tf.reduce_max(outputs * outputs, [0, 2]))
        pairs = zip(optimizer.compute_gradients(first), optimizer.compute_gradients(second))
        train_op = optimizer.apply_gradients([(a + 2 * b, v) for (a, v), (b, _) in pairs], step())
        return spec_of(mode, first + second, train_op)

    towers.compare(model_fn, ten_rows()[:2], 3, static=static)


@BOTH
def test_loops_over_rows(static, behavior):
    """One row a round, and as many rounds as there are rows."""

    def forward(x):
        body = lambda i, kept: (i + 1, kept.write(i, x[i] * 2))  # noqa: E731
        kept = tf.TensorArray(tf.float32, tf.shape(x)[0], element_shape=[3])
        kept = tf.while_loop(lambda i, _: i < tf.shape(x)[0], body, (0, kept))[1]
        return tf.layers.dense(tf.reshape(kept.stack(), [-1, 3]), 1)

    towers.compare(of_all_modes(forward), ten_rows()[:2], 4, static=static)


def loops_of_towers(forward, static=True):
    """How many copies of a loop there are, which does as on one device."""
    ours, one = towers.compare(of_all_modes(forward), ten_rows()[:3], 3, static=static)
    names = [op.name for op in ours.graph.get_operations() if op.type.endswith('While')]
    return sum('tower_' in name for name in names), ours, one


@BOTH
def test_large_zeros(static):
    """Of so many entries that TensorFlow makes no constant of them."""

    def forward(x):
        wide = tf.tile(x, [1, 100])
        zeros = tf.zeros([x.shape[0] or tf.shape(x)[0], 300])
        kept = lambda h: tf.where(wide > 0, h + wide, tf.zeros_like(h))  # noqa: E731
        _, h = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, 0.5 * kept(h)), (0, zeros))
        return tf.layers.dense(h, 1)

    copies, _, _ = loops_of_towers(forward, static)
    assert copies == 3


def test_a_loop_that_rows_end_runs_once():
    def forward(x):
        w = tf.get_variable('w', [3, 3])
        ends = lambda i, h: (tf.reduce_max(tf.abs(h)) > 0.1) & (i < 20)  # noqa: E731
        body = lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w)) * 0.9)  # noqa: E731
        return tf.layers.dense(tf.while_loop(ends, body, (0, x))[1], 1)

    copies, _, _ = loops_of_towers(forward)
    assert copies == 0


def test_a_loop_with_effects_runs_once():
    def forward(x):
        count = tf.get_variable('count', [], trainable=False, initializer=tf.zeros_initializer())

        def body(i, h):
            with tf.control_dependencies([count.assign_add(1.0)]):
                return i + 1, tf.tanh(h)

        return tf.layers.dense(tf.while_loop(lambda i, h: i < 3, body, (0, x))[1], 1)

    copies, ours, one = loops_of_towers(forward)
    assert copies == 0 and ours.values['count'] == one.values['count'] == 9


def test_a_size_that_a_loop_carries():
    """It's that of the whole batch after the loop, though each tower's loop is given its own."""

    def loop(x):
        more = lambda i, n, h: (i + 1, n, h + tf.ones([n, 1]))  # noqa: E731
        _, size, x = tf.while_loop(lambda i, *_: i < 3, more, (0, tf.shape(x)[0], x))
        return x / tf.cast(size, tf.float32)

    def nested(x):
        return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, loop(x)), (0, x))[1]

    assert 'StatelessWhile' in check_rule(loop, floats(7, 3))
    check_rule(nested, floats(7, 3))
