"""Loops that take one row after the other, as `tf.map_fn` does: towers take their own rows.

For example,

    tf.map_fn(lambda image: tf.image.per_image_standardization(image), images)

makes a list of the images. Step i of its loop reads element i, and writes element i of another
list. So a tower whose lists have the elements of its own rows makes as many steps as it has rows,
and all ops in them stay as they are: each is given what one device gives it in the step of the same
row.

That holds if a step knows of its number no more than which elements it reads and writes, and leaves
nothing to the next step but a number that is larger by 1. The graph has to show it, or the loop
runs once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import FLOW, NotGatherable, Placement, RowList
from estimator_mgpu.partition.plan import (
    FULL,
    LOCAL,
    Decision,
    LocalShape,
    Need,
    OpPlan,
    VariableValue,
)
from estimator_mgpu.partition.propagation.called_functions import CalledFunctions
from estimator_mgpu.partition.propagation.function_bodies import plan_of_repeated
from estimator_mgpu.partition.rules import lists
from estimator_mgpu.partition.rules.notation import NotSharded
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import ONE, Size
from estimator_mgpu.tf_internals import op_types
from estimator_mgpu.tf_internals.effects import can_be_repeated
from estimator_mgpu.tf_internals.v1_loops import OpOrLoop, V1Loop, passed_on

_ACCESSES = (*op_types.LIST_READS, *op_types.LIST_WRITES)


class _Part(NamedTuple):
    """A loop's condition, or its body, as a function of the loop's variables and constants."""

    inputs: Sequence[tf.Tensor]
    ops: Sequence[OpOrLoop]

    def index_of(self, tensor: tf.Tensor) -> int | None:
        """Which of the inputs a tensor is, if it's one."""
        source = passed_on(tensor)
        for index, argument in enumerate(self.inputs):
            if source is argument:
                return index
        return None


