"""What is known and decided of a graph, or of a function that it calls, while ops are visited."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
    FLOW,
    REPLICATE,
    REPLICATE_LIST,
    Partial,
    Placement,
    RowList,
)
from estimator_mgpu.partition.plan import FULL, LOCAL, Decision, OpPlan
from estimator_mgpu.partition.rules import lists, tensor_arrays
from estimator_mgpu.partition.rules.notation import Rule
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import Entries, RowSpace, RowsToLast
from estimator_mgpu.tf_internals import op_types
from estimator_mgpu.tf_internals.v1_loops import OpOrLoop, V1Loop, passed_on

CallRule = Callable[['Scope', Any, Sequence[Placement]], Optional[Decision]]
"""Decides how a loop, a branch or a call runs on every tower; None if it runs once."""

ALL = 'all'
"""In place of a sparse tensor's name, which has a colon: its sums are those of all examples."""


class EqualNames:
    """Sets of names that stand for the same, joined two by two, each known by its first name."""

    def __init__(self) -> None:
        self._earlier: dict[str, str] = {}  # by name, one that is the same and was there before

    def __len__(self) -> int:
        return len(self._earlier)

    def first(self, name: str) -> str:
        """The first one of those that are the same as a name."""
        while name in self._earlier:
            name = self._earlier[name]
        return name

    def join(self, name: str, other: str) -> None:
        """Notes that both are the same. `ALL` becomes the first one."""
        first = self.first(name)
        second = self.first(other)
        if second == ALL:
            first, second = second, first
        if first != second:
            self._earlier[second] = first

    def sets(self) -> dict[str, list[str]]:
        """By the first name of each set, its other names."""
        sets: dict[str, list[str]] = {}
        for name in self._earlier:
            sets.setdefault(self.first(name), []).append(name)
        return sets


