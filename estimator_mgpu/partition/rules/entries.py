"""Rules for the entries of sparse tensors, of which each tower has those of its examples.

An entry is a row of a selection (`SelectedRows`), and the indices of a sparse tensor are
`Positions`: each begins with the row in which its entry is. `tf.nn.safe_embedding_lookup_sparse`,
say, of two examples on two towers, the second of which has no id:

    indices [[0, 0], [0, 1]]  ids [7, 7]    =>    [[0, 0], [0, 1]]  [7, 7]    and    []  []

    SparseFillEmptyRows                           [[0, 0], [0, 1]]  [7, 7]    and    [[0, 0]]  [0]
    Unique                                        [7]  places [0, 0]          and    [0]  places [0]
    SparseSegmentMean of table[ids]               [table[7]]                  and    [table[0]]

What a tower looks up are its own different ids: see `unique_ids`.

Selections are made of rows, and summed to rows, so these rules are functions of the placements, as
those in `selections` are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches.batch import parts_of
from estimator_mgpu.partition.placements import (
    REPLICATE,
    Partial,
    Placement,
    PlacesOfIds,
    Positions,
    Shard,
    rows_of,
)
from estimator_mgpu.partition.plan import (
    FULL,
    LOCAL,
    CountedFromFirst,
    Decision,
    LocalShape,
    Need,
    OpPlan,
    Padding,
    Slice,
    local_shape_by_rows,
)
from estimator_mgpu.partition.rules import ragged, unique_ids
from estimator_mgpu.partition.rules.row_indices import (
    begin_with_repeated_rows,
    begins_with_first_column,
    column_of,
)
from estimator_mgpu.partition.rules.selections import (
    before_arrangement,
    of_positions,
    of_rows,
    of_shape,
)
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import (
    ONE,
    Entries,
    Entry,
    Largest,
    RowSpace,
    RowsToLast,
    SelectedRows,
    Size,
    UniqueRows,
    origin_of,
    per_row,
)
from estimator_mgpu.tf_internals import op_types

_SEGMENTS = tuple(f'Segment{reduction}' for reduction in ('Max', 'Mean', 'Min', 'Prod', 'Sum'))
# What lookups of sparse ids make of each row, or models themselves: it's zero without entries.
_SUMS = ('SegmentMean', 'SegmentSum', *op_types.SPARSE_SEGMENTS)

# Of the ops that give indices: those whose entries have different ones if the first input's have.
_KEEP_INDICES = (
    *('Cast', 'GatherV2', 'Identity', 'SparseFillEmptyRows', 'SparseReorder', 'SparseReshape'),
    'SparseSlice',
)
# And those that may make the same indices twice: ids in the place of columns, say.
_MAY_REPEAT_INDICES = (
    *('ConcatV2', 'DynamicPartition', 'ExpandDims', 'GatherNd', 'Maximum', 'Pack', 'Reshape'),
    *('Squeeze', 'StridedSlice', 'Transpose'),
)


def decide(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """How an op on entries is sharded; None if it has to run once.

    Args:
      op: one of `TYPES`, or one that is given positions or places of ids.
    """
    rule = _RULES.get(op.type) or _USES.get(op.type)
    positions = [placement for placement in placements if isinstance(placement, Positions)]
    if rule is None or any(isinstance(one.rows, UniqueRows) for one in positions):
        return None  # What is in rows of different ids, several towers may have.
    return rule(op, placements, sizes)


def _indices_of(
    tensor: tf.Tensor, placement: Placement, sizes: Sizes
) -> tuple[Positions, Need] | None:
    """The indices of a sparse tensor: which ones towers have, and in which form; None if none.

    They may be computed of the number of rows alone: then towers take those of their rows.
    """
    if isinstance(placement, Positions):
        return placement, LOCAL
    dims = sizes.dims(tensor)
    rows = dims[0].rows if dims and len(dims) == 2 else None
    repeats = per_row(dims[0], rows) if dims and rows else None
    if rows is None or repeats is None or isinstance(rows, SelectedRows):
        return None
    if not begin_with_repeated_rows(tensor, rows, sizes):
        return None
    positions = Positions(rows, rows, ONE, repeats=repeats, fill_rows=True)
    return positions, CountedFromFirst(Slice(0, rows, repeats), rows, ONE)


def _reshape(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`SparseReshape`: indices, the shape, and the new shape.

    Entries are numbered in row-major order. So an example has the same entries in [batch, 6] as in
    [2 * batch, 3], or in any shape that has a multiple of the batch first.
    """
    indices = _indices_of(op.inputs[0], placements[0], sizes)
    before = sizes.entries(op.inputs[1])
    asked = sizes.entries(op.inputs[2])
    after = sizes.entries(op.outputs[1])
    if indices is None or not before or not asked or not after:
        return None
    positions, need = indices
    rows = positions.rows
    if not before[0].same_as(positions.total):
        return None  # Of [2 * batch, 3], all entries may be in the first half of the rows.
    factor = per_row(after[0], rows)
    shape = local_shape_by_rows(before, rows)
    new_shape: Need | None = local_shape_by_rows(asked, rows)
    if asked[0] == Size(-1) and not any(rows in size.symbols for size in asked):
        new_shape = FULL
    if factor is None or shape is None or new_shape is None:
        return None
    return Decision(
        OpPlan((need, shape, new_shape)),
        [_with_factor(positions, factor), None],
        [[positions.count, Size(len(after))], [Size(len(after))]],
    )


