"""Sizes and names that happen to be those of something else don't mislead."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import batches, floats, predict, spec_of, step
from towers import compare, train

ROWS = 12


def model_of(loss_of):
    def model_fn(features, labels, mode):
        loss = loss_of(features, labels)
        train_op = tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss, step())
        return spec_of(mode, loss, train_op)

    return model_fn


LOSSES = [
    tf.losses.mean_squared_error,
    tf.losses.absolute_difference,
    tf.losses.sigmoid_cross_entropy,
    tf.losses.huber_loss,
    tf.losses.log_loss,
]


@pytest.mark.parametrize('width', [2, 3, 4, 6], ids='width={}'.format)
@pytest.mark.parametrize('towers', [2, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('loss', LOSSES, ids=lambda f: f.__name__)
def test_outputs_as_wide_as_there_are_towers_or_rows(loss, towers, width):
    """The number of entries of a shard is then a number of rows of the batch, or of something."""

    def loss_of(features, labels):
        output = tf.layers.dense(features, width)
        if loss is tf.losses.log_loss:
            output = tf.sigmoid(output)
        return loss(labels, output)

    targets = [np.random.RandomState(i).rand(ROWS, width).astype('f') for i in range(4)]
    data = [(x, y) for (x, _), y in zip(batches(), targets)]
    compare(model_of(loss_of), data, towers)


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('towers', [2, 3], ids='towers={}'.format)
def test_real_and_generated_rows_in_one(towers, static):
    def loss_of(features, labels):
        rows = tf.concat([features, tf.layers.dense(features, 3)], 0)
        zeros = tf.zeros([tf.shape(features)[0], 1])
        real = tf.concat([tf.ones_like(features[:, :1]), zeros], 0)
        return tf.losses.sigmoid_cross_entropy(real, tf.layers.dense(rows, 1))

    compare(model_of(loss_of), batches(), towers, static=static)


def segments(output, ids, count):
    return tf.math.unsorted_segment_sum(output, ids[:, 0], count)


def scattered(output, ids, count):
    return tf.scatter_nd(ids, output, [count, 1])


def confused(output, ids, count):
    """By a shape that is stacked from numbers."""
    rows = tf.cast(output[:, 0] > 0, tf.int64)
    counted = tf.math.confusion_matrix(ids[:, 0], rows, num_classes=count)
    return tf.cast(counted, tf.float32) * tf.reduce_sum(output)


def by_segments(sums, count):
    def loss_of(features, labels):
        ids = tf.cast(tf.abs(labels) * 3, tf.int32) % 5
        return tf.reduce_sum(tf.square(sums(predict(features), ids, count))) / ROWS**2

    return model_of(loss_of)


@pytest.mark.parametrize('count', [5, 12, 18], ids='count={}'.format)
@pytest.mark.parametrize('sums', [segments, scattered, confused], ids=lambda f: f.__name__)
def test_sums_of_as_many_segments_as_there_are_rows(sums, count, caplog):
    """As many as there are in the batch, or in several shards."""
    compare(by_segments(sums, count), batches(), 2)
    assert 'segments are taken for rows' not in caplog.text


@pytest.mark.parametrize('sums', [segments, scattered, confused], ids=lambda f: f.__name__)
def test_sums_of_as_many_segments_as_a_shard_has_rows_are_warned_of(sums, caplog):
    train(by_segments(sums, ROWS // 2), batches(steps=1), 2)
    assert 'segments are taken for rows' in caplog.text


def mean_then_sum(output, targets):
    return tf.reduce_sum(tf.reduce_mean(tf.square(output - targets), 0))


def sum_then_mean(output, targets):
    return tf.reduce_mean(tf.reduce_sum(tf.transpose(tf.square(output - targets)), 1))


def entropy_of_the_mean(output, targets):
    shares = tf.reduce_mean(tf.nn.softmax(output), 0)
    return mean_then_sum(output, targets) + tf.reduce_sum(shares * tf.log(shares))


def of_products(output, targets):
    products = tf.matmul(output, output, transpose_a=True)
    return tf.reduce_mean(tf.square(output - targets)) + 0.001 * tf.reduce_mean(products)


INNER = [mean_then_sum, sum_then_mean, entropy_of_the_mean, of_products]


@pytest.mark.parametrize('width', [4, 5], ids='width={}'.format)
@pytest.mark.parametrize('loss', INNER, ids=lambda f: f.__name__)
def test_a_layer_as_wide_as_a_shard_has_rows_is_no_matter_of_doubt(loss, width, behavior, caplog):
    def loss_of(features, labels):
        output = tf.layers.dense(tf.layers.dense(features, width, tf.nn.tanh), width)
        return loss(output, tf.concat([labels] * width, 1))

    compare(model_of(loss_of), batches(), ROWS // 4)
    assert 'cannot be told' not in caplog.text


def test_a_slice_that_adds_a_dimension_is_no_matter_of_doubt(caplog):

    def loss_of(features, labels):
        output = tf.layers.dense(features, 4)[:, None, :]
        return tf.reduce_sum(tf.reduce_mean(tf.square(output - labels[:, None]), 0))

    compare(model_of(loss_of), batches(), ROWS // 4)
    assert 'cannot be told' not in caplog.text


def by_class(features, labels):
    """Sums over the rows of each class by how many there are."""
    one_hot = tf.one_hot(tf.cast(labels[:, 0] > 2, tf.int32), 2)
    losses = tf.square(predict(features) - labels)
    return tf.reduce_mean(tf.reduce_sum(losses * one_hot, 0) / (tf.reduce_sum(one_hot, 0) + 1))


def of_generated(features, labels):
    """Rows that depend on the batch by its size alone, as noise does."""
    noise = tf.fill([tf.shape(features)[0], 4], 0.5)
    output = tf.layers.dense(tf.layers.dense(noise, 3), 1)
    return tf.reduce_sum(tf.nn.softplus(output)) / tf.cast(tf.shape(output)[0], tf.float32)


def times_the_sum_of_ones(features, labels):
    mean = tf.reduce_mean(tf.square(predict(features) - labels))
    return 0.07 * mean * tf.reduce_sum(tf.ones_like(labels))


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('towers', [2, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize(
    'loss_of', [by_class, of_generated, times_the_sum_of_ones], ids=lambda f: f.__name__
)
def test_sums_by_sizes(loss_of, towers, static, behavior, caplog):
    data = [(x, y + 2) for x, y in batches()]
    compare(model_of(loss_of), data, towers, static=static)
    assert 'cannot be told' not in caplog.text


def by_a_function(total, rows):
    return tf.function(lambda total: total / rows())(total)


def by_a_branch(total, rows):
    return tf.cond(step() < 5, lambda: total / rows(), lambda: 2 * total / rows())


def by_a_loop(total, rows):
    return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x + total / rows()), (0, 0.0))[1]


@pytest.mark.parametrize('mean', [by_a_function, by_a_branch, by_a_loop], ids=lambda f: f.__name__)
def test_sums_by_static_sizes_inside_of_functions(mean, behavior, caplog):
    """Averages over the shards are exact; that they're meant is said to be a guess."""

    def loss_of(features, labels):
        total = tf.reduce_sum(tf.square(predict(features) - labels))
        return mean(total, lambda: tf.cast(tf.shape(labels)[0], tf.float32))

    compare(model_of(loss_of), batches(), 3)
    assert 'cannot be told' in caplog.text


def test_weights_of_a_softmax_over_the_rows_are_doubted(caplog):
    """Each shard's add up to 1, and so would be taken for a share of the batch's."""

    def loss_of(features, labels):
        weights = tf.nn.softmax(tf.layers.dense(features, 1), 0)
        return tf.reduce_sum(weights * tf.square(predict(features) - labels))

    with pytest.raises(AssertionError):
        compare(model_of(loss_of), [(floats(ROWS, 3), floats(ROWS, 1))], 2)
    assert 'not quite the mean over the batch' in caplog.text
