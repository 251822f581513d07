"""Loops and branches: what the functions that they call are given, and what they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from . import plan
from .plan import KEPT, OWN, REPLICATE, WHOLE, Division, OpPlan, Partial, Placement, Shard
from .rules import kinds
from .rules.signature import Undivided
from .symbols import Size, per_row

if TYPE_CHECKING:
    from .inside import Inside
    from .propagation import Pass


def call(
    inside: type[Inside], outer: Pass, op: tf.Operation, given: list[Placement]
) -> Division | None:
    """What an op that calls functions comes to; None if it has to run once."""
    graphs = private.function_graphs(op)
    if all(p == REPLICATE for p in given) or not graphs:
        return None
    return (_loop if op.type in kinds.LOOPS else _branch)(_Call(inside, outer, op, given, graphs))


@dataclass
class _Call:
    """What an op calls functions with."""

    inside: type[Inside]
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
        self.wanted: dict[tf.Operation, plan.Slice] = {}  # what rows are asked for of, inside

    def size(self, i: int) -> list[Size]:
        """The entries of an argument, if it's a size that stays what it is."""
        body = self.graphs[-1]
        stays = self.op.type not in kinds.LOOPS or body.outputs[i] is body.inputs[i]
        return (self.outer.sizes.entries(self._arguments[i]) if stays else None) or []

    def run(self, graph: Any, like: Any, strict: bool) -> tuple[Inside, list[Placement]]:
        """A pass over a function, and the placements of what it returns."""
        inside = self.inside(self.outer, graph, strict, self.wanted)
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
            return plan.Slice(placed.axis, placed.rows, self.factor(i, placed.axis))
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
        if placed == REPLICATE and any(map(call.inside.differs, insides, tensors)):
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
    if not (found := set(placements) - {REPLICATE}):
        return REPLICATE
    placed = found.pop()
    for tensor, own in zip(tensors, placements):
        empty = isinstance(placed, KEPT) and tensor.op.type in kinds.EMPTY_LISTS
        nothing = isinstance(placed, Partial) and placed.reduce == 'sum' and _is_zero(tensor)
        if own != placed and not (own == REPLICATE and (empty or nothing)):
            raise Undivided(f'{tensor.name} has rows, or sums, in some branches only')
    return placed


def _is_zero(tensor: tf.Tensor) -> bool:
    """Whether it's nothing but zeros, which are a part of any sum."""
    if tensor.op.type in kinds.ALIKE:
        return not kinds.ALIKE[tensor.op.type]
    value = private.constant_value(tensor.op.inputs[1] if tensor.op.type == kinds.FILL else tensor)
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
