"""Rows that aren't the batch's: as many as a mask leaves, or as a Python function returns."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers

KEPT = {'most': 0.2, 'none': 2.0}  # Which of the rows below are kept: those above.


def rows():
    """A batch of 12 rows, whose second column says which are kept."""
    x = np.random.RandomState(1).randn(12, 4).astype(np.float32)
    x[:, 1] = np.linspace(0, 1, 12)
    return [(x, x[:, :1] ** 2)]


def net(x, name='net'):
    with tf.variable_scope(name):
        return tf.layers.dense(tf.layers.dense(x, 5, tf.tanh), 1)


def masked(x, y, above):
    mask = x[:, 1] > above
    left = net(tf.boolean_mask(x, mask))
    return tf.reduce_sum(tf.square(left - tf.boolean_mask(y, mask)))


def masked_twice(x, y, above):
    """Rows of two spaces, that are summed, and products of one space within the other."""
    one = net(tf.boolean_mask(x, x[:, 1] > above))
    two = net(tf.boolean_mask(x, x[:, 1] <= 0.5), 'two')
    return (
        tf.reduce_sum(tf.square(one))
        + tf.reduce_mean(tf.square(two))
        + tf.reduce_sum(one * two[:1])
    )


def scattered(x, y, above):
    """What was left comes back to the batch's rows."""
    places = tf.where(x[:, 1] > above)
    made = tf.scatter_nd(places, net(tf.gather_nd(x, places)), tf.shape(y, out_type=tf.int64))
    return tf.reduce_mean(tf.square(net(x, 'own') + made - y))


def of_python(x, y, above):
    """As many rows as a Python function likes; one of them is repeated for all of the batch's."""
    chosen = tf.py_function(lambda x: x[x[:, 1] > above], [x], tf.float32)
    chosen.set_shape([None, 4])
    one = tf.py_function(lambda x: x[:1], [x], tf.float32)
    one.set_shape([None, 4])
    return tf.reduce_sum(tf.square(net(chosen))) + tf.reduce_mean(
        net(one, 'one') * net(x, 'own') - y
    )


def convolved(x, y, above):
    images = tf.reshape(tf.boolean_mask(x, x[:, 1] > above), [-1, 2, 2, 1])
    made = tf.layers.conv2d(images, 3, 2, padding='same', activation=tf.tanh)
    return tf.reduce_sum(tf.square(made)) + tf.reduce_mean(tf.square(net(x) - y))


def clipped(x, y, above):
    """Its largest entry and its mean are of all rows that are left."""
    made = net(tf.boolean_mask(x, x[:, 1] > above))
    top = tf.reduce_max(tf.concat([made, tf.zeros([1, 1])], 0))
    return tf.reduce_sum(tf.square(made)) * (1 + top) + tf.reduce_mean(tf.square(net(x, 'own') - y))


def paired(x, y, above):
    """Each row that is left with each of the batch's, as rows of their own."""
    left = tf.gather_nd(x, tf.where(x[:, 1] > above))
    pairs = tf.reshape(tf.matmul(left, tf.tanh(x), transpose_b=True), [-1, 1])
    return tf.reduce_sum(tf.square(tf.layers.dense(pairs, 2, tf.tanh, name='net/dense')))


CASES = [
    (loss_of, kept)
    for kept in KEPT
    for loss_of in (masked, masked_twice, scattered, of_python, clipped, paired)
]
CASES.append((convolved, 'most'))  # TensorFlow's convolutions fail without rows.


def model_of(loss_of, kept):
    def model_fn(features, labels, mode):
        loss = loss_of(features, labels, KEPT[kept])
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        train_op = optimizer.minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize(('loss_of', 'kept'), CASES)
def test_as_on_one_device(loss_of, kept, static):
    ours, _ = towers.compare(model_of(loss_of, kept), rows(), 3, static=static)
    copies = [op.name for op in ours.graph.get_operations() if 'tower_2' in op.name]
    assert any(name.endswith(('net/dense/MatMul', '/Conv2D')) for name in copies)


def test_rows_that_meet_the_batch_by_broadcasting_are_made_whole():
    """Here five rows of its own meet a batch of one, which is repeated for them."""

    def loss_of(x, y, above):
        made = tf.py_function(lambda x: tf.repeat(x, 5, 0), [x], tf.float32)
        made.set_shape([None, 4])
        return tf.reduce_sum(tf.square(net(made) - y)) + tf.reduce_mean(tf.square(net(x, 'own')))

    one_row = [tuple(part[:1] for part in rows()[0])]
    towers.compare(model_of(loss_of, 'most'), one_row, 3, static=False)
