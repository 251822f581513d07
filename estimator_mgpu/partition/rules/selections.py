"""Rules for selections, of which towers pick their rows: `tf.dynamic_partition` and `tf.where`.

For example, `tf.nn.embedding_lookup` of a table in two partitions looks each id up in the one that
has its row, and puts the rows back in the order of the ids:

    which = ids % 2
    selected_ids = tf.dynamic_partition(ids // 2, which, 2)
    selected_rows = [tf.gather(table[0], selected_ids[0]), tf.gather(table[1], selected_ids[1])]
    positions = tf.dynamic_partition(tf.range(tf.size(ids)), which, 2)
    rows = tf.dynamic_stitch(positions, selected_rows)

Each tower does this with its own ids, and counts positions from its own first id. The rows of a
selection are a row space of their own (`SelectedRows`), and so whatever has rules can be done with
them.

What a mask selects is a selection as well. Its positions are those of `tf.where`, as in
`tf.boolean_mask`, or where a layer is only given what isn't padding:

    positions = tf.where(mask)
    tokens = dense(tf.gather_nd(net, positions))
    net += tf.scatter_nd(positions, tokens, tf.shape(net, out_type=tf.int64))

Selections are made of rows, and put together to rows: two row spaces meet in one op, which a text
can't say. So these rules are functions of the placements, as those for lists are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
    CountedByTower,
    PaddedPositions,
    Placement,
    PlacesOfIds,
    Positions,
    Shard,
)
from estimator_mgpu.partition.plan import (
    FULL,
    LOCAL,
    Constant,
    CountedFromFirst,
    Decision,
    Form,
    LocalRange,
    LocalShape,
    Need,
    OpPlan,
    Slice,
    local_shape_by_rows,
)
from estimator_mgpu.partition.rules import (
    elementwise,
    linear_algebra,
    lookups,
    neural_networks,
    reductions,
    shapes,
    strings,
)
from estimator_mgpu.partition.rules.row_indices import are_rows
from estimator_mgpu.partition.rules.row_lengths import of_sequence_mask
from estimator_mgpu.partition.rules.zeros import is_zero
from estimator_mgpu.partition.size_inference import Sizes, counts_from_0
from estimator_mgpu.partition.sizes import (
    ONE,
    DenseEntries,
    RowSpace,
    RowsToLast,
    SelectedRows,
    Size,
    UniqueRows,
    may_be_paired,
    per_row,
    product,
)
from estimator_mgpu.tf_internals import op_types

_NEED_ROWS = {
    *('MirrorPad', 'MirrorPadGrad', 'ScatterNd'),
    *('TensorScatterAdd', 'TensorScatterMax', 'TensorScatterMin', 'TensorScatterSub'),
    'TensorScatterUpdate',
}
DO_WITHOUT_ROWS = {
    *elementwise.RULES,
    *linear_algebra.RULES,
    *lookups.RULES,
    *neural_networks.DENSE,
    *reductions.RULES,
    *shapes.RULES,
    *strings.RULES,
} - _NEED_ROWS
"""Types of ops that may be sharded by the rows of a selection, of which a tower may have none.

Kernels of others fail then, and those of pooling even end the process.
"""

_INDEX_TYPES = (tf.int32, tf.int64)  # others are too small for positions
_SAME_ENTRIES = ('ExpandDims', 'Identity', 'Reshape', 'Squeeze')  # ops that keep them, in order
_SAME_NUMBERS = ('Cast', *_SAME_ENTRIES)  # the same for entries of the types above


def decide(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """How an op with selections is sharded; None if it has to run once.

    Args:
      op: one of `TYPES`, or one that is given positions or places of ids.
    """
    rule = _RULES.get(op.type) or _USES.get(op.type)
    return None if rule is None else rule(op, placements, sizes)


def _partition(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`DynamicPartition`: the data's rows, and for each the selection to which it goes.

    A selection has its rows in their order, so those of all towers, one tower after the other, are
    those of the full value.

    The placement of `which` decides: it's computed from the ids, whose rows are the examples. The
    data may be the same for all towers, such as the positions `tf.range(tf.size(ids))`.

    An example may have several rows: with ids of shape [n, 5], `which` is a vector of 5 * n
    entries, 5 for each example. That's the factor.
    """
    data, which = op.inputs
    rows = _rows_to_select(placements[1])
    data_dims = sizes.dims(data)
    if rows is None or sizes.rank(which) != 1 or data_dims is None:
        return None
    factor = sizes.per_row(which, 0, rows)
    if factor is None:
        return None
    if not rows.is_ordered and (factor != ONE or not is_range(data, sizes)):
        return None  # Only positions tell the order of these rows in the batch.

    key = which.name, op.type, len(op.outputs)
    selections = sizes.selections(key, op.outputs, rows, is_partition=True)
    need: Need
    outputs: list[Placement]
    if is_range(data, sizes):
        need = LocalRange(rows, factor)
        outputs = [Positions(selection, rows, factor, selections) for selection in selections]
    else:
        # The data has as many rows, or the op fails.
        need = LOCAL if placements[0] == placements[1] else Slice(0, rows, factor)
        outputs = [Shard(0, selection) for selection in selections]
    dims = [[selection.size, *data_dims[1:]] for selection in selections]
    return Decision(OpPlan((need, LOCAL)), outputs, dims)


