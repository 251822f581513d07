"""Ragged tensors of the batch: each device has the values of its examples."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu import steps
from models import floats, spec_of, step
from towers import assert_same, compare, compare_outputs, train, types_run_once

pytestmark = pytest.mark.usefixtures('behavior')

IDS, WIDTH = 10, 3
ALL = [12, 7, 2, 1]


def batches_of(*sizes):
    """Batches of so many examples: some are empty, some have an id twice; the first has none."""
    made = []
    for seed, rows in enumerate(sizes):
        random = np.random.RandomState(seed)
        lengths = random.randint(0, 4, rows)
        lengths[0], lengths[-1] = 0, 3
        ids = random.randint(0, IDS, lengths.sum()).astype(np.int64)
        splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        dense = floats(rows, WIDTH, seed=seed)
        texts = [' '.join(map(str, ids[i:j])) for i, j in zip(splits[:-1], splits[1:])]
        features = {'ids': ids, 'splits': splits, 'dense': dense, 'text': np.array(texts, 'S20')}
        made.append((features, floats(rows, 1, seed=seed)))
    return made


def to_ragged(features, labels):
    ragged = tf.RaggedTensor.from_row_splits(features['ids'], features['splits'], validate=False)
    return {'ids': ragged, 'dense': features['dense'], 'text': features.get('text')}, labels


def table():
    with tf.variable_scope('', reuse=tf.AUTO_REUSE):
        return tf.get_variable('table', [IDS, WIDTH])


def embedded(features):
    return tf.ragged.map_flat_values(tf.tanh, tf.nn.embedding_lookup(table(), features['ids']))


def total(features):
    return tf.reduce_sum(embedded(features), 1)


def mean(features):
    lengths = tf.cast(tf.maximum(features['ids'].row_lengths(), 1), tf.float32)
    return tf.reduce_sum(embedded(features), 1) / lengths[:, None]


def ragged_mean(features):
    found = tf.reduce_mean(embedded(features), 1)
    return tf.where_v2(tf.math.is_nan(found), tf.zeros_like(found), found)


def largest(features):
    return tf.maximum(tf.reduce_max(embedded(features), 1), -1)


def smallest(features):
    return tf.minimum(tf.reduce_min(embedded(features), 1), 1)


def repeated(features):
    """Each value with what its example has: of a dense tensor, and of itself."""
    ids, both = features['ids'], embedded(features)
    values = both.flat_values * tf.repeat(features['dense'], ids.row_lengths(), axis=0)
    values += tf.gather(tf.reduce_sum(both, 1), ids.value_rowids())
    return tf.reduce_sum(both.with_flat_values(tf.tanh(values)), 1)


def of_two(features):
    """Two ragged tensors with the same splits."""
    ids = features['ids']
    weights = ids.with_values(0.1 * tf.cast(ids.values, tf.float32))
    return tf.reduce_sum(embedded(features) * tf.expand_dims(weights, -1), 1)


def padded(features):
    """Filled up to the longest row."""
    return tf.reduce_sum(embedded(features).to_tensor(default_value=0.5), 1)


def cut(features):
    net = embedded(features).to_tensor(shape=[None, 2, None], default_value=-1.0)
    return tf.reduce_max(net, 1)


def twice_padded(features):
    """Gradients of both are added up, as rows."""
    return padded(features) + cut(features)


def words(features):
    """Parts of each text: none of some, and other numbers of others."""
    parts = tf.strings.split(features['text'], result_type='RaggedTensor')
    ids = tf.ragged.map_flat_values(tf.strings.to_hash_bucket_fast, parts, num_buckets=IDS)
    hidden = tf.ragged.map_flat_values(tf.tanh, tf.nn.embedding_lookup(table(), ids))
    return tf.reduce_sum(hidden, 1) + tf.reduce_max(hidden.to_tensor(), 1)


def sparse_words(features):
    parts = tf.string_split(features['text'])
    hashed = tf.strings.to_hash_bucket_fast(parts.values, IDS)
    ids = tf.SparseTensor(parts.indices, hashed, parts.dense_shape)
    dense = tf.strings.to_hash_bucket_fast(tf.sparse.to_dense(parts, default_value='x'), IDS)
    lengths = tf.reduce_sum(tf.cast(dense, tf.float32), 1, keepdims=True)
    return tf.nn.safe_embedding_lookup_sparse(table(), ids) * lengths


def lookup_of_sparse(features):
    """With weights, which are sparse, too."""
    ids = features['ids']
    weights = ids.with_values(1 / (1 + tf.cast(ids.flat_values, tf.float32)))
    return tf.nn.safe_embedding_lookup_sparse(table(), ids.to_sparse(), weights.to_sparse())


def without_last_values(features):
    """Each example has its first two ids."""
    return tf.reduce_sum(tf.nn.embedding_lookup(table(), features['ids'][:, :2]), 1)


def regression(forward):
    def model_fn(features, labels, mode):
        net = tf.layers.dense(tf.layers.dense(forward(features), 4, tf.nn.tanh), 1)
        loss = tf.losses.mean_squared_error(labels, net)
        return spec_of(mode, loss, tf.train.AdagradOptimizer(0.1).minimize(loss, step()))

    return model_fn


SHARDED = {f'UnsortedSegment{reduction}' for reduction in ('Max', 'Min', 'Sum')}
SHARDED |= {
    'RaggedTensorToTensor',
    'StringSplit',
    'StringSplitV2',
    'DenseBincount',
    'SparseToDense',
}
SHARDED |= {'ResourceGather', 'GatherV2', 'Tanh', 'TanhGrad', 'Mul', 'Equal', 'SelectV2'}


@pytest.mark.parametrize(
    'forward',
    [
        *(total, mean, ragged_mean, largest, smallest, repeated, of_two, padded, cut, words),
        sparse_words,
    ],
    ids=lambda function: function.__name__,
)
def test_reductions(forward):
    """With fewer examples than devices in some batches."""
    model_fn = regression(forward)
    ours, _ = compare(model_fn, batches_of(*ALL), 3, static=False, preprocess=to_ragged)
    # The optimizer adds up gradients of ids that were looked up, which may be different already.
    sharded = SHARDED - {'UnsortedSegmentSum'} if forward is sparse_words else SHARDED
    assert not types_run_once(ours.graph) & sharded


@pytest.mark.parametrize(
    'forward, sharded',
    [
        (lookup_of_sparse, ['RaggedTensorToSparse', 'SparseFillEmptyRows', 'SegmentSum']),
        (without_last_values, ['UnsortedSegmentSum', 'MatMul']),
    ],
    ids=lambda value: value.__name__ if callable(value) else '',
)
def test_ragged_tensors_in_another_form(forward, sharded):
    model_fn = regression(forward)
    ours, _ = compare(model_fn, batches_of(*ALL), 3, static=False, preprocess=to_ragged)
    once = steps.of_graph(ours.graph).plan.once
    types = {ours.graph.get_operation_by_name(op).type for op in once if 'Adagrad' not in op}
    assert not types & {*sharded}


def test_sums_of_gradients():
    compare(regression(twice_padded), batches_of(*ALL), 3, static=False, preprocess=to_ragged)


@pytest.mark.parametrize(
    'forward', [largest, padded, words], ids=lambda function: function.__name__
)
@pytest.mark.parametrize('microbatches', [2, 3])
def test_microbatches(microbatches, forward):
    options = {'static': False, 'preprocess': to_ragged}
    model_fn = regression(forward)
    one = train(model_fn, batches_of(*ALL), 0, **options)
    ours = train(
        model_fn, batches_of(*ALL), 2, values=one.start, microbatches=microbatches, **options
    )
    assert_same(ours, one)


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_to_the_end_of_the_data(static):
    """The last batch of each epoch is short, and has fewer examples than there are devices."""

    def preprocess(features, labels):
        lengths = features['lengths']
        return {'ids': tf.RaggedTensor.from_tensor(features['ids'], lengths)}, labels

    batches = []
    for seed, rows in enumerate([6, 6, 6 if static else 2]):
        random = np.random.RandomState(seed)
        ids = random.randint(0, IDS, [rows, 3]).astype(np.int64)
        lengths = random.randint(0, 4, rows).astype(np.int64)
        batches.append(({'ids': ids, 'lengths': lengths}, floats(rows, 1, seed=seed)))
    options = {'preprocess': preprocess, 'static': static, 'epochs': 2}
    compare(regression(mean), batches, 4, **options)


# What an op gives that needs values of all examples, or numbers of all rows.


def flat_values(features):
    return features['ids'].flat_values


def number_of_row(features):
    """As a number, and the number of the row behind it."""
    rows = features['ids'].value_rowids()
    return tf.stack([rows, rows + 1, -rows], 1)


def gathered_from_other_rows(features):
    """A row's number looks something up that has other rows, and more of them."""
    rows = features['ids'].value_rowids()
    return tf.gather(tf.range(100.0), rows) + tf.gather(tf.cumsum(features['dense']), rows)[:, 0]


