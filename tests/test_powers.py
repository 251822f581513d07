"""Rows that are divided by how many they are before they are summed: their sum is a mean."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import batches, floats, spec_of, step, weights, with_loss
from towers import compare, evaluate, train

BOTH = pytest.mark.parametrize('static', [True, False], ids='static={}'.format)


def squares(labels, output):
    return tf.square(output - labels)[:, 0] + 0.1


def count(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


def shares(x):
    """1 / n for each row."""
    return tf.fill([tf.shape(x)[0]], 1 / count(x))


def filled(rows, labels):
    return tf.reduce_sum(rows * shares(rows))


def broadcast(rows, labels):
    return tf.reduce_sum(rows * tf.broadcast_to(1 / count(rows), tf.shape(rows)))


def tiled(rows, labels):
    return tf.reduce_sum(rows * tf.tile([1 / count(rows)], tf.shape(rows)))


def multiplied(rows, labels):
    return tf.reduce_sum(rows * tf.math.reciprocal(count(rows)))


def by_roots(rows, labels):
    return tf.nn.l2_loss(rows / tf.sqrt(count(rows)))


def by_entries(rows, labels):
    wide = tf.stack([rows, 2 * rows], 1)
    return tf.reduce_sum(wide * tf.fill(tf.shape(wide), 1 / tf.cast(tf.size(wide), tf.float32)))


def products(rows, labels):
    return tf.tensordot(rows, shares(rows), 1) + tf.einsum('i,i->', rows, shares(rows))


def weighted(rows, labels):
    return tf.losses.compute_weighted_loss(rows, shares(rows), reduction='weighted_sum')


def before_a_layer(rows, labels):
    kernel = tf.constant([[1.0, 2.0]])
    return tf.reduce_sum(tf.matmul(rows[:, None] / count(rows), kernel))


def some(rows, labels):
    return tf.reduce_sum(tf.where(labels[:, 0] > 0, rows / count(rows), tf.zeros_like(rows)))


def guarded(rows, labels):
    return tf.reduce_sum(tf.maximum(rows / tf.maximum(count(rows), 1), 1e-8))


def added(rows, labels):
    return tf.reduce_sum(tf.add_n([rows / count(rows), tf.square(rows) / count(labels)]))


def of_chosen(rows, labels):
    """Divided by how many were chosen of each shard, which may be none."""
    chosen = tf.boolean_mask(rows, labels[:, 0] > 0.5)
    return tf.reduce_sum(chosen / tf.maximum(count(chosen), 1)) + 0.1 * tf.reduce_mean(rows)


def of_all_by_chosen(rows, labels):
    """Of all rows, also on devices where none was chosen."""
    chosen = tf.where(labels[:, 0] > 0.5)
    return tf.reduce_sum(rows / tf.maximum(count(chosen), 1))


def of_entries_of_chosen(rows, labels):
    chosen = tf.boolean_mask(tf.stack([rows, 2 * rows], 1), labels[:, 0] > 0)
    return tf.reduce_sum(chosen / tf.cast(tf.size(chosen), tf.float32))


def chosen_by_all(rows, labels):
    return tf.reduce_sum(tf.boolean_mask(rows, labels[:, 0] > 0) / count(rows))


def histogram(rows, labels):
    """Shares of classes."""
    classes = tf.cast(labels[:, 0] > 0, tf.int32)
    return tf.reduce_sum(
        tf.square(tf.math.unsorted_segment_sum(rows * shares(rows), classes, 2) - 0.5)
    )


def complex_numbers(rows, labels):
    shares = tf.cast(rows, tf.complex64) / tf.cast(count(rows), tf.complex64)
    return tf.math.real(tf.reduce_sum(shares))


def by_integers(rows, labels):
    """Of a row's own length, by the number of rows: one denominator."""
    lengths = tf.cast(tf.abs(labels[:, 0]) * 3, tf.int32) + 1
    return tf.reduce_sum(rows / tf.cast(lengths * tf.shape(rows)[0], tf.float32))


def by_integers_of_a_function(rows, labels):
    lengths = tf.cast(tf.abs(labels[:, 0]) * 3, tf.int32) + 1
    divide = tf.function(
        lambda x, n: x / tf.cast(tf.maximum(tf.shape(x)[0] * n, 1), tf.float32), autograph=False
    )
    return tf.reduce_sum(divide(rows, lengths))


def by_weights_that_are_not_0(rows, labels):
    """TensorFlow counts these."""
    return tf.losses.compute_weighted_loss(rows, 1 / count(rows))


def in_a_function(rows, labels):
    divide = tf.function(lambda x: x / count(x), autograph=False)
    return tf.reduce_sum(divide(rows))


def by_what_a_function_captures(rows, labels):
    n = count(rows)
    return tf.reduce_sum(tf.function(lambda x: x / n, autograph=False)(rows))


def in_a_loop(rows, labels):
    n = count(rows)
    return tf.reduce_sum(tf.map_fn(lambda row: row / n, rows))


