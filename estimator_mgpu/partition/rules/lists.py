"""Rules for TensorLists and Optionals, where loops and branches keep what their gradients need.

A tower's list has the tower's shards of the elements. Lists cannot be gathered, so these rules are
functions of the placements, rather than texts: an op with lists is sharded only if its lists are.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
    FLOW,
    REPLICATE,
    CountedByTower,
    ElementShape,
    ListPlacement,
    NestedList,
    NotGatherable,
    Placement,
    RowList,
    Shard,
    ShardList,
    SizeList,
)
from estimator_mgpu.partition.plan import (
    FULL,
    LOCAL,
    Constant,
    Decision,
    LocalShape,
    Need,
    OpPlan,
    Slice,
    local_shape_of,
)
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import RowSpace, Size
from estimator_mgpu.tf_internals.op_types import EMPTY_LISTS

# Ops that give a list like those that they are given.
_SAME_PLACEMENT = ('Identity', 'ZerosLike', 'AddN', 'AddV2', 'Add')
# The last input becomes an element of the list, which is the first input; or of a new Optional.
_PUT = ('TensorListSetItem', 'TensorListPushBack', 'OptionalFromValue')
# The last output is an element of the list, which is the first input.
_POP = ('TensorListPopBack', 'OptionalGetValue')
_GET = ('TensorListGetItem', 'TensorListStack', *_POP)


def empty_list(op: tf.Operation, placement: Placement | None) -> OpPlan:
    """How each tower makes an empty list of its own: for elements of any size.

    The first input of such an op is the shape of the elements, which is another one on towers.

    Args:
      op: what makes the list.
      placement: the list's, if it's to have an element for each row: see `is_for_rows`.
    """
    needs: list[Need] = [FULL] * len(op.inputs)
    if op.inputs:  # An `OptionalNone` has none.
        needs[0] = _any_shape(op.inputs[0])
    if isinstance(placement, RowList):
        needs[1] = LocalShape((placement.count,), 0, placement.rows)
    return OpPlan(tuple(needs))


# The input that says how many elements there are, and the attribute with their type.
_LISTS_OF_A_LENGTH = {'TensorArrayV3': (0, 'dtype'), 'TensorListReserve': (1, 'element_dtype')}


def is_for_rows(op: tf.Operation, placement: RowList, sizes: Sizes) -> bool:
    """Whether an op makes an empty list, or a TensorArray, of an element for each row."""
    if op.type not in _LISTS_OF_A_LENGTH:
        return False
    position, element_type = _LISTS_OF_A_LENGTH[op.type]
    if op.get_attr(element_type) == tf.variant:
        return False  # Variants, such as ragged rows, can't be put together again.
    entries = sizes.entries(op.inputs[position]) or []
    return len(entries) == 1 and entries[0].same_as(placement.count) is True


def decide(
    op: tf.Operation,
    placements: Sequence[Placement],
    batch: RowSpace,
    sizes: Sizes,
    in_function: bool,
) -> Decision | None:
    """How an op with lists is sharded; None if it has to run once.

    Args:
      op: one of TensorLists or Optionals, or one that is given some.
      batch: the batch's row space.
      sizes: where the sizes of an element that is a shape are recorded.
      in_function: whether the op is in a function, or in a loop, that towers have copies of.
    """
    if FLOW in placements:
        return _flow(op, placements)
    if op.type in _SAME_PLACEMENT:
        if any(placement != placements[0] for placement in placements):
            return None
        return Decision(OpPlan((LOCAL,) * len(op.inputs)), [placements[0]])
    if op.type == 'TensorListFromTensor':
        return _unstack(op, placements[0], batch, sizes)
    if op.type in _PUT:
        return _put(op, placements, batch, sizes)

    if not placements:
        return None  # An `OptionalNone`, in a branch.
    first = placements[0]
    if not isinstance(first, NotGatherable):
        return None
    if op.type in EMPTY_LISTS:
        # One that is made like another one. Only ops on the same tower use it.
        return _on_first_input(op, [None])
    if op.type in _GET:
        return _get(op, first, sizes, in_function)
    if isinstance(first, ShardList):
        results: dict[str, Placement] = {
            'TensorListLength': REPLICATE,
            'TensorListElementShape': ElementShape(),
            'TensorListResize': first,
        }
        return _on_first_input(op, [results[op.type]]) if op.type in results else None
    return None


def _flow(op: tf.Operation, placements: Sequence[Placement]) -> Decision | None:
    """What comes of flows, as sums of them in gradients; each tower has its own."""
    is_flow = all(placement in (FLOW, REPLICATE) for placement in placements)
    if op.type not in _SAME_PLACEMENT or not is_flow:
        return None
    needs = tuple(LOCAL if placement == FLOW else FULL for placement in placements)
    return Decision(OpPlan(needs), [FLOW])


def _on_first_input(op: tf.Operation, placements: Sequence[Placement | None]) -> Decision:
    """Each tower takes its own first input, and the full values of the others."""
    needs: list[Need] = [LOCAL, FULL]
    return Decision(OpPlan(tuple(needs[: len(op.inputs)])), placements)


def _unstack(
    op: tf.Operation, placement: Placement, batch: RowSpace, sizes: Sizes
) -> Decision | None:
    """`TensorListFromTensor`: of [time, batch, units], it makes a list of [batch, units].

    Of [batch, units], it makes a list with an element for each example.
    """
    if not isinstance(placement, Shard):
        return None
    by_row = row_list(op.inputs[0], placement, sizes)
    if by_row is not None:
        return Decision(OpPlan((LOCAL, FULL)), [by_row])
    elements = list_with(op.inputs[0], placement, batch, sizes, stacked=1)
    if elements is None:
        return None
    return Decision(OpPlan((LOCAL, _any_shape(op.inputs[1]))), [elements])


def row_list(tensor: tf.Tensor, placement: Placement, sizes: Sizes) -> RowList | None:
    """The list with an element for each entry along a tensor's dimension 0; None if it's no shard.

    Its elements aren't in blocks.
    """
    if not isinstance(placement, Shard) or placement.axis > 0 or placement.in_blocks:
        return None
    factor = sizes.per_row(tensor, 0, placement.rows)
    if factor is None or factor.static is None:
        return None
    return RowList(placement.rows, factor)


def stacked_rows(rows: RowList, output: tf.Tensor, sizes: Sizes) -> list[Size] | None:
    """The dimensions of all elements of a list, stacked; None if their number is unknown."""
    if not output.shape.rank:
        return None
    return [rows.count, *sizes.static_dims(output)[1:]]


def _get(op: tf.Operation, current: Placement, sizes: Sizes, in_function: bool) -> Decision | None:
    """An element of a list, or all of them stacked."""
    if isinstance(current, RowList):
        dims = stacked_rows(current, op.outputs[0], sizes)
        if op.type != 'TensorListStack' or dims is None:
            return None
        plan = OpPlan((LOCAL, FULL), {'num_elements': -1})
        return Decision(plan, [Shard(0, current.rows)], [dims])
    if not isinstance(current, ShardList) and op.type not in _POP:
        return None
    output = op.outputs[-1]
    stacked = int(op.type == 'TensorListStack')
    element = element_of(current, output, sizes, in_function, stacked)
    if element is None:
        return None

    # The last of several inputs is the shape of an element. A tower is given that of its shard if
    # it's known; otherwise any shape, as its elements have one.
    needs: list[Need] = [FULL] * len(op.inputs)
    needs[0] = LOCAL
    if len(op.inputs) > 1 and isinstance(current, ShardList):
        shape = op.inputs[-1]
        local_shape = local_shape_of(sizes.entries(shape), current.axis, current.rows)
        needs[-1] = local_shape or _any_shape(shape)

    plan = OpPlan(tuple(needs))
    placement, dims = element
    if op.type == 'TensorListPopBack':
        return Decision(plan, [current, placement], [None, dims])  # The list that is left is first.
    return Decision(plan, [placement], [dims])


def element_of(
    current: Placement, output: tf.Tensor, sizes: Sizes, in_function: bool, stacked: int
) -> tuple[Placement, list[Size] | None] | None:
    """The placement and the dimensions of what is taken out of a list; None if it isn't known.

    Args:
      current: the list's placement.
      output: what is taken out: an element, or several.
      sizes: where the sizes are recorded if it's a shape.
      in_function: whether it's taken out in a function, where towers may have sizes of their own.
      stacked: 1 if it's several elements, stacked along a new dimension 0.
    """
    if isinstance(current, ShardList):
        shard = Shard(current.axis + stacked, current.rows, current.in_blocks)
        rank = current.rank + stacked
        return shard, sizes.dims_of_shard(output, shard, current.factor, rank)
    if isinstance(current, SizeList) and in_function and not stacked:
        sizes.set_entries(output, current.sizes)
        return REPLICATE, None
    if isinstance(current, NestedList):
        return current.element, None
    return None


def _put(
    op: tf.Operation, placements: Sequence[Placement], batch: RowSpace, sizes: Sizes
) -> Decision | None:
    """An element is put into a list, or becomes an Optional."""
    *before, item = placements
    element = op.inputs[-1]
    needs: list[Need] = []
    current: Placement = REPLICATE  # An empty list, or none.
    if before:
        if op.type == 'OptionalFromValue':
            return None  # Several values in one Optional.
        current = before[0]
        needs = [LOCAL, *[FULL] * (len(before) - 1)]

    if item == REPLICATE and isinstance(current, ShardList):
        need = Slice(current.axis, batch, current.factor, current.in_blocks)
        return Decision(OpPlan((*needs, need)), [current])

    result = list_with(element, item, batch, sizes)
    if result is None or current not in (REPLICATE, result):
        return None
    return Decision(OpPlan((*needs, LOCAL)), [result])


def list_with(
    value: tf.Tensor, placement: Placement, batch: RowSpace, sizes: Sizes, stacked: int = 0
) -> ListPlacement | None:
    """The placement of a list into which a value is put; None if it isn't known.

    Nor if it isn't known how many entries an example has in a shard.

    Args:
      placement: the value's.
      batch: the batch's row space.
      sizes: of the value.
      stacked: 1 if the value is several elements, stacked along a new dimension 0.
    """
    if isinstance(placement, Shard):
        factor = sizes.per_row(value, placement.axis, placement.rows)
        if factor is None or factor.static is None or placement.axis < stacked:
            return None
        axis = placement.axis - stacked
        rank = sizes.rank(value) - stacked
        return ShardList(axis, placement.rows, factor, rank, placement.in_blocks)
    if isinstance(placement, NotGatherable) and not isinstance(placement, CountedByTower):
        return NestedList(placement)
    entries = sizes.entries(value) or []
    if placement == REPLICATE and not stacked and any(batch in size.symbols for size in entries):
        return SizeList(tuple(entries))
    return None


def _any_shape(shape: tf.Tensor) -> Constant:
    """In place of the shape of elements: of any size, and of any rank if that isn't known."""
    rank = shape.shape.num_elements() if shape.shape.rank == 1 else None
    if rank is None:
        return Constant((-1,), scalar=True)
    return Constant((-1,) * rank)