def is_first_row(features):
    rows = features['ids'].value_rowids()
    return tf.stack([rows > 0, rows >= 1, tf.maximum(rows, 2) > 2], 1)


def of_flat_values(features):
    values = tf.cast(features['ids'].flat_values, tf.float32)
    return tf.stack([tf.reduce_sum(values), tf.reduce_max(values), tf.reduce_mean(values)])


def in_order(features):
    return tf.cumsum(features['ids'].flat_values) + tf.sort(features['ids'].flat_values)


def different_ids(features):
    ids, places = tf.unique(features['ids'].flat_values)
    return (
        tf.gather(ids, places) + tf.cast(places, tf.int64) + 100 * tf.cast(tf.size(ids), tf.int64)
    )


def numbered(rows):
    """With the number of each row, of all of them."""
    return rows + tf.cast(tf.range(tf.shape(rows)[0]), rows.dtype)


def masked_places(mask):
    """The rows in which a mask has entries."""
    size = tf.shape(mask)
    return numbered(tf.boolean_mask(tf.tile(tf.range(size[0])[:, None], [1, size[1]]), mask))


def cut_mask(features):
    """Fewer entries than a row has."""
    lengths = features['ids'].row_lengths()
    zero = tf.constant(0, tf.int64)
    few = tf.maximum(zero, tf.reduce_max(lengths[1:2]))
    smallest = tf.maximum(zero, tf.reduce_min(lengths))
    masks = [tf.sequence_mask(lengths, columns) for columns in (2, few, smallest)]
    return tf.concat([masked_places(mask) for mask in masks], 0)