def in_branches(rows, labels):
    n = count(rows)
    return tf.reduce_sum(tf.cond(step() >= 0, lambda: rows / n, lambda: 2 * rows / n))


EXACT = [filled, broadcast, tiled, multiplied, by_roots, by_entries, products, weighted]
EXACT += [before_a_layer, some, guarded, added, of_chosen, of_entries_of_chosen, chosen_by_all]
EXACT += [histogram, complex_numbers, by_integers, by_weights_that_are_not_0]
EXACT += [by_integers_of_a_function, in_a_function, by_what_a_function_captures, in_a_loop]
EXACT += [in_branches, of_all_by_chosen]


def of_rows(loss):
    return with_loss(lambda labels, output: loss(squares(labels, output), labels))


@pytest.mark.parametrize('loss', EXACT, ids=lambda f: f.__name__)
@pytest.mark.parametrize('towers', [3, 5], ids='towers={}'.format)
@BOTH
def test_means(loss, towers, static, behavior, caplog):
    data = batches()
    compare(of_rows(loss), data, towers, static=static)
    assert 'a value of all rows of a shard' not in caplog.text
    assert 'cannot be told' not in caplog.text


def plus_others(rows, labels):
    return tf.reduce_sum(rows / count(rows) + 0.1 * tf.square(rows))


def plus_shares(rows, labels):
    return tf.reduce_sum(rows + shares(rows))


def one_of_both(rows, labels):
    return tf.reduce_sum(tf.where(labels[:, 0] > 0, rows / count(rows), rows))


def squared(rows, labels):
    return tf.reduce_sum(tf.square(rows / count(rows)))


def exponential(rows, labels):
    return tf.reduce_sum(tf.exp(rows / count(rows)))


def above_a_bound(rows, labels):
    return tf.reduce_sum(tf.maximum(rows / count(rows), 0.05))


def by_at_least_5(rows, labels):
    return tf.reduce_sum(rows / tf.maximum(count(rows), 5))


def by_at_most_5(rows, labels):
    return tf.reduce_sum(rows / tf.minimum(count(rows), 5))


def above_a_share(rows, labels):
    above = tf.cast(rows > 1 / count(rows), tf.float32)
    return tf.reduce_mean(above * rows)


def chosen_by_shares(rows, labels):
    return tf.reduce_sum(tf.boolean_mask(rows, rows > 1 / count(rows)))


def rounded(rows, labels):
    shares = tf.cast(tf.cast(20 * rows / count(rows), tf.int32), tf.float32)
    return tf.reduce_mean(rows * shares)


def through_a_layer(rows, labels):
    return tf.reduce_mean(tf.tanh(rows[:, None] / count(rows) + tf.constant([0.1, 0.2])))


def complex_sums(rows, labels):
    n = tf.cast(count(rows), tf.complex64)
    return tf.math.real(tf.reduce_sum(tf.cast(rows, tf.complex64) + 1 / n))


def one_of_two_branches(rows, labels):
    n = count(rows)
    return tf.reduce_sum(tf.cond(step() >= 0, lambda: rows / n, lambda: rows))


def rounds(rows, labels):
    """Divided again in each round."""
    n = count(rows)
    return tf.reduce_sum(
        tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x / n), [0, rows])[1]
    )


def chosen_to_all(rows, labels):
    """It goes by which part of a shard was chosen."""
    chosen = tf.boolean_mask(rows, labels[:, 0] > 0)
    return tf.reduce_mean(chosen * count(chosen) / count(rows))


def by_two_numbers(rows, labels):
    chosen = tf.boolean_mask(rows, labels[:, 0] > 0)
    return tf.reduce_sum(chosen / (count(chosen) + count(rows)))


WARNED = [plus_others, plus_shares, one_of_both, squared, exponential, above_a_bound]
WARNED += [above_a_share, through_a_layer, one_of_two_branches, rounds, chosen_to_all]
WARNED += [by_two_numbers, complex_sums, chosen_by_shares, rounded]
WARNED += [by_at_least_5, by_at_most_5]


@pytest.mark.parametrize('loss', WARNED, ids=lambda f: f.__name__)
@BOTH
def test_what_goes_by_the_number_otherwise_is_warned_of(loss, static, behavior, caplog):
    train(of_rows(loss), batches(steps=1), 3, static=static)
    assert 'is a value of all rows of a shard' in caplog.text


@pytest.mark.parametrize('towers', [3, 5], ids='towers={}'.format)
@BOTH
def test_places_are_no_numbers(towers, static, behavior, caplog):
    """Of the last of two steps, as of sequences with their time first: n further on."""

    def taken(rows, labels):
        n = tf.shape(rows)[0]
        steps = tf.reshape(tf.stack([2 * rows, rows]), [-1])
        return tf.reduce_mean(tf.gather(steps, tf.ones_like(rows, tf.int32) * n + tf.range(n)))

    compare(of_rows(taken), batches(), towers, static=static)
    assert 'is a value of all rows of a shard' not in caplog.text


