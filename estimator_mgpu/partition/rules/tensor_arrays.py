"""Rules for TensorArrays and stacks, where v1 loops keep values and what their gradients need.

Unlike a TensorList, such a list isn't passed from op to op. All ops name it by its *handle*, and
change it in place. So the placement of a handle is that of the list, and changes when an op puts
the first element into it.

The ops on a TensorArray are ordered by a *flow*: a float scalar that each of them gives to the next
one. It has no meaning as a number. A tower's list has flows of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
    FLOW,
    REPLICATE,
    REPLICATE_LIST,
    ListPlacement,
    Placement,
    ReplicateList,
    RowList,
    Shard,
    ShardList,
)
from estimator_mgpu.partition.plan import (
    FULL,
    LOCAL,
    Decision,
    LocalRange,
    LocalShape,
    Need,
    OpPlan,
    Slice,
)
from estimator_mgpu.partition.rules import lists
from estimator_mgpu.partition.rules.row_indices import are_rows
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import RowSpace, Size
from estimator_mgpu.tf_internals.v1_loops import passed_on

# Ops that put an input into a list: which one; and 1 if it's several elements, stacked along a new
# dimension 0.
PUTS = {'StackPushV2': (1, 0), 'TensorArrayScatterV3': (2, 1), 'TensorArrayWriteV3': (2, 0)}
# Ops that take elements out; 1 if these are stacked.
_GETS = {'StackPopV2': 0, 'TensorArrayGatherV3': 1, 'TensorArrayReadV3': 0}
_STACK_OPS = ('StackPopV2', 'StackPushV2')  # the ops that have no flow


def new_list(op: tf.Operation, placement: Placement) -> OpPlan:
    """How each tower makes a list of its own.

    Args:
      op: what makes the list. Its only input is the size.
      placement: the list's.
    """
    if isinstance(placement, RowList):
        return OpPlan((LocalShape((placement.count,), 0, placement.rows),))
    return OpPlan((FULL,), _local_attrs(op, placement))


def _local_attrs(op: tf.Operation, placement: Placement) -> dict[str, LocalShape]:
    """Attributes of an op that are other ones on a tower: the shape of elements, if it's fixed."""
    if 'element_shape' not in op.node_def.attr or not isinstance(placement, ShardList):
        return {}
    shape = tf.TensorShape(op.get_attr('element_shape'))
    if shape.rank is None:
        return {}
    entries = [Size(-1 if length is None else length) for length in shape.as_list()]
    entries[placement.axis] = placement.factor * placement.rows.size
    return {'element_shape': LocalShape(tuple(entries), placement.axis, placement.rows)}