def longer_mask(features):
    """More entries than a row has, or as many as another row has."""
    lengths = features['ids'].row_lengths()
    columns = tf.reduce_max(lengths) + 1
    masks = [tf.sequence_mask(lengths + 1, columns), tf.sequence_mask(lengths[::-1], columns)]
    return tf.concat([masked_places(mask) for mask in masks], 0)


def lengths_of_other_splits(features):
    """The ends of one ragged tensor, and the starts of another one; or of fewer rows."""
    splits = features['ids'].row_splits
    lengths = splits[1:] - tf.maximum(splits - 1, 0)[:-1]
    return numbered(tf.repeat(tf.range(tf.size(lengths)), lengths))


def lengths_of_splits_with_fractions(features):
    """Rounded lengths, and lengths of rounded splits: two masks have other numbers of entries."""
    splits = tf.concat([[0.0], tf.cumsum(tf.zeros_like(features['dense'][:, 0]) + 1.5)], 0)
    whole = tf.cast(splits, tf.int32)
    lengths = [tf.cast(splits[1:] - splits[:-1], tf.int32), whole[1:] - whole[:-1]]
    return tf.stack([tf.shape(tf.where(tf.sequence_mask(one)))[0] for one in lengths])


def lengths_that_are_no_int32(features):
    """-2 ** 33 + 2 entries are none, and as int32 they are 2."""
    lengths = tf.zeros_like(features['dense'][:, 0], tf.int64) + (2 - 2**33)
    masks = [tf.sequence_mask(one) for one in (lengths, tf.cast(lengths, tf.int32))]
    return tf.stack([tf.shape(tf.where(mask))[0] for mask in masks])


def rows_and_shapes(features):
    ids = features['ids']
    rows = tf.stack([ids.nrows(), tf.size(ids.flat_values, out_type=tf.int64), ids.row_splits[-1]])
    return tf.concat([rows, ids.row_lengths(), ids.row_splits], 0)


