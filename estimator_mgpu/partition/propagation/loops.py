"""Loops and branches: what the functions that they call are given, and what they return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition import plan
from estimator_mgpu.partition.placements import REPLICATE, Kept, Partial, Placement, Shard
from estimator_mgpu.partition.plan import FULL, LOCAL, Decision, OpPlan
from estimator_mgpu.partition.rules.notation import NotSharded
from estimator_mgpu.partition.sizes import Size
from estimator_mgpu.tf_internals import function_calls, op_types, private

if TYPE_CHECKING:
    from estimator_mgpu.partition.propagation.engine import Inside, Pass


Wanted = dict[tf.Operation, plan.Slice]
"""The rows that are asked for, inside, of what each op makes that is whole."""


class Call:
    """An op that calls functions, which each tower does with its own.

    `While`: what each variable is to towers is a fixed point; the condition is the same on all. A
    variable that starts whole and becomes rows is sliced before the loop. One that adds up what
    rows come to starts at zero on all towers but the first.

    `If`, `Case`, a call in a loop: all towers take one branch, and all branches return alike.
    """

    def __init__(
        self, inside: type[Inside], outer: Pass, op: tf.Operation, given: Sequence[Placement]
    ):
        self.inside, self.outer, self.op = inside, outer, op
        self.first = int(op.type in op_types.BRANCHES)  # Which is taken isn't given to it.
        self.arguments, self.given = list(op.inputs)[self.first :], given[self.first :]
        self.placed = list(self.given)  # what arguments are to towers inside
        self.wanted: Wanted = {}
        self.loops = op.type in op_types.LOOPS
        self.graphs = function_calls.function_graphs(op)
        self.bodies = self.graphs[1:] if self.loops else self.graphs

    def division(self) -> Decision | None:
        """What it comes to; None if it has to run once."""
        if all(p == REPLICATE for p in self.given) or not self.graphs:
            return None
        self._settle()
        insides, returned = zip(*(self._run(body, strict=True) for body in self.bodies))
        found = [self._output(i, insides, placed) for i, placed in enumerate(zip(*returned))]
        if all(placed == REPLICATE for placed, _ in found):
            return None
        if self.loops:
            asked, condition = len(self.wanted), self.graphs[0]
            inside, [decision] = self._run(condition, strict=True)
            same = decision == REPLICATE and not inside.differs(condition.outputs[0])
            if not same or len(self.wanted) > asked:
                raise NotSharded('rows say when it ends')
            insides = (inside, *insides)
        needs = list(map(self._need, range(len(self.placed))))
        if not self.outer.own_lists(zip(self.arguments, needs)):
            return None
        made: list[Placement | None] = [placed for placed, _ in found]
        if self.loops:  # Nobody is given a variable, which it has the value of, or a tower's size.
            alone = (plan.VariableValue, plan.LocalShape)
            made = [None if isinstance(n, alone) else p for n, p in zip(needs, made)]
        planned = OpPlan((*[FULL] * self.first, *needs), {}, [inside.ops for inside in insides])
        return Decision(planned, made, [dims for _, dims in found])

    def _settle(self) -> None:
        """Finds out what arguments are inside; a loop returns what it's called with next."""
        while True:
            before = list(self.placed), len(self.wanted)
            for body in self.bodies:
                _, returned = self._run(body, strict=False)
                if self.loops:
                    self.placed = list(map(_meet, self.placed, returned))
                for i, argument in enumerate(body.inputs):
                    if (need := self.wanted.get(argument.op)) and self.placed[i] == REPLICATE:
                        self.placed[i] = Shard(need.axis, need.rows)
            if before == (self.placed, len(self.wanted)):
                return

    def _run(self, graph: Any, strict: bool) -> tuple[Inside, list[Placement]]:
        """A pass over a function, and the placements of what it returns."""
        inside = self.inside(self.outer, graph, strict, self.wanted)
        for i, (argument, placed) in enumerate(zip(graph.inputs, self.placed)):
            if placed != REPLICATE:
                inside.placements[argument.name] = placed
            if isinstance(placed, Shard):  # A loop's condition has no shapes.
                rank = argument.shape.rank or self.graphs[-1].inputs[i].shape.rank
                if rank is None:
                    raise NotSharded(f'the size of {self.arguments[i].name} is unknown')
                factor = self._factor(i, placed.axis)
                dims = inside.sizes.dims_of_rows(argument, placed, factor, rank)
                inside.sizes.know(argument, dims)
            if (size := self._size(i)) and argument.shape.rank in (0, 1):
                inside.sizes.know_values(argument, size)
        arguments = {t.op for t in graph.inputs}
        for op in graph.get_operations():
            if op not in arguments:
                inside.visit(op)
        return inside, [inside.seen(t) for t in graph.outputs]

    def _output(
        self, i: int, insides: Sequence[Inside], placements: Sequence[Placement]
    ) -> tuple[Placement, list[Size] | None]:
        """What towers have of an output, and its dimensions."""
        output, tensors = self.op.outputs[i], [body.outputs[i] for body in self.bodies]
        placed = _joined(tensors, placements)
        if self.loops and placed != self.placed[i]:
            raise NotSharded(f'{output.name} is not what it was')
        if placed == REPLICATE and any(own.differs(t) for own, t in zip(insides, tensors)):
            if not self.loops or not (size := self._size(i)):
                raise NotSharded(f'{output.name} is a size that goes by rows')
            self.outer.sizes.know_values(output, size)
        if not isinstance(placed, Shard):
            return placed, None
        axis, rows = placed
        factors = [own.sizes.per_row(t, axis, rows) for own, t in zip(insides, tensors)]
        factor = self._factor(i, axis) if self.loops else factors[0]
        known = factor is not None and (self.loops or factor.static is not None)
        if factor is None or not known or any(other != factor for other in factors):
            raise NotSharded(f'the size of {output.name} is unknown, or another')
        rank = len(insides[0].sizes.dims(tensors[0]) or [])
        return placed, self.outer.sizes.dims_of_rows(output, placed, factor, rank)

    def _need(self, i: int) -> plan.Need:
        """What towers' ops are given for an argument."""
        tensor, placed, given = self.arguments[i], self.placed[i], self.given[i]
        if isinstance(placed, Shard) and placed != given:
            return plan.Slice(placed.axis, placed.rows, self._factor(i, placed.axis))
        if placed != REPLICATE:
            return LOCAL if placed == given or isinstance(placed, Kept) else plan.FULL_ON_FIRST
        rows = [at for at, n in enumerate(self._size(i)) if self.outer.rows in n.symbols]
        if not rows:
            return self._value(i) or FULL
        local = self.outer.sizes.local(tensor, rows[0], self.outer.rows)
        if local is None or len(rows) > 1:
            raise NotSharded(f'the sizes in {tensor.name} are unknown')
        return local

    def _size(self, i: int) -> list[Size]:
        """The entries of an argument, if it's a size that stays what it is."""
        body = self.graphs[-1]
        stays = not self.loops or body.outputs[i] is body.inputs[i]
        return (self.outer.sizes.entries(self.arguments[i]) if stays else None) or []

    def _value(self, i: int) -> plan.VariableValue | None:
        """A variable's value, if that is all that a loop asks for of an argument."""
        users = [user for graph in self.graphs for user in graph.inputs[i].consumers()]
        # In a function, it's what calls that which would have to read it.
        read = users and self.loops and not isinstance(self.outer, self.inside)
        found = read and all(user.type == op_types.READ_VARIABLE for user in users)
        return plan.VariableValue(users[0].get_attr('dtype')) if found else None

    def _factor(self, i: int, axis: int) -> Size:
        """How many entries a row has in an argument."""
        asked = [self.wanted.get(body.inputs[i].op) for body in self.bodies]
        known = [self.outer.sizes.per_row(self.arguments[i], axis, self.outer.rows)]
        found = next(filter(None, [*known, *(need.factor for need in asked if need)]), None)
        if found is None:
            raise NotSharded(f'the size of {self.arguments[i].name} is unknown')
        return found


