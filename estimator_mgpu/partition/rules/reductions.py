"""Reductions and cumulative ops.

A reduction over examples gives a partial result on each tower: of a sum, the sum over the tower's
examples; of a mean, their mean. `towers.reduce_and_gather` makes one result of these: it adds sums,
and averages means, each weighted by its tower's number of examples.

A reduction over other dimensions is sharded by examples, and so are cumulative ops, which can't be
sharded along their own axis.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import Constant
from estimator_mgpu.partition.rules.notation import (
    NotSharded,
    Rule,
    Signature,
    along_axes,
    axes_of,
    rank,
    table,
)
from estimator_mgpu.partition.size_inference import Sizes


def _reduction(op: tf.Operation, sizes: Sizes) -> Signature:
    """For example, `Sum` of a matrix over axis 0: inputs (0, 1), output (1,), reduce 'sum'.

    A shard along axis 0 gives a partial sum. A shard along axis 1 gives a shard of the output.
    """
    axes = range(rank(op.inputs[0], sizes))
    reduced = axes_of(op, 1, sizes, len(axes))
    if op.type == 'Mean' and not op.inputs[0].dtype.is_floating:
        raise NotSharded  # A mean of integers is rounded: the mean of the towers' means is another.

    if op.get_attr('keep_dims'):
        output = tuple(None if axis in reduced else axis for axis in axes)
    else:
        output = tuple(axis for axis in axes if axis not in reduced)
    # Towers are given the axes as a constant. The graph may compute them from shapes, and if a
    # tower has 1 example, then it would take the batch for a dimension that was broadcast.
    operands = [tuple(axes), Constant(tuple(reduced))]
    return Signature(operands, [output], reduce=op.type.lower())


_RULES: dict[str, Rule] = {
    'All Any Max Mean Min Prod Sum': _reduction,
    'L2Loss': 'S -> * (sum)',
    'ArgMax ArgMin': along_axes(1, 'all * -> left'),
    'Cumprod Cumsum CumulativeLogsumexp': along_axes(1, 'all * -> all'),
}
RULES = table(_RULES)
