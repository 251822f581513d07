"""The inside of a function that towers call: the same rules, where nothing can be made whole.

Inside, nothing can be summed, gathered or sliced: if an op asks for that, or has side effects, what
calls the function runs once. Sizes are each tower's own there, as its tensors say them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import tensorflow.compat.v1 as tf

from . import plan
from .functions import call
from .plan import OWN, REPLICATE, WHOLE, Division, Need, OpPlan, Partial, Placement, Shard, Slice
from .propagation import Caller, Pass
from .rules import kinds
from .rules.signature import Undivided
from .symbols import Entry, Size, per_row


class Inside(Pass):
    """A pass over a function's ops, within the pass over its caller's.

    While it isn't known yet what a loop's variables are, it isn't `strict`: what is asked for is
    taken to be there. `wanted` is of which arguments, constants and fills rows are asked for.
    """

    def __init__(self, outer: Pass, graph: Any, strict: bool, wanted: dict[tf.Operation, Slice]):
        super().__init__(outer.rows, outer.table, outer.callers, scope=f'{graph.name}/')
        self.graph, self.strict, self.wanted = graph, strict, wanted

    def run(self) -> list[Placement]:
        """Visits all ops; returns the placements of what the function returns."""
        names = {t.op.name for t in self.graph.inputs}
        for op in self.graph.get_operations():
            if op.name not in names:
                self.visit(op)
        return [self.seen(t) for t in self.graph.outputs]

    def visit(self, op: tf.Operation) -> None:
        if op.type == kinds.GROUP:
            return
        if op in self.wanted:
            self._make(op, self.wanted[op])
            return
        calls = op.type in self.callers
        if op.op_def.is_stateful and op.type not in kinds.READS and not calls:
            raise Undivided(f'in it, a {op.type} has effects, or draws numbers')
        placements = [self.seen(t) for t in op.inputs]
        whole = all(p == REPLICATE for p in placements)
        if op.type in kinds.SIZES:
            if not whole and any(self.sizes.entries(t) is None for t in op.outputs):
                raise Undivided(f'the sizes of {op.name} are unknown')
            return
        if whole and not any(map(self.differs, op.inputs)):
            if calls:
                raise Undivided(f'a {op.type} that is the same on all towers')
            return  # The same on all towers.
        if whole and (op.type == kinds.BROADCAST_AXES or all(map(self._is_known, op.outputs))):
            return  # Sizes, of which each tower computes its own.
        self.decide(op, placements)

    def linear(self, op: tf.Operation, placements: list[Placement]) -> Partial | None:
        made = super().linear(op, placements)
        if made or self.strict:
            return made
        total = Partial('sum', self.rows)
        return super().linear(op, [total if p == REPLICATE else p for p in placements])

    def differs(self, tensor: tf.Tensor) -> bool:
        """Whether towers have their own versions of a size."""
        return any(self.rows in entry.symbols for entry in self.sizes.entries(tensor) or [])

    def _is_known(self, tensor: tf.Tensor) -> bool:
        sizes = self.sizes.entries(tensor)
        return sizes is not None and not any(isinstance(s, Entry) for e in sizes for s in e.symbols)

    def _may_be_made(self, tensor: tf.Tensor) -> bool:
        """Whether each tower can have its rows of a tensor: an argument, or of known size."""
        if any(tensor is argument for argument in self.graph.inputs):
            return True
        fill = tensor.op.type == kinds.FILL and self.sizes.numbers(tensor.op.inputs[0]) is not None
        return bool(self.rows.static) and (fill or tensor.op.type == kinds.CONST)

    def _make(self, op: tf.Operation, need: Slice) -> None:
        """Lets each tower make its rows of a constant or a fill."""
        dims = [Size(d) for d in op.outputs[0].shape.as_list()]
        if (own := per_row(dims[need.axis], self.rows)) is None:
            raise Undivided(f'the size of {op.name} is unknown')
        needs: tuple[Need, ...] = (Slice(need.axis, self.rows, own),)
        if op.type == kinds.FILL:
            needs = (plan.Local(tuple(dims), need.axis, self.rows), WHOLE)
        dims[need.axis] = own * Size(1, (self.rows,))
        super().divide(op, Division(OpPlan(needs), [Shard(need.axis, self.rows)], [dims]))

    def own_lists(self, given: Iterable[tuple[tf.Tensor, object]]) -> bool:
        return not self.strict or super().own_lists(given)

    def whole(self, op: tf.Operation, placements: list[Placement], reason: str) -> None:
        raise Undivided(f'in it, {op.name}: {reason}')

    def reduce(self, op: tf.Operation, placements: list[Placement]) -> list[Placement]:
        raise Undivided(f'in it, {op.name} needs a sum over all rows')

    def divide(self, op: tf.Operation, found: Division) -> None:
        if Partial('mean', self.rows) in found.placements:
            raise Undivided(f'in it, {op.name} needs a mean over all rows')
        needs = tuple(self._possible(op, *given) for given in zip(op.inputs, found.plan.needs))
        super().divide(op, found._replace(plan=found.plan._replace(needs=needs)))

    def _possible(self, op: tf.Operation, tensor: tf.Tensor, need: Need) -> Need:
        """What an op is given inside for what it needs, if it can be."""
        differs = self.differs(tensor)
        if need == WHOLE and (differs or self.seen(tensor) != REPLICATE):
            raise Undivided(f'in it, {op.name} needs all rows')
        if isinstance(need, Slice) and self._may_be_made(tensor):
            self.wanted[tensor.op] = need
        elif (isinstance(need, Slice) or need == plan.FIRST) and self.strict:
            raise Undivided(f'{op.type} needs rows of {tensor.name}')
        elif isinstance(need, plan.Numbers):
            return need
        elif isinstance(need, plan.Local):
            more = [self.rows in e.symbols if differs else e.static is None for e in need.entries]
            if sum(more) > int(differs):  # The tower has its own rows.
                raise Undivided(f'{op.type} needs other sizes')
            return OWN if differs else need
        return OWN


CALLERS: dict[str, Caller] = {  # what divides ops that call functions, by their type
    name: partial(call, Inside) for name in (*kinds.LOOPS, *kinds.BRANCHES, *kinds.CALLS)
}