def _with_factor(positions: Positions, factor: Size) -> Positions:
    """The positions of the same entries, of which a row has another number."""
    fill_rows = positions.fill_rows and factor == positions.factor
    return dataclasses.replace(positions, selections=(), factor=factor, fill_rows=fill_rows)


def _key_in_order(op: tf.Operation, operands: Sequence[Positions]) -> Hashable:
    """The key of the entries that an op brings into the order of their rows.

    Entries with the same key are equally many in each row: those of ids and of their weights, say.
    """
    # An example's entries may be shared out to several rows in more than one way.
    return op.type, tuple(operands) if operands[0].factor == ONE else op.inputs[0].name


def _in_order(
    op: tf.Operation, key: Hashable, rows: RowSpace, factor: Size, sizes: Sizes
) -> Positions:
    """The indices of the entries that an op gives, in the order of their rows.

    Args:
      key: the same for all ops that give each row as many entries.
    """
    selection = SelectedRows(op.outputs[0].name, None, origin_of(rows))
    return Positions(sizes.same_for(key, selection), rows, factor)


def _sparse_tensor(positions: Positions, columns: int, needs: Sequence[Need]) -> Decision:
    """A decision for an op that gives a sparse tensor: indices, values and mostly a shape.

    Args:
      columns: how many dimensions it has.
    """
    size = Size(columns)
    return Decision(
        OpPlan(tuple(needs)),
        [positions, positions.shard, None],
        [[positions.count, size], [positions.count], [size]],
    )


