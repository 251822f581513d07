"""What a graph tells of integers: as one works them out by hand."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu import check_rule, replicate, steps
from estimator_mgpu.partition.nodes.node_builder import NodeBuilder
from estimator_mgpu.partition.plan import LocalShape, local_shape_of
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import (
    Dim,
    Entry,
    RowSpace,
    RowsToLast,
    Size,
    Splits,
    UnknownSize,
)
from estimator_mgpu.partition.tower import towers_of
from estimator_mgpu.partition.towers.reduce_and_gather import gather
from estimator_mgpu.partition.towers.shards import EqualShards, index_type
from models import batches, floats, of_all_modes, spec_of, weights
from towers import compare

ROWS = RowSpace('batch', None)
B = ROWS.size


def entries(make):
    """The entries of what `make` computes of the shape of a [batch, 3, 5] tensor."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 3, 5])
        sizes = Sizes()
        sizes.set_dims(x, [B, Size(3), Size(5)])
        found = sizes.entries(make(tf.shape(x)))
        return None if found is None else [_told(size) for size in found]


def _told(size):
    """A number, 'B' for a multiple of the rows, '?' for what isn't known."""
    if not size.symbols:
        return size.number
    return ('B' if size.number == 1 else f'{size.number}B') if size.symbols == (ROWS,) else '?'


def _reshaped_sparse(shape, new_shape):
    """An empty sparse tensor of one shape, reshaped to another one."""
    shape = tf.cast(shape, tf.int64)
    sparse = tf.SparseTensor(tf.zeros([0, 3], tf.int64), tf.zeros([0]), shape)
    return tf.sparse.reshape(sparse, new_shape)


