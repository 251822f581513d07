"""Rows that are put into groups by an id, of which several shards may have some."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import floats, spec_of, step, weights
from towers import behavior_of, compare, evaluate, train

BOTH = pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
BEHAVIORS = pytest.mark.parametrize('behavior', ['v1', 'v2'])
TOLD = 'has an entry for each group of rows'
DATA = [
    (
        {
            'x': floats(12, 3, seed=i),
            'sorted': np.sort(np.random.RandomState(i).randint(0, 7, 12)),
            'ids': np.random.RandomState(i).randint(0, 5, 12),
        },
        floats(12, seed=i),
    )
    for i in (1, 2)
]


def table():
    return weights('table', 5, 2)


def mean_of_sorted(output, features):
    return tf.reduce_mean(tf.math.segment_mean(output, features['sorted']))


def squares_of_sums(output, features):
    return tf.reduce_sum(tf.square(tf.math.segment_sum(output, features['sorted'])))


def bags(output, features):
    _, bag = tf.unique(features['sorted'])
    return tf.reduce_mean(tf.nn.softplus(tf.math.segment_max(output, bag)))


def mean_over_users(output, features):
    users, user = tf.unique(features['ids'])
    means = tf.math.unsorted_segment_mean(tf.square(output), user, tf.size(users))
    return tf.reduce_mean(means)


def vectors_once(output, features):
    return tf.nn.l2_loss(tf.gather(table(), tf.unique(features['ids'])[0]))


def vectors_once_in_a_function(output, features):
    def inside(vectors, ids):
        return tf.nn.l2_loss(tf.gather(vectors, tf.unique(ids)[0]))

    return tf.function(inside, autograph=False)(tf.identity(table()), features['ids'])


def those_that_are_not_there(output, features):
    absent, _ = tf.setdiff1d(tf.range(5, dtype=tf.int64), features['ids'])
    return tf.reduce_sum(tf.square(tf.gather(table(), absent)))


def union(output, features):
    ids = features['ids'][None]
    return tf.nn.l2_loss(tf.gather(table(), tf.sets.union(ids, ids).values))


def looked_up_by_group(output, features):
    places = tf.stack([features['sorted'], tf.zeros_like(features['sorted'])], 1)
    ids = tf.SparseTensor(places, features['ids'], [7, 1])
    vectors = tf.nn.embedding_lookup_sparse(table(), ids, None, combiner='mean')
    return tf.reduce_mean(tf.square(vectors - 1))


def some_rows_of_each(output, features):
    some = features['x'][:, 1] > 0
    ids = tf.boolean_mask(features['sorted'], some)
    return tf.reduce_mean(tf.math.segment_mean(tf.square(tf.boolean_mask(output, some)), ids))


def sums_and_a_constant(output, features):
    users, user = tf.unique(features['ids'])
    sums = tf.math.unsorted_segment_sum(output, user, tf.size(users))
    return tf.reduce_sum(sums - weights('bias', 1))


def neighbours(output, features):
    pairs = tf.range(tf.shape(output)[0]) // 2
    return tf.reduce_mean(tf.square(tf.math.segment_sum(output, pairs)))


def made_for_each(output, features):
    users = tf.shape(tf.unique(features['ids'])[0])[0]
    return tf.reduce_sum(tf.square(tf.ones([users]) * weights('bias', 1)))


def ids_given_to_a_function(output, features):
    def inside(values, ids):
        return tf.reduce_mean(tf.square(tf.math.unsorted_segment_sum(values, ids, 12)))

    ids = tf.cast(tf.unique(features['ids'])[1], tf.int32)
    sums = tf.function(lambda *given: tf.math.segment_mean(*given), autograph=False)(
        output, features['sorted']
    )
    return tf.function(inside, autograph=False)(output, ids) + tf.reduce_mean(tf.square(sums))


def rows_and_groups(output, features):
    means = tf.math.segment_mean(output, features['sorted'])
    return tf.reduce_mean(tf.square(tf.concat([output, means], 0)))


def given_back_by_a_layer(output, features):
    """What rows of a shard that have the same id have in common, as pooling per graph gives it."""
    users, user = tf.unique(features['ids'])
    means = tf.math.unsorted_segment_mean(output[:, None], user, tf.size(users))
    hidden = tf.tanh(tf.matmul(means, weights('hidden', 1, 2)))
    return tf.reduce_mean(tf.square(tf.gather(hidden, user)[:, 1] - output))


WARNED = [ids_given_to_a_function, rows_and_groups, given_back_by_a_layer]
WARNED += [mean_of_sorted, squares_of_sums, bags, mean_over_users, vectors_once]
WARNED += [vectors_once_in_a_function, those_that_are_not_there, union, looked_up_by_group]
WARNED += [some_rows_of_each, sums_and_a_constant, neighbours, made_for_each]


def gathered_back(output, features):
    ids, back = tf.unique(features['ids'])
    return tf.reduce_mean(tf.square(tf.gather(tf.gather(table(), ids), back)[:, 0] - output))


def sums_that_are_summed(output, features):
    users, user = tf.unique(features['ids'])
    return tf.reduce_sum(2 * tf.math.unsorted_segment_sum(tf.square(output), user, tf.size(users)))


def sums_of_all_classes(output, features):
    sums = tf.math.unsorted_segment_sum(output, features['ids'], 5)
    means = tf.math.unsorted_segment_mean(output, features['ids'], 5)
    return tf.reduce_mean(tf.square(sums)) + tf.reduce_mean(tf.square(means))


def entries_of_rows(output, features):
    """Attention within rows that are put one after another."""
    ragged = tf.RaggedTensor.from_tensor(tf.tile(output[:, None], [1, 3]) * features['x'])
    row = ragged.value_rowids()
    shares = tf.exp(ragged.flat_values)
    shares /= tf.gather(tf.math.segment_sum(shares, row), row)
    return tf.reduce_mean(tf.square(tf.math.segment_sum(shares * ragged.flat_values, row) - 1))


def looked_up_by_row(output, features):
    rows = tf.range(tf.shape(output, out_type=tf.int64)[0])
    places = tf.stack([rows, tf.zeros_like(rows)], 1)
    ids = tf.SparseTensor(places, features['ids'], [tf.shape(output, out_type=tf.int64)[0], 1])
    vectors = tf.nn.embedding_lookup_sparse(table(), ids, None, combiner='mean')
    return tf.reduce_mean(tf.square(vectors - output[:, None]))


def of_tokens(output, features):
    """Of entries that come one after another, two of each row."""
    tokens = tf.reshape(tf.stack([output, output**2], 1), [-1])
    row = tf.range(2 * tf.shape(output)[0]) // 2
    return tf.reduce_mean(tf.square(tf.math.segment_sum(tokens, row) - 1))


def of_indices(output, features):
    table = tf.sparse.from_dense(tf.nn.relu(features['x']))
    row, _ = tf.unstack(table.indices, axis=1)
    rows = tf.shape(output)[0]
    most = tf.math.unsorted_segment_max(table.values, row, rows)
    return tf.reduce_mean(tf.square(tf.maximum(most, 0.0) - output))


def sums_of_entries(output, features):
    wide = output[:, None] * features['x']
    return tf.reduce_sum(tf.reduce_sum(tf.math.segment_sum(wide, features['sorted']), 1))


def through_a_layer_once(output, features):
    """Vectors that are looked up, and changed, once for each different id."""
    ids, back = tf.unique(features['ids'])
    hidden = tf.tanh(tf.matmul(tf.gather(table(), ids), weights('hidden', 2, 2)))
    return tf.reduce_mean(tf.square(tf.gather(hidden, back)[:, 0] - output))


def rows_given_to_a_function(output, features):
    ragged = tf.RaggedTensor.from_tensor(tf.tile(output[:, None], [1, 3]) * features['x'])

    def inside(values, ids):
        return tf.math.segment_mean(values, ids)

    means = tf.function(inside, autograph=False)(ragged.flat_values, ragged.value_rowids())
    return tf.reduce_mean(tf.square(means - 1))


def segments_of_columns(output, features):
    wide = output[:, None] * features['x']
    sums = tf.transpose(tf.math.segment_sum(tf.transpose(wide), [0, 0, 1]))
    return tf.reduce_mean(tf.square(sums[:, 0] - 1))


def segments_of_columns_in_a_loop(output, features):
    wide = output[:, None] * features['x']

    def body(i, total):
        sums = tf.transpose(tf.math.segment_sum(tf.transpose(wide), [0, 0, 1]))
        return i + 1, total + tf.square(sums[:, 0] - 1)

    _, total = tf.while_loop(lambda i, _: i < 2, body, (0, tf.zeros_like(output)))
    return tf.reduce_mean(total)


EXACT = [through_a_layer_once, rows_given_to_a_function]
EXACT += [segments_of_columns, segments_of_columns_in_a_loop]
EXACT += [gathered_back, sums_that_are_summed, sums_of_all_classes, entries_of_rows]
EXACT += [looked_up_by_row, of_tokens, of_indices, sums_of_entries]


def model_of(loss_of):
    def model_fn(features, labels, mode):
        output = tf.tanh(tf.tensordot(features['x'], weights('kernel', 3, 1), 1))[:, 0]
        loss = tf.reduce_mean(tf.square(output - labels)) + 0.1 * loss_of(output, features)
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    return model_fn


@BEHAVIORS
@BOTH
@pytest.mark.parametrize('loss_of', WARNED, ids=lambda f: f.__name__)
def test_losses_of_groups_are_warned_of(loss_of, static, behavior, caplog):
    with behavior_of(behavior):
        train(model_of(loss_of), DATA[:1], 3, static=static)
    others = ["it goes back to 'PartitionedCall'", 'it counts what differs among the rows']
    others.append('rows are combined with other rows of their shard')
    assert any(sentence in caplog.text for sentence in [TOLD, *others])


@BEHAVIORS
@BOTH
@pytest.mark.parametrize('loss_of', EXACT, ids=lambda f: f.__name__)
def test_losses_of_rows(loss_of, static, behavior, caplog):
    with behavior_of(behavior):
        compare(model_of(loss_of), DATA, 3, static=static)
    assert TOLD not in caplog.text
    assert 'their shard' not in caplog.text


def test_metrics_of_groups_are_warned_of(caplog):
    def model_fn(features, labels, mode):
        output = features['x'][:, 0]
        users, user = tf.unique(features['ids'])
        best = tf.math.unsorted_segment_max(output, user, tf.size(users))
        metrics = {'best': tf.metrics.mean(best)}
        loss = tf.reduce_mean(output)
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    evaluate(model_fn, DATA, 3)
    assert 'The metrics best are taken over shards' in caplog.text
