"""Ops that look entries up by indices, and their inverse, sums by segments.

`tf.one_hot` is such a lookup, in an identity matrix. Each index is looked up by itself, so the op
is sharded as the indices are, and each tower needs all of the table. The gradient of a table has a
row for each index: these rows are gathered. Only if towers have different ids of their own, they
are summed by id on each tower before: see `unique_ids`.
"""

from __future__ import annotations

import string

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import FULL, IndicesOfRows, Label, SizesOf
from estimator_mgpu.partition.rules.notation import (
    Operand,
    Rule,
    Signature,
    axes_of,
    by_attribute,
    rank,
    require,
    table,
)
from estimator_mgpu.partition.rules.row_indices import begin_with_rows
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import Size
from estimator_mgpu.tf_internals import op_types


def _lookup(op: tf.Operation, sizes: Sizes) -> str:
    """`GatherV2`: the indices' dimensions (I) take the place of the axis in the table's shape.

    Axis 0 is '_P I * -> IP', axis 1 'a_P I * -> aIP'. With `batch_dims=1`, each row of the indices
    is for a row of the table: 'a_P aI * -> aIP'.

    Where indices are positions or places of ids, `selections` is asked first.
    """
    [axis] = axes_of(op, 2, sizes, rank(op.inputs[0], sizes))
    before = string.ascii_lowercase[:axis]
    batch = before[: op.get_attr('batch_dims')]
    return f'{before}_P {batch}I * -> {before}IP'


def _one_hot(op: tf.Operation, sizes: Sizes) -> Signature:
    """`OneHot`: along the dimensions of the indices. The new one has as many entries as it says."""
    count = rank(op.inputs[0], sizes)
    [axis] = axes_of(op, 'axis', sizes, count + 1)
    [depth] = require(sizes.entries(op.inputs[1]))
    labels = tuple(range(count))
    dims: list[Size | None] = [None] * (count + 1)
    dims[axis] = depth
    return Signature(
        [labels, FULL, FULL, FULL], [(*labels[:axis], None, *labels[axis:])], dims=[dims]
    )


def _unsorted_segments(op: tf.Operation, sizes: Sizes) -> str:
    """`UnsortedSegmentSum` and the like: each entry is added to the segment that its id names.

    A tower's result has all segments, and is a partial sum, or maximum. If the number of segments
    is computed from the batch, the result has one entry an example, or more: such partial sums are
    as large as what they are made of, so they aren't worth it, and the op runs once.
    """
    number_of_segments = op.inputs[2]
    require(sizes.numbers(number_of_segments))
    reduction = op.type.removeprefix('UnsortedSegment').lower()
    return f'I... I * -> * ({reduction})'


def _gather_nd(op: tf.Operation, sizes: Sizes) -> str | Signature:
    """`GatherNd`: the last dimension of the indices is a position in the table.

    If each index begins with its own row, towers need no more than their rows of the table: the
    last step of each example, say, is at [[0, 3], [1, 5], ...].
    """
    table, indices = op.inputs
    dims = sizes.dims(table)
    if not dims or not begin_with_rows(indices, dims[0], sizes):
        return '* I_ -> I...'
    index_dims = require(sizes.dims(indices))
    named = require(index_dims[-1].static)
    output_dims = [*index_dims[:-1], *dims[named:]]
    # The same as the text says, also if TensorFlow doesn't know the rank of the output.
    indexed = tuple(range(len(index_dims) - 1))
    output = (*indexed, *[None] * len(dims[named:]))
    with_table = Signature([FULL, (*indexed, None)], [output], dims=[output_dims])
    return Signature(
        [_by_rows(len(dims)), IndicesOfRows(_by_rows(len(index_dims)), dims[0])],
        [_by_rows(len(output_dims))],
        dims=[output_dims],
        otherwise=with_table,
    )


def _by_rows(count: int) -> tuple[Label, ...]:
    """Labels of which the first one, of the rows, is sharded."""
    return ('n', *[None] * (count - 1))


def _scatter(op: tf.Operation, sizes: Sizes) -> Signature:
    """`ScatterNd`: updates where indices say, and zeros elsewhere; others update a tensor.

    They can be sharded along the dimensions that the indices don't name. An index of two numbers,
    say, is a place in the first two dimensions; of [time, batch, units], with the indices
    [[0], [1]], a tower updates its examples at both times.

    If each index begins with its own row, towers update their rows.
    """
    if op.type == 'ScatterNd':
        indices, _, shape = op.inputs
        dims = require(sizes.entries(shape))
    else:
        tensor, indices, _ = op.inputs
        dims = require(sizes.dims(tensor))
    index_dims = require(sizes.dims(indices))
    named = require(index_dims[-1].static)

    unnamed = range(named, len(dims))
    updates = (*[None] * (len(index_dims) - 1), *unnamed)
    along_unnamed = _scattered(op, FULL, updates, (*[None] * named, *unnamed), dims)
    if not begin_with_rows(indices, dims[0], sizes):
        return along_unnamed

    indices_of_rows = IndicesOfRows(_by_rows(len(index_dims)), dims[0])
    by_rows = _scattered(op, indices_of_rows, _by_rows(len(updates)), _by_rows(len(dims)), dims)
    return by_rows._replace(otherwise=along_unnamed)


def _scattered(
    op: tf.Operation,
    indices: Operand,
    updates: tuple[Label, ...],
    output: tuple[Label, ...],
    dims: list[Size],
) -> Signature:
    """The signature of a scatter, whose output has these labels and dimensions."""
    if op.type == 'ScatterNd':
        inputs = [indices, updates, SizesOf(output)]
    else:
        inputs = [output, indices, updates]
    return Signature(inputs, [output], dims=[dims])


_RULES: dict[str, Rule] = {
    'Gather': '_P I -> IP',
    'GatherV2': _lookup,
    'GatherNd': _gather_nd,
    'ResourceGatherNd': '* I_ -> I...',
    'LookupTableFind LookupTableFindV2': '* S * -> S...',
    'OneHot': _one_hot,
    'ScatterNd': _scatter,
    'TensorScatterAdd TensorScatterMax TensorScatterMin TensorScatterSub': _scatter,
    'TensorScatterUpdate': _scatter,
    'ResourceGather': by_attribute('batch_dims', {0: '* I -> I...'}),
    ' '.join(op_types.UNSORTED_SEGMENTS): _unsorted_segments,
}
RULES = table(_RULES)
