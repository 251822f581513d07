"""Splitting and joining are exact inverses, for any nest and any number of rows."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu import sharding, weights
from models import batches, floats, spec_of, step, with_loss
from towers import compare, session, train

Point = collections.namedtuple('Point', ['x', 'y'])


def nest(rows, static=True):
    """A batch with every kind of tensor in every kind of container."""
    dense = tf.constant(np.arange(rows * 2).reshape(rows, 2))
    words = tf.constant([f'w{i}' for i in range(rows)])
    if not static:
        dense = tf.placeholder_with_default(dense, [None, 2])
        words = tf.placeholder_with_default(words, [None])
    indices = [[i, j] for i in range(rows) for j in range(i % 3)]
    sparse = tf.SparseTensor(
        np.array(indices, np.int64).reshape(-1, 2), np.arange(len(indices)), [rows, 4]
    )
    ragged = tf.RaggedTensor.from_row_lengths(
        np.arange(sum(i % 3 for i in range(rows))), [i % 3 for i in range(rows)]
    )
    features = {
        'dense': dense,
        'deep': {'words': words, 'pair': (dense * 2, [sparse])},
        'point': Point(ragged, None),
        'scalar': tf.constant(3.0),
        'name': 'a string',
        'vocabulary': tf.constant(['a', 'b', 'c']),
    }
    return features, tf.cast(dense[:, 0], tf.float32)


def numbers(tensors):
    """Everything as dense NumPy values; a sparse value keeps its shape."""
    with session(1) as sess:
        return sess.run(
            tf.nest.map_structure(
                lambda t: t.to_sparse() if isinstance(t, tf.RaggedTensor) else t, tensors
            )
        )


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('towers', [1, 2, 3, 8], ids='towers={}'.format)
@pytest.mark.parametrize('rows', [1, 2, 3, 7, 8, 9, 15], ids='rows={}'.format)
def test_join_is_the_inverse_of_split(rows, towers, static):
    with tf.Graph().as_default():
        features, labels = nest(rows, static)
        shards = sharding.split(features, labels, towers, ['vocabulary'])
        paths = [
            lambda f: f['dense'],
            lambda f: f['deep']['words'],
            lambda f: f['deep']['pair'][0],
            lambda f: f['deep']['pair'][1][0],
            lambda f: f['point'].x,
        ]
        joined = [sharding.join([p(f) for f in shards.features], shards.rows) for p in paths]
        joined.append(sharding.join(shards.labels, shards.rows))
        expected = [p(features) for p in paths] + [labels]
        counts = [shards.rows, shards.total]
        for ours, whole in zip(numbers(joined), numbers(expected)):
            if isinstance(whole, tf.SparseTensorValue):
                np.testing.assert_array_equal(ours.indices, whole.indices)
                np.testing.assert_array_equal(ours.dense_shape[0], whole.dense_shape[0])
                ours, whole = ours.values, whole.values
            np.testing.assert_array_equal(ours, whole)
        counts, total = numbers(counts)
        assert sum(counts) == total == rows
        assert max(counts) - min(counts) <= 1
        assert sorted(counts, reverse=True) == counts
        for shard in shards.features:
            assert shard['scalar'] is features['scalar']
            assert shard['vocabulary'] is features['vocabulary']
            assert shard['name'] == 'a string'
            assert isinstance(shard['point'], Point)
            assert shard['point'].y is None


def test_rows_by_hand():
    """5 rows over 3 towers are 2, 2 and 1; a tower without rows has the first one."""
    with tf.Graph().as_default():
        rows = tf.constant([10, 11, 12, 13, 14])
        shards = sharding.split(rows, None, 3)
        assert [list(s) for s in numbers(shards.features)] == [[10, 11], [12, 13], [14]]
        assert shards.labels == [None] * 3
        few = sharding.split(rows[:2], None, 3)
        assert [list(s) for s in numbers(few.features)] == [[10], [11], [10]]
        assert numbers(few.rows) == [1, 1, 0]


def test_weights_by_hand():
    with tf.Graph().as_default():
        shards = sharding.split(tf.zeros([5, 1]), None, 3)
        assert numbers(weights.of_shards(shards)) == {'mean': [0.4, 0.4, 0.2], 'sum': [1, 1, 1]}
        shards = sharding.split(tf.zeros([2, 1]), None, 3)
        assert numbers(weights.of_shards(shards)) == {'mean': [0.5, 0.5, 0], 'sum': [1, 1, 0]}
        shards = sharding.split(tf.constant([[1.0], [3.0]]), None, 3)
        found = numbers(weights.of_shards(shards, lambda features, labels: tf.reduce_sum(features)))
        assert found == {'mean': [0.5, 0.5, 0], 'sum': [1, 1, 0], 'units': [0.25, 0.75, 0]}


@pytest.mark.parametrize(
    ('rows', 'known'), [(8, 4), (7, None), (1, None)], ids=['divides', 'does not', 'too few']
)
def test_static_rows_are_kept_where_they_are_equal(rows, known):
    with tf.Graph().as_default():
        features, labels = nest(rows)
        shards = sharding.split(features, labels, 2, ['vocabulary'])
        assert shards.static_rows == known
        for shard, its_labels in zip(shards.features, shards.labels):
            assert shard['dense'].shape.as_list() == [known, 2]
            assert shard['deep']['pair'][1][0].shape.as_list() == [known, 4]
            assert its_labels.shape.as_list() == [known]


ROWS = {'1': 1, 'N-1': 4, 'N': 5, 'N+1': 6, '2N-1': 9}


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('rows', ROWS.values(), ids=ROWS.keys())
def test_any_batch_size_is_exact(rows, static):
    def loss(labels, output):
        return tf.reduce_mean(tf.square(labels - output)) + tf.reduce_sum(tf.abs(output))

    compare(with_loss(loss), batches(rows, steps=4), 5, static=static)


@pytest.mark.parametrize('rows', ROWS.values(), ids=ROWS.keys())
def test_convolution_and_batch_norm_without_rows(rows):
    """Batch norm sees its shard only, so it is compared by what one tower without rows changes."""

    def model_fn(features, labels, mode):
        image = tf.tile(features[:, :, None, None], [1, 3, 9, 2])
        hidden = tf.layers.conv2d(image, 4, 3, padding='same')
        hidden = tf.nn.relu(tf.layers.batch_normalization(hidden, training=True))
        hidden = tf.layers.max_pooling2d(hidden, 3, 3)
        output = tf.layers.dense(tf.layers.flatten(hidden), 1)
        loss = tf.reduce_mean(tf.square(output - labels))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            return spec_of(mode, loss, tf.train.AdamOptimizer(0.01).minimize(loss, step()))

    run = train(model_fn, batches(rows, steps=3), 5, static=False)
    assert np.isfinite(run.losses).all()
    assert all(np.isfinite(value).all() for value in run.values.values())


def test_convolution_without_rows_is_exact():
    def model_fn(features, labels, mode):
        image = tf.tile(features[:, :, None, None], [1, 3, 9, 2])
        hidden = tf.layers.max_pooling2d(tf.layers.conv2d(image, 4, 3, padding='same'), 3, 3)
        output = tf.layers.dense(tf.layers.flatten(hidden), 1)
        loss = tf.reduce_mean(tf.square(output - labels))
        return spec_of(mode, loss, tf.train.AdamOptimizer(0.01).minimize(loss, step()))

    compare(model_fn, batches(3, steps=4), 5)


def test_batch_sizes_may_change_from_step_to_step():
    steps = [batches(rows, steps=1)[0] for rows in (6, 1, 5, 8)]
    loss = with_loss(lambda labels, output: tf.reduce_mean(tf.square(labels - output)))
    compare(loss, steps, 4, static=False)


@pytest.mark.parametrize('kind', ['sparse', 'ragged', 'nested'])
def test_trains_on_nests(kind):
    """Sparse and ragged ids, and weights in a nested dict, each row's own."""

    def model_fn(features, labels, mode):
        ids = tf.cast(tf.abs(features['deep']['x']) * 10, tf.int32) % 5
        table = tf.get_variable('table', [5, 2])
        if kind == 'sparse':
            rows = tf.nn.embedding_lookup_sparse(table, features['ids'], None, combiner='sum')
        elif kind == 'ragged':
            rows = tf.reduce_sum(tf.ragged.map_flat_values(tf.gather, table, features['ids']), 1)
        else:
            rows = tf.reduce_sum(tf.gather(table, ids), 1)
        output = tf.reduce_sum(rows, 1, keepdims=True) * features['scale']
        loss = tf.reduce_mean(tf.square(output - labels['y'][0]))
        return spec_of(mode, loss, tf.train.AdagradOptimizer(0.1).minimize(loss, step()))

    def preprocess(features, labels):
        ids = tf.cast(tf.abs(features['deep']['x']) * 10, tf.int32) % 5
        ragged = tf.RaggedTensor.from_tensor(ids, 1 + tf.range(tf.shape(ids)[0]) % 3)
        return {**features, 'ids': ragged if kind == 'ragged' else ragged.to_sparse()}, labels

    data = [
        ({'deep': {'x': floats(7, 3, seed=i)}, 'scale': np.float32(2)}, {'y': (floats(7, 1),)})
        for i in range(4)
    ]
    compare(model_fn, data, 3, preprocess=preprocess)


def test_rows_that_differ_when_the_step_runs():
    data = [(floats(6, 3), floats(5, 1))]
    loss = with_loss(lambda labels, output: tf.reduce_mean(output) + tf.reduce_mean(labels))
    with pytest.raises(tf.errors.InvalidArgumentError, match='same number of rows'):
        train(loss, data, 2, static=False)