def dense_and_sparse(features):
    ids = features['ids']
    sparse = ids.to_sparse()
    few = ids.with_values(ids.flat_values > 1).to_sparse()
    numbers = tf.concat([sparse.indices, few.indices], 0)
    values = tf.where_v2(few.values, sparse.values, -sparse.values)
    shapes = tf.concat([sparse.dense_shape, few.dense_shape], 0)
    deep = tf.RaggedTensor.from_row_lengths(ids, [ids.nrows()]).to_sparse()
    return tf.concat(
        [
            *(values, tf.reshape(ids.to_tensor(), [-1]), tf.reshape(numbers, [-1]), shapes),
            *(deep.values, deep.dense_shape),
        ],
        0,
    )


def padded_ids(features):
    ids = features['ids']
    return tf.concat([ids.to_tensor(-1), ids.to_tensor(shape=[None, 5])], 1)


def padded_positions(features):
    """Where values are, as in the gradient of the op: also cut, and with another padding."""
    ids = features['ids']
    positions = ids.with_values(tf.range(tf.size(ids.flat_values)))
    found = [
        positions.to_tensor(-1),
        positions.to_tensor(-2),
        positions.to_tensor(-1, shape=[None, 2]),
    ]
    own = [tf.boolean_mask(one, tf.not_equal(one, -1)) for one in found]
    others = tf.boolean_mask(found[0][:, :2], tf.equal(found[2], -1))
    more = [tf.reshape(one + 1, [-1]) for one in found]
    looked_up = [tf.gather(tf.cast(ids.flat_values, tf.int32), one) for one in (own[0], own[2])]
    # With another mask, some are -1.
    with_padding = tf.boolean_mask(found[0], tf.not_equal(tf.roll(found[0], 1, 0), -1))
    looked_up.append(tf.gather(tf.cast(ids.flat_values, tf.int32), tf.maximum(with_padding, 0)))
    return tf.concat([*own, others, *more, *looked_up], 0)


def padded_to_a_number(features):
    """Which only the step knows: -1 is as long as the longest row, of all towers."""
    one = tf.reshape(tf.identity(features['dense'])[:1, :1] * 0, [])
    numbers = [tf.cast(one, tf.int64) - 1, tf.cast(one, tf.int64) + 2]
    found = [features['ids'].to_tensor(7, shape=tf.stack([-1, number])) for number in numbers]
    return tf.stack([tf.reduce_sum(one, 1) for one in found], 1)


def parts_of_parts(features):
    """Some devices, or all of them, have no text to be split."""
    parts = tf.strings.split(features['text'], '11', result_type='RaggedTensor').flat_values
    few = tf.boolean_mask(parts, tf.strings.regex_full_match(parts, '.*0 .*'))
    return tf.shape(tf.strings.split(few, ' ', result_type='RaggedTensor').to_tensor())


def counts_of_columns(features):
    """Lengths by another column than that of the rows; some rows have as many."""
    parts = tf.string_split(features['text'])
    columns = tf.cast(parts.indices[:, 1], tf.int32)
    count = tf.compat.dimension_value(features['text'].shape[0]) or tf.size(features['text'])
    lengths = tf.math.bincount(columns, minlength=count, maxlength=count)
    lengths.set_shape(features['text'].shape)
    return numbered(tf.repeat(features['dense'][:, 0], lengths, axis=0))


def with_padding_of_rows(features):
    """More rows than the batch has."""
    return tf.shape(features['ids'].to_tensor(shape=[20, None]))


def padded_by_a_vector(features):
    return embedded(features).to_tensor(default_value=tf.constant([1.0, 2.0, 3.0]))


def parts_of_texts(features):
    sparse = tf.string_split(features['text'])
    few = tf.strings.split(features['text'], sep=' ', maxsplit=1, result_type='RaggedTensor')
    numbers = tf.concat(
        [sparse.indices[:, 0], tf.reshape(sparse.indices, [-1]), sparse.dense_shape], 0
    )
    return tf.concat(
        [
            tf.strings.as_string(tf.concat([numbers, few.row_splits, few.row_lengths()], 0)),
            *(sparse.values, few.flat_values),
            tf.reshape(
                tf.strings.split(few.flat_values, '1', result_type='RaggedTensor').to_tensor(), [-1]
            ),
        ],
        0,
    )


