"""The inside of a function that towers call: the same rules, where nothing can be made whole.

Inside, nothing can be summed, gathered or sliced: if an op asks for that, or has side effects, what
calls the function runs once. Sizes are each tower's own there, as its tensors say them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.partition import lists, plan
from estimator_mgpu.partition.placements import REPLICATE, SUM, Partial, Placement, Shard
from estimator_mgpu.partition.plan import WHOLE, Division, FunctionPlan, Need, OpPlan
from estimator_mgpu.partition.propagation import Pass
from estimator_mgpu.partition.sizes import SIZE_OPS
from estimator_mgpu.partition.symbols import Entry, Size, per_row
from estimator_mgpu.partition.waits import READS


class Undivided(Exception):
    """A function asks for something that towers can't do by themselves."""


class Inside(Pass):
    """A pass over a function's ops, within the pass over its caller's.

    Args:
      strict: whether nothing may be asked for any more that the function hasn't; while it isn't
        known yet what a loop's variables are, that's taken to be there.
      wanted: of which arguments, constants and fills rows are asked for; more are added.
    """

    def __init__(
        self, outer: Pass, graph: Any, strict: bool, wanted: dict[tf.Operation, plan.Slice]
    ):
        rules = outer.table, outer.callers
        super().__init__(outer.rows, *rules, set(), set(), f'{graph.name}/')
        self.graph = graph
        self.strict = strict
        self.wanted = wanted
        self.given: dict[tuple[str, int], Need] = {}

    def begin(
        self,
        argument: tf.Tensor,
        placement: Placement,
        dims: Sequence[Size] | None,
        entries: Sequence[Size] | None,
    ) -> None:
        """Says what towers have of an argument: its dimensions, and its entries if it's a size."""
        if placement != REPLICATE:
            self.placements[argument.name] = placement
        if dims is not None:
            self.sizes.know(argument, dims)
        if entries is not None and argument.shape.rank in (0, 1):
            self.sizes.know_values(argument, entries)

    def run(self) -> list[Placement]:
        """Visits all ops; returns the placements of what the function returns."""
        names = {t.op.name for t in self.graph.inputs}
        for op in self.graph.get_operations():
            if op.name not in names:
                self.visit(op)
        return [self.seen(t) for t in self.graph.outputs]

    def function_plan(self) -> FunctionPlan:
        """What the towers' copies of the function have otherwise."""
        others = {name: own for name, own in self.ops.items() if own.attrs or own.functions}
        return FunctionPlan(self.given, others)

    def visit(self, op: tf.Operation) -> None:
        if op.type == 'NoOp':
            return
        if op in self.wanted:
            self._make(op, self.wanted[op])
            return
        definition = private.op_def(op.type)
        calls = op.type in self.callers
        if definition is None or (definition.is_stateful and op.type not in READS and not calls):
            raise Undivided(f'{op.type} has effects, or draws numbers')
        placements = [self.seen(t) for t in op.inputs]
        if op.type in SIZE_OPS:
            if any(p != REPLICATE for p in placements) and any(
                self.sizes.entries(t) is None for t in op.outputs
            ):
                raise Undivided(f'sizes of {op.name}')
            return
        if all(p == REPLICATE for p in placements):
            if not any(map(self.differs, op.inputs)):
                if calls:
                    raise Undivided(f'a {op.type} that is the same on all towers')
                return  # The same on all towers.
            if op.type == 'BroadcastGradientArgs' or all(map(self._is_known, op.outputs)):
                return  # Sizes, of which each tower computes its own.
        if any(isinstance(p, Partial) for p in placements):
            self.by_parts(op, placements)
        else:
            self.by_rule(op, placements)

    def linear(self, op: tf.Operation, placements: list[Placement]) -> Partial | None:
        made = super().linear(op, placements)
        if made is None and not self.strict:
            made = super().linear(op, [SUM if p == REPLICATE else p for p in placements])
        return made

    def differs(self, tensor: tf.Tensor) -> bool:
        """Whether towers have their own versions of a size."""
        return any(entry.rows for entry in self.sizes.entries(tensor) or [])

    def _is_known(self, tensor: tf.Tensor) -> bool:
        entries = self.sizes.entries(tensor)
        if entries is None:
            return False
        return not any(isinstance(s, Entry) for e in entries for s in e.symbols)

    def _may_be_made(self, tensor: tf.Tensor) -> bool:
        """Whether each tower can have its rows of a tensor: an argument, or of known size."""
        if any(tensor is argument for argument in self.graph.inputs):
            return True
        if not self.rows.static:
            return False
        if tensor.op.type != 'Fill':
            return tensor.op.type == 'Const'
        return self.sizes.numbers(tensor.op.inputs[0]) is not None

    def _make(self, op: tf.Operation, need: plan.Slice) -> None:
        """Lets each tower make its rows of a constant or a fill."""
        dims = [Size(d) for d in op.outputs[0].shape.as_list()]
        own = per_row(dims[need.axis], self.rows)
        if own is None:
            raise Undivided(f'the size of {op.name}')
        needs: tuple[Need, ...] = ()
        if op.type == 'Fill':
            needs = (plan.Local(tuple(dims), need.axis), WHOLE)
        else:
            self.given[op.name, -1] = plan.Slice(need.axis, own)
        dims[need.axis] = own * Size(1, (self.rows,))
        self.divide(op, Division(OpPlan(needs), [Shard(need.axis, self.rows)], [dims]))

    def own_lists(self, given: Any) -> bool:
        """Lists are the function's own, if they're made empty, of elements of any size."""
        empty = [t for t, need in given if need == plan.OWN and t.dtype == tf.variant]
        empty = [t for t in empty if self.strict and self.seen(t) == REPLICATE]
        for op in (t.op for t in empty):
            if op.type in lists.MAKERS and len(op.inputs):
                self.given[op.name, 0] = lists.any_shape(op.inputs[0])
        return all(t.op.type in lists.MAKERS for t in empty)

    def whole(self, op: tf.Operation, placements: list[Placement], reason: str) -> None:
        raise Undivided(f'{op.name}: {reason} ({placements})')

    def reduce(self, op: tf.Operation, placements: list[Placement]) -> list[Placement]:
        raise Undivided(f'{op.type} needs a sum')

    def divide(self, op: tf.Operation, found: Division) -> None:
        for i, (tensor, need) in enumerate(zip(op.inputs, found.plan.needs)):
            self._check(op, i, tensor, need)
        super().divide(op, found)
        if Partial('mean') in found.placements:
            raise Undivided(f'{op.type} needs a mean')

    def _check(self, op: tf.Operation, position: int, tensor: tf.Tensor, need: Need) -> None:
        """Whether an op can be given what it needs, inside."""
        if need == WHOLE:
            if self.seen(tensor) != REPLICATE or self.differs(tensor):
                raise Undivided(f'{op.type} needs all of {tensor.name}')
        elif isinstance(need, plan.Slice) and self._may_be_made(tensor):
            self.wanted[tensor.op] = need
        elif isinstance(need, plan.Slice) or need == plan.FIRST:
            if self.strict:
                raise Undivided(f'{op.type} needs rows of {tensor.name}')
        elif isinstance(need, plan.Numbers):
            self.given[op.name, position] = need
        elif isinstance(need, plan.Local):
            others = [e for i, e in enumerate(need.entries) if i != need.position]
            if self.differs(tensor):
                if any(e.rows for e in others):
                    raise Undivided(f'{op.type} needs two sizes')
            elif all(e.static is not None for e in need.entries):
                self.given[op.name, position] = need
            else:
                raise Undivided(f'{op.type} needs a size')
