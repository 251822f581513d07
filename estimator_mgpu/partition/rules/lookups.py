"""Ops that look entries up by indices, and their inverse, sums by segments.

Each index is looked up by itself, so the op is sharded as the indices are, and each tower needs all
of the table.
"""

from __future__ import annotations

import string

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import FULL
from estimator_mgpu.partition.rules.axes import axes_of
from estimator_mgpu.partition.rules.notation import (
    Rule,
    Signature,
    by_attribute,
    rank,
    require,
    table,
)
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import Size


def _gather(op: tf.Operation, sizes: Sizes) -> str:
    """`GatherV2`: the indices' dimensions (I) take the place of the axis in the table's shape.

    Axis 0 is '_P I * -> IP', axis 1 'a_P I * -> aIP'. With `batch_dims=1`, each row of the indices
    is for a row of the table: 'a_P aI * -> aIP'.
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


_RULES: dict[str, Rule] = {
    'Gather': '_P I -> IP',
    'GatherV2': _gather,
    # The last dimension of the indices is a position in the table.
    'GatherNd ResourceGatherNd': '* I_ -> I...',
    'LookupTableFind LookupTableFindV2': '* S * -> S...',
    'OneHot': _one_hot,
    'ResourceGather': by_attribute('batch_dims', {0: '* I -> I...'}),
    'UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum': (
        _unsorted_segments
    ),
}
RULES = table(_RULES)
