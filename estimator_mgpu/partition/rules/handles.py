"""Rules for TensorArrays and stacks, where v1 loops keep values and what their gradients need.

Unlike a TensorList, such a list isn't passed from op to op. All ops name it by its *handle*, and
change it in place. So the placement of a handle is that of the list, and changes when an op puts
the first element into it.

The ops on a TensorArray are ordered by a *flow*: a float scalar that each of them gives to the next
one. It has no meaning as a number. A tower's list has flows of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
    FLOW,
    REPLICATE,
    REPLICATE_LIST,
    Flow,
    ListPlacement,
    NestedList,
    NotGatherable,
    Placement,
    ReplicateList,
    Shard,
    ShardList,
    SizeList,
)
from estimator_mgpu.partition.plan import FULL, LOCAL, Decision, LocalShape, Need, OpPlan, Slice
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import RowSpace, Size


class _Put(NamedTuple):
    """An op that puts values into a list."""

    value: int  # the input that is put
    stacked: int  # 1 if that is several elements, stacked along a new dimension 0


PUTS = {
    'StackPushV2': _Put(1, 0),
    'TensorArrayScatterV3': _Put(2, 1),
    'TensorArrayWriteV3': _Put(2, 0),
}
# Ops that take elements out; 1 if these are stacked along a new dimension 0.
_GETS = {'StackPopV2': 0, 'TensorArrayGatherV3': 1, 'TensorArrayReadV3': 0}


def decide(
    op: tf.Operation,
    placements: Sequence[Placement],
    batch: RowSpace,
    sizes: Sizes,
    in_function: bool,
) -> Decision | None:
    """How an op on a TensorArray or a stack is sharded; None if it has to run once.

    Args:
      op: one whose first input is a handle.
      placements: of the op's inputs; the handle's is that of the list.
      batch: the batch's row space.
      sizes: where the sizes of an element that is a shape are recorded.
      in_function: whether the op is in a loop, which towers have copies of: then all lists that
        are used there are towers' own.
    """
    if not placements:
        return None
    decision = _decision(op, placements, batch, sizes, in_function)
    flow = op.inputs[-1]
    if decision is None or not op.type.startswith('TensorArray'):
        return decision
    # The list is the tower's own, and so is the flow by which the op comes after those before it.
    return decision._replace(lists=[*decision.lists, (flow, FLOW)])


def _decision(
    op: tf.Operation,
    placements: Sequence[Placement],
    batch: RowSpace,
    sizes: Sizes,
    in_function: bool,
) -> Decision | None:
    current = placements[0]
    if op.type in PUTS:
        return _put(op, placements, batch, sizes, in_function)
    if current == REPLICATE and not in_function:
        return None

    if op.type in _GETS:
        return _get(op, current, sizes)
    if op.type == 'TensorArraySizeV3':
        return Decision(OpPlan((LOCAL, LOCAL)), [REPLICATE])
    if op.type == 'TensorArrayGradV3':
        # A list of the gradients of the elements, each with the placement of its element.
        if isinstance(current, (ShardList, ReplicateList)):
            return Decision(OpPlan((LOCAL, LOCAL)), [current, FLOW])
        return Decision(OpPlan((LOCAL, LOCAL)), [REPLICATE, FLOW])
    return None


def new_list(op: tf.Operation, placement: Placement) -> OpPlan:
    """How each tower makes a list of its own.

    Args:
      op: what makes the list. Its only input is the size.
      placement: the list's.
    """
    return OpPlan((FULL,), _local_attrs(op, placement))


def _local_attrs(op: tf.Operation, placement: Placement) -> dict[str, LocalShape]:
    """Attributes of an op that are other ones on a tower: the shape of elements, if it's fixed."""
    if 'element_shape' not in op.node_def.attr or not isinstance(placement, ShardList):
        return {}
    shape = tf.TensorShape(op.get_attr('element_shape'))
    if shape.rank is None:
        return {}
    entries = [Size(-1 if length is None else length) for length in shape.as_list()]
    entries[placement.axis] = placement.factor * Size(1, (placement.rows,))
    return {'element_shape': LocalShape(tuple(entries), placement.axis, placement.rows)}


