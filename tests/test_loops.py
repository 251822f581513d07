"""Loops until all rows are finished, for as long as there are rows, or with effects."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from models import floats, of_all_modes, spec_of, step, ten_rows, weights
from towers import compare

BOTH = pytest.mark.parametrize('static', [True, False], ids='static={}'.format)
LENGTHS = np.array([1, 2, 2, 1, 5, 4], np.int64)
DATA = [({'steps': floats(6, 5, 3, seed=i), 'lengths': LENGTHS}, floats(6, seed=i)) for i in (1, 2)]


def start(features):
    state = tf.zeros_like(features['steps'][:, 0])
    return 0, state, tf.zeros_like(features['lengths'], tf.bool), array()


def array():
    return tf.TensorArray(tf.float32, 0, dynamic_size=True, element_shape=[None, 3])


def advance(features):
    """Returns a round of a recurrent network, which goes on with rows that are finished."""
    kernel = weights('kernel', 3, 3)

    def body(time, state, finished, outputs):
        state = tf.tanh(state @ kernel + features['steps'][:, time])
        finished |= tf.cast(time + 1, tf.int64) >= features['lengths']
        return time + 1, state, finished, outputs.write(time, state)

    return body


def steps_of(outputs):
    return tf.transpose(outputs.stack(), [1, 0, 2])


def unfinished(time, state, finished, outputs):
    return ~tf.reduce_all(finished)


def until(going):
    """Returns what a loop gives for each round."""

    def decode(features):
        return steps_of(tf.while_loop(going, advance(features), start(features))[3])

    decode.__name__ = going.__name__
    return decode


@until
def not_all(time, state, finished, outputs):
    return unfinished(time, state, finished, outputs)


def by_the_longest(features):
    """Which is looked for in every round."""
    going = lambda time, *_: tf.cast(time, tf.int64) < tf.reduce_max(features['lengths'])  # noqa: E731
    return until(going)(features)


def with_a_branch(features):
    """As decoders do that save work once all are finished."""
    advanced = advance(features)

    def body(time, state, finished, outputs):
        time, state, finished, outputs = advanced(time, state, finished, outputs)
        state = tf.where(finished[:, None] & tf.ones_like(state, tf.bool), 0 * state, state)
        state = tf.cond(tf.reduce_all(finished), lambda: 0 * state, lambda: state * 1.5)
        return time, state, finished, outputs

    return steps_of(tf.while_loop(unfinished, body, start(features))[3])


def twice(features):
    """The second goes on from what the first has made."""
    first = tf.while_loop(unfinished, advance(features), start(features))
    zero, _, rest, outputs = start(features)
    second = tf.while_loop(unfinished, advance(features), (zero, first[1], rest, outputs))
    return steps_of(first[3]) + steps_of(second[3])


def halting(features):
    """As adaptive computation does: until each row has had enough."""
    state, kernel = features['steps'][:, 0], weights('kernel', 3, 3)

    def body(state, total, count):
        total += tf.sigmoid(tf.reduce_sum(state, 1))
        return tf.tanh(state @ kernel), total, count + tf.cast(total < 1.2, tf.float32)

    zeros = tf.zeros_like(state[:, 0])
    going = lambda state, total, count: tf.reduce_any(total < 1.2)  # noqa: E731
    state, _, count = tf.while_loop(going, body, (state, zeros, zeros), maximum_iterations=20)
    return (state + count[:, None])[:, None]


def nested(inner):
    """A loop, a branch or a function inside of the loop, with variables or without."""

    def decode(features):
        advanced = advance(features)
        step_of = inner(weights('other', 3, 3), weights('table', 7, 3))

        def body(time, state, finished, outputs):
            return advanced(time, step_of(time, state), finished, outputs)

        return steps_of(tf.while_loop(unfinished, body, start(features))[3])

    decode.__name__ = inner.__name__
    return decode


@nested
def a_map(kernel, table):
    return lambda time, state: tf.map_fn(lambda row: tf.tanh(row * kernel[0]), state)


@nested
def a_function(kernel, table):
    return lambda time, state: tf.function(lambda x: tf.tanh(x @ kernel))(state)


DECODERS = [
    not_all,
    by_the_longest,
    with_a_branch,
    twice,
    halting,
    a_map,
    a_function,
]


def mean_loss(decode):
    """Goes by how many steps there are, whether they are a row's own or not."""

    def loss_of(features, labels):
        return tf.reduce_mean(tf.square(tf.reduce_mean(decode(features), [1, 2]) - labels))

    return loss_of


def masked_loss(features, labels):
    """As sequence-to-sequence models have it: a mask as long as the longest of the batch."""
    longest = tf.reduce_max(features['lengths'])
    mask = tf.sequence_mask(features['lengths'], longest, tf.float32)
    wanted = tf.reduce_sum(features['steps'], 2)[:, :longest]
    errors = tf.square(tf.reduce_sum(not_all(features), 2) - wanted) * mask
    return tf.reduce_sum(errors) / tf.reduce_sum(mask)


def model_of(loss_of):
    def model_fn(features, labels, mode):
        loss = loss_of(features, labels)
        return spec_of(mode, loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step()))

    return model_fn


@pytest.mark.parametrize('decode', DECODERS, ids=lambda f: f.__name__)
@BOTH
def test_training(decode, static, behavior):
    compare(model_of(mean_loss(decode)), DATA, 4, static=static)


@BOTH
def test_a_mask_of_the_whole_batch(static):
    compare(model_of(masked_loss), DATA, 4, static=static)


@BOTH
def test_two_gradients(static):
    """Gradients add outputs to a loop, and a second one more of them."""

    def model_fn(features, labels, mode):
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        outputs = not_all(features)
        first = tf.reduce_mean(tf.square(tf.reduce_mean(outputs, [1, 2]) - labels))
        second = tf.reduce_mean(tf.reduce_max(outputs * outputs, [1, 2]))
        pairs = zip(optimizer.compute_gradients(first), optimizer.compute_gradients(second))
        train_op = optimizer.apply_gradients([(a + 2 * b, v) for (a, v), (b, _) in pairs], step())
        return spec_of(mode, first + second, train_op)

    compare(model_fn, DATA, 3, static=static)


def as_many_as_rows(features):
    """Takes one row a round."""
    values = features['steps'][:, 0]
    body = lambda i, kept: (i + 1, kept.write(i, values[i] * 2))  # noqa: E731
    kept = tf.TensorArray(tf.float32, tf.shape(values)[0], element_shape=[3])
    return tf.while_loop(lambda i, _: i < tf.shape(values)[0], body, (0, kept))[1].stack()[:, None]


def scaled(outputs):
    return outputs * weights('scale', 3)


@BOTH
def test_loops_over_rows(static, behavior):
    compare(model_of(mean_loss(lambda x: scaled(as_many_as_rows(x)))), DATA, 4, static=static)


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