def weighted_counts(features):
    """Counts of rows, and of what isn't rows."""
    sparse = tf.string_split(features['text'])
    rows = tf.cast(sparse.indices[:, 0], tf.int32)
    count = tf.cast(sparse.dense_shape[0], tf.int32)
    weights = tf.strings.to_number(sparse.values)
    found = [
        tf.math.bincount(rows, minlength=count, maxlength=count),
        tf.math.bincount(rows, minlength=count, maxlength=count, weights=weights),
        tf.math.bincount(rows, minlength=count + 1, maxlength=count + 1),
        tf.math.bincount(
            tf.cast(features['ids'].flat_values, tf.int32), minlength=IDS, maxlength=IDS
        ),
    ]
    return tf.concat([tf.cast(one, tf.float32) for one in found], 0)


PROGRAMS = [
    padded_ids,
    padded_positions,
    padded_to_a_number,
    parts_of_parts,
    counts_of_columns,
    with_padding_of_rows,
    padded_by_a_vector,
    parts_of_texts,
    weighted_counts,
    flat_values,
    number_of_row,
    gathered_from_other_rows,
    is_first_row,
    of_flat_values,
    in_order,
    different_ids,
    cut_mask,
    longer_mask,
    lengths_of_other_splits,
    lengths_of_splits_with_fractions,
    lengths_that_are_no_int32,
    rows_and_shapes,
    dense_and_sparse,
    total,
]


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('towers', [2, 4])
def test_values_of_one_device(towers, static):
    batches = [features for features, _ in batches_of(*ALL[: 1 if static else None])]
    options = {'static': static, 'preprocess': to_ragged}
    options['values'] = {'table': floats(IDS, WIDTH), 'global_step': 0}
    compare_outputs(PROGRAMS, batches, towers, **options)


def extremes(features):
    values = tf.cast(features['ids'], tf.float32)
    return tf.concat([tf.reduce_max(values, 1), tf.reduce_min(values, 1)], 0)


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_no_values(static):
    """The largest of none is the smallest number, rather than -inf."""
    features = {
        'ids': np.zeros(0, np.int64),
        'splits': np.zeros(9, np.int64),
        'dense': floats(8, WIDTH),
    }
    options = {'static': static, 'preprocess': to_ragged}
    options['values'] = {'table': floats(IDS, WIDTH), 'global_step': 0}
    compare_outputs([extremes, total, flat_values], [features], 4, **options)


@pytest.mark.parametrize('splits', [[1, 3, 3, 4], [0, 2, 3, 3], [0, 0, 0, 6]])
def test_values_in_no_row(splits):
    """What uses all values is given those in no row, too; sums of rows fail as on one device."""
    features = {'ids': np.arange(6), 'splits': np.array(splits), 'dense': floats(3, WIDTH)}
    options = {'static': False, 'preprocess': to_ragged}
    options['values'] = {'table': floats(IDS, WIDTH), 'global_step': 0}
    compare_outputs([flat_values, of_flat_values, in_order], [features], 2, **options)
    if splits[-1] - splits[0] < 6:
        for towers in (0, 2):
            with pytest.raises(tf.errors.InvalidArgumentError):
                train(regression(total), [(features, floats(3, 1))], towers, **options)


@pytest.mark.parametrize('kind', ['two levels', 'two dimensions'])
def test_other_ranks(kind):
    """Rows of rows run once; values may have more dimensions."""

    def preprocess(features, labels):
        values, splits = features['values'], features['splits']
        if kind == 'two levels':
            inner = features['inner']
            values = tf.RaggedTensor.from_row_splits(features['x'], inner, validate=False)
        return {'x': tf.RaggedTensor.from_row_splits(values, splits, validate=False)}, labels

    def model_fn(features, labels, mode):
        weights = tf.get_variable('w', [])
        found = tf.reduce_sum(
            tf.ragged.map_flat_values(lambda x: tf.tanh(x * weights), features['x']), 1
        )
        if kind == 'two levels':
            found = tf.reduce_sum(found, 1)[:, None]
        loss = tf.losses.mean_squared_error(labels, tf.layers.dense(found, 1))
        return spec_of(mode, loss, tf.train.AdagradOptimizer(0.1).minimize(loss, step()))

    features = {
        'x': floats(9),
        'inner': np.array([0, 2, 2, 5, 9]),
        'values': floats(4, 2),
        'splits': np.array([0, 2, 2, 3, 4]),
    }
    ours, _ = compare(model_fn, [(features, floats(4, 1))], 2, static=False, preprocess=preprocess)
    assert ('Tanh' in types_run_once(ours.graph)) == (kind == 'two levels')