@dataclass
class HandleOp:
    """An op on a TensorArray or a stack.

    Attributes:
      op: one whose first input is a handle.
      placements: of the op's inputs; the handle's is that of the list.
      batch: the batch's row space.
      sizes: where the sizes of an element that is a shape are recorded.
      in_function: whether the op is in a loop, which towers have copies of: then all lists that
        are used there are towers' own.
      assumes: whether the loop is visited again if the op changes the list's placement.
    """

    op: tf.Operation
    placements: Sequence[Placement]
    batch: RowSpace
    sizes: Sizes
    in_function: bool
    assumes: bool

    @property
    def current(self) -> Placement:
        """The placement of the list. It's replicated if nothing is known of the list so far."""
        return self.placements[0]

    def decide(self) -> Decision | None:
        """How the op is sharded; None if it has to run once."""
        decision = self._decide_but_flow()
        if decision is None or self.op.type in _STACK_OPS:
            return decision
        # The list is the tower's own, and so is the flow by which the op comes after others.
        flow = self.op.inputs[-1]
        return decision._replace(lists=[*decision.lists, (flow, FLOW)])

    def _decide_but_flow(self) -> Decision | None:
        if self.op.type in PUTS:
            return self._put()
        if self.current == REPLICATE and not self.in_function:
            return None
        if isinstance(self.current, RowList):
            return self._stack_rows(self.current)

        if self.op.type in _GETS:
            return self._get()
        if self.op.type == 'TensorArraySizeV3':
            return Decision(OpPlan((LOCAL, LOCAL)), [REPLICATE])
        if self.op.type == 'TensorArrayGradV3':
            # A list of the gradients of the elements, each with the placement of its element.
            is_known = isinstance(self.current, (ShardList, ReplicateList))
            gradients = self.current if is_known else REPLICATE
            return Decision(OpPlan((LOCAL, LOCAL)), [gradients, FLOW])
        return None

    def _needs(self) -> list[Need]:
        """Each tower uses its own list and flow, and the full values of other inputs."""
        needs: list[Need] = [FULL] * len(self.op.inputs)
        needs[0] = LOCAL
        if self.op.type not in _STACK_OPS:
            needs[-1] = LOCAL
        return needs

    def _put(self) -> Decision | None:
        """A value becomes an element, or several."""
        position, stacked = PUTS[self.op.type]
        handle = self.op.inputs[0]
        value = self.op.inputs[position]
        placement = self.placements[position]
        if isinstance(placement, Shard) and placement.rows is not self.batch:
            return None
        by_row = lists.row_list(value, placement, self.sizes) if stacked else None
        if by_row is not None:
            return self._unstack_rows(by_row)
        if self.current == placement == REPLICATE and not self.in_function:
            return None  # The list may be one that towers don't have.

        result: ListPlacement | None
        if placement == REPLICATE and isinstance(self.current, ShardList):
            result = self.current
            axis = result.axis + stacked
            need: Need = Slice(axis, self.batch, result.factor, result.in_blocks)
            placement = Shard(axis, self.batch, result.in_blocks)
        else:
            result = self._list_with(value, placement, stacked)
            need = LOCAL if placement != REPLICATE or self.in_function else FULL
        # If a list has elements in full, shards can't be put beside these. If it comes from outside
        # of the loop, they will be sharded as well in the next visit.
        may_become = self.current == REPLICATE or (self.current == REPLICATE_LIST and self.assumes)
        if result is None or (result != self.current and not may_become):
            return None

        needs = self._needs()
        needs[position] = need
        plan = OpPlan(tuple(needs))
        if self.op.type in _STACK_OPS:  # It gives the value that was pushed.
            dims = self.sizes.dims(value) if isinstance(placement, Shard) else None
            return Decision(plan, [placement], [dims], [(handle, result)])
        return Decision(plan, [FLOW], lists=[(handle, result)])

    def _unstack_rows(self, by_row: RowList) -> Decision | None:
        """`TensorArrayScatterV3`: each row becomes an element, in the order of the rows."""
        handle = self.op.inputs[0]
        is_new = self.current == REPLICATE and not self.in_function
        if not is_new or not lists.is_for_rows(passed_on(handle).op, by_row, self.sizes):
            return None
        if not self._takes_each(by_row):
            return None
        plan = OpPlan((LOCAL, LocalRange(by_row.rows, by_row.factor), LOCAL, LOCAL))
        return Decision(plan, [FLOW], lists=[(handle, by_row)])

    def _stack_rows(self, by_row: RowList) -> Decision | None:
        """`TensorArrayGatherV3`: all elements, in the order of the rows."""
        dims = lists.stacked_rows(by_row, self.op.outputs[0], self.sizes)
        if self.op.type != 'TensorArrayGatherV3' or self.in_function or dims is None:
            return None
        if not self._takes_each(by_row):
            return None
        plan = OpPlan((LOCAL, LocalRange(by_row.rows, by_row.factor), LOCAL))
        return Decision(plan, [Shard(0, by_row.rows)], [dims])

    def _takes_each(self, by_row: RowList) -> bool:
        """Whether the op's indices are those of all elements, from 0 on."""
        indices = self.op.inputs[1]
        dims = self.sizes.dims(indices) or []
        is_of_each = len(dims) == 1 and dims[0].same_as(by_row.count)
        return bool(is_of_each) and are_rows(indices, by_row.count, self.sizes)

    def _list_with(
        self, value: tf.Tensor, placement: Placement, stacked: int
    ) -> ListPlacement | None:
        """The placement of a list into which a value is put; None if it isn't known."""
        is_replicated = placement == REPLICATE
        if is_replicated and value.dtype == tf.resource:
            return None  # It's not known either what is in a list that the list has.
        entries = self.sizes.entries(value) or []
        if is_replicated and not any(self.batch in size.symbols for size in entries):
            return REPLICATE_LIST
        return lists.list_with(value, placement, self.batch, self.sizes, stacked)

    def _get(self) -> Decision | None:
        """An element, or all of them stacked."""
        stacked = _GETS[self.op.type]
        output = self.op.outputs[0]
        element = lists.element_of(self.current, output, self.sizes, self.in_function, stacked)
        plan = OpPlan(tuple(self._needs()), _local_attrs(self.op, self.current))
        if element is not None:
            placement, dims = element
            return Decision(plan, [placement], [dims])

        # What was pushed on a stack, and by whom, has to be known. A TensorArray of which nothing
        # is known has elements that were put into it before the loop.
        if self.current == REPLICATE_LIST or (
            self.current == REPLICATE and self.op.type not in _STACK_OPS
        ):
            lists_now = [(self.op.inputs[0], REPLICATE_LIST)]
            return Decision(plan, [REPLICATE], lists=lists_now)
        return None