def _put(
    op: tf.Operation,
    placements: Sequence[Placement],
    batch: RowSpace,
    sizes: Sizes,
    in_function: bool,
) -> Decision | None:
    """A value becomes an element, or several."""
    put = PUTS[op.type]
    current = placements[0]
    value = placements[put.value]
    if isinstance(value, Shard) and value.rows is not batch:
        return None
    if current == REPLICATE and value == REPLICATE and not in_function:
        return None

    need: Need = LOCAL if value != REPLICATE or in_function else FULL
    output = value
    if value == REPLICATE and isinstance(current, ShardList):
        axis = current.axis + put.stacked
        need = Slice(axis, batch, current.factor)
        output = Shard(axis, batch)
        result: ListPlacement | None = current
    else:
        result = _list_with(op.inputs[put.value], value, put.stacked, batch, sizes)
    if result is None or current not in (REPLICATE, REPLICATE_LIST, result):
        return None

    needs: list[Need] = [FULL] * len(op.inputs)
    needs[0] = LOCAL
    needs[put.value] = need
    if op.type == 'StackPushV2':  # It gives the value that was pushed.
        dims = sizes.dims(op.inputs[put.value]) if isinstance(output, Shard) else None
        return Decision(OpPlan(tuple(needs)), [output], [dims], [(op.inputs[0], result)])
    needs[-1] = LOCAL
    return Decision(OpPlan(tuple(needs)), [FLOW], lists=[(op.inputs[0], result)])


def _list_with(
    value: tf.Tensor, placement: Placement, stacked: int, batch: RowSpace, sizes: Sizes
) -> ListPlacement | None:
    """The placement of a list into which a value is put; None if there is none."""
    if isinstance(placement, Shard):
        factor = sizes.per_row(value, placement.axis, placement.rows)
        if factor is None or factor.static is None or placement.axis < stacked:
            return None
        if placement.in_blocks:
            return None
        rank = len(sizes.dims(value) or [])
        return ShardList(placement.axis - stacked, placement.rows, factor, rank - stacked)
    if isinstance(placement, (ShardList, SizeList, NestedList, ReplicateList, Flow)):
        return NestedList(placement)
    if placement != REPLICATE or value.dtype == tf.resource:
        return None  # Not even what a list in the list has is known.
    entries = sizes.entries(value) or []
    if any(batch in size.symbols for size in entries):
        return None if stacked else SizeList(tuple(entries))
    return REPLICATE_LIST


def _get(op: tf.Operation, placement: Placement, sizes: Sizes) -> Decision | None:
    """An element, or all of them stacked."""
    stacked = _GETS[op.type]
    output = op.outputs[0]
    needs: list[Need] = [FULL] * len(op.inputs)
    needs[0] = LOCAL
    if op.type != 'StackPopV2':
        needs[-1] = LOCAL

    if isinstance(placement, ShardList):
        shard = Shard(placement.axis + stacked, placement.rows)
        dims = sizes.dims_of_shard(output, shard, placement.factor, placement.rank + stacked)
        return Decision(OpPlan(tuple(needs), _local_attrs(op, placement)), [shard], [dims])
    if isinstance(placement, SizeList):
        sizes.set_entries(output, placement.sizes)
        return Decision(OpPlan(tuple(needs)), [REPLICATE])
    if isinstance(placement, NestedList):
        return Decision(OpPlan(tuple(needs)), [placement.element])
    if isinstance(placement, NotGatherable) and placement != REPLICATE_LIST:
        return None
    if placement == REPLICATE and op.type == 'StackPopV2':
        return None  # What was pushed, and by whom, isn't known.
    return Decision(OpPlan(tuple(needs)), [REPLICATE], lists=[(op.inputs[0], REPLICATE_LIST)])
