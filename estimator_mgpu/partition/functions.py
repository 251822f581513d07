"""Loops and branches: what the functions that they call are given, and what they return.

Inside, the rules are the same, but nothing can be summed, gathered or sliced: if an op asks for
that, or has side effects, what calls the function runs once. Sizes are each tower's own there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from . import plan
from .plan import KEPT, OWN, REPLICATE, WHOLE, Division, OpPlan, Partial, Placement, Shard, Slice
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
        fill = tensor.op.type == kinds.FILL and self.sizes.numbers(tensor.op.inputs[0]) is not None
        known = self.rows.static and (fill or tensor.op.type == kinds.CONST)
        return bool(known) or any(tensor is argument for argument in self.graph.inputs)

    def _make(self, op: tf.Operation, need: Slice) -> None:
        """Lets each tower make its rows of a constant or a fill."""
        dims = [Size(d) for d in op.outputs[0].shape.as_list()]
        own = per_row(dims[need.axis], self.rows)
        if own is None:
            raise Undivided(f'the size of {op.name} is unknown')
        needs: tuple[plan.Need, ...] = (Slice(need.axis, self.rows, own),)
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

    def _possible(self, op: tf.Operation, tensor: tf.Tensor, need: plan.Need) -> plan.Need:
        """What an op is given inside for what it needs, if it can be."""
        differs = self.differs(tensor)
        if need == WHOLE and (differs or self.seen(tensor) != REPLICATE):
            raise Undivided(f'in it, {op.name} needs all rows')
        if isinstance(need, Slice) and self._may_be_made(tensor):
            self.wanted[tensor.op] = need
        elif (isinstance(need, Slice) or need == plan.FIRST) and self.strict:
            raise Undivided(f'{op.type} needs rows of {tensor.name}')
        elif isinstance(need, plan.Local):
            more = [self.rows in e.symbols if differs else e.static is None for e in need.entries]
            if sum(more) > int(differs):  # The tower has its own rows.
                raise Undivided(f'{op.type} needs other sizes')
        known = isinstance(need, plan.Numbers) or (isinstance(need, plan.Local) and not differs)
        return need if known else OWN


def call(outer: Pass, op: tf.Operation, given: list[Placement]) -> Division | None:
    """What an op that calls functions comes to; None if it has to run once."""
    graphs = private.function_graphs(op)
    if all(p == REPLICATE for p in given) or not graphs:
        return None
    return (_loop if op.type in kinds.LOOPS else _branch)(_Call(outer, op, given, graphs))


@dataclass
class _Call:
    """What an op calls functions with."""

    outer: Pass
    op: tf.Operation
    placements: Sequence[Placement]
    graphs: Sequence[Any]

    def __post_init__(self) -> None:
        # So many inputs say which function is called, and aren't given to it.
        self.first = len(self.op.inputs) - len(self.graphs[0].inputs)
        self._arguments = list(self.op.inputs)[self.first :]
        self._placements = list(self.placements)[self.first :]
        self._factors: dict[int, Size] = {}
        self.placed = list(self._placements)  # what arguments are to towers inside
        self.wanted: dict[tf.Operation, Slice] = {}  # what rows are asked for of, inside

    def size(self, i: int) -> list[Size]:
        """The entries of an argument, if it's a size that stays what it is."""
        body = self.graphs[-1]
        stays = self.op.type not in kinds.LOOPS or body.outputs[i] is body.inputs[i]
        return (self.outer.sizes.entries(self._arguments[i]) if stays else None) or []

    def run(self, graph: Any, like: Any, strict: bool) -> tuple[Inside, list[Placement]]:
        """A pass over a function, and the placements of what it returns."""
        inside = Inside(self.outer, graph, strict, self.wanted)
        for i, (argument, placement) in enumerate(zip(graph.inputs, self.placed)):
            dims = inside.sizes.dims(like[i])  # A loop's condition has no shapes.
            if isinstance(placement, Shard):
                if dims is None:
                    raise Undivided(f'the size of {self._arguments[i].name} is unknown')
                factor = self.factor(i, placement.axis)
                dims = inside.sizes.dims_of_rows(like[i], placement, factor, len(dims))
            if placement != REPLICATE:
                inside.placements[argument.name] = placement
            inside.sizes.know(argument, dims)
            if (size := self.size(i)) and argument.shape.rank in (0, 1):
                inside.sizes.know_values(argument, size)
        return inside, inside.run()

    def settle(self, graphs: Sequence[Any]) -> None:
        """Finds out what arguments are inside; a loop returns what it's called with next."""
        while True:
            before = list(self.placed), len(self.wanted)
            for graph in graphs:
                _, returned = self.run(graph, graph.inputs, False)
                if self.op.type in kinds.LOOPS:
                    self.placed = list(map(_meet, self.placed, returned))
                for i, argument in enumerate(graph.inputs):
                    if (need := self.wanted.get(argument.op)) and self._placements[i] == REPLICATE:
                        self._factors[i] = need.factor
                        if self.placed[i] == REPLICATE:
                            self.placed[i] = Shard(need.axis, self.outer.rows)
            if before == (self.placed, len(self.wanted)):
                return

    def factor(self, i: int, axis: int) -> Size:
        """How many entries a row has in an argument."""
        tensor = self._arguments[i]
        found = self.outer.sizes.per_row(tensor, axis, self.outer.rows) or self._factors.get(i)
        if found is None:
            raise Undivided(f'the size of {tensor.name} is unknown')
        return found

    def need(self, i: int) -> plan.Need:
        """What towers' ops are given for an argument."""
        tensor, placed, given = self._arguments[i], self.placed[i], self._placements[i]
        if isinstance(placed, Shard) and placed != given:
            return Slice(placed.axis, placed.rows, self.factor(i, placed.axis))
        if placed != REPLICATE:
            return OWN if placed == given or isinstance(placed, KEPT) else plan.FIRST
        size = self.size(i)
        rows = [position for position, entry in enumerate(size) if self.outer.rows in entry.symbols]
        if len(rows) > 1 or any(per_row(size[at], self.outer.rows) is None for at in rows):
            raise Undivided(f'the sizes in {tensor.name} are unknown')
        return plan.Local(tuple(size), rows[0], self.outer.rows) if rows else WHOLE