class _RowLoop:
    """A loop that is given lists with an element for each row.

    Args:
      functions: whose only body is the loop's.
      condition: the loop's condition.
      goes_on: the condition's result.
      body: the loop's body.

    Raises:
      NotSharded: if a step may depend on another one, or on its number.
    """

    def __init__(
        self, functions: CalledFunctions, condition: _Part, goes_on: tf.Tensor, body: _Part
    ):
        if functions.scope.in_function:
            raise NotSharded('a loop over rows is in another loop or function')
        self._functions = functions
        self._arguments = functions.arguments
        self._condition = condition
        self._body = body
        self._results = functions.bodies[0].outputs  # what the variables are after a step
        self._sizes = functions.scope.sizes
        self._row_list = next(one for one in functions.placements if isinstance(one, RowList))
        # The number of steps that a tower makes.
        self._local_limit = LocalShape((self._row_list.count,), 0, self._row_list.rows)
        self._lists: dict[int, RowList] = {}  # by index
        self._flows: set[int] = set()  # indices of what orders the ops on TensorArrays
        self._limits: set[int] = set()  # indices of what is the number of steps
        self._constant_limits: set[tf.Operation] = set()  # comparisons with a constant
        self._counters = set(self._find_counters())  # indices of variables that count the steps
        self._comparisons: set[tf.Operation] = set()  # of these
        self._check_condition(goes_on)
        self._find_lists()
        self._check_uses()
        self._check_results()

    # What is what.

    def _find_counters(self) -> Iterator[int]:
        """Yields the indices of variables that begin with 0, and become 1 larger in each step."""
        for index, (argument, result) in enumerate(zip(self._arguments, self._results)):
            op = passed_on(result).op
            if op.type not in op_types.SUMS_OF_TWO or self._sizes.entries(argument) != [Size(0)]:
                continue
            left, right = op.inputs
            for counter, one in [(left, right), (right, left)]:
                if self._body.index_of(counter) == index and Sizes().entries(one) == [ONE]:
                    yield index

    def _check_condition(self, goes_on: tf.Tensor) -> None:
        """Checks that there is a step for each row: `i < n`, or `(i < n) & (j < n)`."""
        left = [goes_on]
        while left:
            op = passed_on(left.pop()).op
            if op.type == op_types.LOGICAL_AND:
                left += op.inputs
            elif op.type == op_types.LESS:
                self._check_comparison(op)
            else:
                raise NotSharded('the loop is given a list of rows, but may not take all of them')

    def _check_comparison(self, less: tf.Operation) -> None:
        counter, limit = map(self._condition.index_of, less.inputs)
        if counter not in self._counters:
            raise NotSharded('the loop may not begin with the first row, or leave some out')
        self._comparisons.add(less)
        if limit is not None:
            self._limits.add(limit)
            count = self._sizes.entries(self._arguments[limit])
        else:
            self._constant_limits.add(less)
            count = Sizes().entries(less.inputs[1])  # A function may have the graph's names.
        if not count or not count[0].same_as(self._row_list.count):
            raise NotSharded('the loop may not end with the last row')

    def _find_lists(self) -> None:
        """Finds the lists of rows, and those new ones that steps write to."""
        for index, placement in enumerate(self._functions.placements):
            if isinstance(placement, RowList):
                self._lists[index] = placement
            elif isinstance(placement, NotGatherable) and placement != FLOW:
                raise NotSharded('the loop is also given other lists')
        for op in self._body.ops:
            if op.type in op_types.LIST_WRITES:
                list_index = self._body.index_of(op.inputs[0])
                has_flow = op.type.startswith(op_types.HANDLE_PREFIXES)
                flow = self._body.index_of(op.inputs[-1]) if has_flow else None
                if list_index is not None and self._is_new(list_index, flow):
                    self._lists[list_index] = self._row_list
        if any(rows != self._row_list for rows in self._lists.values()):
            raise NotSharded('the loop is given lists of different rows')

        for op in self._body.ops:
            if op.type.startswith(op_types.HANDLE_PREFIXES):
                handle, flow = map(self._body.index_of, (op.inputs[0], op.inputs[-1]))
                if handle in self._lists and flow is not None:
                    self._flows.add(flow)

    def _is_new(self, index: int, flow: int | None) -> bool:
        """Whether a list has no elements before the loop, and room for one of each row.

        Args:
          index: that of the list, or of a TensorArray's handle.
          flow: in the second case, that of the flow.
        """
        maker = passed_on(self._arguments[index]).op
        if flow is not None and passed_on(self._arguments[flow]).op is not maker:
            return False
        return lists.is_for_rows(maker, self._row_list, self._sizes)

    # What a step does with it.

    def _check_uses(self) -> None:
        """Checks that a step's number says no more than which elements it reads and writes."""
        for op in (*self._condition.ops, *self._body.ops):
            members = op.all_ops if isinstance(op, V1Loop) else [op]
            if any(member.type in op_types.KEEPS for member in members):
                raise NotSharded('gradients go through a loop over rows')
            for member in members:
                self._check_can_be_repeated(member)
        for op in self._body.ops:
            if op.type in op_types.PASS_ON or op in self._comparisons:
                continue
            for position, tensor in enumerate(op.inputs):
                index = self._body.index_of(tensor)
                if index is not None and not self._may_use(op, position, index):
                    raise NotSharded(f'in it, {op.name} uses more than the row of a step')

        # What the next step begins with is for that step alone.
        next_names = {passed_on(result).name for result in self._results}
        next_names -= {argument.name for argument in self._body.inputs}
        for op in self._body.ops:
            names = {passed_on(tensor).name for tensor in op.inputs}
            if op.type not in op_types.PASS_ON and next_names & names:
                raise NotSharded(f'in it, {op.name} uses more than the row of a step')

    def _check_can_be_repeated(self, op: tf.Operation) -> None:
        if op.type.startswith(op_types.HANDLE_PREFIXES):
            if op.type not in _ACCESSES or self._body.index_of(op.inputs[0]) not in self._lists:
                raise NotSharded('in it, there is another list')
        elif not can_be_repeated(op):
            raise NotSharded(f'in it, {op.type} has side effects or draws random numbers')

    def _may_use(self, op: OpOrLoop, position: int, variable: int) -> bool:
        """Whether a variable or a constant, of this index, may be that input of an op."""
        is_access = op.type in _ACCESSES
        of_rows = is_access and self._body.index_of(op.inputs[0]) in self._lists
        by_number = is_access and self._body.index_of(op.inputs[1]) in self._counters
        if variable in self._counters:
            increments = [passed_on(self._results[index]).op for index in self._counters]
            return (of_rows and position == 1) or op in increments
        if variable in self._limits:
            return False
        if variable in self._lists:
            return by_number and position == 0
        if variable in self._flows:
            return of_rows and position == len(op.inputs) - 1
        return True

    def _check_results(self) -> None:
        """Checks that a step leaves nothing to the next one but its number and the lists."""
        for index, result in enumerate(self._results):
            if index in self._counters or self._body.index_of(result) == index:
                continue
            op = passed_on(result).op
            position = 0 if index in self._lists else -1
            is_list = index in self._lists or index in self._flows
            is_written = (
                op.type in op_types.LIST_WRITES
                and self._body.index_of(op.inputs[position]) == index
            )
            if not is_list or not is_written:
                raise NotSharded(f'in it, {op.name} is for the step of the next row')

    # What follows.

    def needs(self, readers: Sequence[Any]) -> list[Need]:
        """The forms of the arguments; of those that `readers` only read, the values."""
        needs: list[Need] = []
        for index in range(len(self._arguments)):
            if index in self._limits:
                needs.append(self._local_limit)
            elif index in self._lists or index in self._flows:
                needs.append(LOCAL)
            else:
                needs.append(self._functions.variable_value(readers, index) or FULL)
        return needs

    def new_lists(self) -> list[tuple[tf.Tensor, Placement]]:
        """The lists that steps write to, or read, with their placements."""
        return [(self._arguments[index], rows) for index, rows in self._lists.items()]

    def plans(self, ops: Sequence[tf.Operation]) -> dict[str, OpPlan]:
        """The plans of ops in the condition or in the body: all is there on each tower."""
        plans = {}
        for op in ops:
            plan = plan_of_repeated(op) if op.type in op_types.FUNCTION_CALLERS else OpPlan()
            plans[op.name] = plan._replace(needs=(LOCAL,) * len(op.inputs))
            if op in self._constant_limits:
                plans[op.name] = OpPlan((LOCAL, self._local_limit))
        return plans

    def placement(self, index: int | None) -> Placement | None:
        """The placement of a result; None if no tower's op uses it."""
        if index in self._flows:
            return FLOW
        return None if index is None else self._lists.get(index)


