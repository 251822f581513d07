"""Loops and branches: what the functions that they call are given, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.partition import lists, plan
from estimator_mgpu.partition.calls import CALLS
from estimator_mgpu.partition.placements import (
    KEPT,
    REPLICATE,
    SUM,
    Partial,
    Placement,
    Shard,
    ShardList,
)
from estimator_mgpu.partition.plan import OWN, WHOLE, Division, OpPlan
from estimator_mgpu.partition.symbols import Size, per_row

if TYPE_CHECKING:
    from estimator_mgpu.partition.propagation import Pass

Inside = Callable[..., Any]
"""Begins a pass over a function: (outer pass, graph, strict, wanted), as `Inside` does."""


class Undivided(Exception):
    """A function asks for something that towers can't do by themselves."""


class _Call:
    """What an op calls functions with, and what `placements` that has before anything is sliced.

    Attributes:
      placed: what arguments are to towers inside.
      wanted: what rows are asked for of, inside.
      keeps: whether an argument, by its position, is a size that stays what it is.
    """

    def __init__(
        self,
        inside: Inside,
        outer: Pass,
        arguments: Sequence[tf.Tensor],
        placements: Sequence[Placement],
        keeps: Callable[[int], bool],
    ):
        self._inside = inside
        self._outer = outer
        self._arguments = list(arguments)
        self._placements = list(placements)
        self._factors: dict[int, Size] = {}
        self.placed = list(placements)
        self.wanted: dict[tf.Operation, plan.Slice] = {}
        self.keeps = keeps

    def run(self, graph: Any, like: Any, strict: bool) -> tuple[Any, list[Placement]]:
        """A pass over a function, and the placements of what it returns."""
        inside = self._inside(self._outer, graph, strict, self.wanted)
        for i, (given, argument) in enumerate(zip(self._arguments, graph.inputs)):
            placement = self.placed[i]
            dims = inside.sizes.dims(like[i])  # A loop's condition has no shapes.
            if isinstance(placement, Shard):
                if dims is None:
                    raise Undivided(f'the size of {given.name}')
                dims = list(dims)
                dims[placement.axis] = self.factor(i) * Size(1, (self._outer.rows,))
            entries = self._outer.sizes.entries(given) if self.keeps(i) else None
            inside.begin(argument, placement, dims, entries)
        return inside, inside.run()

    def settle(self, graphs: Sequence[Any], returns: bool) -> None:
        """Finds out what arguments are inside; a loop returns what it's called with next."""
        while True:
            before = list(self.placed), len(self.wanted)
            for graph in graphs:
                _, returned = self.run(graph, graph.inputs, False)
                if returns:
                    self.placed = list(map(_meet, self.placed, returned))
                for i, argument in enumerate(graph.inputs):
                    need = self.wanted.get(argument.op)
                    if need is not None and self._placements[i] == REPLICATE:
                        self._factors[i] = need.factor
                        if self.placed[i] == REPLICATE:
                            self.placed[i] = Shard(need.axis, self._outer.rows)
            if before == (self.placed, len(self.wanted)):
                return

    def factor(self, i: int) -> Size:
        """How many entries a row has in an argument."""
        placed, tensor = self.placed[i], self._arguments[i]
        assert isinstance(placed, Shard)
        found = self._outer.sizes.per_row(tensor, placed.axis, self._outer.rows)
        found = found or self._factors.get(i)
        if found is None:
            raise Undivided(f'the size of {tensor.name}')
        return found

    def need(self, i: int) -> plan.Need:
        """What towers' ops are given for an argument."""
        tensor, placed = self._arguments[i], self.placed[i]
        if placed != self._placements[i]:
            if isinstance(placed, Shard):
                return plan.Slice(placed.axis, self.factor(i))
            return OWN if isinstance(placed, KEPT) else plan.FIRST
        if placed != REPLICATE:
            return OWN
        size = (self._outer.sizes.entries(tensor) or []) if self.keeps(i) else []
        rows = [position for position, entry in enumerate(size) if entry.rows]
        if len(rows) > 1 or any(per_row(size[at], self._outer.rows) is None for at in rows):
            raise Undivided(f'the sizes in {tensor.name}')
        return plan.Local(tuple(size), rows[0]) if rows else WHOLE


def loop(
    inside: Inside, outer: Pass, op: tf.Operation, placements: list[Placement]
) -> Division | None:
    """`While`: what each variable is to towers is a fixed point; the condition is the same on all.

    A variable that starts whole and becomes rows is sliced before the loop. One that adds up what
    rows come to starts at zero on all towers but the first. One that the body leaves as it is keeps
    its size, unless it's a number.
    """
    graphs = private.function_graphs(op)
    if all(p == REPLICATE for p in placements) or not graphs:
        return None
    body = graphs[1]

    def keeps(i: int) -> bool:
        return body.outputs[i] is body.inputs[i]

    def keeps_none_by_rows(i: int) -> bool:
        return keeps(i) and not any(e.rows for e in outer.sizes.entries(op.inputs[i]) or [])

    for which in (keeps, keeps_none_by_rows):
        try:
            call = _Call(inside, outer, op.inputs, placements, which)
            return _loop(outer, op, call, *graphs)
        except Undivided:
            continue
    return None


