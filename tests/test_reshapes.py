"""Rows that are put into groups and back: several devices do as one."""

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import floats, of_all_modes, ten_rows
from towers import compare


def square(name='w'):
    return tf.get_variable(name, [3, 3], use_resource=True)


def views(x):
    """Two views of each example, one after the other."""
    first, second = tf.unstack(tf.reshape(tf.matmul(x, square()), [2, -1, 3]))
    return tf.reduce_sum(tf.square(first - second)) + tf.layers.dense(x, 1)


def groups(x):
    """Normalized by groups of rows, as batch norm with virtual batches does."""
    x = tf.matmul(x, square())
    grouped = tf.reshape(x, [2, -1, 3])
    mean, variance = tf.nn.moments(grouped, [1], keepdims=True)
    return tf.layers.dense(tf.reshape((grouped - mean) * tf.rsqrt(variance + 1), tf.shape(x)), 1)


def constants(x):
    """What isn't of rows is cut into as many pieces as there are rows."""
    table = tf.reshape(tf.range(60.0), [6, 10])
    return tf.layers.dense(tf.reshape(table, [tf.shape(x)[0], -1])[:, :1] * 0.01 + x, 1)


def variables(x):
    table = tf.get_variable('table', [6, 10])
    return tf.layers.dense(tf.reshape(table, [tf.shape(x)[0], -1])[:, :3] + x, 1)


def numbers_known_late(x):
    """Each row is cut into as many pieces as a variable says."""
    pieces = tf.get_variable('pieces', initializer=3, trainable=False)
    shape = tf.stack([tf.shape(x)[0], tf.identity(pieces), 2])
    cut = tf.reshape(tf.matmul(x, tf.get_variable('wide', [3, 6])), shape)
    return tf.reduce_sum(tf.square(cut), [1, 2])[:, None] + tf.layers.dense(x, 1)


def diagonals(x):
    matrices = tf.reshape(tf.tile(tf.matmul(x, square()), [1, 3]), [-1, 3, 3])
    return tf.layers.dense(tf.einsum('bii->b', matrices)[:, None] + x, 1)


def third_derivatives(x):
    w = square()

    @tf.function
    def energy(x):
        return tf.reduce_sum(tf.tanh(tf.matmul(x, w)) ** 3)

    slope = tf.gradients(energy(x), x)[0]
    return tf.layers.dense(tf.gradients(tf.reduce_sum(slope**2), x)[0], 1)


def loops_in_loops(x):
    w = square()

    def inner(x):
        step = lambda i, x: (i + 1, tf.tanh(tf.matmul(x, w)))  # noqa: E731
        return tf.while_loop(lambda i, x: i < 2, step, (0, x))[1]

    x = tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, inner(x)), (0, x))[1]
    step = tf.train.get_or_create_global_step()
    return tf.layers.dense(tf.cond(step < 2, lambda: inner(x), lambda: inner(2.0 * x)), 1)


def pairs_first(x):
    """As many pairs as rows; the graph tells which are which."""
    wide = tf.get_variable('wide', [3, 20], use_resource=True)

    @tf.function
    def made(x, w):
        h = tf.matmul(x, w)
        x_shape, w_shape = tf.raw_ops.ShapeN(input=[x, w])
        for _ in tf.range(2):
            h += tf.ones([x_shape[0], w_shape[1]])
        return tf.reshape(h, [x_shape[0], 10, 2])

    pairs = tf.reshape(tf.transpose(made(x, wide.read_value()), [1, 0, 2]), [-1, 2])
    slope = tf.gradients(tf.reduce_sum(tf.tanh(pairs)), x)[0]
    return tf.layers.dense(x + slope, 1)


MODELS = [
    pairs_first,
    views,
    groups,
    constants,
    variables,
    numbers_known_late,
    diagonals,
    third_derivatives,
    loops_in_loops,
]


@pytest.mark.core
@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('forward', MODELS, ids=lambda f: f.__name__)
def test_as_on_one_device(forward, static):
    batches = [batch for batch in ten_rows() if len(batch[1]) == 10]
    compare(of_all_modes(forward), batches[:3], 3, static=static)


def test_other_numbers_of_rows():
    batches = [(floats(rows, 3), floats(rows, 1)) for rows in (4, 6, 2)]
    for forward in (views, groups, constants):
        compare(of_all_modes(forward), batches, 2, static=False)


def test_a_model_fn_needs_a_graph():
    model_fn = estimator_mgpu.replicate(of_all_modes(views), devices=2)
    with tf.init_scope(), pytest.raises(RuntimeError, match='builds a graph. Let an Estimator'):
        model_fn(features=floats(4, 3), labels=floats(4, 1), mode='train')


def test_an_estimator_needs_a_function():
    with pytest.raises(TypeError, match='model_fn=None is of NoneType, not a function'):
        estimator_mgpu.Estimator(None)