def _fill_empty_rows(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """`SparseFillEmptyRows`: indices, values, the shape, and what is put into rows without entries.

    It brings the entries into the order of the rows. Whatever else is filled up with the same
    indices gets the same ones: the weights of ids, say, if an example is a row.
    """
    indices = _indices_of(op.inputs[0], placements[0], sizes)
    dims = sizes.dims(op.inputs[0])
    shape = sizes.entries(op.inputs[2])
    if indices is None or not shape or not dims:
        return None
    positions, need = indices
    rows = positions.rows
    local_shape = local_shape_by_rows(shape, rows)
    if local_shape is None or per_row(shape[0], rows) != positions.factor:
        return None

    key = _key_in_order(op, [positions])
    filled = _in_order(op, key, rows, positions.factor, sizes)
    filled = dataclasses.replace(filled, fill_rows=True)
    places = Positions(positions.selection, filled.selection, ONE, repeats=positions.repeats)
    return Decision(
        OpPlan((need, of_positions(positions, placements[1]), local_shape, FULL)),
        # The last ones are the places of the entries among the filled ones.
        [filled, filled.shard, Shard(0, rows), places],
        [[filled.count, dims[1]], [filled.count], [shape[0]], [dims[0]]],
    )


def _gradient_of_fill(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """`SparseFillEmptyRowsGrad`: the places of entries among the filled ones, and gradients."""
    places, gradient = placements
    dims = sizes.dims(op.inputs[1])
    if not isinstance(places, Positions) or not dims:
        return None
    need = of_rows(places, gradient, dims[0])
    if need is None:
        return None
    of_default = Partial('sum', origin_of(places.rows))
    return Decision(OpPlan((LOCAL, need)), [places.shard, of_default], [[places.count], []])


def _are_different(indices: tf.Tensor) -> bool:
    """Whether no two entries have the same indices: a sparse tensor of the batch has none such.

    Args:
      indices: those of which towers have their own.
    """
    op = indices.op
    if len(parts_of(indices)) > 1:
        return True  # Machines have read them, each its own part of the batch's.
    if op.type == 'SparseConcat':
        return all(map(_are_different, op.inputs[: op.get_attr('N')]))
    if op.type == 'GatherV2' and before_arrangement(op.inputs[1]).op.type != 'Where':
        return False
    if op.type in _KEEP_INDICES:
        return _are_different(op.inputs[0])
    return op.type not in _MAY_REPEAT_INDICES  # Others are the batch's, or in a mask or a text.


def _reorder(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`SparseReorder`: indices, values, the shape. It sorts the entries, by their rows first.

    In which order it gives entries with the same indices depends on all entries, so these need the
    same value.
    """
    indices = _indices_of(op.inputs[0], placements[0], sizes)
    shape = sizes.entries(op.inputs[2])
    if indices is None or not shape:
        return None
    are_different = isinstance(placements[0], Positions) and _are_different(op.inputs[0])
    if not are_different and op.inputs[1].op.type != op_types.FILL:
        return None
    positions, need = indices
    local_shape = local_shape_by_rows(shape, positions.rows)
    if local_shape is None or not shape[0].same_as(positions.total):
        return None
    key = _key_in_order(op, [positions])
    ordered = _in_order(op, key, positions.rows, positions.factor, sizes)
    needs = (need, of_positions(positions, placements[1]), local_shape)
    return _sparse_tensor(ordered, len(shape), needs)


class _SparseOperands(NamedTuple):
    """Sparse tensors that an op combines, each row with the same row of the others.

    Attributes:
      positions: their indices, all of the same rows.
      needs: the forms of all indices, then of all values, then of all shapes.
    """

    positions: Sequence[Positions]
    needs: Sequence[Need]


def _sparse_operands(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> _SparseOperands | None:
    """An op's first inputs: all indices, all values, and all shapes; None if rows differ."""
    count = op.get_attr('N')
    all_positions: list[Positions] = []
    needs_of_indices: list[Need] = []
    needs_of_values: list[Need] = []
    needs_of_shapes: list[Need] = []
    for number in range(count):
        indices = _indices_of(op.inputs[number], placements[number], sizes)
        shape = sizes.entries(op.inputs[2 * count + number])
        if indices is None or not shape:
            return None
        positions, need = indices
        rows = all_positions[0].rows if all_positions else positions.rows
        local_shape = local_shape_by_rows(shape, rows)
        is_of_rows = positions.total == rows.size and shape[0].same_as(rows.size)
        if not is_of_rows or local_shape is None:
            return None
        all_positions.append(positions)
        needs_of_indices.append(need)
        needs_of_values.append(of_positions(positions, placements[count + number]))
        needs_of_shapes.append(local_shape)
    return _SparseOperands(all_positions, needs_of_indices + needs_of_values + needs_of_shapes)


def _cross(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`SparseCross`: indices, values and shapes of sparse tensors, and dense ones, of rows.

    It gives the entries of each row, in the order of the rows.
    """
    sparse = _sparse_operands(op, placements, sizes)
    if sparse is None or not all(one.selection.is_ordered for one in sparse.positions):
        return None  # It takes entries to be in the order of the rows.
    needs = list(sparse.needs)
    dense = range(len(needs), len(needs) + len(op.get_attr('dense_types')))
    own_rows = [positions.rows for positions in sparse.positions]
    own_rows += [rows for rows in (rows_of(placements[index]) for index in dense) if rows]
    if not own_rows or isinstance(own_rows[0], SelectedRows):
        return None
    rows = own_rows[0]
    for index in dense:
        dims = sizes.dims(op.inputs[index])
        if not dims or not dims[0].same_as(rows.size):
            return None
        needs.append(LOCAL if placements[index] == Shard(0, rows) else Slice(0, rows, ONE))
    needs += [FULL] * (len(op.inputs) - len(needs))

    crossed = _in_order(op, op.name, rows, ONE, sizes)
    shape = op.outputs[2]
    sizes.set_entries(shape, [rows.size, Size.of(Largest(shape.name, 1))])
    return _sparse_tensor(crossed, 2, needs)


def _concat(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`SparseConcat` of entries of the same rows: indices, values and shapes.

    It gives the entries of each row, in the order of the rows.
    """
    sparse = _sparse_operands(op, placements, sizes)
    if sparse is None or isinstance(sparse.positions[0].rows, SelectedRows):
        return None
    shapes = [sizes.entries(shape) or [] for shape in op.inputs[-len(sparse.positions) :]]
    axis = op.get_attr('concat_dim') % len(shapes[0])
    if axis == 0 or not _are_different(op.outputs[0]):
        return None
    if not all(isinstance(placement, Positions) for placement in placements[: len(shapes)]):
        return None
    columns = [Size.of(Largest(op.outputs[2].name, axis))]
    sizes.set_entries(op.outputs[2], shapes[0][:axis] + columns + shapes[0][axis + 1 :])
    key = _key_in_order(op, sparse.positions)
    joined = _in_order(op, key, sparse.positions[0].rows, ONE, sizes)
    return _sparse_tensor(joined, len(shapes[0]), sparse.needs)


def _slice_entries(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """`SparseSlice` of all rows: indices, values, the shape, where it starts, and the new shape."""
    shape, start, size = (sizes.entries(operand) for operand in op.inputs[2:])
    if not shape or not start or not size:
        return None
    if start[0] != Size(0) or not size[0].same_as(shape[0]):
        return None
    name = op.outputs[2].name
    columns = range(1, len(shape))
    # If the op runs once, its own output has the shape. Otherwise each tower's copy gives one, and
    # the largest counts, which is set below.
    sizes.set_entries(op.outputs[2], [shape[0], *[Size.of(Entry(name, i)) for i in columns]])

    indices = _indices_of(op.inputs[0], placements[0], sizes)
    if indices is None or not indices[0].selection.is_ordered:
        return None  # It keeps their order, and doesn't tell which ones it takes.
    positions, need = indices
    local_shape = local_shape_by_rows(shape, positions.rows)
    local_size = local_shape_by_rows(size, positions.rows)
    if local_shape is None or local_size is None or not shape[0].same_as(positions.total):
        return None
    sizes.set_entries(op.outputs[2], [shape[0], *[Size.of(Largest(name, i)) for i in columns]])
    needs = (need, of_positions(positions, placements[1]), local_shape, FULL, local_size)
    key = op.type, op.inputs[0].name, tuple(start), tuple(size)
    left = _in_order(op, key, positions.rows, positions.factor, sizes)
    return _sparse_tensor(left, len(shape), needs)


def _column(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """A `StridedSlice` such as `indices[:, 0]`, the rows of entries, or what another column has.

    Or `indices[:, :2]`, which are indices as well.
    """
    positions = placements[0]
    if not isinstance(positions, Positions):
        return None
    plan = OpPlan((LOCAL, FULL, FULL, FULL))
    of_rows = dataclasses.replace(positions, selections=())
    if begins_with_first_column(op, sizes):
        return Decision(plan, [of_rows], [[positions.count, sizes.static_dims(op.outputs[0])[1]]])
    column = column_of(op, sizes)
    if column is None:
        return None
    return Decision(plan, [of_rows if column == 0 else positions.shard], [[positions.count]])


def _join_columns(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """`ConcatV2` of indices with columns of others, as `tf.sparse.to_indicator` makes indices."""
    positions = placements[0]
    columns = sizes.static_dims(op.outputs[0])[1:]
    if not isinstance(positions, Positions) or sizes.numbers(op.inputs[-1]) not in ([1], [-1]):
        return None
    if len(columns) != 1:
        return None
    # All have equally many rows, or the op fails.
    needs = [LOCAL, *(of_positions(positions, placement) for placement in placements[1:-1]), FULL]
    of_rows = dataclasses.replace(positions, selections=())
    return Decision(OpPlan(tuple(needs)), [of_rows], [[positions.count, *columns]])


def _segments(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`SegmentSum` and the like: entries, and the row of each of them."""
    placement, positions = placements
    dims = sizes.dims(op.inputs[0])
    if not isinstance(positions, Positions) or not dims:
        return None
    return _summed_to_last(op, positions, (of_positions(positions, placement), LOCAL), dims, sizes)


def _sparse_segments(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """`SparseSegmentSum` and the like: a table, an id for each entry, and the row of each of them.

    How many rows there are, it's told as another input, or it's the last entry's row that says it.
    """
    dims = sizes.dims(op.inputs[0])
    positions = placements[2]
    if not isinstance(positions, Positions) or not dims:
        return None
    data_and_ids = _data_and_ids(placements[0], dims, placements[1], positions)
    if data_and_ids is None:
        return None
    needs = (*data_and_ids, LOCAL)
    if len(op.inputs) == 3:
        return _summed_to_last(op, positions, needs, dims, sizes)

    count = of_shape(positions, sizes.entries(op.inputs[3]))
    return None if count is None else _summed(positions, (*needs, count), dims)


def _data_and_ids(
    data: Placement, data_dims: Sequence[Size], ids: Placement, positions: Positions
) -> tuple[Need, Need] | None:
    """The forms of a table, or of what was looked up of it, and of each entry's place in that."""
    if isinstance(ids, PlacesOfIds):
        is_of_ids = data == Shard(0, ids.ids) and data_dims[0] == ids.ids.size
        return (LOCAL, LOCAL) if is_of_ids and unique_ids.have_places(positions, ids) else None
    return (FULL, LOCAL) if data == REPLICATE and ids == positions.shard else None


def _summed_to_last(
    op: tf.Operation,
    positions: Positions,
    needs: tuple[Need, ...],
    data_dims: Sequence[Size],
    sizes: Sizes,
) -> Decision | None:
    """A decision for sums of entries by their rows, up to the last row with an entry.

    A tower's sums end with its own last row with an entry. Behind these it puts zeros, the sums of
    rows without entries.
    """
    if positions.fill_rows:
        return _summed(positions, needs, data_dims)
    entries = positions.selection
    if not isinstance(entries, SelectedRows) or op.type not in _SUMS or entries.origin.is_of_tensor:
        return None
    if positions.rows is not entries.origin or positions.total != entries.origin.size:
        return None
    indices = entries.name if isinstance(entries, Entries) else op.inputs[len(needs) - 1].name
    to_last: RowSpace = RowsToLast.of([entries.name], entries.origin)
    rows = sizes.same_for(key_of_sums(entries.name), to_last)  # or others that propagation has set
    plan = OpPlan(needs, padding=Padding(rows, entries.name, indices))
    return Decision(plan, [Shard(0, rows)], [[rows.size, *data_dims[1:]]])


def key_of_sums(entries: str) -> tuple[str, str]:
    """What says which rows sums of entries have, by the name of the row space of the entries."""
    return 'sums', entries


def _summed(positions: Positions, needs: tuple[Need, ...], data_dims: Sequence[Size]) -> Decision:
    """A decision for sums of entries by their rows."""
    dims = [positions.total, *data_dims[1:]]
    return Decision(OpPlan(needs), [Shard(0, positions.rows)], [dims])


def _pad(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`Pad` of the rows up to the last one with an entry: a tower puts its others behind them."""
    rows = rows_of(placements[0])
    dims = sizes.dims(op.inputs[0])
    paddings = sizes.entries(op.inputs[1])  # two numbers a dimension
    if not isinstance(rows, RowsToLast) or not dims or not paddings:
        return None
    is_of_rows = placements[0] == Shard(0, rows) and dims[0] == rows.size
    fills_up = paddings == [Size(0), rows.behind.size, *[Size(0)] * (len(paddings) - 2)]
    if not is_of_rows or not fills_up or not op.inputs[1].shape.is_fully_defined():
        return None
    local = LocalShape(tuple(paddings), 1, rows.behind)
    plan = OpPlan((LOCAL, local, *[FULL] * (len(op.inputs) - 2)))
    return Decision(plan, [Shard(0, rows.origin)], [[rows.origin.size, *dims[1:]]])


def _slice(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`Slice` of all rows, up to the last one with an entry, as in the gradient of `Pad`."""
    dims = sizes.dims(op.inputs[0])
    size = sizes.entries(op.inputs[2])
    rows = size[0].rows if size else None
    if not isinstance(rows, RowsToLast) or not dims or not size:
        return None
    if placements[0] != Shard(0, rows.origin) or dims[0] != rows.origin.size:
        return None
    takes_first = sizes.numbers(op.inputs[1]) == [0] * len(size) and size[0] == rows.size
    if not takes_first or not all(map(Size.same_as, size[1:], dims[1:])):
        return None
    plan = OpPlan((LOCAL, FULL, LocalShape(tuple(size), 0, rows)))
    return Decision(plan, [Shard(0, rows)], [size])


_RULES = {
    'SparseReshape': _reshape,
    'SparseFillEmptyRows': _fill_empty_rows,
    'SparseFillEmptyRowsGrad': _gradient_of_fill,
    'SparseReorder': _reorder,
    'SparseConcat': _concat,
    'SparseSlice': _slice_entries,
    **dict.fromkeys(['SparseCross', 'SparseCrossHashed', 'SparseCrossV2'], _cross),
    **dict.fromkeys(_SEGMENTS, _segments),
    **dict.fromkeys(op_types.SPARSE_SEGMENTS, _sparse_segments),
    'Pad': _pad,
    'PadV2': _pad,
    'Slice': _slice,
    **ragged.RULES,
    **unique_ids.RULES,
}
TYPES = tuple(_RULES)
"""Types of ops on entries, whatever they are given."""

_USES = {
    'ConcatV2': _join_columns,
    'StridedSlice': _column,
    **ragged.USES,
    **unique_ids.USES,
}
"""By type of op that is given positions, or places of ids: how it's sharded."""