def _loop(call: _Call) -> Division | None:
    """`While`: what each variable is to towers is a fixed point; the condition is the same on all.

    A variable that starts whole and becomes rows is sliced before the loop. One that adds up what
    rows come to starts at zero on all towers but the first.
    """
    outer, op, (condition, body) = call.outer, call.op, call.graphs
    call.settle([body])
    placed = call.placed
    inside, returned = call.run(body, body.inputs, True)
    dims: list[list[Size] | None] = [None] * len(placed)
    for i, (a, b) in enumerate(zip(placed, returned)):
        if a != b:
            raise Undivided(f'{body.outputs[i].name} is not what it was')
        if isinstance(a, Shard):
            before, after = (inside.sizes.dims(t[i]) or [] for t in (body.inputs, body.outputs))
            if before[a.axis] != after[a.axis]:
                raise Undivided(f'{body.outputs[i].name} has another size')
            factor = call.factor(i, a.axis)
            dims[i] = outer.sizes.dims_of_rows(op.outputs[i], a, factor, len(after))
        if a == REPLICATE and inside.differs(body.outputs[i]) and not call.size(i):
            raise Undivided(f'{body.outputs[i].name} is a size that goes by rows')
    if not any(isinstance(p, (Shard, plan.ShardList)) for p in placed):
        return None
    known = len(call.wanted)
    asked, [decision] = call.run(condition, body.inputs, True)
    if len(call.wanted) > known or decision != REPLICATE or asked.differs(condition.outputs[0]):
        raise Undivided('rows say when it ends')
    needs = tuple(map(call.need, range(len(placed))))
    if not outer.own_lists(zip(op.inputs, needs)):
        return None
    if not outer.scope:  # Else it's the caller of the outer function that would have to do it.
        needs = tuple(_value(i, body, condition) or need for i, need in enumerate(needs))
    # Nobody is given a variable by a loop, which has its value.
    made = [None if isinstance(need, plan.Value) else p for p, need in zip(placed, needs)]
    return Division(OpPlan(needs, {}, [asked.ops, inside.ops]), made, dims)


