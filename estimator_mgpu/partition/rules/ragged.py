"""Rules for ragged tensors and split strings, of which each tower has those of its examples.

The values of a ragged tensor, and the parts of a string, are rows of a selection (`SelectedRows`).
Two things say in which row each of them is: row splits, of which towers are given their own
(`RaggedRows`), or the numbers of rows, which are `Positions`. Two examples, one a tower:

    'a b'  'c'                                           =>    'a b'         and    'c'

    StringSplit              a b c, in rows 0 0 1              a b, 0 0             c, 0
    DenseBincount of rows    2 1                               2                    1
    RaggedTensorToTensor     [[a, b], [c, '']]                 [[a, b]]             [[c, '']]
    Sub of row splits        [2, 3] - [0, 2] = [2, 1]          [2] - [0] = [2]      [1] - [0] = [1]

As those in `entries` and `selections`, these rules are functions of the placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches.batch import parts_of
from estimator_mgpu.partition.placements import PaddedPositions, Placement, Positions, Shard
from estimator_mgpu.partition.plan import (
    FULL,
    LOCAL,
    Decision,
    LocalRange,
    Need,
    OpPlan,
    RaggedRows,
    Slice,
    local_shape_by_rows,
)
from estimator_mgpu.partition.rules import row_lengths
from estimator_mgpu.partition.rules.selections import is_range, of_shape
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import (
    ONE,
    Entry,
    Largest,
    LongestRow,
    RowSpace,
    SelectedRows,
    Size,
    Splits,
    UniqueRows,
)


def _split_strings(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """`StringSplit` and the like: strings, each of which is a row, and a delimiter.

    It gives the parts of each string, in the order of the rows.
    """
    strings = placements[0]
    if not isinstance(strings, Shard) or isinstance(strings.rows, UniqueRows):
        return None
    rows = strings.rows
    factor = sizes.per_row(op.inputs[0], 0, rows)
    if factor is None or strings.in_blocks or not rows.is_ordered:
        return None
    indices, _, shape = op.outputs
    [parts] = sizes.selections(row_lengths.of_indices(indices), [indices], rows)
    positions = Positions(parts, rows, factor)
    sizes.set_entries(shape, [positions.total, Size.of(Largest(shape.name, 1))])
    others = len(op.inputs) - 1
    return Decision(
        OpPlan((LOCAL, *[FULL] * others)),
        [positions, positions.shard, None],
        [[positions.count, Size(2)], [positions.count], [Size(2)]],
    )


def _count(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`DenseBincount`: how many entries each row has."""
    positions, _, _ = placements
    is_vector = sizes.rank(op.inputs[0]) == 1
    if not isinstance(positions, Positions) or not is_vector or not row_lengths.is_count(op):
        return None
    count = of_shape(positions, sizes.entries(row_lengths.limited(op.inputs[1], sizes)))
    if count is None:
        return None
    plan = OpPlan((LOCAL, count, FULL))
    return Decision(plan, [Shard(0, positions.rows)], [[positions.total]])


class _Partition(NamedTuple):
    """A ragged tensor of which each tower has its rows."""

    rows: RowSpace
    total: Size  # how many rows of the ragged tensor all towers have together
    values: RowSpace
    needs: tuple[Need, ...]  # of what says in which row each value is