def plus_a_term(rows, labels):
    return tf.reduce_sum(tf.concat([rows, [tf.nn.l2_loss(tf.trainable_variables()[0])]], 0))


def mean_with_a_term(rows, labels):
    return tf.reduce_mean(tf.concat([rows, [0.5]], 0))


def padded(rows, labels):
    return tf.reduce_mean(tf.tanh(tf.pad(rows[:, None], [[0, 2], [0, 0]])))


def padded_to_8(rows, labels):
    missing = 8 - tf.shape(rows)[0] % 8
    return tf.reduce_mean(tf.pad(rows, [[0, missing]]))


@pytest.mark.parametrize(
    'loss', [plus_a_term, mean_with_a_term, padded, padded_to_8], ids=lambda f: f.__name__
)
@BOTH
def test_what_is_no_row_among_rows_is_warned_of(loss, static, behavior, caplog):
    """Each device adds it to its own."""
    train(of_rows(loss), batches(steps=1), 3, static=static)
    assert 'is a mean or a sum over rows cannot be told' in caplog.text


@BOTH
def test_columns_may_be_padded(static, behavior, caplog):
    def padded(rows, labels):
        pairs = tf.stack([rows, 2 * rows], 1)
        missing = 5 - tf.shape(pairs)[1]
        pairs = tf.pad(pairs, [[0, 0], [1, missing]])
        return tf.reduce_mean(tf.concat([pairs, tf.zeros([tf.shape(rows)[0], 1])], 1))

    compare(of_rows(padded), batches(), 3, static=static)
    assert 'cannot be told' not in caplog.text


@BOTH
def test_a_tape(static):
    def model_fn(features, labels, mode):
        with tf.GradientTape() as tape:
            rows = tf.square(tf.tensordot(features, weights('kernel', 3), 1) - labels[:, 0])
            loss = of_chosen(rows, labels) + filled(rows, labels)
        variables = tf.trainable_variables()
        pairs = zip(tape.gradient(loss, variables), variables)
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        return spec_of(mode, loss, optimizer.apply_gradients(pairs, step()))

    compare(model_fn, batches(), 3, static=static)


@BOTH
def test_a_loss_of_rows(static):
    """Their sum is minimized, which is a mean."""

    def model_fn(features, labels, mode):
        rows = tf.square(tf.tensordot(features, weights('kernel', 3), 1) - labels[:, 0])
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        train_op = optimizer.minimize(rows / count(rows), step())
        return spec_of(mode, tf.reduce_mean(rows), train_op)

    compare(model_fn, batches(), 3, static=static)


@BOTH
def test_metrics(static, caplog):
    """Running totals of shares, and a mean of those of what was chosen."""

    def model_fn(features, labels, mode):
        rows = tf.square(features[:, 0] - labels[:, 0])
        chosen = tf.boolean_mask(rows, labels[:, 0] > 0)
        metrics = {
            'mean': tf.metrics.mean(rows / count(rows)),
            'chosen': tf.metrics.mean(tf.reduce_sum(chosen / count(chosen))),
        }
        return tf.estimator.EstimatorSpec(
            mode, loss=tf.reduce_sum(rows / count(rows)), eval_metric_ops=metrics
        )

    ours, one = (evaluate(model_fn, batches(), n, static=static) for n in (3, 0))
    np.testing.assert_allclose(ours.losses, one.losses, rtol=1e-5)
    for name, expected in one.metrics.items():
        np.testing.assert_allclose(ours.metrics[name], expected, rtol=1e-5, err_msg=name)
    assert 'a value of all rows of a shard' not in caplog.text


@BOTH
def test_shares_that_are_scattered_are_warned_of(static, caplog):
    def model_fn(features, labels, mode):
        shares_of = tf.get_variable('shares', [2], initializer=tf.zeros_initializer())
        classes = tf.cast(labels[:, 0] > 0, tf.int32)
        loss = tf.reduce_mean(tf.square(features[:, 0] * weights('w', 1)))
        with tf.control_dependencies([tf.scatter_add(shares_of, classes, shares(features))]):
            train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, step())
        return spec_of(mode, loss, train_op)

    train(model_fn, [(floats(6, 3), floats(6, 1))], 3, static=static)
    assert 'is a value of all rows of a shard' in caplog.text


def test_predicted_shares_are_warned_of(caplog):
    def model_fn(features, labels, mode):
        return tf.estimator.EstimatorSpec(mode, predictions=features[:, 0] * shares(features))

    evaluate(model_fn, batches(steps=1), 3, mode='infer')
    assert 'is a value of all rows of a shard' in caplog.text


def test_nothing_chosen():
    """A sum of nothing is 0, as on one device, rather than no number."""
    data = [(floats(6, 3), np.zeros([6, 1], 'f'))]
    ours, one = compare(of_rows(of_chosen), data, 3, static=False)
    assert np.isfinite(one.losses).all()
