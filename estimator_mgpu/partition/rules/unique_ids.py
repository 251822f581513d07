"""Rules for different ids, such as those that are looked up in a table.

Each tower has different ids of its own (`UniqueRows`), those of its entries or of its examples, and
each has a place among them. The gradients of the rows that a tower looked up are partial sums by
id: towers that have an id in common add up theirs.

As those in `entries` and `selections`, these rules are functions of the placements.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
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
    Decision,
    LocalShape,
    Need,
    OpPlan,
    Slice,
    local_shape_by_rows,
)
from estimator_mgpu.partition.rules.selections import before_arrangement, new_shape, of_rows
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import (
    ONE,
    SelectedRows,
    Size,
    UniqueRows,
    origin_of,
    product,
)
from estimator_mgpu.tf_internals import op_types

# Ops that give rows of a table, which may be in parts.
_TABLE_LOOKUPS = (*op_types.LOOKUPS, 'ResourceGather', 'DynamicStitch', 'ParallelDynamicStitch')

_SPARSE = tuple(f'SparseSegment{reduction}' for reduction in ('Mean', 'SqrtN', 'Sum'))


def _unique(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`Unique`: of ids, those that are different, and the place of each.

    Optimizers ask for it once more, of the ids that were looked up. If a model has looked up
    different ids, these are different already. Otherwise it's done once, by the table.
    """
    rows = rows_of(placements[0])
    if rows is None or placements[0] != Shard(0, rows):
        return None
    factor = sizes.per_row(op.inputs[0], 0, rows)
    if factor is None or (isinstance(rows, SelectedRows) and factor != ONE):
        return None  # Each entry has one id.
    if isinstance(rows, UniqueRows):
        if not rows.are_in(before_arrangement(op.inputs[0]).name):
            return None  # What is computed of different ids may be the same.
        dims = [[rows.size], [rows.size]]
        return Decision(OpPlan((LOCAL,)), [Shard(0, rows), PlacesOfIds(rows, rows)], dims)

    if not isinstance(rows, SelectedRows) and not _are_looked_up_at(op.outputs[1]):
        return None
    picked_from = rows if isinstance(rows, SelectedRows) and not rows.is_ordered else None
    ids = UniqueRows(op.outputs[0].name, None, origin_of(rows), picked_from)
    places = PlacesOfIds(ids, rows, factor)
    return Decision(OpPlan((LOCAL,)), [Shard(0, ids), places], [[ids.size], [places.count]])


def _are_looked_up_at(places: tf.Tensor) -> bool:
    """Whether places of ids say where to look up rows of a table, which belong to the ids.

    What a layer computes of these rows isn't looked up in this way: its gradients are sharded by
    examples of the batch only.
    """
    for user in places.consumers():
        looks_up = user.type in ('GatherV2', *op_types.SPARSE_SEGMENTS)
        if looks_up and before_arrangement(user.inputs[0]).op.type in _TABLE_LOOKUPS:
            return True
        if user.type == op_types.RESHAPE and _are_looked_up_at(user.outputs[0]):
            return True
    return False


