"""Entries of sparse tensors: each device has those of its examples, as if there was one device."""

import inspect

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu import steps
from models import floats, spec_of, step
from towers import (
    MODES,
    assert_same,
    compare,
    compare_predictions,
    evaluate,
    train,
    types_run_once,
)

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
    """Batches of so many examples each, with sparse and with dense ids; -1 is none.

    The sparse ones have weights with indices of their own, in the same order.
    """
    made = []
    for seed, rows in enumerate(sizes):
        dense = np.random.RandomState(seed).randint(-1, IDS // 3, [rows, COLUMNS])
        features = {**entries_of(rows, seed, **options), 'dense': dense.astype(np.int64)}
        features['indices of weights'] = features['indices']
        features['weights'] = floats(len(features['ids']), seed=seed) + 1
        made.append((features, floats(rows, 1, seed=seed) + 2))
    return made


def to_sparse(features, labels):
    features['shape'].set_shape([2])
    sparse = tf.SparseTensor(features['indices'], features['ids'], features['shape'])
    own = tf.SparseTensor(features['indices of weights'], features['weights'], sparse.dense_shape)
    return {'sparse': sparse, 'weights': own, 'dense': features['dense']}, labels


SPARSE = {'static': False, 'preprocess': to_sparse}


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
    ours, _ = compare(model_fn, batches_of(*ALL), 3, **SPARSE)
    assert not types_run_once(ours.graph) & LOOKUPS


@pytest.mark.parametrize('combiner', ['sum', 'mean', 'sqrtn'])
@pytest.mark.parametrize('key', ['sparse', 'dense'])
def test_weighted_lookup(key, combiner):
    model_fn = regression(safe_lookup(combiner, key, weights=True), 'adagrad')
    ours, _ = compare(model_fn, batches_of(*ALL), 3, **SPARSE)
    assert not types_run_once(ours.graph) & LOOKUPS


@pytest.mark.parametrize('optimizer', ['sgd', 'adagrad'])
@pytest.mark.parametrize('divided', [False, True], ids=['by id', 'by a number of the id'])
def test_dense_gradient(divided, optimizer, behavior):
    """Rows of the table are used without a lookup, too: so all gradients of it are dense."""

    def forward(features):
        weighted = safe_lookup('mean', weights=True)(features)
        with tf.variable_scope('', reuse=tf.AUTO_REUSE):
            ids = features['sparse']
            sums = tf.nn.safe_embedding_lookup_sparse(table(), ids, None, 'sum')
            different, places = tf.unique(ids.values)
            rows = tf.gather(tf.gather(table(), different // (4 if divided else 1)), places)
            own = tf.sparse.sparse_dense_matmul(
                ids.with_values(tf.reduce_sum(rows, 1)), floats(COLUMNS, WIDTH)
            )
            return tf.concat([weighted, sums, own @ table()[:WIDTH]], 1)

    model_fn = regression(forward, optimizer)
    ours, _ = compare(model_fn, batches_of(*ALL), 3, **SPARSE)
    assert not types_run_once(ours.graph) & {'UnsortedSegmentSum', 'AddN', *LOOKUPS}


@pytest.mark.parametrize('towers', [2, 3])
@pytest.mark.parametrize('optimizer', ['adam', 'adagrad', 'momentum'])
def test_own_gradient_of_different_ids(optimizer, towers, behavior):
    """What belongs to ids is no sum over towers: an id that several towers have counts once."""
    optimizers = {**OPTIMIZERS, 'momentum': lambda: tf.train.MomentumOptimizer(0.1, 0.9)}

    def model_fn(features, labels, mode):
        ids, _ = tf.unique(features['sparse'].values)
        gradient = tf.IndexedSlices(0.1 * tf.gather(table(), ids), ids)
        loss = tf.reduce_mean(tf.square(labels))
        [variable] = tf.trainable_variables()
        train_op = optimizers[optimizer]().apply_gradients([(gradient, variable)], step())
        return spec_of(mode, loss, train_op)

    compare(model_fn, batches_of(*ALL), towers, **SPARSE)


@pytest.mark.parametrize('towers', [2, 3])
@pytest.mark.parametrize('regularized', [True, False], ids=['made once', 'of the batch'])
def test_sums_by_id_added_to_a_dense_gradient(regularized, towers, behavior):
    """Towers have sums in rows of the table only if they have other sums in these as well."""

    def model_fn(features, labels, mode):
        found = safe_lookup('mean')(features)
        with tf.variable_scope('', reuse=True):
            rows = table()
        net = found if regularized else found + labels @ rows[:1]
        loss = tf.losses.mean_squared_error(labels, network(net))
        loss += 0.1 * tf.nn.l2_loss(rows) if regularized else 0.0
        return spec_of(mode, loss, OPTIMIZERS['adam']().minimize(loss, step()))

    ours, _ = compare(model_fn, batches_of(*ALL), towers, **SPARSE)
    plan = steps.of_graph(ours.graph).plan
    ops = [op for op in ours.graph.get_operations() if '/AddN/inputs_' in op.name]
    [to_rows] = {op.name for op in ops if 'replicate' not in op.name}
    assert (to_rows in plan.ops) == (not regularized)


@pytest.mark.parametrize('tables, devices', [(1, [1]), (2, [1, 2]), (3, [0, 1, 2])])
def test_where_ids_are_put_together(tables, devices, behavior):
    """On a device without a table, if there is one: towers look up ids of their own."""

    def forward(features):
        found = []
        for number in range(tables):
            with tf.variable_scope(f'part_{number}'):
                found.append(safe_lookup('sum')(features))
        return tf.concat(found, 1)

    model_fn = regression(forward, 'adagrad')
    ours, _ = compare(model_fn, batches_of(*ALL), 3, **SPARSE)
    merges = [op for op in ours.graph.get_operations() if '/replicate/Unique_' in op.name]
    found = sorted(tf.DeviceSpec.from_string(op.device).device_index for op in merges)
    assert found == devices


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
    ours, _ = compare(model_fn, batches_of(*ALL), 3, **SPARSE)
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
    ours, _ = compare(model_fn, batches_of(*ALL), 3, **SPARSE)
    types = {f'SparseSegment{reduction}', f'SparseSegment{reduction}GradV2'}
    assert not types_run_once(ours.graph) & types

    def model_of_gradients(features, labels, mode):
        gradient = tf.gradients(tf.reduce_sum(forward(features) ** 2), tf.trainable_variables())[0]
        found = {'values': gradient.values, 'indices': gradient.indices}
        return tf.estimator.EstimatorSpec(mode, predictions=found)

    values = {'table': floats(IDS, WIDTH), 'global_step': 0}
    compare_predictions(model_of_gradients, batches_of(*ALL), 3, values=values, **SPARSE)


@pytest.mark.parametrize('combiner', ['sum', 'mean'])
def test_entries_in_any_order(combiner):
    batches = batches_of(*ALL, in_order=False)
    model_fn = regression(safe_lookup(combiner), 'adam')
    compare(model_fn, batches, 3, **SPARSE)


def lookup_without_filling(features):
    """Ids are those of entries in any order, and none is added for an example without any."""
    sparse = features['sparse']
    unique, places = tf.unique(sparse.values)
    rows = tf.gather(tf.nn.embedding_lookup(table(), unique), places)
    count = tf.size(features['dense'][:, 0])
    return tf.math.unsorted_segment_sum(rows, sparse.indices[:, 0], count)


@pytest.mark.parametrize('optimizer', OPTIMIZERS)
def test_different_ids_of_entries_in_any_order(optimizer, behavior):
    batches = batches_of(*ALL, in_order=False)
    model_fn = regression(lookup_without_filling, optimizer)
    ours, _ = compare(model_fn, batches, 3, **SPARSE)
    once = steps.of_graph(ours.graph).plan.once
    assert not {'Unique', 'GatherV2', 'UnsortedSegmentSum'} & once.keys()


@pytest.mark.parametrize('forward', [safe_lookup('mean'), lookup_without_filling])
@pytest.mark.parametrize('microbatches', [2, 3])
def test_microbatches(microbatches, forward):
    model_fn = regression(forward, 'adagrad')
    compare(model_fn, batches_of(*ALL), 2, microbatches=microbatches, **SPARSE)


@pytest.mark.parametrize('row', [-1, 12])
def test_an_entry_in_no_row(row):
    """It's an error on several devices, as on one."""
    batches = batches_of(12)
    batches[0][0]['indices'][-1 if row > 0 else 0, 0] = row
    for towers in (0, 3):
        with pytest.raises(tf.errors.InvalidArgumentError):
            train(regression(safe_lookup('sum')), batches, towers, **SPARSE)


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


def combined(features):
    """Entries that are put together with others, sorted, or cut."""
    sparse = features['sparse']
    dense = tf.sparse.from_dense(features['dense'] + 1)
    ordered = tf.sparse.reorder(sparse)
    shape = tf.stack([sparse.dense_shape[0], 2])
    filled, _ = tf.sparse.fill_empty_rows(sparse, 0)
    return [
        *(ordered, tf.sparse.concat(1, [sparse, dense, sparse]), tf.sparse.concat(0, [sparse] * 2)),
        *(
            tf.sparse.slice(one, start, shape)
            for one in (sparse, ordered)
            for start in ([0, 1], [0, 0])
        ),
        filled,
    ]


def size64(tensor):
    return tf.size(tensor, out_type=tf.int64)


def sparse_of(mask, values):
    """What a mask leaves of a matrix, as a sparse tensor of as many rows."""
    found = tf.where(mask)
    return tf.SparseTensor(found, tf.gather_nd(values, found), tf.shape(mask, out_type=tf.int64))


def taller(sparse, times=2):
    """The same entries in a sparse tensor of more rows, the last ones of which are empty."""
    rows, columns = tf.unstack(sparse.dense_shape)
    return tf.SparseTensor(sparse.indices, sparse.values, [times * rows, columns])


def several_ids_of_an_entry(features):
    """Three ids for each entry that a mask leaves."""
    ids = features['dense']
    chosen = tf.boolean_mask(ids, ids[:, 0] > 0) % 4
    flat = tf.reshape(chosen, [-1])
    unique, places = tf.unique(flat)
    scale = tf.cast(flat, tf.float32) + 1
    looked_up = tf.gather(tf.gather(table(), unique), places) * scale[:, None]
    gradient = tf.gradients(tf.reduce_sum(looked_up**2), looked_up)[0]
    sums = tf.math.unsorted_segment_sum(gradient, places, tf.size(unique))
    return unique, looked_up, sums


def ids_in_blocks(features):
    """The ids of two columns, one column after the other."""
    ids = features['dense']
    chosen = tf.boolean_mask(ids, ids[:, 0] > 0) % 4
    flat = tf.reshape(tf.transpose(chosen[:, :2]), [-1])
    unique, places = tf.unique(flat)
    looked_up = tf.gather(tf.gather(table(), unique), places)
    return unique, looked_up, tf.math.unsorted_segment_sum(looked_up, places, tf.size(unique))


def masks_in_blocks(features):
    """What a mask leaves, of a matrix with the columns one after the other."""
    ids = tf.reshape(tf.transpose(features['dense']), [-1, 1])
    filled, is_empty = tf.sparse.fill_empty_rows(sparse_of(ids > 0, ids), 0)
    unique, places = tf.unique(filled.values)
    rows = tf.gather(tf.gather(table(), unique), places)
    return filled.values, is_empty, rows, tf.math.segment_sum(rows, filled.indices[:, 0])


def several_entries_of_an_id(features):
    """What belongs to ids, flat: an entry's place is that of another id's."""
    filled, _ = tf.sparse.fill_empty_rows(features['sparse'], 0)
    unique, places = tf.unique(filled.values)
    flat = tf.reshape(tf.gather(table(), unique), [-1])
    flat_rows = tf.reshape(flat, [-1, 1])
    sums = tf.sparse.segment_sum(flat_rows, places, tf.cast(filled.indices[:, 0], tf.int32))
    return tf.gather(flat, places), sums


def ids_along_another_axis(features):
    """What belongs to ids, transposed, and what is picked of that."""
    filled, _ = tf.sparse.fill_empty_rows(features['sparse'], 0)
    unique, places = tf.unique(filled.values)
    columns = tf.transpose(tf.gather(table(), unique))
    return columns, tf.cumsum(columns, axis=1), tf.gather(columns, places, axis=1)


def reshaped_from_taller(features):
    """Pairs of rows become one, and what is in a row goes to another tower's."""
    double = taller(features['sparse'])
    rows = double.dense_shape[0] // 2
    wide = tf.sparse.reshape(double, tf.stack([rows, 2 * double.dense_shape[1]]))
    narrow = tf.sparse.reshape(double, [-1, 1])
    filled, is_empty = tf.sparse.fill_empty_rows(wide, 0)
    return wide.indices, narrow.indices, filled.values, filled.indices, is_empty


def reshaped_to_shorter(features):
    """Four rows of half the batch's columns each, of which the last ones are empty."""
    double = taller(features['sparse'], 4)
    halved = tf.sparse.reshape(double, tf.stack([2 * size64(features['dense'][:, 0]), -1]))
    return halved.indices, tf.sparse.fill_empty_rows(halved, 0)[0].values


def filled_taller(features):
    filled, is_empty = tf.sparse.fill_empty_rows(taller(features['sparse']), 0)
    unique, places = tf.unique(filled.values)
    rows = tf.gather(tf.gather(table(), unique), places)
    return filled.values, is_empty, tf.math.segment_sum(rows, filled.indices[:, 0])


def crossed_taller(features):
    double = taller(features['sparse'])
    crossed = tf.sparse.cross_hashed([double, double], 5)
    filled, _ = tf.sparse.fill_empty_rows(crossed, 0)
    return crossed.indices, crossed.values, crossed.dense_shape, filled.values


def joined_taller(features):
    """Put together with others, sorted, or cut, in more rows than the batch has; and among rows."""
    sparse = features['sparse']
    double = taller(sparse)
    halved = tf.sparse.reshape(sparse, tf.stack([-1, 1]))
    rows = sparse.dense_shape[0]
    found = [
        tf.sparse.concat(1, [double, double]),
        tf.sparse.concat(0, [sparse, double]),
        tf.sparse.concat(-1, [halved, halved]),
        tf.sparse.reorder(double),
        tf.sparse.reorder(halved),
        tf.sparse.slice(double, [0, 0], [rows, 2]),
        tf.sparse.slice(double, [0, 1], double.dense_shape),
        tf.sparse.slice(tf.sparse.reorder(halved), [0, 0], [COLUMNS * rows, 1]),
        tf.sparse.slice(tf.sparse.reorder(sparse), [1, 0], [rows, 2]),
        tf.sparse.slice(tf.sparse.reorder(sparse), [0, 1], [rows - 1, 1]),
    ]
    return [[one.indices, one.values, one.dense_shape] for one in found]


def summed_taller(features):
    """Into more rows than the batch has, and into as many."""
    weights = table()
    filled, _ = tf.sparse.fill_empty_rows(features['sparse'], 0)
    count = tf.size(features['dense'][:, 0])
    rows = tf.cast(filled.indices[:, 0], tf.int32)
    sums = [
        tf.sparse.segment_mean(weights, filled.values, rows, num_segments=times * count)
        for times in (1, 2)
    ]
    return sums + [tf.gradients(tf.reduce_sum(one**2), tf.trainable_variables()) for one in sums]


def masked_columns(features):
    """A mask of `begin` that TensorFlow ignores, as the same dimension is shrunk."""
    sparse = features['sparse']
    found = []
    for mask in (1, 3):
        for number in (0, 1):
            column = tf.raw_ops.StridedSlice(
                input=sparse.indices,
                begin=[0, number],
                end=[0, number + 1],
                strides=[1, 1],
                begin_mask=mask,
                end_mask=mask,
                shrink_axis_mask=2,
            )
            count = tf.size(features['dense'][:, 0])
            found += [column, tf.math.unsorted_segment_sum(sparse.values, column, count)]
    return found


def columns_in_other_places(features):
    """Some columns of indices, together with others, before and behind them."""
    sparse = features['sparse']
    indices, ids = sparse.indices, sparse.values[:, None]
    found = [
        *(indices[:, :1], indices[:, 0:2], indices[:, 1:], indices[:, :-1], indices[:, -2:]),
        *(indices[1:, :1], indices[::2, :1], indices[:, ::2], indices[:, ::-1], indices[..., :1]),
        *(indices[:, :1, None], indices[:, :0]),
    ]
    first = indices[:, :-1]
    joined = [
        tf.concat([first, ids], 1),
        tf.concat([first, ids, indices], -1),
        tf.concat([ids, first], 1),
        tf.concat([first, first], 0),
        tf.concat([first, tf.range(size64(ids))[:, None]], 1),
    ]
    shape = tf.stack([sparse.dense_shape[0], IDS])
    sums = [
        tf.math.unsorted_segment_sum(sparse.values, tf.reshape(indices[:, :1], [-1]), shape[0]),
        tf.scatter_nd(joined[0], ids, [shape[0], IDS, 1]),
        tf.scatter_nd(joined[2], ids, [shape[1], shape[0], 1]),
        tf.gather_nd(tf.cast(features['dense'], tf.int64), joined[0] // [[1, IDS]]),
    ]
    return found + joined + sums


def columns_of_all(features):
    """Of indices of which each row has equally many."""
    ids = features['dense']
    rows = tf.tile(tf.range(size64(ids[:, 0]))[:, None], [1, COLUMNS])
    columns = tf.tile(tf.range(COLUMNS, dtype=tf.int64)[None], [size64(ids[:, 0]), 1])
    indices = tf.stack([tf.reshape(rows, [-1]), tf.reshape(columns, [-1])], 1)
    sparse = tf.SparseTensor(indices, tf.reshape(ids, [-1]), tf.shape(ids, out_type=tf.int64))
    same = tf.sparse.reshape(sparse, [-1, COLUMNS])
    column = same.indices[:, 1]
    return column, column + same.values, tf.math.segment_sum(column, same.indices[:, 0])


def entries_of_ids(features):
    """A sparse tensor whose rows are different ids, of which towers may have the same."""
    weights = table()
    filled, _ = tf.sparse.fill_empty_rows(features['sparse'], 0)
    unique, _ = tf.unique(filled.values)
    digits = tf.stack([unique % 4, unique // 4], 1)
    sparse = sparse_of(digits > 1, digits)
    of_ids, is_empty = tf.sparse.fill_empty_rows(sparse, 0)
    rows = tf.cast(of_ids.indices[:, 0], tf.int32)
    sums = tf.sparse.segment_sum(weights, of_ids.values, rows)
    direct = tf.sparse.segment_sum(
        weights,
        sparse.values,
        tf.cast(sparse.indices[:, 0], tf.int32),
        num_segments=tf.size(unique),
    )
    gradient = tf.gradients(tf.reduce_sum(direct**2), tf.trainable_variables())
    return of_ids.values, is_empty, sums, direct, gradient


def rows_of_some_rows(features):
    """Rows of what a mask leaves, filled up: of the examples, some still have no entry."""
    ids = features['dense']
    left = tf.where(ids[:, 0] > 2)
    digits = tf.gather_nd(ids, left)
    filled, _ = tf.sparse.fill_empty_rows(sparse_of(digits > 3, digits), 0)
    examples = tf.gather(tf.reshape(left, [-1]), filled.indices[:, 0])
    return examples, tf.math.segment_sum(filled.values, examples)


def rows_of_two_widths(features):
    """Three rows an example: of one of its columns each, or of two."""
    sparse = features['sparse']
    rows = tf.unstack(sparse.dense_shape)[0]
    wider = tf.SparseTensor(sparse.indices, sparse.values, [rows, 2 * COLUMNS])
    found = []
    for one, width in ((sparse, 1), (wider, 2)):
        reshaped = tf.sparse.reshape(one, tf.stack([COLUMNS * rows, width]))
        filled, is_empty = tf.sparse.fill_empty_rows(reshaped, 0)
        numbers = tf.range(size64(filled.values))
        sums = tf.math.segment_sum(numbers, filled.indices[:, 0])
        found += [filled.values, is_empty, filled.values * numbers, sums]
    return found


def two_ids_of_an_entry(features):
    """Ids of which an entry has two: there are places for each, and half as many rows."""
    filled, _ = tf.sparse.fill_empty_rows(features['sparse'], 0)
    pairs = tf.stack([filled.values, filled.values // 2], 1)
    unique, places = tf.unique(tf.reshape(pairs, [-1]))
    rows = tf.reshape(tf.gather(tf.gather(table(), unique), places), [-1, 2 * WIDTH])
    numbers = tf.cast(tf.repeat(filled.indices[:, 0], 2), tf.int32)
    both = tf.sparse.segment_mean(tf.gather(tf.global_variables()[-1], unique), places, numbers)
    gradient = tf.gradients(tf.reduce_sum(both**2), tf.global_variables()[-1])[0]
    return unique, rows, tf.math.segment_sum(rows, filled.indices[:, 0]), both, gradient.values


def summed_by_id_of_other_rows(features):
    """What isn't of the entries themselves, by their places, and by all ids."""
    filled, _ = tf.sparse.fill_empty_rows(features['sparse'], 0)
    unique, places = tf.unique(filled.values)
    count = tf.size(unique)
    numbers = tf.range(tf.size(filled.values))
    return [
        tf.math.unsorted_segment_sum(numbers, places, count),
        tf.math.unsorted_segment_sum(numbers, places, 2 * count),
        tf.math.unsorted_segment_max(numbers, places, count),
        tf.cumsum(unique),
        tf.range(tf.size(unique, out_type=tf.int64)) * unique,
        tf.reduce_max(unique),
        unique[::-1],
        tf.concat([unique, unique], 0),
        tf.reshape(tf.stack([unique, unique + 1], 1), [-1]),
        tf.gather(unique, tf.range(count)),
        tf.boolean_mask(unique, unique > 4),
    ]


def dense_taller(features):
    """Made dense, with more rows than the batch has."""
    double = taller(features['sparse'])
    values = tf.cast(double.values, tf.float32)
    double = tf.SparseTensor(double.indices, values, double.dense_shape)
    return (
        tf.sparse.to_dense(double),
        tf.sparse.sparse_dense_matmul(double, floats(COLUMNS, 2)),
        tf.sparse.reduce_sum(double, 1),
        tf.math.segment_sum(double.values, double.indices[:, 0]),
    )


def masked_taller(features):
    """What a mask finds, in a sparse tensor with more rows than the mask."""
    ids = features['dense']
    double = taller(sparse_of(ids > 2, ids), 3)
    filled, is_empty = tf.sparse.fill_empty_rows(double, 0)
    narrow = tf.sparse.reshape(double, [-1, 1])
    return narrow.indices, narrow.dense_shape, filled.values, filled.indices, is_empty


def texts_of_entries(features):
    """Parts of each entry's text, and each entry several times, whatever order entries are in."""
    ids = features['sparse'].values
    parts = tf.string_split(tf.strings.join([tf.strings.as_string(ids), 'a b'], ' '))
    mask = tf.sequence_mask(ids % 3 + 1, 3)
    several = tf.boolean_mask(tf.tile(ids[:, None], [1, 3]), mask)
    one_after_another = tf.reshape(tf.stack([ids, ids + 1], 1), [-1])
    return parts.indices, parts.values, several, tf.repeat(ids, ids % 3), one_after_another


def entries_in_two_parts(features):
    """Some of them, before and after their positions, in whatever order entries are."""
    values = features['sparse'].values
    which = tf.cast(values % 4 // 2, tf.int32)
    few = tf.dynamic_partition(values % 2, which, 2)
    positions = tf.dynamic_partition(tf.range(size64(values)), which, 2)
    parts = tf.dynamic_partition(features['sparse'].indices[:, 1], which, 2)
    together = tf.dynamic_stitch([tf.cast(one, tf.int32) for one in positions], parts)
    twice = tf.dynamic_partition(tf.repeat(values, 2), tf.repeat(which, 2), 2)
    return few, positions, parts, together, twice


def different_ids(features):
    """Of entries that aren't filled up, in whatever order they are, and of what is left of them."""
    found = []
    sparse = features['sparse']
    for entries in (sparse, tf.sparse.retain(sparse, sparse.values % 4 < 2)):
        unique, places = tf.unique(entries.values)
        looked_up = tf.gather(table_of_ids(), unique)
        rows = tf.gather(looked_up, places)
        count = tf.size(features['dense'][:, 0])
        sums = tf.math.unsorted_segment_sum(rows, entries.indices[:, 0], count)
        both = tf.gradients(tf.reduce_sum(sums**2), [looked_up, table_of_ids()])
        found += [unique, places, unique // 3, looked_up, sums, tf.reduce_sum(looked_up), *both]
        found += tf.dynamic_partition(unique, tf.cast(unique % 4 // 2, tf.int32), 2)
        found.append(tf.unique(unique // 3)[0])
    return found


def sums_by_different_ids(features):
    """What belongs to ids that are different already is added up by id, or by a number of it."""
    ids, _ = tf.unique(features['sparse'].values)
    same, places = tf.unique(ids)
    found = []
    for rows in (tf.gather(table_of_ids(), ids), ids, tf.zeros([size64(ids), 2]) + 1):
        found.append(tf.math.unsorted_segment_sum(rows, places, tf.size(same)))
        found.append(tf.math.unsorted_segment_sum(rows, places, 2 * tf.size(same)))
        found += [tf.math.unsorted_segment_sum(rows, ids // by, IDS) for by in (1, 2)]
        found += [2 * found[-4], tf.reduce_sum(found[-4], 0), tf.gather(found[-4], places)]
    return found


def reshaped_sums_by_id(features):
    """Gradients by id in other shapes, of which one dimension may be left open.

    A tower without ids has an empty one.
    """
    ids, places = tf.unique(features['sparse'].values)
    looked_up = tf.gather(table_of_ids(), ids)
    gradient = tf.gradients(tf.reduce_sum(tf.gather(looked_up, places) ** 2), looked_up)[0]
    found = []
    for shape in ([None, -1], [None, WIDTH, 1], [None, 1, -1], [-1, WIDTH], [WIDTH, None]):
        sums = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, tf.size(ids))
        count = tf.shape(sums)[0]
        reshaped = tf.reshape(sums, [count if size is None else size for size in shape])
        rows = tf.shape(features['dense'])[0]
        found += [reshaped, tf.fill([rows, tf.shape(reshaped)[-1]], 2.0)]
    return found


def ids_of_examples(features):
    """Different ids of all examples: one or several of each, and in blocks."""
    ids = features['dense'] % 6
    found = []
    for flat in (ids[:, 1], tf.reshape(ids, [-1]), tf.reshape(tf.transpose(ids), [-1])):
        unique, places = tf.unique(flat)
        looked_up = tf.gather(table_of_ids(), unique)
        rows = tf.gather(looked_up, places)
        scaled = rows * (1 + tf.cast(flat, tf.float32))[:, None]
        gradients = tf.gradients(tf.reduce_sum(scaled**2), [looked_up, table_of_ids()])
        sums = tf.math.unsorted_segment_sum(tf.range(tf.size(flat)), places, tf.size(unique))
        in_rows = tf.reshape(rows, [-1, tf.size(flat) // tf.size(ids[:, 0]), WIDTH])
        found += [unique, places, rows, in_rows, *gradients, sums, tf.reduce_sum(unique)]
        found += [tf.gather(unique, places), tf.gather(table_of_ids(), places), tf.size(unique)]
    count = tf.size(ids[:, 0])
    for shape in ([-1, 3], [count, 3], [count, -1], [3, -1], [-1, 3, 1], [3 * count, 1], [-1]):
        unique, places = tf.unique(tf.reshape(ids, [-1]))
        looked_up = tf.gather(table_of_ids(), unique)
        arranged = tf.reshape(places, shape)
        rows = tf.gather(looked_up, arranged)
        scaled = rows * (1 + tf.cast(arranged, tf.float32))[..., None]
        sums = tf.math.unsorted_segment_sum(rows, arranged, tf.size(unique))
        found += [arranged, rows, sums, *tf.gradients(tf.reduce_sum(scaled**2), table_of_ids())]
    return found


def sums_of_ids_of_examples(features):
    """Of ids that all examples have several of, added up by example or by another number."""
    ids = tf.maximum(features['dense'], 0)
    unique, places = tf.unique(tf.reshape(ids, [-1]))
    looked_up = tf.gather(table_of_ids(), unique)
    found = []
    for count in (COLUMNS, 1):  # Each example has three of them, or one of each three has one.
        numbers = tf.repeat(tf.range(tf.size(places) // count), count)
        sums = tf.sparse.segment_mean(looked_up, places, numbers)
        found += [sums, *tf.gradients(tf.reduce_sum(sums**2), [looked_up, table_of_ids()])]
    filled, _ = tf.sparse.fill_empty_rows(features['sparse'], 0)
    sums = tf.gather(looked_up, tf.unique(ids[:, 0])[1])
    return [*found, sums, tf.gather(sums, filled.indices[:, 0])]


def table_of_ids():
    with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
        return table()


HOSTILE = [
    ids_of_examples,
    sums_of_ids_of_examples,
    joined_taller,
    columns_in_other_places,
    different_ids,
    sums_by_different_ids,
    reshaped_sums_by_id,
    entries_in_two_parts,
    texts_of_entries,
    rows_of_two_widths,
    two_ids_of_an_entry,
    summed_by_id_of_other_rows,
    dense_taller,
    masked_taller,
    several_ids_of_an_entry,
    ids_in_blocks,
    masks_in_blocks,
    several_entries_of_an_id,
    ids_along_another_axis,
    reshaped_from_taller,
    reshaped_to_shorter,
    filled_taller,
    crossed_taller,
    summed_taller,
    masked_columns,
    columns_of_all,
    entries_of_ids,
    rows_of_some_rows,
]


@pytest.mark.parametrize('function', HOSTILE, ids=lambda f: f.__name__)
def test_other_shapes(function, behavior):
    """Sizes other than those of which towers have shares, or entries of what isn't an example."""

    def model_fn(features, labels, mode):
        found = tf.nest.flatten(function(features))
        found = {f'part {i}': tf.convert_to_tensor(one) for i, one in enumerate(found)}
        return tf.estimator.EstimatorSpec(mode, predictions=found)

    batches = batches_of(12, 7, 3)
    for features, _ in batches:
        features['dense'][-1] = 4  # so that each selection has something
    values = {'table': floats(IDS, WIDTH), 'global_step': 0}
    compare_predictions(model_fn, batches, 3, values=values, **SPARSE)


@pytest.mark.parametrize('in_order', [True, False], ids=['in order', 'in any order'])
@pytest.mark.parametrize('towers', [2, 4])
def test_values_of_one_device(towers, in_order):
    """Of a batch whose entries are in any order, too: what an op gives is in that of one device."""

    def model_fn(features, labels, mode):
        found = {**parts(features), **gradients(features)}
        found.update(zip('abcde', texts_of_entries(features)))
        more = [entries_in_two_parts(features), different_ids(features), combined(features)]
        more = tf.nest.flatten(more, expand_composites=True)
        found.update({f'more {i}': one for i, one in enumerate(more)})
        return tf.estimator.EstimatorSpec(mode, predictions=found)

    batches = batches_of(*ALL, in_order=in_order)
    values = {'table': floats(IDS, WIDTH), 'other/table': floats(IDS, WIDTH, seed=1)}
    values['global_step'] = 0
    compare_predictions(model_fn, batches, towers, values=values, **SPARSE)


# Entries that are put together with others, sorted, cut or filled up.


def joined(features):
    """Ids of two features, with weights."""
    sparse = features['sparse']
    others = sparse.with_values(sparse.values // 2)
    ids = tf.sparse.concat(1, [sparse, tf.sparse.from_dense(features['dense'] + 1), others])
    weights = ids.with_values(tf.cast(ids.values, tf.float32) / IDS + 1)
    return tf.nn.safe_embedding_lookup_sparse(table(), ids, weights)


def joined_with_weights(features):
    """Weights are put together as their ids are."""
    sparse, weights = features['sparse'], features['weights']
    weights = tf.SparseTensor(sparse.indices, weights.values, sparse.dense_shape)
    ids = tf.sparse.concat(1, [sparse, sparse.with_values(sparse.values // 2)])
    weights = tf.sparse.concat(1, [weights, weights])
    return tf.nn.safe_embedding_lookup_sparse(table(), ids, weights)


def sorted_and_cut(features):
    """The first ids of each example, with their weights."""
    sparse = tf.sparse.reorder(features['sparse'])
    sparse = tf.sparse.slice(sparse, [0, 0], [sparse.dense_shape[0], 2])
    weights = sparse.with_values(tf.cast(sparse.values, tf.float32) / IDS + 1)
    return tf.nn.safe_embedding_lookup_sparse(table(), sparse, weights)


def sorted_alike(features):
    """Ids and trained weights of the same entries."""
    sparse, own = features['sparse'], features['weights']
    scale = tf.get_variable('scale', [], initializer=tf.ones_initializer())
    weights = tf.SparseTensor(sparse.indices, own.values * scale, sparse.dense_shape)
    return tf.nn.safe_embedding_lookup_sparse(
        table(), tf.sparse.reorder(sparse), tf.sparse.reorder(weights), 'sum'
    )


def filled_with_trained(features):
    """A score for each id, and one for examples without ids: all of these are trained."""
    ids = features['sparse']
    scores = tf.reduce_sum(tf.gather(table(), ids.values), 1)
    default = tf.get_variable('default', [], initializer=tf.ones_initializer())
    filled, _ = tf.sparse.fill_empty_rows(ids.with_values(scores), default)
    sums = tf.math.segment_sum(tf.tanh(filled.values), filled.indices[:, 0])
    return tf.reshape(sums, [-1, 1])


def indicators(features):
    """Which ids each example has."""
    return tf.cast(tf.sparse.to_indicator(features['sparse'], IDS), tf.float32) @ table()


def ids_looked_up_once(features):
    """Each different id of the batch is looked up once."""
    unique, places = tf.unique(tf.reshape(tf.maximum(features['dense'], 0), [-1]))
    rows = tf.nn.embedding_lookup(table(), unique)
    sums = tf.reduce_sum(tf.gather(rows, tf.reshape(places, [-1, COLUMNS])) ** 2, 1)
    return sums + tf.reduce_sum(tf.reshape(tf.gather(rows, places), [-1, COLUMNS, WIDTH]), 1)


COMBINED = [
    joined,
    joined_with_weights,
    sorted_and_cut,
    sorted_alike,
    filled_with_trained,
    indicators,
    ids_looked_up_once,
]
OF_ENTRIES = {'SparseConcat', 'SparseReorder', 'SparseSlice', 'SparseFillEmptyRowsGrad', 'Unique'}


@pytest.mark.parametrize('optimizer', ['sgd', 'adagrad'])
@pytest.mark.parametrize('in_order', [True, False], ids=['in order', 'in any order'])
@pytest.mark.parametrize('forward', COMBINED, ids=lambda f: f.__name__)
def test_combined_entries(forward, in_order, optimizer, behavior):
    batches = batches_of(*ALL, in_order=in_order)
    ours, _ = compare(regression(forward, optimizer), batches, 3, **SPARSE)
    assert not types_run_once(ours.graph) & (OF_ENTRIES | LOOKUPS)


def test_an_id_twice_in_an_example_with_other_weights(behavior):
    """In which order they are sorted depends on all entries of the batch."""
    count = 40  # More than `std::sort` keeps in their order.

    def model_fn(features, labels, mode):
        sparse, weights = features['sparse'], features['weights']
        weighted = tf.sparse.merge(sparse, sparse.with_values(weights.values), IDS)
        joined = tf.sparse.concat(1, [weighted, weighted])
        return tf.estimator.EstimatorSpec(
            mode,
            predictions={
                'weights': weighted.values,
                'dense': tf.sparse.to_dense(weighted, validate_indices=False),
                'joined': joined.values,
            },
        )

    features, labels = batches_of(12)[0]
    indices = np.argwhere(np.ones([12, count]))
    features.update({'indices': indices, 'indices of weights': indices})
    features['ids'] = np.arange(12 * count) % 5
    features['weights'] = floats(12 * count)
    features['shape'] = np.array([12, count])
    compare_predictions(model_fn, [(features, labels)], 3, values={'global_step': 0}, **SPARSE)


@pytest.mark.parametrize('forward', COMBINED, ids=lambda f: f.__name__)
def test_microbatches_of_combined_entries(forward):
    model_fn = regression(forward, 'adagrad')
    compare(model_fn, batches_of(*ALL), 2, microbatches=2, **SPARSE)


# Weights of ids that are a sparse tensor of their own.


def lookup_with_own_weights(combiner='mean'):
    """Weights are trained as well, so that gradients go through them."""

    def lookup(features):
        own = features['weights']
        scale = tf.get_variable('scale', [], initializer=tf.ones_initializer())
        scaled = tf.SparseTensor(own.indices, scale * own.values, own.dense_shape)
        return tf.nn.safe_embedding_lookup_sparse(table(), features['sparse'], scaled, combiner)

    return lookup


@pytest.mark.parametrize('in_order', [True, False], ids=['in order', 'in any order'])
@pytest.mark.parametrize('combiner', ['sum', 'mean', 'sqrtn'])
def test_own_weights(combiner, in_order, behavior):
    model_fn = regression(lookup_with_own_weights(combiner), 'adagrad')
    batches = batches_of(*ALL, in_order=in_order)
    ours, _ = compare(model_fn, batches, 3, **SPARSE)
    assert not types_run_once(ours.graph) & LOOKUPS


def test_own_weights_in_another_order(behavior):
    """Their indices don't count: a weight is that of the id at the same place."""
    batches = batches_of(*ALL)
    for features, _ in batches:
        features['indices of weights'] = features['indices'][::-1]
    model_fn = regression(lookup_with_own_weights(), 'adagrad')
    ours, _ = compare(model_fn, batches, 3, **SPARSE)
    assert not types_run_once(ours.graph) & LOOKUPS


@pytest.mark.parametrize('microbatches', [2, 3])
def test_microbatches_of_own_weights(microbatches):
    model_fn = regression(lookup_with_own_weights(), 'adagrad')
    compare(model_fn, batches_of(*ALL), 2, microbatches=microbatches, **SPARSE)


@pytest.mark.parametrize('count', ['fewer', 'more', 'one', 'none'])
def test_other_numbers_of_weights(count, behavior):
    """It's an error on several devices, as on one."""
    batches = batches_of(12)
    features, _ = batches[0]
    ids = len(features['ids'])
    weights = {'fewer': ids - 1, 'more': ids + 1, 'one': 1, 'none': 0}[count]
    features['weights'] = floats(weights) + 1
    features['indices of weights'] = np.resize(features['indices'], [weights, 2])
    model_fn = regression(lookup_with_own_weights())
    with pytest.raises(tf.errors.InvalidArgumentError):
        train(model_fn, batches, 0, **SPARSE)
    message = (
        rf'same number of entries.*feature .+sparse.+, feature .+weights.+ \[{ids} {weights}\]'
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        train(model_fn, batches, 3, **SPARSE)


def no_entries(features):
    """Of a batch that has none."""
    nothing = np.zeros([0, 2], np.int64)
    more = {'indices': nothing, 'indices of weights': nothing}
    return {**features, **more, 'ids': np.zeros(0, np.int64), 'weights': floats(0)}


def test_own_weights_of_no_entries():
    batches = [(no_entries(features), labels) for features, labels in batches_of(*ALL)]
    batches += batches_of(6)
    compare(regression(lookup_with_own_weights()), batches, 3, **SPARSE)


def weights_by_themselves(features):
    """They have indices of their own, and a use of their own."""
    own, sparse = features['weights'], features['sparse']
    filled, is_empty = tf.sparse.fill_empty_rows(own, 0.5)
    kept = tf.sparse.retain(own, own.values > 1)
    both = own.values * tf.cast(sparse.values, tf.float32)
    return (
        *(both, own.values, own.indices, filled.values, filled.indices, is_empty),
        *(kept.values, kept.indices, tf.where(own.values > 1, both, own.values)),
        tf.sparse.to_dense(tf.sparse.reorder(own)),
        tf.sparse.sparse_dense_matmul(own, floats(COLUMNS, 2)),
        tf.sparse.sparse_dense_matmul(sparse.with_values(both), floats(COLUMNS, 2)),
        tf.sparse.sparse_dense_matmul(own.with_values(both), floats(COLUMNS, 2)),
        tf.reduce_sum(own.values),
        tf.cumsum(both),
    )


def test_weights_by_themselves(behavior):
    def model_fn(features, labels, mode):
        found = {f'part {i}': one for i, one in enumerate(weights_by_themselves(features))}
        return tf.estimator.EstimatorSpec(mode, predictions=found)

    batches = batches_of(12, 7, 3, 1) + batches_of(12, 7, in_order=False)
    for features, _ in batches:
        order = np.random.RandomState(1).permutation(len(features['ids']))
        features['indices of weights'] = features['indices'][order]
    compare_predictions(model_fn, batches, 3, **SPARSE)


def test_several_sparse_tensors_entry_by_entry(behavior):
    """Each is used with the one before."""

    def preprocess(features, labels):
        made, labels = to_sparse(features, labels)
        indices = tf.cast(tf.cast(features['indices'], tf.int32), tf.int64)  # the same numbers
        shape = made['sparse'].dense_shape
        made['third'] = tf.SparseTensor(indices, features['weights'] ** 2, shape)
        made['fourth'] = tf.SparseTensor(indices, features['weights'] + 2, shape)
        return made, labels

    def model_fn(features, labels, mode):
        second, third, fourth = [features[name].values for name in ('weights', 'third', 'fourth')]
        both = third * fourth + second * third
        values = both + tf.cast(features['sparse'].values, tf.float32)
        weighted = features['sparse'].with_values(values)
        rows = tf.sparse.sparse_dense_matmul(weighted, table()[:COLUMNS])
        loss = tf.losses.mean_squared_error(labels, network(rows))
        return spec_of(mode, loss, OPTIMIZERS['adagrad']().minimize(loss, step()))

    ours, _ = compare(model_fn, batches_of(*ALL), 3, static=False, preprocess=preprocess)
    assert not types_run_once(ours.graph) & {'Mul', 'AddV2', 'Add', 'SparseTensorDenseMatMul'}


def test_two_values_of_an_entry_with_one_of_another(behavior):
    """Of two sparse tensors, one of which has twice as many entries."""

    def preprocess(features, labels):
        made, labels = to_sparse(features, labels)
        indices = tf.repeat(features['indices'], 2, axis=0)
        values = tf.repeat(features['weights'], 2)
        made['twice'] = tf.SparseTensor(indices, values, made['sparse'].dense_shape)
        return made, labels

    def model_fn(features, labels, mode):
        values = features['weights'].values
        pairs = tf.reshape(tf.stack([values, 1 - values], 1), [-1])
        found = {'product': pairs * features['twice'].values}
        return tf.estimator.EstimatorSpec(mode, predictions=found)

    compare_predictions(model_fn, batches_of(*ALL), 3, static=False, preprocess=preprocess)


def test_same_indices(behavior):
    """Of ids and weights: nobody has to check that they are as many."""

    def preprocess(features, labels):
        features, labels = to_sparse(features, labels)
        features['weights'] = features['sparse'].with_values(features['weights'].values)
        return features, labels

    model_fn = regression(lookup_with_own_weights(), 'adagrad')
    ours, _ = compare(model_fn, batches_of(*ALL), 3, static=False, preprocess=preprocess)
    assert not types_run_once(ours.graph) & LOOKUPS
    checks = [op for op in ours.graph.get_operations() if op.type == 'Assert']
    assert not any(op.name.startswith('replicate/') for op in checks)


# Dense ids and dense weights: -1 and 0 are padding, which each leave out by themselves.


def from_dense(dense, padding):
    """As feature columns do."""
    places = tf.where(tf.not_equal(dense, tf.cast(padding, dense.dtype)))
    shape = tf.shape(dense, out_type=tf.int64)
    return tf.SparseTensor(places, tf.gather_nd(dense, places), shape)


def dense_weights_of(features):
    """For each id, a weight of its own."""
    ids = features['dense']
    return np.where(ids == -1, 0, floats(*ids.shape) + 2).astype(np.float32)


def batches_with_dense_weights(*sizes):
    batches = batches_of(*sizes)
    for features, _ in batches:
        features['dense weights'] = dense_weights_of(features)
    return batches


def to_sparse_with_dense_weights(features, labels):
    dense = features['dense weights']
    features, labels = to_sparse(features, labels)
    return {**features, 'dense weights': dense}, labels


def lookup_with_dense_weights(combiner, safe=True, scaled=False):
    """Scaled weights are trained as well, so that gradients go through what is left out."""

    def lookup(features):
        ids, weights = from_dense(features['dense'], -1), features['dense weights']
        if scaled:
            weights *= tf.get_variable('scale', [COLUMNS], initializer=tf.ones_initializer())
        weights = from_dense(weights, 0)
        if safe:
            return tf.nn.safe_embedding_lookup_sparse(table(), ids, weights, combiner)
        found = tf.nn.embedding_lookup_sparse(table(), ids, weights, combiner=combiner)
        behind = tf.shape(features['dense'])[0] - tf.shape(found)[0]
        return tf.pad(found, [[0, behind], [0, 0]])

    return lookup


DENSE = {'static': False, 'preprocess': to_sparse_with_dense_weights}
ON_ENTRIES = {'LogicalAnd', 'SegmentSum', 'Unique'}


@pytest.mark.parametrize('scaled', [False, True], ids=['given', 'trained'])
@pytest.mark.parametrize('combiner', ['sum', 'mean', 'sqrtn'])
def test_dense_weights(combiner, scaled, behavior):
    model_fn = regression(lookup_with_dense_weights(combiner, scaled=scaled), 'adagrad')
    ours, _ = compare(model_fn, batches_with_dense_weights(*ALL), 3, **DENSE)
    assert not types_run_once(ours.graph) & (LOOKUPS | ON_ENTRIES)


def test_dense_weights_of_a_plain_lookup(behavior):
    model_fn = regression(lookup_with_dense_weights('sum', safe=False), 'adagrad')
    compare(model_fn, batches_with_dense_weights(*ALL), 3, **DENSE)


@pytest.mark.parametrize('microbatches', [2, 3])
def test_microbatches_of_dense_weights(microbatches):
    model_fn = regression(lookup_with_dense_weights('mean', scaled=True), 'adagrad')
    one = train(model_fn, batches_with_dense_weights(*ALL), 0, **DENSE)
    ours = train(
        model_fn,
        batches_with_dense_weights(*ALL),
        2,
        values=one.start,
        microbatches=microbatches,
        **DENSE,
    )
    assert_same(ours, one)


def test_dense_weights_of_other_examples(behavior):
    """As many as ids, but not in each example: a weight is that of the id at the same place."""
    batches = batches_with_dense_weights(*ALL)
    for features, _ in batches:
        weights = features['dense weights']
        features['dense weights'] = np.sort(weights.ravel()).reshape(weights.shape)
    model_fn = regression(lookup_with_dense_weights('mean'), 'adagrad')
    ours, _ = compare(model_fn, batches, 3, **DENSE)
    assert not types_run_once(ours.graph) & LOOKUPS


@pytest.mark.parametrize('count', ['fewer', 'more'])
def test_other_numbers_of_dense_weights(count, behavior):
    """It's an error on several devices, as on one."""
    batches = batches_with_dense_weights(12)
    weights = batches[0][0]['dense weights']
    is_changed = weights != 0 if count == 'fewer' else weights == 0
    weights[tuple(np.argwhere(is_changed)[0])] = 1.5 if count == 'more' else 0
    ids = np.sum(batches[0][0]['dense'] != -1)
    model_fn = regression(lookup_with_dense_weights('mean'))
    with pytest.raises(tf.errors.InvalidArgumentError):
        train(model_fn, batches, 0, **DENSE)
    titles = 'feature .+dense weights.+, feature .+dense.+ are'
    message = rf'same number of entries.*{titles}\] \[{np.sum(weights != 0)} {ids}\]'
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        train(model_fn, batches, 3, **DENSE)


def test_one_entry_for_all_of_another_mask():
    """What a user's mask selects may be one row, which is broadcast to others: so it runs once."""

    def model_fn(features, labels, mode):
        ids = tf.cast(features['dense'], tf.float32)
        first = tf.boolean_mask(ids, tf.range(tf.shape(ids)[0]) < 1)
        others = tf.boolean_mask(ids, tf.not_equal(ids[:, 0], 2))
        return tf.estimator.EstimatorSpec(mode, predictions={'product': others * first})

    compare_predictions(model_fn, batches_of(*ALL), 3, **SPARSE)


# Lookups that give no row for the last examples of a batch if these have no ids.


def entry_in_last_row(batches):
    """Batches whose last example has an id."""
    for features, _ in batches:
        features['indices'] = np.concatenate([features['indices'], features['shape'][None] - 1])
        features['indices of weights'] = features['indices']
        features['ids'] = np.append(features['ids'], 8)
        features['weights'] = np.append(features['weights'], np.float32(3))
    return batches


def entries_to_the_middle(batches):
    """Batches in which no example has an id but in the first half, if any has."""
    for features, _ in batches:
        keep = features['indices'][:, 0] < len(features['dense']) // 2
        for name in ('indices', 'indices of weights', 'ids', 'weights'):
            features[name] = features[name][keep]
    return batches


def plain_lookup(combiner='mean', weights=False):
    def lookup(features):
        own = features['weights']
        scale = tf.get_variable('scale', [], initializer=tf.ones_initializer())
        scaled = tf.SparseTensor(own.indices, scale * own.values, own.dense_shape)
        return tf.nn.embedding_lookup_sparse(
            table(), features['sparse'], scaled if weights else None, combiner=combiner
        )

    return lookup


@pytest.mark.parametrize('optimizer', ['sgd', 'adagrad'])
@pytest.mark.parametrize('weights', [False, True])
@pytest.mark.parametrize('combiner', ['sum', 'mean', 'sqrtn'])
def test_plain_lookup(combiner, weights, optimizer, behavior):
    """Beside labels, of which there are as many as examples."""
    model_fn = regression(plain_lookup(combiner, weights), optimizer)
    batches = entry_in_last_row(batches_of(*ALL, 5, 4))
    ours, _ = compare(model_fn, batches, 3, **SPARSE)
    once = steps.of_graph(ours.graph).plan.once
    assert not any(name.startswith('embedding_lookup_sparse') for name in once)


@pytest.mark.parametrize('microbatches', [2, 3])
@pytest.mark.parametrize('weights', [False, True])
def test_microbatches_of_plain_lookups(weights, microbatches):
    model_fn = regression(plain_lookup('mean', weights), 'adagrad')
    batches = entry_in_last_row(batches_of(*ALL))
    compare(model_fn, batches, 2, microbatches=microbatches, **SPARSE)


@pytest.mark.parametrize('row', [-1, 12])
def test_an_entry_in_no_row_of_a_plain_lookup(row):
    batches = entry_in_last_row(batches_of(12))
    batches[0][0]['indices'][-1 if row > 0 else 0, 0] = row
    for forward in (plain_lookup('sum'), padded_lookup('mean', weights=True)):
        for towers in (0, 3):
            with pytest.raises(tf.errors.InvalidArgumentError):
                train(regression(forward), batches, towers, **SPARSE)


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('weights', [False, True])
def test_plain_lookup_without_ids_of_last_examples(weights, static, behavior):
    """It's an error on several devices, as on one."""
    batches = entries_to_the_middle(batches_of(12))
    model_fn = regression(plain_lookup('mean', weights))
    options = {'static': static, 'preprocess': to_sparse}
    compare(model_fn, entry_in_last_row(batches_of(12)), 3, **options)
    with pytest.raises(tf.errors.InvalidArgumentError):
        train(model_fn, batches, 0, **options)
    message = r'last example of a batch needs an entry in feature .+sparse.+ \[6 12\]'
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        train(model_fn, batches, 3, **options)


def rows_by_themselves(features):
    """What becomes of the rows up to the last one with an id, beside nothing of the batch."""
    sparse = features['sparse']
    found = []
    for combiner in ('sum', 'mean'):
        for weights in (None, features['weights']):
            with tf.variable_scope(f'{combiner}_{weights is None}'):
                rows = tf.nn.embedding_lookup_sparse(table(), sparse, weights, combiner=combiner)
                hidden = tf.tanh(rows @ floats(WIDTH, 3))
                loss = tf.reduce_mean(hidden**2) + tf.reduce_max(rows)
                gradients = tf.gradients(loss, tf.trainable_variables()[-1])
            found += [rows, hidden, tf.shape(rows), loss, tf.cumsum(rows), *gradients]
            found += [tf.boolean_mask(hidden, hidden[:, 0] > 0), hidden[::-1]]
    return tf.nest.flatten(found, expand_composites=True)


@pytest.mark.parametrize('towers, microbatches', [(2, 1), (3, 1), (5, 1), (2, 2)])
@pytest.mark.parametrize('kind', ['all', 'half'])
def test_rows_to_last(kind, towers, microbatches, behavior):
    def model_fn(features, labels, mode):
        found = {f'part {i}': one for i, one in enumerate(rows_by_themselves(features))}
        return tf.estimator.EstimatorSpec(mode, predictions=found)

    batches = entry_in_last_row(batches_of(*ALL))
    if kind == 'half':
        batches = entries_to_the_middle(batches_of(12, 7, 2, 5, 30))
    batches = [(features, None) for features, _ in batches if len(features['ids'])]
    values = {'global_step': 0}
    values |= {
        f'{combiner}_{none}/table': floats(IDS, WIDTH)
        for combiner in ('sum', 'mean')
        for none in (False, True)
    }
    options = {'values': values, 'microbatches': microbatches, **SPARSE}
    compare_predictions(model_fn, batches, towers, **options)


@pytest.mark.parametrize('strategy', ['mod', 'div'])
def test_plain_lookup_in_parts(strategy):
    def forward(features):
        partitioner = tf.fixed_size_partitioner(3)
        parts = tf.get_variable('table', [IDS, WIDTH], partitioner=partitioner)
        return tf.nn.embedding_lookup_sparse(
            list(parts), features['sparse'], features['weights'], strategy, combiner='mean'
        )

    batches = entry_in_last_row(batches_of(*ALL))
    model_fn = regression(forward, 'adagrad')
    ours, _ = compare(model_fn, batches, 3, **SPARSE)
    once = steps.of_graph(ours.graph).plan.once
    assert not any(name.startswith('embedding_lookup_sparse') for name in once)


def missing_rows(features, rows):
    """How many rows of a lookup are missing behind those that it gives."""
    return tf.shape(features['dense'])[0] - tf.shape(rows)[0]


def padded_lookup(combiner='mean', weights=False):
    def lookup(features):
        rows = plain_lookup(combiner, weights)(features)
        return tf.pad(rows, [[0, missing_rows(features, rows)], [0, 0]])

    return lookup


def batches_to_pad():
    """Batches whose last example has an id, those whose last ones have none, and one without."""
    batches = entry_in_last_row(batches_of(12, 2, 5)) + entries_to_the_middle(batches_of(30, 7, 5))
    features, labels = batches_of(6)[0]
    return [*batches, (no_entries(features), labels), *entries_to_the_middle(batches_of(3))]


@pytest.mark.parametrize('weights', [False, True])
@pytest.mark.parametrize('combiner', ['sum', 'mean', 'sqrtn'])
def test_padded_lookup(combiner, weights, behavior):
    model_fn = regression(padded_lookup(combiner, weights), 'adagrad')
    ours, _ = compare(model_fn, batches_to_pad(), 4, **SPARSE)
    once = steps.of_graph(ours.graph).plan.once
    assert not any(name.startswith(('embedding_lookup_sparse', 'Pad')) for name in once)
    assert 'gradients/Pad_grad/Slice_1' not in once


@pytest.mark.parametrize('microbatches', [2, 3])
@pytest.mark.parametrize('weights', [False, True])
def test_microbatches_of_padded_lookups(weights, microbatches):
    model_fn = regression(padded_lookup('mean', weights), 'adagrad')
    compare(model_fn, batches_to_pad(), 2, microbatches=microbatches, **SPARSE)


def sums_of_kept_ids(combiner, key='sparse'):
    """A plain lookup of some of the ids, with trained weights; the last examples may have none."""

    def lookup(features):
        ids = features[key] if key == 'sparse' else tf.sparse.from_dense(features[key])
        kept = tf.sparse.retain(ids, ids.values % 4 < 3)
        scores = tf.gather(tf.get_variable('scores', [IDS]), kept.values)
        rows = tf.nn.embedding_lookup_sparse(
            table(), kept, kept.with_values(tf.sigmoid(scores)), combiner=combiner
        )
        return tf.pad(rows, [[0, missing_rows(features, rows)], [0, 0]])

    return lookup


def means_of_masked(features):
    """Means of what a mask leaves of each example."""
    ids = features['dense']
    places = tf.where(ids > 2)
    rows = tf.tanh(tf.gather(table(), tf.gather_nd(ids, places)))
    means = tf.math.segment_mean(rows, places[:, 0])
    return tf.pad(means, [[0, missing_rows(features, means)], [0, 0]])


OF_KEPT = {
    **{
        f'{key}, {combiner}': sums_of_kept_ids(combiner, key)
        for key in ('sparse', 'dense')
        for combiner in ('sum', 'mean', 'sqrtn')
    },
    'masked': means_of_masked,
}
SUMS = {'SegmentSum', 'SegmentMean', 'Pad', 'Slice', 'Where', 'Unique'}


@pytest.mark.parametrize('forward', OF_KEPT.values(), ids=[*OF_KEPT])
def test_sums_of_entries_that_are_kept(forward, behavior):
    ours, _ = compare(regression(forward, 'adagrad'), batches_to_pad(), 4, **SPARSE)
    assert not types_run_once(ours.graph) & (SUMS | LOOKUPS)


@pytest.mark.parametrize('forward', [*OF_KEPT.values()][::3], ids=[*OF_KEPT][::3])
def test_microbatches_of_sums_of_entries_that_are_kept(forward):
    model_fn = regression(forward, 'adagrad')
    compare(model_fn, batches_to_pad(), 2, microbatches=2, **SPARSE)


@pytest.mark.parametrize('has_last', [True, False])
def test_sums_of_entries_that_are_kept_beside_examples(has_last, behavior):
    """Of ids that fewer examples have, it's an error on several devices, as on one."""

    def forward(features):
        places = tf.where(features['dense'] > 2, name='kept')
        rows = tf.gather(table(), tf.gather_nd(features['dense'], places))
        return tf.math.segment_sum(rows, places[:, 0])

    batches = batches_of(*ALL)
    for features, _ in batches:
        features['dense'][-1] = 5 if has_last else 1
    model_fn = regression(forward)
    if has_last:
        ours, _ = compare(model_fn, batches, 3, **SPARSE)
        assert not types_run_once(ours.graph) & SUMS
        return
    with pytest.raises(tf.errors.InvalidArgumentError):
        train(model_fn, batches, 0, **SPARSE)
    with pytest.raises(tf.errors.InvalidArgumentError, match='needs an entry in .*strided_slice'):
        train(model_fn, batches, 3, **SPARSE)


def other_paddings(features):
    """Of the rows of a lookup, and of all rows; and slices that end where the lookup does."""
    rows = tf.nn.embedding_lookup_sparse(table(), features['sparse'], None, combiner='sum')
    more = missing_rows(features, rows)
    all_rows = tf.nn.safe_embedding_lookup_sparse(tf.global_variables()[-1], features['sparse'])
    dense = tf.cast(features['dense'], tf.float32)
    first = dense[:, :WIDTH]
    count = tf.shape(rows)[0]
    found = [
        tf.pad(rows, [[0, more], [0, 0]], constant_values=7),
        tf.pad(rows, [[0, more], [1, 2]]),
        tf.pad(rows, [[1, more], [0, 0]]),
        tf.pad(rows, [[0, 2 * more], [0, 0]]),
        tf.pad(rows, [[more, 0], [0, 0]]),
        tf.pad(rows, [[0, more + 1], [0, 0]]),
        tf.pad(all_rows, [[0, missing_rows(features, all_rows)], [0, 0]]),
        tf.pad(all_rows, [[0, more], [0, 0]]),
        tf.pad(dense, [[0, more], [0, 0]]),
        tf.concat([rows, tf.zeros([more, WIDTH])], 0),
        tf.concat([rows, tf.zeros([missing_rows(features, all_rows), WIDTH])], 0),
        tf.slice(first, [0, 0], tf.shape(rows)) * rows,
        tf.slice(dense, [0, 1], tf.shape(rows)) * rows,
        tf.slice(dense, [0, 0], [count, 2]),
        tf.slice(dense, [0, 0], [more, 3]),
        tf.slice(dense, [count, 0], [more, 3]),
        tf.slice(dense[::-1], [0, 0], [count, 3]),
        dense[:count],
        tf.ones([more, 3]),
        tf.range(more),
        tf.reduce_mean(tf.zeros([count, 2]) + rows),
    ]
    padded = tf.pad(rows, [[0, more], [0, 0]])
    return [*found, padded * first, tf.gradients(padded * first, tf.global_variables()[-1])]


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('towers', [2, 4])
def test_other_paddings(towers, static, behavior):
    def model_fn(features, labels, mode):
        found = tf.nest.flatten(other_paddings(features), expand_composites=True)
        found = {f'part {i}': one for i, one in enumerate(found)}
        return tf.estimator.EstimatorSpec(mode, predictions=found)

    def preprocess(features, labels):
        for name in ('indices', 'indices of weights', 'ids', 'weights'):
            shape = [None, 2] if 'indices' in name else [None]
            features[name] = tf.placeholder_with_default(features[name], shape)
        return to_sparse(features, labels)

    batches = [(features, None) for features, _ in batches_to_pad()]
    values = {'table': floats(IDS, WIDTH), 'global_step': 0}
    options = {'static': static, 'preprocess': preprocess, 'values': values}
    for given in [[batch] for batch in batches] if static else [batches]:
        compare_predictions(model_fn, given, towers, **options)


def two_plain_lookups(features):
    with tf.variable_scope('other'):
        other = plain_lookup('sum')(features)
    return tf.concat([plain_lookup('mean')({**features, 'sparse': features['own']}), other], 1)


def with_own_ids(features, labels):
    made, labels = to_sparse(features, labels)
    own = features['indices of weights'], tf.cast(features['weights'], tf.int64) % IDS
    made['own'] = tf.SparseTensor(*own, made['sparse'].dense_shape)
    return made, labels


def test_two_plain_lookups(behavior):
    """Beside each other, and nothing of the batch: both have as many rows, or it's an error."""

    def model_fn(features, labels, mode):
        both = two_plain_lookups(features)
        padded = tf.pad(both, [[0, missing_rows(features, both)], [0, 0]])
        found = {'both': tf.tanh(both), 'padded': padded + features['dense'][:, :1]}
        return tf.estimator.EstimatorSpec(mode, predictions=found)

    def preprocess(features, labels):
        made, labels = with_own_ids(features, labels)
        made['dense'] = tf.cast(made['dense'], tf.float32)
        return made, labels

    options = {'static': False, 'preprocess': preprocess}
    names = ['table', 'other/table', 'scale', 'other/scale']
    options['values'] = {name: np.float32(1) for name in names}
    options['values'] |= {name: floats(IDS, WIDTH) for name in names[:2]} | {'global_step': 0}
    whole, half = entry_in_last_row(batches_of(*ALL)), entries_to_the_middle(batches_of(12, 7, 30))
    for batches in (whole, half, whole + half):
        compare_predictions(model_fn, batches, 3, **options)

    [(features, _)] = batches = entry_in_last_row(batches_of(12))
    features['indices of weights'] = np.minimum(features['indices'], [6, COLUMNS])
    options['mode'] = MODES.PREDICT
    with pytest.raises(tf.errors.InvalidArgumentError):
        evaluate(model_fn, batches, 0, **options)
    message = r'must be the same in feature .+ and feature .+: sums.+ \[(7 12|12 7)\]'
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        evaluate(model_fn, batches, 3, **options)


@pytest.mark.parametrize('microbatches', [1, 2])
def test_training_of_two_plain_lookups(microbatches, behavior):
    """They have as many rows as each other, and as there are labels."""
    model_fn = regression(two_plain_lookups, 'adagrad')
    batches = entry_in_last_row(batches_of(*ALL, 5, 4))
    options = {'static': False, 'preprocess': with_own_ids, 'microbatches': microbatches}
    ours, _ = compare(model_fn, batches, 3, **options)
    once = steps.of_graph(ours.graph).plan.once
    assert not any(name.startswith(('embedding_lookup_sparse', 'concat')) for name in once)
    batches = entries_to_the_middle(batches_of(12))
    with pytest.raises(tf.errors.InvalidArgumentError, match='last example of a batch needs'):
        train(model_fn, batches, 3, **options)


def test_rows_that_meet_in_a_branch(behavior):
    """In a step in which there aren't as many of both, it isn't taken."""

    def forward(features):
        rows, own = plain_lookup('sum')(features), features['weights'].values
        ids, dense = features['sparse'].values, tf.cast(features['dense'], tf.float32)
        padded = tf.pad(rows, [[0, missing_rows(features, rows)], [0, 0]])
        has_all = tf.equal(missing_rows(features, rows), 0)
        net = tf.cond(has_all, lambda: tf.concat([rows, dense], 1), lambda: 2 * dense)
        are_as_many = tf.equal(tf.size(ids), tf.size(own))
        product = lambda: tf.reduce_sum(tf.cast(ids, tf.float32) * own)  # noqa: E731
        return padded, net[:, :2], tf.cond(are_as_many, product, lambda: -1.0)

    def model_fn(features, labels, mode):
        found = {f'part {i}': one for i, one in enumerate(forward(features))}
        found['part 2'] = tf.reshape(found['part 2'], [1])
        return tf.estimator.EstimatorSpec(mode, predictions=found)

    batches = batches_to_pad()
    for features, _ in batches[::2]:
        features['weights'] = np.append(features['weights'], np.float32(1))
        indices = features['indices of weights']
        features['indices of weights'] = np.concatenate([indices, [[0, 0]]])
    values = {'table': floats(IDS, WIDTH), 'scale': np.float32(1), 'global_step': 0}
    compare_predictions(model_fn, batches, 3, values=values, **SPARSE)