def _branch(call: _Call) -> Division | None:
    """`If`, `Case`, a call in a loop: all towers take one branch, and all branches return alike."""
    outer, op, graphs = call.outer, call.op, call.graphs
    call.settle(graphs)
    insides, returned = zip(*(call.run(graph, graph.inputs, True) for graph in graphs))
    made = []
    dims: list[list[Size] | None] = [None] * len(op.outputs)
    for i, output in enumerate(op.outputs):
        tensors = [graph.outputs[i] for graph in graphs]
        placed = _joined(tensors, [placements[i] for placements in returned])
        if placed == REPLICATE and any(map(Inside.differs, insides, tensors)):
            raise Undivided(f'{output.name} is a size that goes by rows')
        if isinstance(placed, Shard):
            each = zip(insides, tensors)
            factor, *others = (own.sizes.per_row(t, placed.axis, outer.rows) for own, t in each)
            if factor is None or factor.static is None or any(f != factor for f in others):
                raise Undivided(f'the size of {output.name} is unknown')
            rank = len(insides[0].sizes.dims(tensors[0]) or [])
            dims[i] = outer.sizes.dims_of_rows(output, placed, factor, rank)
        made.append(placed)
    if all(p == REPLICATE for p in made):
        return None
    needs = (*[WHOLE] * call.first, *map(call.need, range(len(call.placed))))
    return Division(OpPlan(needs, {}, [inside.ops for inside in insides]), made, dims)


def _joined(tensors: Sequence[tf.Tensor], placements: Sequence[Placement]) -> Placement:
    """What branches return, each a tensor."""
    placed = next((p for p in placements if p != REPLICATE), REPLICATE)
    for tensor, own in zip(tensors, placements):
        empty = isinstance(placed, KEPT) and tensor.op.type in kinds.EMPTY_LISTS
        nothing = isinstance(placed, Partial) and placed.reduce == 'sum' and _is_zero(tensor)
        if own != placed and not (own == REPLICATE and (empty or nothing)):
            raise Undivided(f'{tensor.name} has rows, or sums, in some branches only')
    return placed


def _is_zero(tensor: tf.Tensor) -> bool:
    """Whether it's nothing but zeros, which are a part of any sum."""
    entry = tensor.op.inputs[1] if tensor.op.type == kinds.FILL else tensor
    value = kinds.ALIKE.get(tensor.op.type, private.constant_value(entry))
    return value is not None and not np.any(value)


def _meet(a: Placement, b: Placement) -> Placement:
    """What a loop's variable is, that starts as one and becomes another."""
    if a == b or b == REPLICATE:
        return a
    if a == REPLICATE and not (isinstance(b, Partial) and b.reduce != 'sum'):
        return b
    raise Undivided(f'a {a} becomes a {b}')


def _value(position: int, *graphs: Any) -> plan.Value | None:
    """A variable's value, if that is all that is asked for of an argument."""
    users = [user for graph in graphs for user in graph.inputs[position].consumers()]
    read = users and all(user.type == kinds.READ for user in users)
    return plan.Value(users[0].get_attr('dtype')) if read else None


CALLERS: dict[str, Caller] = dict.fromkeys((*kinds.LOOPS, *kinds.BRANCHES, *kinds.CALLS), call)
"""What divides ops that call functions, by their type."""