def _gradient_of_gather(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """`UnsortedSegmentSum`: for each id, the sum of what its entries have."""
    placement, places, _ = placements
    data_dims = sizes.dims(op.inputs[0])
    if not isinstance(places, PlacesOfIds) or not data_dims or sizes.rank(op.inputs[1]) != 1:
        return None
    count = _count_of_ids(places.ids, op.inputs[2], sizes)
    if count is None:
        return None
    if places.rows is places.ids:
        # Each id has one row. These aren't parts of a sum: towers with the same id have the same.
        rows = Shard(0, places.ids)
        if placement != rows or data_dims[0] != places.ids.size:
            return None
        return Decision(OpPlan((LOCAL, LOCAL, count)), [rows], [data_dims])
    # There are as many rows as places, or the op fails.
    data = LOCAL if placement == places.shard else Slice(0, places.rows, places.factor)
    needs = (data, LOCAL, count)
    return _summed_by_id(places.ids, needs, data_dims)


def decide_of_sums_by_id(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """How an op on the sums by id that towers have is sharded; None if it needs the full ones.

    Args:
      op: one that is given partial results.
      placements: of its inputs.
      sizes: of tensors.
    """
    ids = rows_of(placements[0])
    dims = sizes.dims(op.inputs[0])
    if not isinstance(ids, UniqueRows) or not isinstance(placements[0], Partial):
        return None
    if not dims or dims[0] != ids.size:
        return None
    if op.type == op_types.RESHAPE:
        return _reshaped_sums_by_id(op, ids, dims, sizes)
    if op.type == op_types.UNSORTED_SEGMENT_SUM:
        return _sums_of_sums(op, ids, placements[1], dims, sizes)
    if op.type == 'GatherV2':
        return _sums_of_picked_ids(op, ids, placements[1], dims, sizes)
    return None


def _reshaped_sums_by_id(
    op: tf.Operation, ids: UniqueRows, dims: Sequence[Size], sizes: Sizes
) -> Decision | None:
    """`Reshape`, as in the gradient of a lookup: each row stays the sum of one id."""
    shape = new_shape(op, product(dims), sizes)
    local_shape = local_shape_by_rows(shape, ids)
    # A tower without ids can't tell what -1 stands for, as it has no entries.
    if not shape or local_shape is None or shape[0] != ids.size or Size(-1) in shape:
        return None
    return Decision(OpPlan((LOCAL, local_shape)), [Partial('sum', ids)], [shape])


def _sums_of_sums(
    op: tf.Operation, ids: UniqueRows, segments: Placement, dims: Sequence[Size], sizes: Sizes
) -> Decision | None:
    """`UnsortedSegmentSum`: sums by id are added up by other numbers.

    An optimizer adds up the rows of a gradient that have the same id, as it doesn't know that they
    have different ones. And a gradient becomes dense if it's added to a dense one: the sum of each
    id is in the id's row then.
    """
    if sizes.dims(op.inputs[1]) != [ids.size]:
        return None
    if isinstance(segments, PlacesOfIds):
        count = _count_of_ids(segments.ids, op.inputs[2], sizes)
        if segments.rows is not ids or count is None:
            return None
        return _summed_by_id(segments.ids, (LOCAL, LOCAL, count), dims)
    rows = sizes.entries(op.inputs[2])
    if segments != Shard(0, ids) or not rows or sizes.numbers(op.inputs[2]) is None:
        return None  # If the batch tells the number, parts may be as large as what they're made of.
    plan = OpPlan((LOCAL, LOCAL, FULL))
    return Decision(plan, [Partial('sum', ids.origin)], [[*rows, *dims[1:]]])


def _sums_of_picked_ids(
    op: tf.Operation, ids: UniqueRows, positions: Placement, dims: Sequence[Size], sizes: Sizes
) -> Decision | None:
    """`GatherV2` at positions, as in the gradient of a table in parts: each part has some ids."""
    if not isinstance(positions, Positions) or positions.rows is not ids:
        return None
    if positions.repeats != ONE:
        return None  # Each id of the part has one row.
    is_along_ids = sizes.numbers(op.inputs[2]) == [0] and op.get_attr('batch_dims') == 0
    if not is_along_ids or sizes.rank(op.inputs[1]) != 1:
        return None
    placement = Partial('sum', positions.selection)
    return Decision(OpPlan((LOCAL, LOCAL, FULL)), [placement], [[positions.count, *dims[1:]]])


def _gradient(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """`SparseSegmentSumGrad` and the like: gradients, each entry's place, its row, and a size."""
    _, places, positions, _ = placements
    dims = sizes.dims(op.inputs[0])
    if not isinstance(places, PlacesOfIds) or not isinstance(positions, Positions) or not dims:
        return None
    gradient = of_rows(positions, placements[0], dims[0])
    count = _count_of_ids(places.ids, op.inputs[3], sizes)
    if gradient is None or count is None or not have_places(positions, places):
        return None
    return _summed_by_id(places.ids, (gradient, LOCAL, LOCAL, count), dims)


def have_places(positions: Positions, places: PlacesOfIds) -> bool:
    """Whether there is a place for each of some positions, in the same order."""
    return places.shard == positions.shard and places.factor == positions.repeats


def _sparse_gradient(
    op: tf.Operation, placements: Sequence[Placement], sizes: Sizes
) -> Decision | None:
    """`SparseSegmentSumGradV2` and the like: as above, with ids, which it gives sorted as well."""
    _, ids, positions, _ = placements
    dims = sizes.dims(op.inputs[0])
    if not isinstance(positions, Positions) or ids != positions.shard or not dims:
        return None
    gradient = of_rows(positions, placements[0], dims[0])
    if gradient is None:
        return None
    origin = origin_of(positions.rows)
    rows = UniqueRows(op.outputs[1].name, None, origin, is_sorted=True)
    summed = _summed_by_id(rows, (gradient, LOCAL, LOCAL, FULL), dims)
    return summed._replace(
        placements=[*summed.placements, Shard(0, rows)],
        dims=[*summed.dims, [rows.size]],
    )


def _count_of_ids(ids: UniqueRows, count: tf.Tensor, sizes: Sizes) -> LocalShape | None:
    """The form of a scalar that says how many different ids there are; None if it doesn't."""
    entries = sizes.entries(count)
    return local_shape_by_rows(entries, ids) if entries == [ids.size] else None


def _summed_by_id(ids: UniqueRows, needs: tuple[Need, ...], data_dims: Sequence[Size]) -> Decision:
    """A decision for sums by ids, of which towers have a part each."""
    return Decision(OpPlan(needs), [Partial('sum', ids)], [[ids.size, *data_dims[1:]]])


RULES = {
    op_types.UNIQUE: _unique,
    **dict.fromkeys([f'{op_type}Grad' for op_type in _SPARSE], _gradient),
    **dict.fromkeys([f'{op_type}GradV2' for op_type in _SPARSE], _sparse_gradient),
}
"""By type of op: how it's sharded."""
USES = {op_types.UNSORTED_SEGMENT_SUM: _gradient_of_gather}
"""The same for ops that are given places of ids."""