def _joined(tensors: Sequence[tf.Tensor], placements: Sequence[Placement]) -> Placement:
    """What branches return, each a tensor."""
    placed = next((p for p in placements if p != REPLICATE), REPLICATE)
    for tensor, own in zip(tensors, placements):
        empty = isinstance(placed, Kept) and tensor.op.type in op_types.EMPTY_LISTS
        nothing = isinstance(placed, Partial) and placed.reduce == 'sum' and _is_zero(tensor)
        if own != placed and not (own == REPLICATE and (empty or nothing)):
            raise NotSharded(f'{tensor.name} has rows, or sums, in some branches only')
    return placed


def _is_zero(tensor: tf.Tensor) -> bool:
    """Whether it's nothing but zeros, which are a part of any sum."""
    if tensor.op.type in op_types.ZEROS_ONES_LIKE:
        return not op_types.ZEROS_ONES_LIKE[tensor.op.type]
    value = private.constant_value(
        tensor.op.inputs[1] if tensor.op.type == op_types.FILL else tensor
    )
    return value is not None and not np.any(value)


def _meet(a: Placement, b: Placement) -> Placement:
    """What a loop's variable is, that starts as one and becomes another."""
    if a == b or b == REPLICATE:
        return a
    if a == REPLICATE and not (isinstance(b, Partial) and b.reduce != 'sum'):
        return b
    raise NotSharded(f'a {a} becomes a {b}')