def decide_row_loop(functions: CalledFunctions, condition: Any) -> Decision:
    """Decides how a `While` runs that is given lists with an element for each row.

    Args:
      functions: whose only body is the loop's.
      condition: the function of the loop's condition.

    Raises:
      NotSharded: if it has to run once.
    """
    graphs = [condition, *functions.bodies]
    parts = [_Part(graph.inputs, graph.get_operations()) for graph in graphs]
    loop = _RowLoop(functions, parts[0], condition.outputs[0], parts[1])
    plan = OpPlan(tuple(loop.needs(graphs)), functions=[loop.plans(part.ops) for part in parts])
    indices = range(len(functions.arguments))
    return Decision(plan, [loop.placement(index) for index in indices], lists=loop.new_lists())


def decide_v1_row_loop(functions: CalledFunctions, loop: V1Loop) -> Decision:
    """The same for a loop of TensorFlow 1, whose condition is a part of its body."""
    [body] = functions.bodies
    part = _Part(body.inputs, body.ops)
    row_loop = _RowLoop(functions, part._replace(ops=[]), body.condition, part)
    needs = row_loop.needs([body])
    plans = {**row_loop.plans(loop.all_ops), **plans_of_reads(loop, needs)}
    indices = [part.index_of(result) for result in body.results]
    return Decision(
        OpPlan(tuple(needs), functions=[plans]),
        [row_loop.placement(index) for index in indices],
        lists=row_loop.new_lists(),
    )


def plans_of_reads(loop: V1Loop, needs: Sequence[Need]) -> dict[str, OpPlan]:
    """The plans of the reads of variables in a v1 loop that is given their values."""
    return {
        read.name: OpPlan((need,))
        for enter, need in zip(loop.enters, needs)
        if isinstance(need, VariableValue)
        for read in enter.outputs[0].consumers()
    }