def _rows_to_select(placement: Placement) -> RowSpace | None:
    """The rows of which each tower may pick some: its own ones, in their order; None if none."""
    if not isinstance(placement, Shard) or placement.axis > 0 or placement.in_blocks:
        return None
    return placement.rows


def is_range(tensor: tf.Tensor, sizes: Sizes) -> bool:
    """Whether a tensor is a vector of the numbers from 0 on: its entries are their positions."""
    if sizes.rank(tensor) != 1:
        return False
    while tensor.dtype in _INDEX_TYPES and tensor.op.type in _SAME_NUMBERS:
        tensor = tensor.op.inputs[0]
    return tensor.dtype in _INDEX_TYPES and counts_from_0(tensor.op, sizes)


def _stitch(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`DynamicStitch`: positions, and for each of them the data that is put there.

    With the positions of all selections that were made together, each tower has all of its rows
    again.
    """
    count = len(op.inputs) // 2
    positions = [placement for placement in placements[:count] if isinstance(placement, Positions)]
    data_dims = sizes.dims(op.inputs[count])
    if len(positions) < count or data_dims is None:
        return None
    first = positions[0]
    given = [placement.selection for placement in positions]
    if len(given) != len(first.selections) or set(given) != set(first.selections):
        return None

    # What is put at a selection's positions has as many rows as the selection, or the op fails.
    needs: list[Need] = []
    for placement, selection in zip(placements[count:], given):
        needs.append(LOCAL if placement == Shard(0, selection) else Slice(0, selection, ONE))
    dims = [first.factor * first.rows.size, *data_dims[1:]]
    return Decision(OpPlan((*[LOCAL] * count, *needs)), [Shard(0, first.rows)], [dims])


def _where(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`Where`: the indices of a mask's true entries, each of which begins with its row.

    They are in the order of the rows, so those of all towers are those of the global batch.
    """
    [mask] = op.inputs
    rows = _rows_to_select(placements[0])
    factor = None if rows is None else sizes.per_row(mask, 0, rows)
    if rows is None or factor is None:
        return None
    if not rows.is_ordered and (factor != ONE or sizes.rank(mask) != 1):
        return None  # Their order among those of all towers is told by one number for each row.

    # A mask that is reshaped has the same true entries.
    mask = before_arrangement(mask)
    key = of_sequence_mask(mask, sizes) or (mask.name, op.type)
    kind = DenseEntries if _is_without_padding(mask, sizes) else SelectedRows
    [selection] = sizes.selections(key, op.outputs, rows, kind)
    columns = Size(sizes.rank(op.inputs[0]))
    positions = Positions(selection, rows, factor)
    return Decision(OpPlan((LOCAL,)), [positions], [[selection.size, columns]])


def _is_without_padding(mask: tf.Tensor, sizes: Sizes) -> bool:
    """Whether a mask tells which entries of a dense tensor a sparse one has: all but of one value.

    So say `tf.sparse.from_dense`, and feature columns, which are given ids that are padded by -1.
    """
    if mask.op.type != 'NotEqual' or sizes.rank(mask) < 2:
        return False
    padding = mask.op.inputs[1]
    return padding.shape.rank == 0 or is_zero(padding)


# Ops that are given positions.


def _keep_positions(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """Positions of another type; or a vector in place of a matrix of one column, or the reverse."""
    [output] = op.outputs
    dims = sizes.dims(op.inputs[0])
    is_counted = isinstance(placements[0], CountedByTower)
    if not is_counted or not dims or output.dtype not in _INDEX_TYPES:
        return None
    if op.type in ('Cast', 'Identity'):
        return Decision(OpPlan((LOCAL,)), [placements[0]], [dims])

    if isinstance(placements[0], PlacesOfIds) and op.type == 'Reshape':
        reshaped = _reshaped_places(op, placements[0], product(dims), sizes)
        if reshaped is not None:
            return reshaped
    if isinstance(placements[0], PaddedPositions):
        if op.type != 'Reshape' or sizes.entries(op.inputs[1]) not in ([Size(-1)], [product(dims)]):
            return None
        return Decision(OpPlan((LOCAL, Constant((-1,)))), [placements[0]], [[product(dims)]])

    columns_before = dims[1:]
    columns_after = sizes.static_dims(output)[1:]
    if not output.shape.rank or not _are_one(columns_before) or not _are_one(columns_after):
        return None
    if op.type == 'Squeeze':
        plan = OpPlan((LOCAL,), {'squeeze_dims': [1]})
    elif op.type == 'ExpandDims':
        plan = OpPlan((LOCAL, Constant((1,), scalar=True)))
    else:
        plan = OpPlan((LOCAL, Constant((-1, *[1] * len(columns_after)))))
    return Decision(plan, [placements[0]], [[dims[0], *columns_after]])


def _reshaped_places(
    op: tf.Operation, places: PlacesOfIds, count: Size, sizes: Sizes
) -> Decision | None:
    """Places of all ids that examples have, `count` of them: in a vector, or some in each row."""
    shape = new_shape(op, count, sizes)
    if isinstance(places.rows, SelectedRows):
        return None
    local_shape = local_shape_by_rows(shape, places.rows)
    if not shape or local_shape is None or not product(shape).same_as(count):
        return None
    factor = per_row(shape[0], places.rows)
    assert factor is not None
    placement = dataclasses.replace(places, factor=factor)
    return Decision(OpPlan((LOCAL, local_shape)), [placement], [shape])


def new_shape(op: tf.Operation, count: Size, sizes: Sizes) -> list[Size]:
    """The shape that a `Reshape` is given: [] if it isn't known.

    In place of -1 is what it stands for; it stays -1 if that isn't known.

    Args:
      count: how many entries the tensor has.
    """
    shape = list(sizes.entries(op.inputs[1]) or [])
    if shape.count(Size(-1)) == 1:
        others = Size(-1) * product(shape)
        shape[shape.index(Size(-1))] = count.over(others) or Size(-1)
    return shape


def _are_one(columns: list[Size]) -> bool:
    """Whether these are the columns of a matrix that has one, or those of a vector."""
    return columns in ([], [ONE])


def _zeros_like(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`ZerosLike`: zeros, as many as positions."""
    [positions] = placements
    dims = sizes.dims(op.inputs[0])
    if not isinstance(positions, Positions) or not dims:
        return None
    return Decision(OpPlan((LOCAL,)), [positions.shard], [dims])


def _with_zero(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`Maximum` and `GreaterEqual` of positions and zeros, in gradients of sums by segments.

    A position that is counted from a tower's first row is negative if it was so before: only the
    first tower is given such.
    """
    positions, zeros = placements
    dims = sizes.dims(op.inputs[0])
    if not isinstance(positions, Positions) or not dims or not is_zero(op.inputs[1]):
        return None
    is_scalar = op.inputs[1].shape.rank == 0
    if not is_scalar and (zeros != positions.shard or sizes.dims(op.inputs[1]) != dims):
        return None
    placement: Placement = positions if op.type == 'Maximum' else positions.shard
    return Decision(OpPlan((LOCAL, FULL if is_scalar else LOCAL)), [placement], [dims])


def _take_positions(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """`GatherV2` at a vector of positions, or of places of ids.

    It takes the rows of a selection; or for each entry, what belongs to its id.
    """
    rows, indices, axis = op.inputs
    is_along_rows = sizes.numbers(axis) == [0] and op.get_attr('batch_dims') == 0
    if not is_along_rows:
        return None
    if isinstance(placements[1], PlacesOfIds):
        return _taken_of_ids(op, placements[0], placements[1], sizes)
    if sizes.rank(indices) != 1:
        return None
    if isinstance(placements[0], PaddedPositions):
        return _without_padding(op, placements, sizes)
    return _taken(rows, placements[:2], 1, sizes, (FULL,))


def _taken_of_ids(
    op: tf.Operation, placement: Placement, places: PlacesOfIds, sizes: Sizes
) -> Decision | None:
    """For each entry what belongs to its id, taken of a tensor with a row for each id."""
    dims = sizes.dims(op.inputs[0])
    dims_of_places = sizes.dims(op.inputs[1])
    if not dims or not dims_of_places or placement != Shard(0, places.ids):
        return None
    if dims[0] != places.ids.size:
        return None
    entry_dims = [*dims_of_places, *dims[1:]]
    return Decision(OpPlan((LOCAL, LOCAL, FULL)), [places.shard], [entry_dims])


def _without_padding(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """Padded positions, a vector, without their padding: at the positions where they aren't -1."""
    padded, positions, _ = placements
    if not isinstance(padded, PaddedPositions) or not isinstance(positions, Positions):
        return None
    found = before_arrangement(op.inputs[1])
    mask = before_arrangement(found.op.inputs[0]) if found.op.type == 'Where' else found
    if mask.op.type != 'NotEqual' or positions.rows is not padded.rows:
        return None
    marks = mask.op.inputs[1]
    is_mask = before_arrangement(mask.op.inputs[0]) is before_arrangement(op.inputs[0])
    if not is_mask or sizes.entries(marks) != [Size(-1)]:
        return None
    taken = Positions(positions.selection, padded.values, ONE)
    return Decision(OpPlan((LOCAL, LOCAL, FULL)), [taken], [[positions.count]])


def before_arrangement(tensor: tf.Tensor) -> tf.Tensor:
    """What a tensor was before ops that keep its entries, in order."""
    while tensor.op.type in _SAME_ENTRIES:
        tensor = tensor.op.inputs[0]
    return tensor


def _gather_nd(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`GatherNd` of a matrix of positions: it takes the entries of a selection."""
    dims = sizes.dims(op.inputs[1]) or []
    if len(dims) != 2:
        return None
    return _taken(op.inputs[0], placements, dims[1].as_integer(), sizes)


def _taken(
    rows: tf.Tensor,
    placements: Sequence[Placement],
    named: int,
    sizes: Sizes,
    more_needs: tuple[Need, ...] = (),
) -> Decision | None:
    """What is at the positions in a tensor.

    Args:
      placements: of the rows, and of the positions.
      named: how many of its dimensions a position names.
      more_needs: the forms of the op's other inputs.
    """
    placement, positions = placements
    dims = sizes.dims(rows)
    if not isinstance(positions, Positions) or not dims:
        return None
    need = of_rows(positions, placement, dims[0])
    if need is None:
        return None
    taken: Placement = positions.shard
    if isinstance(placement, Positions) and placement.shard == Shard(0, positions.rows):
        need = LOCAL
        taken = dataclasses.replace(
            positions,
            selections=(),
            rows=placement.rows,
            factor=placement.factor,
            fill_rows=positions.fill_rows and placement.fill_rows,
        )
    elif isinstance(positions.rows, UniqueRows) and placement != Shard(0, positions.rows):
        return None
    elif _are_numbers_of_rows(rows, positions.rows, sizes):
        taken = dataclasses.replace(positions, selections=(), factor=ONE, fill_rows=False)
        counted = CountedFromFirst(need, positions.rows, ONE)
        plan = OpPlan((counted, LOCAL, *more_needs))
        return Decision(plan, [taken], [[positions.count]])
    selection_dims = [positions.count, *dims[named:]]
    return Decision(OpPlan((need, LOCAL, *more_needs)), [taken], [selection_dims])


def _are_numbers_of_rows(tensor: tf.Tensor, rows: RowSpace, sizes: Sizes) -> bool:
    """Whether a vector has, for each entry of a row, the number of the row: `[0, 0, 1, 1]`, say."""
    if isinstance(rows, SelectedRows) or sizes.rank(tensor) != 1:
        return False
    return tensor.dtype in _INDEX_TYPES and are_rows(tensor, rows.size, sizes)


def _scatter_nd(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`ScatterNd` at a matrix of positions: zeros, but for the entries of a selection."""
    indices, _, shape = op.inputs
    positions, placement, _ = placements
    dims = sizes.entries(shape)
    is_of_selection = isinstance(positions, Positions) and isinstance(positions.rows, SelectedRows)
    if sizes.rank(indices) != 2 or not dims or is_of_selection:
        # The kernel fails without rows, which a selection may be. An empty tower of the batch
        # computes on the first example instead: see `towers/shards.py`.
        return None
    put_back = _put_back(positions, placement, dims)
    if put_back is None:
        return None
    plan = OpPlan((LOCAL, put_back.rows, put_back.shape))
    return Decision(plan, [put_back.placement], [dims])


def _segments(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`UnsortedSegmentSum` and the like, by a vector of positions: selected rows, or zeros."""
    data, indices, count = op.inputs
    placement, positions, _ = placements
    data_dims = sizes.dims(data)
    count_entries = sizes.entries(count)
    if sizes.rank(indices) != 1 or not data_dims or not count_entries:
        return None
    put_back = _put_back(positions, placement, count_entries)
    if put_back is None:
        return None
    plan = OpPlan((put_back.rows, LOCAL, put_back.shape))
    return Decision(plan, [put_back.placement], [[*count_entries, *data_dims[1:]]])


class _PutBack(NamedTuple):
    """How the rows of a selection are put at their positions in a tensor."""

    rows: Need  # the form of the rows
    shape: LocalShape  # the tower's version of the tensor's dimensions
    placement: Shard  # of the tensor


def _put_back(positions: Placement, placement: Placement, dims: Sequence[Size]) -> _PutBack | None:
    """How the rows of a selection are put at their positions; None if towers can't do that.

    Args:
      positions: their placement.
      placement: that of the rows.
      dims: those of the tensor, or only the first one.
    """
    if not isinstance(positions, Positions) or isinstance(positions.rows, UniqueRows):
        return None
    local_shape = of_shape(positions, dims)
    if local_shape is None:
        return None
    # There are as many rows as positions, or the op fails.
    return _PutBack(of_positions(positions, placement), local_shape, Shard(0, positions.rows))


def of_rows(positions: Positions, placement: Placement, count: Size) -> Form | Slice | None:
    """The form of what has a row for each at which entries may be; None if it hasn't.

    Args:
      positions: those of the entries.
      placement: of the tensor with the rows.
      count: how many rows it has.
    """
    rows = positions.rows
    factor = positions.factor
    to_last = count.rows
    if isinstance(to_last, RowsToLast) and rows is to_last.origin and factor == ONE:
        # Behind these, there are no entries.
        if positions.selection.name not in to_last.summed or count != to_last.size:
            return None
        rows = to_last
    elif may_be_paired(count, rows) and factor == ONE:
        return Slice(0, rows, ONE)
    elif not count.same_as(positions.total):
        return None
    return LOCAL if placement == Shard(0, rows) else Slice(0, rows, factor)


def of_shape(positions: Positions, dims: Sequence[Size] | None) -> LocalShape | None:
    """The form of a shape that begins with the number of rows at which entries may be.

    None if it begins with another number.
    """
    if not dims or not dims[0].same_as(positions.total):
        return None
    return LocalShape(tuple(dims), 0, positions.rows)


def of_positions(positions: Positions, placement: Placement) -> Need:
    """The form of what has an entry for each position, or the op fails."""
    if placement == positions.shard:
        return LOCAL
    return Slice(0, positions.selection, positions.repeats)


_RULES = {
    'DynamicPartition': _partition,
    **dict.fromkeys(['DynamicStitch', 'ParallelDynamicStitch'], _stitch),
    'Where': _where,
}
TYPES = tuple(_RULES)
"""Types of ops that make selections, or put them together."""

_USES = {
    **dict.fromkeys(_SAME_NUMBERS, _keep_positions),
    'ZerosLike': _zeros_like,
    **dict.fromkeys(['GreaterEqual', 'Maximum'], _with_zero),
    'GatherV2': _take_positions,
    'GatherNd': _gather_nd,
    'ScatterNd': _scatter_nd,
    **dict.fromkeys(op_types.UNSORTED_SEGMENTS, _segments),
}
"""By type of op that is given positions, or places of ids: how it's sharded."""
