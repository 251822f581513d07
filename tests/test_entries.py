"""Entries of sparse tensors: each device has those of its examples, as if there was one device."""

import inspect

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import floats, spec_of, step
from towers import MODES, assert_close, assert_same, compare, evaluate, train, types_run_once

IDS, COLUMNS, WIDTH = 20, 3, 2


def entries_of(rows, seed=0, in_order=True):
    """A sparse tensor: some rows are empty, some have an id twice; and its weights."""
    random = np.random.RandomState(seed)
    counts = random.randint(0, COLUMNS + 1, rows)
    counts[rows // 2] = 0
    indices = np.array([[i, j] for i in range(rows) for j in range(counts[i])]).reshape([-1, 2])
    if not in_order:
        random.shuffle(indices)
    return {
        'indices': indices.astype(np.int64),
        'ids': random.randint(0, IDS // 2, len(indices)).astype(np.int64) * 2,
        'shape': np.array([rows, COLUMNS], np.int64),
    }


def batches_of(*sizes, **options):
    """Batches of so many examples each, with sparse and with dense ids; -1 is none."""
    made = []
    for seed, rows in enumerate(sizes):
        dense = np.random.RandomState(seed).randint(-1, IDS // 3, [rows, COLUMNS])
        features = {**entries_of(rows, seed, **options), 'dense': dense.astype(np.int64)}
        made.append((features, floats(rows, 1, seed=seed) + 2))
    return made


def to_sparse(features, labels):
    features['shape'].set_shape([2])
    sparse = tf.SparseTensor(features['indices'], features['ids'], features['shape'])
    return {'sparse': sparse, 'dense': features['dense']}, labels


def network(x):
    return tf.layers.dense(tf.layers.dense(x, 4, tf.nn.tanh), 1)


def table(name='table'):
    return tf.get_variable(name, [IDS, WIDTH])


OPTIMIZERS = {
    'sgd': lambda: tf.train.GradientDescentOptimizer(0.01),
    'adam': lambda: tf.train.AdamOptimizer(0.1, epsilon=1e-3),
    'adagrad': lambda: tf.train.AdagradOptimizer(0.1),
    'ftrl': lambda: tf.train.FtrlOptimizer(0.1),
}


def regression(forward, optimizer='sgd'):
    """A model_fn that trains a network on what a function makes of the features."""

    def model_fn(features, labels, mode):
        loss = tf.losses.mean_squared_error(labels, network(forward(features)))
        return spec_of(mode, loss, OPTIMIZERS[optimizer]().minimize(loss, step()))

    return model_fn


def safe_lookup(combiner, key='sparse', weights=False):
    def lookup(features):
        ids = features[key]
        if key == 'dense':
            found = tf.where(tf.not_equal(ids, -1))
            shape = tf.shape(ids, out_type=tf.int64)
            ids = tf.SparseTensor(found, tf.gather_nd(ids, found), shape)
        weighted = None
        if weights:
            weighted = tf.SparseTensor(
                ids.indices, 0.1 + 0.1 * tf.cast(ids.values, tf.float32), ids.dense_shape
            )
        return tf.nn.safe_embedding_lookup_sparse(table(), ids, weighted, combiner)

    return lookup


ALL = [12, 7, 2, 1]
LOOKUPS = {'SparseFillEmptyRows', 'SparseReshape', 'Where', 'GatherNd', 'ResourceGather'}
LOOKUPS |= {f'SparseSegment{name}' for name in ('Sum', 'Mean', 'SqrtN')}
LOOKUPS |= {f'SparseSegment{name}Grad' for name in ('Sum', 'Mean', 'SqrtN')}


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
@pytest.mark.parametrize('key', ['sparse', 'dense'])
@pytest.mark.parametrize('combiner', ['sum', 'mean', 'sqrtn'])
def test_lookup(combiner, key, optimizer):
    """With fewer examples than towers in some batches."""
    model_fn = regression(safe_lookup(combiner, key), optimizer)
    ours, _ = compare(model_fn, batches_of(*ALL), 3, static=False, preprocess=to_sparse)
    assert not types_run_once(ours.graph) & LOOKUPS


@pytest.mark.parametrize('combiner', ['sum', 'mean', 'sqrtn'])
@pytest.mark.parametrize('key', ['sparse', 'dense'])
def test_weighted_lookup(key, combiner):
    model_fn = regression(safe_lookup(combiner, key, weights=True), 'adagrad')
    ours, _ = compare(model_fn, batches_of(*ALL), 3, static=False, preprocess=to_sparse)
    assert not types_run_once(ours.graph) & LOOKUPS


@pytest.mark.parametrize('weights', [False, True])
@pytest.mark.parametrize('strategy', ['mod', 'div'])
def test_table_in_parts(strategy, weights):
    """Each device finds the parts in which its own ids are."""

    def forward(features):
        partitioner = tf.fixed_size_partitioner(3)
        parts = tf.get_variable('table', [IDS, WIDTH], partitioner=partitioner)
        ids = features['sparse']
        found = 0.1 * tf.cast(ids.values + 1, tf.float32)
        weighted = tf.SparseTensor(ids.indices, found, ids.dense_shape) if weights else None
        return tf.nn.safe_embedding_lookup_sparse(
            list(parts), ids, weighted, 'mean', partition_strategy=strategy
        )

    model_fn = regression(forward, 'adagrad')
    ours, _ = compare(model_fn, batches_of(*ALL), 3, static=False, preprocess=to_sparse)
    forward_ops = {'ResourceGather', 'DynamicPartition', 'ParallelDynamicStitch', 'SegmentSum'}
    assert not types_run_once(ours.graph) & (forward_ops | LOOKUPS)


@pytest.mark.skipif(
    'sparse_gradient' not in inspect.signature(tf.raw_ops.SparseSegmentSum).parameters,
    reason='this TensorFlow has no sparse gradients of sums of rows',
)
@pytest.mark.parametrize('reduction', ['Sum', 'Mean', 'SqrtN'])
def test_sums_of_rows_of_a_table(reduction):
    """Towers add up rows where the table is, and each id's gradients are added up there."""

    def forward(features):
        filled, _ = tf.sparse.fill_empty_rows(features['sparse'], 0)
        reduce = getattr(tf.raw_ops, f'SparseSegment{reduction}')
        return reduce(
            data=table(),
            indices=filled.values,
            segment_ids=filled.indices[:, 0],
            sparse_gradient=True,
        )

    model_fn = regression(forward, 'adagrad')
    ours, _ = compare(model_fn, batches_of(*ALL), 3, static=False, preprocess=to_sparse)
    types = {f'SparseSegment{reduction}', f'SparseSegment{reduction}GradV2'}
    assert not types_run_once(ours.graph) & types

    def model_of_gradients(features, labels, mode):
        gradient = tf.gradients(tf.reduce_sum(forward(features) ** 2), tf.trainable_variables())[0]
        found = {'values': gradient.values, 'indices': gradient.indices}
        return tf.estimator.EstimatorSpec(mode, predictions=found)

    options = {'mode': MODES.PREDICT, 'static': False, 'preprocess': to_sparse}
    options['values'] = {'table': floats(IDS, WIDTH), 'global_step': 0}
    one, several = [evaluate(model_of_gradients, batches_of(*ALL), n, **options) for n in (0, 3)]
    assert_close(several.predictions, one.predictions, 1e-5)


@pytest.mark.parametrize('combiner', ['sum', 'mean'])
def test_entries_in_any_order(combiner):
    batches = batches_of(*ALL, in_order=False)
    model_fn = regression(safe_lookup(combiner), 'adam')
    compare(model_fn, batches, 3, static=False, preprocess=to_sparse)


@pytest.mark.parametrize('microbatches', [2, 3])
def test_microbatches(microbatches):
    model_fn = regression(safe_lookup('mean'), 'adagrad')
    options = {'static': False, 'preprocess': to_sparse}
    one = train(model_fn, batches_of(*ALL), 0, **options)
    ours = train(
        model_fn, batches_of(*ALL), 2, values=one.start, microbatches=microbatches, **options
    )
    assert_same(ours, one)


@pytest.mark.parametrize('row', [-1, 12])
def test_an_entry_in_no_row(row):
    """It's an error on several devices, as on one."""
    batches = batches_of(12)
    batches[0][0]['indices'][-1 if row > 0 else 0, 0] = row
    for towers in (0, 3):
        with pytest.raises(tf.errors.InvalidArgumentError):
            train(
                regression(safe_lookup('sum')),
                batches,
                towers,
                static=False,
                preprocess=to_sparse,
            )


def gradients(features):
    """Whoever looks at the gradient of a table sees that of one device."""
    net = safe_lookup('mean')(features)
    dense = safe_lookup('sum', 'dense')
    with tf.variable_scope('other'):
        net += dense(features)
    found = tf.gradients(tf.reduce_sum(net**2), tf.trainable_variables())
    values = {f'values {i}': gradient.values for i, gradient in enumerate(found)}
    return {**values, **{f'indices {i}': gradient.indices for i, gradient in enumerate(found)}}


def parts(features):
    """What is in the middle of lookups."""
    sparse = features['sparse']
    picked = tf.sparse.retain(sparse, sparse.values > 4)
    doubled = tf.sparse.retain(
        tf.SparseTensor(picked.indices, picked.values * 2, picked.dense_shape), picked.values < 14
    )
    filled, is_empty = tf.sparse.fill_empty_rows(doubled, 0)
    ids, places = tf.unique(filled.values)
    narrow = tf.sparse.reshape(sparse, [-1, 1])
    cumulative = tf.cumsum(doubled.values + 1)
    numbers = tf.range(tf.size(sparse.values, out_type=tf.int64))
    pairs = tf.stack([sparse.values, 2 * sparse.values], 1)
    seconds = tf.gather_nd(pairs, tf.stack([numbers, tf.ones_like(numbers)], 1))
    numbers_of_picked = tf.range(tf.size(doubled.values, out_type=tf.int64))
    found = [
        *(sparse.values + 1, sparse.indices, picked.values, picked.indices, doubled.values),
        *(doubled.indices, filled.values, filled.indices, is_empty, ids, places, ids * 2),
        *(
            narrow.indices,
            narrow.dense_shape,
            tf.sparse.to_dense(filled, validate_indices=False),
            cumulative,
        ),
        *(sparse.values * numbers, doubled.values * numbers_of_picked, seconds),
        tf.transpose(pairs) * numbers[None],
        *(tf.reduce_sum(doubled.values), tf.reduce_max(ids), tf.size(ids), tf.reduce_sum(ids)),
    ]
    return {f'part {i}': tensor for i, tensor in enumerate(found)}


@pytest.mark.parametrize('in_order', [True, False], ids=['in order', 'in any order'])
@pytest.mark.parametrize('towers', [2, 4])
def test_values_of_one_device(towers, in_order):
    """Of a batch whose entries are in any order, too: what an op gives is in that of one device."""

    def model_fn(features, labels, mode):
        found = {**parts(features), **gradients(features)}
        return tf.estimator.EstimatorSpec(mode, predictions=found)

    batches = batches_of(*ALL, in_order=in_order)
    options = {'mode': MODES.PREDICT, 'static': False, 'preprocess': to_sparse}
    values = {'table': floats(IDS, WIDTH), 'other/table': floats(IDS, WIDTH, seed=1)}
    values['global_step'] = 0
    one = evaluate(model_fn, batches, 0, values=values, **options)
    ours = evaluate(model_fn, batches, towers, values=values, **options)
    assert_close(ours.predictions, one.predictions, 1e-5)
