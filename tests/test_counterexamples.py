"""What models drawn at random (test_random_models.py) were found to do wrong, made simple."""

import pytest
import tensorflow.compat.v1 as tf

from models import away_from_0, spec_of, step, with_loss
from towers import compare


@pytest.mark.parametrize('towers', [3, 4], ids='towers={}'.format)
def test_norm_of_an_l2_loss_and_gathered_rows(towers, behavior):
    """The gradient is dense on one device; of slices with the same ids, the norm is another."""

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', [7, 1])
        ids = tf.cast(tf.abs(features) * 10, tf.int32) % 7
        output = tf.reduce_sum(tf.gather(table, ids), 1)
        loss = tf.reduce_mean(tf.square(output - labels)) + tf.nn.l2_loss(table)
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        grads, variables = zip(*optimizer.compute_gradients(loss))
        clipped, _ = tf.clip_by_global_norm(grads, 0.5)
        return spec_of(mode, loss, optimizer.apply_gradients(zip(clipped, variables), step()))

    compare(model_fn, away_from_0(), towers)


def rows(tensor):
    return tf.cast(tf.shape(tensor)[0], tf.float32)


SIZES = {
    'mean times rows': lambda y, p: 0.1 * tf.reduce_mean(tf.square(y - p)) * rows(p),
    'mean times size': lambda y, p: (
        0.1 * tf.reduce_mean(tf.square(y - p)) * tf.cast(tf.size(p), tf.float32)
    ),
    'sum by rows': lambda y, p: tf.reduce_sum(tf.square(y - p)) / rows(p),
}


@pytest.mark.parametrize('towers', [3, 6], ids='towers={}'.format)
@pytest.mark.parametrize('loss', SIZES.values(), ids=SIZES.keys())
def test_static_sizes(loss, towers, caplog):
    """6 towers have 2 rows each: a number that might be any other."""
    compare(with_loss(loss), away_from_0(), towers)
    assert 'cannot be told' not in caplog.text


def test_rows_of_variables_are_not_those_of_shards():
    """The variable has as many rows as a shard."""

    def loss(labels, output):
        w = tf.get_variable('rows', [3, 1])
        return tf.reduce_mean(tf.square(output - labels)) * rows(w) + tf.nn.l2_loss(w)

    compare(with_loss(loss), away_from_0(), 4)


MAPPED = {
    'sum': lambda y, p: tf.reduce_sum(tf.square(y - p)),
    'mean': lambda y, p: tf.reduce_mean(tf.square(y - p)),
    'mean times rows': lambda y, p: 0.1 * tf.reduce_mean(tf.square(y - p)) * rows(p),
}


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('towers', [3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('loss', MAPPED.values(), ids=MAPPED.keys())
def test_rows_that_went_through_a_loop_one_by_one(loss, towers, static, behavior, caplog):
    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [3, 1])
        output = tf.map_fn(lambda row: tf.linalg.matvec(w, row, transpose_a=True), features)
        value = loss(labels, output)
        train_op = tf.train.MomentumOptimizer(0.01, 0.9).minimize(value, step())
        return spec_of(mode, value, train_op)

    batches = away_from_0() if static else [(x[:10], y[:10]) for x, y in away_from_0()]
    compare(model_fn, batches, towers, static=static)
    if behavior == 'v1':
        assert 'cannot be told' not in caplog.text