def _ragged_to_dense(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """`RaggedTensorToTensor`: a shape, values, a default, and what says in which row each value is.

    All rows are filled up to the length of the longest one, which towers are given. If the values
    are numbers from 0 on, as in the op's gradient, they are the positions of other values.
    """
    shape, values, default, *_ = op.inputs
    partition = _partition(op, placements, sizes)
    dims = sizes.dims(values)
    asked = sizes.entries(shape)
    if partition is None or not dims or not asked or default.shape.rank != 0:
        return None
    if asked == [Size(-1)] and shape.shape.rank == 0:
        asked = [Size(-1)] * (1 + len(dims))  # A scalar asks for nothing.

    found = [partition.total, Size.of(LongestRow(op.inputs[-1].name)), *dims[1:]]
    if len(asked) != len(found):
        return None
    for axis, size in enumerate(asked):
        if any(isinstance(symbol, Entry) for symbol in size.symbols):
            return None  # It may be -1.
        if axis == 1 and size != Size(-1):
            found[1] = size
        elif size != Size(-1) and not size.same_as(found[axis]):
            return None
    local_shape = local_shape_by_rows(found, partition.rows)
    if local_shape is None:
        return None

    selection = partition.values
    data: Need
    placement: Placement
    if is_range(values, sizes) and sizes.entries(default) == [Size(-1)]:
        if dims != [selection.size] or not isinstance(selection, SelectedRows):
            return None
        data = LocalRange(selection, ONE)
        placement = PaddedPositions(selection, partition.rows)
    else:
        data = LOCAL if placements[1] == Shard(0, selection) else Slice(0, selection, ONE)
        placement = Shard(0, partition.rows)
    needs = (local_shape, data, FULL, *partition.needs)
    return Decision(OpPlan(needs), [placement], [found])


def _partition(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> _Partition | None:
    """The ragged tensor of a `RaggedTensorToTensor`; None if towers don't have their rows of it.

    It's one of the batch, or one that was made of entries in the order of the rows.
    """
    kinds = op.get_attr('row_partition_types')
    if kinds == [b'ROW_SPLITS']:
        return _partition_by_splits(op.inputs[3], sizes)

    if kinds == [b'FIRST_DIM_SIZE', b'VALUE_ROWIDS']:
        positions = placements[4]
        if not isinstance(positions, Positions) or not positions.selection.is_ordered:
            return None
        count = of_shape(positions, sizes.entries(op.inputs[3]))
        if count is None or positions.repeats != ONE:
            return None
        return _Partition(positions.rows, positions.total, positions.selection, (count, LOCAL))
    return None


def _partition_by_splits(splits: tf.Tensor, sizes: Sizes) -> _Partition | None:
    """The ragged tensor of the batch that has some row splits; None if it's another one."""
    dims = sizes.dims(splits)
    symbols = dims[0].symbols if dims else ()
    if len(symbols) != 1 or not isinstance(symbols[0], Splits):
        return None
    rows = symbols[0].rows
    selection = sizes.selection_of(row_lengths.of_splits(splits), rows)
    if selection is None:
        return None
    return _Partition(rows, rows.size, selection, (RaggedRows(selection.name, splits.name, rows),))


def _ragged_to_sparse(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """`RaggedTensorToSparse`: row splits and values, which become indices, values and a shape."""
    splits, *_, values = op.inputs
    if len(op.inputs) > 2 or sizes.rank(values) != 1:
        return None
    partition = _partition_by_splits(splits, sizes)
    if partition is None:
        return None
    longest = Size.of(LongestRow(splits.name))
    sizes.set_entries(op.outputs[2], [partition.total, longest])
    values_placement = Shard(0, partition.values)
    data = LOCAL if placements[1] == values_placement else Slice(0, partition.values, ONE)
    positions = Positions(partition.values, partition.rows, ONE)
    count = positions.count
    return Decision(
        OpPlan((*partition.needs, data)),
        [positions, values_placement, None],
        [[count, Size(2)], [count], [Size(2)]],
    )


def _lengths(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`Sub` of row splits: where rows end, and where they begin. It gives the rows' lengths.

    If one machine has read all row splits, lengths are computed once, and towers take their own.
    """
    splits = row_lengths.splits_before(op, sizes)
    if splits is None or len(parts_of(splits)) == 1:
        return None
    partition = _partition_by_splits(splits, sizes)
    if partition is None:
        return None
    [need] = partition.needs
    assert isinstance(need, RaggedRows)
    needs = need._replace(offset=1), need._replace(offset=0)
    return Decision(OpPlan(needs), [Shard(0, partition.rows)], [[partition.total]])


def _is_padding(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`NotEqual` of padded positions and -1."""
    positions, _ = placements
    dims = sizes.dims(op.inputs[0])
    if not isinstance(positions, PaddedPositions) or not dims:
        return None
    if sizes.entries(op.inputs[1]) != [Size(-1)] or op.inputs[1].shape.rank != 0:
        return None
    return Decision(OpPlan((LOCAL, FULL)), [Shard(0, positions.rows)], [dims])


RULES = {
    **dict.fromkeys(['StringSplit', 'StringSplitV2'], _split_strings),
    'DenseBincount': _count,
    'RaggedTensorToSparse': _ragged_to_sparse,
    'RaggedTensorToTensor': _ragged_to_dense,
    'Sub': _lengths,
}
"""By type of op: how it's sharded."""
USES = {'NotEqual': _is_padding}
"""The same for ops that are given positions."""