@pytest.mark.parametrize(
    'make, expected',
    {
        'itself': (lambda s: s, ['B', 3, 5]),
        'first': (lambda s: s[0], ['B']),
        'last': (lambda s: s[-1:], [5]),
        'last one': (lambda s: s[-1], [5]),
        'last but one': (lambda s: s[-2], [3]),
        'strided': (lambda s: s[::2], ['B', 5]),
        'of a scalar': (lambda s: s[0][None], ['B']),
        'reversed': (lambda s: s[::-1], [5, 3, 'B']),
        'slice': (lambda s: tf.slice(s, [1], [-1]), [3, 5]),
        'slice of a matrix': (lambda s: tf.slice(tf.stack([s, s]), [0, 0], [2, 1]), ['B', 'B']),
        'slice of unknown begin': (lambda s: tf.slice(s, s[:1], [1]), ['?']),
        'product': (lambda s: tf.reduce_prod(s), ['15B']),
        'product of some': (lambda s: tf.reduce_prod(s[1:], keepdims=True), [15]),
        'packed': (lambda s: tf.stack([s[0], 7, s[1] * s[2]]), ['B', 7, 15]),
        'joined': (lambda s: tf.concat([[-1], s[1:], s[:1] * 2], 0), [-1, 3, 5, '2B']),
        'quotient': (lambda s: tf.reduce_prod(s) // s[0], [15]),
        'no quotient': (lambda s: s[:1] // 4, ['?']),
        'by zero': (lambda s: s[1:2] // (s[2] - 5), ['?']),
        'remainder': (lambda s: s[2] % s[1], [2]),
        'remainder by zero': (lambda s: s[2] % (s[1] - 3), ['?']),
        'sum with zero': (lambda s: s + 0, ['B', 3, 5]),
        'sum': (lambda s: s + s, ['2B', 6, 10]),
        'sum of unlike': (lambda s: s + 1, ['?', '?', '?']),
        'larger': (lambda s: tf.maximum(s[1:], 4), [4, 5]),
        'larger of unlike': (lambda s: tf.maximum(s[0], 1), ['?']),
        'gathered': (lambda s: tf.gather(s, [2, 0]), [5, 'B']),
        'gathered beyond the end': (lambda s: tf.gather(s, [7]), ['?']),
        'gathered from a matrix': (lambda s: tf.gather(tf.stack([s, s]), [0]), ['?'] * 3),
        'gathered by rows': (lambda s: tf.gather([1, 2], s[:1]), ['?']),
        'stitched': (lambda s: tf.dynamic_stitch([[0, 2], [1]], [s[:2], s[2:]]), ['B', 5, 3]),
        'stitched rows': (
            lambda s: tf.dynamic_stitch([[0], [1]], [[s[:2]], [s[1:]]]),
            ['?', '?', '?', '?'],
        ),
        'stitched with a gap': (
            lambda s: tf.dynamic_stitch([[0], [2]], [s[:1], s[1:2]]),
            ['?', '?', '?'],
        ),
        'zeros': (lambda s: tf.raw_ops.ZerosLike(x=s[1:]), [0, 0]),
        'filled': (lambda s: tf.fill([2], s[0]), ['B', 'B']),
        'filled with many': (lambda s: tf.fill([10_000], s[0]), None),
        'a constant of many': (lambda s: tf.constant([*range(100)]), None),
        'range': (lambda s: tf.range(tf.size(s)), [0, 1, 2]),
        'inverse': (lambda s: tf.math.invert_permutation([2, 0, 1]), [1, 2, 0]),
        'unstacked': (lambda s: tf.unstack(s)[2], [5]),
        'as int64': (lambda s: tf.cast(s, tf.int64), ['B', 3, 5]),
        'too large for its type': (lambda s: s[1:] * 2**30, ['?', '?']),
        'too many rows for it': (
            lambda s: tf.cast(tf.cast(s, tf.int64) * 2**31, tf.int32),
            ['?'] * 3,
        ),
        'not too large for int64': (
            lambda s: tf.cast(s, tf.int64) * 2**31,
            ['2147483648B', 3 * 2**31, 5 * 2**31],
        ),
        'split': (lambda s: tf.split(s, 3)[0], ['B']),
        'split by sizes': (lambda s: tf.split(s, [1, 2])[1], [3, 5]),
        'split by unknown sizes': (lambda s: tf.split(s, [1, -1])[1], ['?', '?']),
        'transposed': (lambda s: tf.transpose(tf.stack([s, 2 * s])), ['B', '2B', 3, 6, 5, 10]),
        'where a part begins': (
            lambda s: tf.raw_ops.ConcatOffset(concat_dim=1, shape=[s, s, s])[2],
            [0, 6, 0],
        ),
        'where a part of unknown parts begins': (
            lambda s: tf.raw_ops.ConcatOffset(concat_dim=0, shape=[s, [7, 3, 5], s])[2],
            ['?', 0, 0],
        ),
        'of a sparse tensor': (lambda s: _reshaped_sparse(s, [-1, 5]).dense_shape, ['3B', 5]),
        'indices of a sparse tensor': (lambda s: _reshaped_sparse(s, [-1, 5]).indices, []),
        'of split strings': (
            lambda s: tf.string_split(tf.fill(s[:1], 'a b')).dense_shape,
            ['B', '?'],
        ),
        'indices of split strings': (
            lambda s: tf.string_split(tf.fill(s[:1] * 0, 'a b')).indices,
            None,
        ),
        'reshaped': (lambda s: tf.reshape(s, [3, 1]), ['B', 3, 5]),
        'squeezed': (lambda s: tf.squeeze(tf.reshape(s, [3, 1])), ['B', 3, 5]),
        'by way of floats': (lambda s: tf.cast(tf.cast(s, tf.float32), tf.int32), ['?', '?', '?']),
    }.values(),
    ids=lambda value: None if callable(value) else str(value),
)
def test_entries(make, expected):
    assert entries(make) == expected


def _filled_up(ragged, count, more=0):
    """A value for each row up to the last one that has any, and zeros for the others."""
    values = tf.math.segment_max(ragged.values, ragged.value_rowids())
    zeros = tf.zeros(count - (tf.shape(values) + more))
    return tf.concat([values, zeros], 0)


@pytest.mark.parametrize(
    'make, expected',
    {
        'range': (lambda s, _: tf.range(s[0]), ['B']),
        'range from 1': (lambda s, _: tf.range(1, s[0]), ['?']),
        'segments': (
            lambda s, _: tf.math.unsorted_segment_sum(tf.zeros([7, 4]), [0] * 7, s[0]),
            ['B', 4],
        ),
        'segments of unknown number': (
            lambda s, _: tf.math.unsorted_segment_sum(
                tf.zeros([7, 4]), [0] * 7, tf.placeholder(tf.int32)
            ),
            ['?', 4],
        ),
        'scattered': (lambda s, _: tf.scatter_nd([[0]], [1.0], s[:1]), ['B']),
        'ragged': (lambda _, ragged: ragged.to_tensor(), ['B', '?']),
        'ragged, and cut': (lambda _, ragged: ragged.to_tensor(shape=[6, None]), [6, '?']),
        'ragged of other rows': (
            lambda s, _: tf.RaggedTensor.from_row_splits(
                tf.zeros([9]), tf.placeholder(tf.int64, [None]), validate=False
            ).to_tensor(),
            ['?', '?'],
        ),
        'rows of ragged': (lambda _, ragged: tf.zeros([ragged.nrows()]), ['B']),
        'sums of ragged': (lambda _, ragged: tf.reduce_sum(ragged, 1), ['B']),
        'cut rows of ragged': (lambda _, ragged: ragged[:, :2].row_splits[1:], ['B']),
        'values of cut rows': (lambda _, ragged: ragged[:, :2].flat_values, ['?']),
        'starts of ragged': (lambda _, ragged: ragged.row_splits[:-1], ['B']),
        'ends of ragged': (lambda _, ragged: ragged.row_splits[1:], ['B']),
        'some of ragged': (lambda _, ragged: ragged.row_splits[2:], ['?']),
        'last of ragged': (lambda _, ragged: ragged.row_splits[-2:], ['?']),
        'none of ragged': (lambda _, ragged: ragged.row_splits[:0], ['?']),
        'first of ragged': (lambda _, ragged: ragged.row_splits[:1], ['?']),
        'every other of ragged': (lambda _, ragged: ragged.row_splits[1::2], ['?']),
        'from 0 to 0 of ragged': (lambda _, ragged: ragged.row_splits[0:0], ['?']),
        'from 1 to 0 of ragged': (lambda _, ragged: ragged.row_splits[1:0], ['?']),
        'less than nothing': (
            # TensorFlow doesn't know that it begins at 5.
            lambda s, _: tf.strided_slice(
                tf.range(3), tf.dynamic_stitch([[0]], [s[2:]]), [0], [1], end_mask=1
            ),
            ['?'],
        ),
        'filled up': (lambda s, ragged: _filled_up(ragged, s[:1]), ['B']),
        'filled up to more': (lambda s, ragged: _filled_up(ragged, s[:1] + 1), ['?']),
        'filled up by more': (lambda s, ragged: _filled_up(ragged, s[:1], more=1), ['?']),
    }.values(),
    ids=lambda value: None if callable(value) else str(value),
)
def test_dims(make, expected):
    """What is made of the shape of a [batch, 3, 5] tensor, or of a ragged tensor of the batch."""
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 3, 5])
        splits = tf.placeholder(tf.int64, [None])
        ragged = tf.RaggedTensor.from_row_splits(tf.zeros([9]), splits, validate=False)
        sizes = Sizes()
        sizes.set_dims(x, [B, Size(3), Size(5)])
        sizes.set_dims(splits, [Size.of(Splits(ROWS))])
        dims = sizes.dims(make(tf.shape(x), ragged))
        assert [_told(size) for size in dims] == expected


def test_symbols_of_different_kinds_differ():
    assert Dim('x:0', 0) != Entry('x:0', 0)
    assert Size(2, (Splits(ROWS),)) != Size(2, (ROWS,))


def test_examples_behind_the_last_one_with_an_entry():
    to_last = RowsToLast('indices', None, ROWS)
    rows, first = ROWS.size, to_last.size
    assert rows + first * Size(-1) == to_last.behind.size
    assert rows + rows * Size(-1) == Size(0)
    others = RowsToLast('indices', None, RowSpace('others', None))
    twice, of_others = Size(2, (ROWS,)), others.size
    for minuend, subtrahend in ((twice, first), (rows, first * first), (rows, of_others)):
        with pytest.raises(UnknownSize):
            minuend + subtrahend * Size(-1)


def test_what_has_no_entries_has_no_rows():
    check_rule(lambda x: tf.concat([x[:0], 2 * x], 0), floats(7), types=[])


def test_quotients_are_whole():
    assert Size(6, (ROWS,)).over(Size(3)) == Size(2, (ROWS,))
    assert Size(6, (ROWS,)).over(Size(4)) is None and Size(6).over(B) is None
    four = RowSpace('batch', 4)
    assert Size(8).over(four.size) == Size(2)
    assert Size(6).over(four.size) is None
    assert Size(6).over(Size(0)) is None


@pytest.mark.parametrize(
    'op, dtype',
    [(tf.tanh, tf.int32), (lambda x: x + tf.ones([1, 1, 1]), tf.int64)],
    ids=['tanh', 'add'],
)
def test_an_output_has_the_sizes_of_inputs(op, dtype):
    """Also those that nobody knows, so that it may be reshaped by them."""

    def reshaped(x):
        length = tf.placeholder_with_default(2, [])
        time_major = tf.transpose(x[:, :length, :length], [1, 0, 2])
        shape = tf.shape(time_major, out_type=dtype)
        return tf.reshape(op(time_major), tf.concat([shape, [1]], 0))

    assert 'Reshape' in check_rule(reshaped, floats(5, 3, 4), types=[])


def test_the_part_of_a_shape_that_a_tower_has():
    """Its own rows, in one dimension; not known of what stands for the rest, nor of other sizes."""
    assert local_shape_of([B, Size(5)], 0, ROWS) == LocalShape((B, Size(5)), 0, ROWS)
    for shape, position in (([Size(-1), Size(5)], 0), ([Size(7)], 0), ([B], 1), (None, 0)):
        assert local_shape_of(shape, position, ROWS) is None


def in_loops(features, labels, mode):
    """Loops carry a number of int64, of which each tower has its own."""
    x, each = features['x'], features['each']
    entries = tf.shape(x, out_type=tf.int64)[0] * each

    def body(i, net, entries):
        net = tf.reshape(net, tf.stack([entries // each, 3]))
        return i + 1, tf.tanh(net @ weights('w', 3, 3)), entries

    _, net, entries = tf.while_loop(lambda i, *_: i < 3, body, [0, x, entries])
    spec = of_all_modes(lambda x: x @ weights('v', 3, 1))(net, labels, mode)
    assert entries.dtype == tf.int64
    return spec._replace(loss=spec.loss + tf.cast(entries // 2**30, tf.float32))


@pytest.mark.parametrize(
    ('each', 'known', 'static'),
    [
        *((3_000_000_000, known, static) for known in (True, False) for static in (True, False)),
        (2**30, True, False),
        (2**40, False, False),
    ],
)
def test_a_loop_over_more_than_int32(each, known, static):
    def model_fn(features, labels, mode):
        number = tf.constant(each, tf.int64) if known else features['each']
        return in_loops({**features, 'each': number}, labels, mode)

    data = [({'x': x, 'each': np.int64(each)}, y) for x, y in batches(9, steps=3)]
    ours, _ = compare(model_fn, data, 4, static=static)
    plan = steps.of_graph(ours.graph).plan
    assert [
        name for name in plan.ops if ours.graph.get_operation_by_name(name).type.endswith('While')
    ]


def test_a_fill_of_the_shape_of_a_static_batch():
    """Each tower makes its shard, also where the graph knows how many examples there are."""

    def model_fn(features, labels, mode):
        ones = tf.raw_ops.Fill(dims=tf.raw_ops.Shape(input=features), value=1.0)
        return spec_of(mode, tf.reduce_mean(features * ones), tf.no_op())

    with tf.Graph().as_default() as graph:
        features = tf.placeholder(tf.float32, [12, 3])
        replicate(model_fn, devices=2)(features=features, labels=None, mode='train')
        plan = steps.of_graph(graph).plan
        assert 'Fill' in {graph.get_operation_by_name(name).type for name in plan.ops}


def test_entries_of_large_tensors():
    """Those of each of 2 towers, of 1,500,000,001 rows; no tensor of them is made."""
    rows = RowSpace('batch', None)
    with tf.Graph().as_default() as graph, tf.Session() as session:
        nodes = NodeBuilder(graph, 'replicate', '/device:CPU:0', None)
        given, each = tf.constant(1_500_000_001), tf.constant(3_000_000_000, tf.int64).name

        def symbol(of, tower, dtype):
            assert dtype == tf.int64
            return shards.total_as(dtype) if of is rows else each

        towers = towers_of(['/device:CPU:0'] * 2)
        shards = EqualShards(rows, given, towers, nodes, symbol)
        entry = Size(2, (Entry(each, 0),))
        extents = [shards.extent(size, towers[1], tf.int64) for size in (Size(7), entry)]
        total = shards.size_value(Size(7, (rows,)), None, tf.int64)
        nodes.build()
        assert session.run([extents, total]) == [
            [
                (7 * 750_000_001, 7 * 750_000_000),
                (6 * 10**9 * 750_000_001, 6 * 10**9 * 750_000_000),
            ],
            7 * 1_500_000_001,
        ]


@pytest.mark.parametrize('entries, index', [(1, tf.int32), (7, tf.int64)])
def test_rows_are_cut_by_what_can_count_them(entries, index):
    """A number of rows is int32, and cheap; of entries there may be more."""
    rows = RowSpace('batch', None)
    with tf.Graph().as_default() as graph, tf.Session() as session:
        nodes, total = NodeBuilder(graph, 'replicate', '/device:CPU:0', None), tf.constant(5)
        towers = towers_of(['/device:CPU:0'] * 2)
        shards = EqualShards(rows, total, towers, nodes, lambda *of: shards.total_as(of[-1]))
        whole = tf.range(5 * entries)
        parts = [shards.slice(whole.name, 0, Size(entries), t, '') for t in towers]
        joined = gather(shards, parts, 0, [Size(entries, (rows,))], '')
        nodes.build()
        cuts = [op for op in graph.get_operations() if op.type == 'StridedSlice']
        assert {op.get_attr('Index') for op in cuts if op.name.startswith('replicate/Str')} == {
            index
        }
        np.testing.assert_array_equal(session.run(joined), np.arange(5 * entries))
    assert index_type(Size(2**31)) == tf.int64 and index_type(Size(2**31 - 1)) == tf.int32
    assert index_type(Size.of(Entry('n:0', 0))) == tf.int64