@dataclass
class Scope:
    """The graph, or a function that towers call.

    Attributes:
      batch: the batch's row space.
      rules: by types of ops.
      call_rules: those of loops, branches and calls, those of TensorFlow 1, too.
      sizes: the sizes of tensors, in terms of the global batch. In a function, which each tower
        calls, the batch in them stands for the tower's examples.
      in_function: nothing can be gathered in a function, nor reduced but in a joint loop.
      is_joint: whether the ops are in a v1 loop of which all towers make each step together.
      assumes: while it isn't known yet how a loop's variables are placed, a function may be visited
        on the assumption that whatever an op needs is there.
      reduced: names of tensors, partial results of towers, that are reduced where they are made.
      run_once: ops that have to run once, as other ops need all of their lists. By the name of such
        an op, why the others do, by their names.
      same_entries: sparse tensors of the batch that are used entry by entry, as weights are with
        their ids, by the names of their indices. Towers have the values where the entries of the
        first one are.
      same_sums: those whose sums are used one by one, and so are as many; `ALL` if these are used
        with all examples.
      reshardable: names of tensors that were gathered, or made once of such. They may be sharded
        again, along dimension 0.
      ops: what was decided for ops that run on every tower, by name.
      placements: of the tensors that towers make, by name.
      in_loops: of those that towers make in v1 loops, by name.
    """

    batch: RowSpace
    rules: Mapping[str, Rule]
    call_rules: Mapping[str, CallRule]
    sizes: Sizes
    in_function: bool = False
    is_joint: bool = False
    assumes: bool = False
    reduced: set[str] = field(default_factory=set)
    run_once: dict[str, dict[str, str]] = field(default_factory=dict)
    same_entries: EqualNames = field(default_factory=EqualNames)
    same_sums: EqualNames = field(default_factory=EqualNames)
    reshardable: set[str] = field(default_factory=set)
    ops: dict[str, OpPlan] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)
    in_loops: dict[str, Placement] = field(default_factory=dict)

    def placement_of(self, tensor: tf.Tensor) -> Placement:
        """The placement that the tensor has for the ops that use it."""
        name = tensor.name
        return REPLICATE if name in self.reduced else self.placements.get(name, REPLICATE)

    def note_same_rows(self, rows: RowSpace, others: RowSpace) -> None:
        """Notes that an op uses the rows of two row spaces one by one: then they become one.

        That's so from the next pass on. A step fails if there aren't as many of both.
        """
        if isinstance(rows, Entries) and isinstance(others, Entries):
            self.same_entries.join(rows.name, others.name)
        sums = self._whose_sums(rows)
        other_sums = self._whose_sums(others)
        if sums is not None and other_sums is not None:
            self.same_sums.join(sums, other_sums)

    def _whose_sums(self, rows: RowSpace) -> str | None:
        """Whose sums have these rows; `ALL` if they are the batch's, None if they are others."""
        if isinstance(rows, RowsToLast):
            return rows.name
        return ALL if rows is self.batch else None

    @property
    def count_of_same_rows(self) -> int:
        """How many row spaces are noted to be the same as others."""
        return len(self.same_entries) + len(self.same_sums)

    def is_reduced(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is a partial result of towers that is reduced where it's made."""
        is_partial = isinstance(self.placements.get(tensor.name), Partial)
        return is_partial and tensor.name in self.reduced

    def placements_of_inputs(self, op: OpOrLoop) -> list[Placement]:
        """The placements of an op's inputs, in order.

        If a v1 loop is given the handle of a list, that has the placement of the list, even if a
        `Switch`, say, has passed it on.
        """
        if not isinstance(op, V1Loop):
            return list(map(self.placement_of, op.inputs))
        return [
            self.placement_of_list(tensor)
            if tensor.dtype == tf.resource
            else self.placement_of(tensor)
            for tensor in op.inputs
        ]

    def follows_gathered(self, op: OpOrLoop) -> bool:
        """Whether an op uses what was gathered, or what was made once of such."""
        return any(tensor.name in self.reshardable for tensor in op.inputs)

    def record(self, op: OpOrLoop, decision: Decision) -> None:
        """Notes that an op, or a v1 loop, runs on every tower."""
        if isinstance(op, V1Loop):
            [ops] = decision.plan.functions
            self.ops.update(ops)
            self.in_loops.update(decision.in_loop)
            for enter, need in zip(op.enters, decision.plan.needs):
                self.ops[enter.name] = OpPlan((need,), is_joint=decision.plan.is_joint)
        else:
            self.ops[op.name] = decision.plan
        for output, placement in zip(op.outputs, decision.placements):
            if placement is not None:
                self.placements[output.name] = placement
        for output, dims in zip(op.outputs, decision.dims):
            self.sizes.set_dims(output, dims)
        for handle, list_placement in decision.lists:
            self._place_list(handle, list_placement)

    def forget(self, op: tf.Operation) -> None:
        """Forgets that an op runs on every tower."""
        del self.ops[op.name]
        for output in op.outputs:
            del self.placements[output.name]

    # Lists, of which each tower has its own.

    def placement_of_list(self, handle: tf.Tensor) -> Placement:
        """The placement of the TensorArray or the stack that a handle names."""
        return self.placement_of(passed_on(handle))

    def _place_list(self, handle: tf.Tensor, placement: Placement) -> None:
        """Notes the placement of a TensorArray or a stack, or of its flow."""
        source = passed_on(handle)
        if source.dtype == tf.variant:
            return  # An op gives the list with another element as another TensorList.
        self.placements[source.name] = placement
        if source.op.type in op_types.NEW_HANDLES and placement != FLOW:
            plan = tensor_arrays.new_list(source.op, placement)
            self.ops[source.op.name] = plan._replace(needs=(LOCAL,)) if self.in_function else plan

    def make_lists(self, op: OpOrLoop, decision: Decision) -> bool:
        """Lets each tower make the lists that an op is to have as its own.

        A list that is empty on one device is so on every tower, but has elements of other sizes. A
        TensorArray with elements can be made by each tower if these are replicated.

        Returns:
          False if one of them is a list that towers neither have nor can make.
        """
        if self.assumes:
            return True
        placements = {passed_on(handle).name: placement for handle, placement in decision.lists}
        made: dict[str, OpPlan] = {}
        for tensor, need in zip(op.inputs, decision.plan.needs):
            is_missing = need == LOCAL and self.placement_of(tensor) == REPLICATE
            if is_missing and not self._make_list(tensor, placements, made):
                return False
        self.ops.update(made)
        return True

    def _make_list(
        self, tensor: tf.Tensor, placements: Mapping[str, Placement], made: dict[str, OpPlan]
    ) -> bool:
        """Lets each tower make one list.

        Args:
          tensor: a TensorList, or the handle or a flow of a TensorArray or a stack.
          placements: of lists, by the names of their handles.
          made: the plans of the ops that make the list are added to these.

        Returns:
          False if that isn't possible.
        """
        op = tensor.op
        if tensor.dtype == tf.variant:
            if op.type not in op_types.EMPTY_LISTS:
                return False
            made[op.name] = lists.empty_list(op, placements.get(passed_on(tensor).name))
            return True
        if self.in_function or op.name in self.ops or op.name in made:
            return True  # Towers have copies of all that is in a loop.
        if op.name in self.run_once:
            return False

        if op.type in op_types.NEW_HANDLES:
            placement = placements.get(passed_on(op.outputs[0]).name, REPLICATE)
            is_by_row = isinstance(placement, RowList)
            made[op.name] = tensor_arrays.new_list(op, placement if is_by_row else REPLICATE)
        elif op.type == op_types.CONST:
            made[op.name] = OpPlan()  # A flow that begins with 0.0, as in a sum of them.
        elif op.type in op_types.PASS_ON:
            made[op.name] = OpPlan((LOCAL, *[FULL] * (len(op.inputs) - 1)))
        elif op.type in tensor_arrays.PUTS:
            if placements.get(passed_on(op.inputs[0]).name) != REPLICATE_LIST:
                return False
            made[op.name] = OpPlan((LOCAL, *[FULL] * (len(op.inputs) - 2), LOCAL))
        else:
            return False
        return all(
            self._make_list(operand, placements, made)
            for operand, need in zip(op.inputs, made[op.name].needs)
            if need == LOCAL
        )