def _loop(outer: Pass, op: tf.Operation, call: _Call, condition: Any, body: Any) -> Division | None:
    call.settle([body], returns=True)
    placed = call.placed
    inside, returned = call.run(body, body.inputs, True)
    for i, (a, b) in enumerate(zip(placed, returned)):
        if a != b:
            raise Undivided(f'{body.outputs[i].name} is not what it was')
        if isinstance(a, Shard):
            before, after = (inside.sizes.dims(t[i]) or [] for t in (body.inputs, body.outputs))
            if before[a.axis] != after[a.axis]:
                raise Undivided(f'{body.outputs[i].name} has another size')
        if a == REPLICATE and inside.differs(body.outputs[i]) and not call.keeps(i):
            raise Undivided(f'{body.outputs[i].name} is a size')
    if not any(isinstance(p, (Shard, ShardList)) for p in placed):
        return None
    known = len(call.wanted)
    asked, [decision] = call.run(condition, body.inputs, True)
    if len(call.wanted) > known or decision != REPLICATE or asked.differs(condition.outputs[0]):
        raise Undivided('it ends by rows')
    needs = tuple(map(call.need, range(len(placed))))
    if not outer.own_lists(zip(op.inputs, needs)):
        return None
    if not outer.scope:  # Else it's the caller of the outer function that would have to do it.
        needs = tuple(_value(i, body, condition) or need for i, need in enumerate(needs))
    dims = [
        outer.sizes.dims_of_rows(t, p.axis, call.factor(i), outer.rows, inside.sizes.dims(own))
        if isinstance(p, Shard)
        else None
        for i, (t, p, own) in enumerate(zip(op.outputs, placed, body.outputs))
    ]
    # Nobody is given a variable by a loop, which has its value.
    made = [None if isinstance(need, plan.Value) else p for p, need in zip(placed, needs)]
    return Division(OpPlan(needs, {}, [asked.ops, inside.ops]), made, dims)


def branch(
    inside: Inside, outer: Pass, op: tf.Operation, placements: list[Placement]
) -> Division | None:
    """`If`, `Case`: which branch it is is the same on all towers, and what all return is alike.

    A call in a loop is as a branch without an alternative.
    """
    graphs = private.function_graphs(op)
    if all(p == REPLICATE for p in placements) or not graphs:
        return None
    first = int(op.type not in CALLS)  # Which branch comes before what it's given.
    try:
        arguments = list(op.inputs)[first:]
        call = _Call(inside, outer, arguments, placements[first:], lambda i: True)
        return _branch(outer, op, call, graphs)
    except Undivided:
        return None


def _branch(outer: Pass, op: tf.Operation, call: _Call, graphs: Sequence[Any]) -> Division | None:
    call.settle(graphs, returns=False)
    runs = [call.run(graph, graph.inputs, True) for graph in graphs]
    made = []
    dims: list[list[Size] | None] = []
    for i, output in enumerate(op.outputs):
        tensors = [graph.outputs[i] for graph in graphs]
        placed = _joined(tensors, [returned[i] for _, returned in runs])
        if placed == REPLICATE and any(inside.differs(t) for (inside, _), t in zip(runs, tensors)):
            raise Undivided(f'{output.name} is a size')
        if isinstance(placed, Shard):
            found = [
                inside.sizes.per_row(t, placed.axis, outer.rows)
                for (inside, _), t in zip(runs, tensors)
            ]
            factor = found[0]
            if factor is None or factor.static is None or any(f != factor for f in found):
                raise Undivided(f'the size of {output.name}')
            like = runs[0][0].sizes.dims(tensors[0])
            dims.append(outer.sizes.dims_of_rows(output, placed.axis, factor, outer.rows, like))
        else:
            dims.append(None)
        made.append(placed)
    if all(p == REPLICATE for p in made):
        return None
    functions = [inside.ops for inside, _ in runs]
    decision = [WHOLE] if op.type not in CALLS else []
    needs = map(call.need, range(len(call.placed)))
    return Division(OpPlan((*decision, *needs), {}, functions), made, dims)


def _joined(tensors: Sequence[tf.Tensor], placements: Sequence[Placement]) -> Placement:
    """What branches return, each a tensor."""
    found = set(placements) - {REPLICATE}
    if not found:
        return REPLICATE
    placed = found.pop()
    for tensor, own in zip(tensors, placements):
        empty = isinstance(placed, KEPT) and tensor.op.type in lists.MAKERS
        nothing = placed == SUM and _is_zero(tensor)
        if own != placed and not (own == REPLICATE and (empty or nothing)):
            raise Undivided(f'{tensor.name} is {own} in one branch, and {placed} in another')
    return placed


def _is_zero(tensor: tf.Tensor) -> bool:
    """Whether it's nothing but zeros, which are a part of any sum."""
    if tensor.op.type == 'ZerosLike':
        return True
    value = private.constant_value(tensor.op.inputs[1] if tensor.op.type == 'Fill' else tensor)
    return value is not None and not np.any(value)


def _meet(a: Placement, b: Placement) -> Placement:
    """What a loop's variable is, that starts as one and becomes another."""
    if a == b or b == REPLICATE:
        return a
    if a == REPLICATE and (b == SUM or not isinstance(b, Partial)):
        return b
    raise Undivided(f'{a} becomes {b}')


def _value(position: int, *graphs: Any) -> plan.Value | None:
    """A variable's value, if that is all that is asked for of an argument."""
    arguments = [graph.inputs[position] for graph in graphs]
    users = [user for argument in arguments for user in argument.consumers()]
    if any(user.type != 'ReadVariableOp' for user in users) or not users:
        return None
    return plan.Value(users[0].get_attr('dtype'))
