"""Rules for `tf.dynamic_partition` and `tf.dynamic_stitch`: parts of which towers pick their rows.

For example, `tf.nn.embedding_lookup` of a table in two parts looks each id up in the part that has
its row, and puts the rows back in the order of the ids:

    which = ids % 2
    ids_of_parts = tf.dynamic_partition(ids // 2, which, 2)
    rows_of_parts = [tf.gather(table[0], ids_of_parts[0]), tf.gather(table[1], ids_of_parts[1])]
    positions = tf.dynamic_partition(tf.range(tf.size(ids)), which, 2)
    rows = tf.dynamic_stitch(positions, rows_of_parts)

Each tower does this with its own ids, and counts positions from its own first id. The rows of a
part are a row space of their own (`PartRows`), and so whatever has rules can be done with them.

Parts are made of rows, and put together to rows: two row spaces meet in one op, which a text can't
say. So these rules are functions of the placements, as those for lists are.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import Placement, Positions, Shard
from estimator_mgpu.partition.plan import FULL, LOCAL, Decision, LocalRange, Need, OpPlan, Slice
from estimator_mgpu.partition.rules import (
    elementwise,
    linear_algebra,
    lookups,
    neural_networks,
    reduction_ops,
    shapes,
    strings,
)
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import ONE, RowSpace, Size

_PARTITION = 'DynamicPartition'
_STITCHES = ('DynamicStitch', 'ParallelDynamicStitch')
_GATHER = 'GatherV2'
TYPES = (_PARTITION, *_STITCHES)
"""Types of ops that make parts, or put them together."""

_NEED_ROWS = {
    *('MirrorPad', 'MirrorPadGrad', 'ScatterNd', 'TensorScatterAdd', 'TensorScatterMax'),
    *('TensorScatterMin', 'TensorScatterSub', 'TensorScatterUpdate'),
}
DO_WITHOUT_ROWS = {
    *elementwise.RULES,
    *linear_algebra.RULES,
    *lookups.RULES,
    *neural_networks.DENSE,
    *reduction_ops.RULES,
    *shapes.RULES,
    *strings.RULES,
} - _NEED_ROWS
"""Types of ops that may be sharded by the rows of a part, of which a tower may have none.

Kernels of others fail then, and those of pooling even end the process.
"""

_INDEX_TYPES = (tf.int32, tf.int64)  # others are too small for positions
_KEEP = ('Cast', 'Identity', 'Reshape')  # ops that keep numbers of such types, in their order


def decide(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """How an op with parts is sharded; None if it has to run once.

    Args:
      op: one of `TYPES`, or one that is given positions.
      placements: of the op's inputs.
      sizes: of tensors.
    """
    if op.type == _PARTITION:
        return _partition(op, placements, sizes)
    if op.type in _STITCHES:
        return _stitch(op, placements, sizes)
    if op.type == _GATHER:
        return _gather(op, placements, sizes)
    return None


def _partition(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`DynamicPartition`: the data's rows, and for each the part to which it goes.

    A part has its rows in their order, so those of all towers, one tower after the other, are those
    of the full value.

    The placement of `which` decides: it's computed from the ids, whose rows are the examples. The
    data may be the same for all towers, such as the positions `tf.range(tf.size(ids))`.

    An example may have several rows: with ids of shape [n, 5], `which` is a vector of 5 * n
    entries, 5 for each example. That's the factor.
    """
    data, which = op.inputs
    shard = placements[1]
    data_dims = sizes.dims(data)
    is_vector = len(sizes.dims(which) or []) == 1
    if not isinstance(shard, Shard) or shard.in_blocks or not is_vector or data_dims is None:
        return None
    factor = sizes.per_row(which, 0, shard.rows)
    if factor is None:
        return None

    parts = sizes.parts(op, shard.rows)
    need: Need
    outputs: list[Placement]
    if _is_range(data, sizes):
        need = LocalRange(shard.rows, factor)
        outputs = [Positions(part, parts, shard.rows, factor) for part in parts]
    else:
        # The data has as many rows, or the op fails.
        need = LOCAL if placements[0] == shard else Slice(0, shard.rows, factor)
        outputs = [Shard(0, part) for part in parts]
    dims = [[_full_size(part), *data_dims[1:]] for part in parts]
    return Decision(OpPlan((need, LOCAL)), outputs, dims)


def _is_range(tensor: tf.Tensor, sizes: Sizes) -> bool:
    """Whether a tensor is a vector of the numbers from 0 on: its entries are their positions."""
    if len(sizes.dims(tensor) or []) != 1:
        return False
    while tensor.dtype in _INDEX_TYPES and tensor.op.type in _KEEP:
        tensor = tensor.op.inputs[0]
    if tensor.dtype not in _INDEX_TYPES or tensor.op.type != 'Range':
        return False
    start, _, delta = tensor.op.inputs
    return sizes.entries(start) == [Size(0)] and sizes.entries(delta) == [ONE]


def _stitch(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`DynamicStitch`: positions, and for each of them the data that is put there.

    With the positions of all parts that were made together, each tower has all of its rows again.
    """
    count = len(op.inputs) // 2
    positions = [placement for placement in placements[:count] if isinstance(placement, Positions)]
    data_dims = sizes.dims(op.inputs[count])
    if len(positions) < count or data_dims is None:
        return None
    first = positions[0]
    given = [placement.part for placement in positions]
    if len(given) != len(first.parts) or set(given) != set(first.parts):
        return None

    # What is put at a part's positions has as many rows as the part, or the op fails.
    needs = [
        LOCAL if placement == Shard(0, part) else Slice(0, part, ONE)
        for placement, part in zip(placements[count:], given)
    ]
    dims = [first.factor * _full_size(first.rows), *data_dims[1:]]
    return Decision(OpPlan((*[LOCAL] * count, *needs)), [Shard(0, first.rows)], [dims])


def _gather(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`GatherV2` of positions, in gradients: it takes the rows of a part again."""
    rows, _, axis = op.inputs
    positions = placements[1]
    dims = sizes.dims(rows)
    is_along_rows = sizes.numbers(axis) == [0] and op.get_attr('batch_dims') == 0
    if not isinstance(positions, Positions) or not is_along_rows or not dims:
        return None
    if not dims[0].same_as(positions.factor * _full_size(positions.rows)):
        return None

    shard = Shard(0, positions.rows)
    is_sharded = placements[0] == shard
    need = LOCAL if is_sharded else Slice(0, positions.rows, positions.factor)
    part_dims = [_full_size(positions.part), *dims[1:]]
    return Decision(OpPlan((need, LOCAL, FULL)), [Shard(0, positions.part)], [part_dims])


def _full_size(rows: RowSpace) -> Size:
    """The number of rows that all towers have together."""
    return Size(1, (rows,))
