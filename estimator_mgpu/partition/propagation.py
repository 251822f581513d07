"""From the batch's placement to every tensor's: one pass over the graph, until nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from .homes import bytes_of
from .matching import Matching
from .plan import KEPT, OWN, REPLICATE, WHOLE, Division, OpPlan, Partial, Placement, Plan, Shard
from .rules import kinds, lists
from .rules.signature import Rule, Undivided, signature_of
from .rules.sizes import Sizes
from .symbols import Rows, Size

Caller = Callable[[Any, tf.Operation, list[Placement]], Optional[Division]]
"""(pass, op, placements of the inputs) -> what it comes to; None if it has to run once."""


def propagate(
    sources: Sequence[tf.Tensor],
    sparse: Sequence[tf.SparseTensor],
    order: Sequence[tf.Operation],
    rows: Rows,
    table: dict[str, Rule],
    callers: dict[str, Caller],
    products: Container[str],
    unused: Set[str],
) -> Plan:
    """Finds out what may run in towers.

    Sources have the rows along dimension 0, and so do sparse tensors, which stay whole. `order` are
    the ops that depend on them, but for the `unused` ones. Rules, and what divides ops that call
    functions, are by types of ops; `products` are those that begin with rows that aren't the
    batch's. A rule that fails, rather than says no, is a RuntimeError.
    """
    reduced: set[str] = set()
    once: set[str] = set()
    while True:
        known = len(reduced), len(once)
        found = Pass(rows, table, callers, reduced, once, products)
        for tensor in sources:
            found.placements[tensor.name] = Shard(0, rows)
            found.sizes.know(tensor, [Size(1, (rows,)), *(found.sizes.dims(tensor) or [])[1:]])
        for leaf in sparse:
            found.again |= {leaf.indices.name, leaf.values.name, leaf.dense_shape.name}
            if entries := found.sizes.entries(leaf.dense_shape):
                found.sizes.know_values(leaf.dense_shape, [Size(1, (rows,)), *entries[1:]])
        for op in order:
            if op.name not in unused:
                found.visit(op)
        if known == (len(reduced), len(once)):
            ops, placements = found.ops, found.placements
            return Plan(rows, sources, order, ops, placements, found.reasons, found.sizes)


@dataclass
class Pass:
    """One pass over the ops.

    It notes for the next, by name, which tensors have to be reduced and which ops have to run once.
    """

    rows: Rows
    table: dict[str, Rule]
    callers: dict[str, Caller]
    reduced: set[str] = field(default_factory=set)
    once: set[str] = field(default_factory=set)
    products: Container[str] = ()
    scope: str = ''  # tells a function's tensors from others of the same name

    def __post_init__(self) -> None:
        self.sizes = Sizes(self.scope)
        self.ops: dict[str, OpPlan] = {}
        self.placements: dict[str, Placement] = {}
        self.reasons: dict[str, tuple[str, int]] = {}
        self.again: set[str] = set()  # made whole, and may be divided again along dimension 0

    def visit(self, op: tf.Operation) -> None:
        """Decides how an op runs."""
        if op.type == kinds.GROUP:  # Stands for the control edges into it, tower by tower.
            if private.waiting(op) and any(c.name in self.ops for c in op.control_inputs):
                self.ops[op.name] = OpPlan()
            return
        placements = [self.seen(t) for t in op.inputs]
        if op.name in self.once or op.type in kinds.SIZES:
            self.whole(op, placements, 'its lists are used whole')
        elif private.in_control_flow(op):
            self.whole(op, placements, 'v1 control flow: call tf.enable_control_flow_v2() before')
        else:
            self.decide(op, placements)

    def decide(self, op: tf.Operation, placements: list[Placement]) -> None:
        """Puts a reduction off, or divides an op by its rule, given what was reduced."""
        if any(isinstance(p, Partial) for p in placements):
            if made := self.linear(op, placements):
                needs = tuple(OWN if p == made else WHOLE for p in placements)
                self.divide(op, Division(OpPlan(needs), [made]))
                return
            placements = self.reduce(op, placements)
        self.by_rule(op, placements)

    def linear(self, op: tf.Operation, placements: list[Placement]) -> Partial | None:
        """What an op makes of partial results; None if it needs the reduced one.

        A product with what is whole isn't made of these: an infinite factor gives inf for the sum,
        but nan where a tower's part is 0. Nor is a quotient.
        """
        padding = op.type in kinds.PADDINGS
        first, *others = reversed(placements) if padding else placements
        if not isinstance(first, Partial):
            return None
        if op.type in kinds.JOINS:
            *others, along = others
            return first if along == REPLICATE and all(p == first for p in others) else None
        sums = op.type in kinds.SUMS and first.reduce == 'sum' and all(p == first for p in others)
        views = op.type in kinds.VIEWS or (padding and first.reduce == 'sum')
        return first if sums or (views and all(p == REPLICATE for p in others)) else None

    def by_rule(self, op: tf.Operation, placements: list[Placement]) -> None:
        """Divides an op by the rule for its type, or lets it run once."""
        try:
            found, reason = self._division(op, placements), ''
        except Undivided as error:
            found, reason = None, str(error)
        except Exception as error:
            what = f'{op.name!r} (a {op.type}): {type(error).__name__}'
            raise RuntimeError(f'{what}: {error}') from error
        if found is None:
            self.whole(op, placements, reason or self._reason(op, placements))
        else:
            self.divide(op, found)

    def _reason(self, op: tf.Operation, placements: list[Placement]) -> str:
        """Why an op runs once that no rule divides; what it follows from says so first."""
        before = [self.reasons[t.op.name][0] for t in op.inputs if t.op.name in self.reasons]
        ruled = op.type in self.table or op.type in self.callers or op.type.startswith(kinds.LISTS)
        if before and (ruled or all(p == REPLICATE for p in placements)):
            return before[0]
        alike = all(getattr(p, 'rows', self.rows) == self.rows for p in placements)
        needs = 'needs all rows' if alike else "is given rows that may not be the batch's"
        return f'this {op.type} {needs}' if ruled else f'no rule for {op.type}'

    def _division(self, op: tf.Operation, placements: list[Placement]) -> Division | None:
        own = [p if getattr(p, 'rows', self.rows) == self.rows else REPLICATE for p in placements]
        if op.type in self.callers:
            return self.callers[op.type](self, op, own)
        if any(isinstance(p, KEPT) for p in placements) or op.type.startswith(kinds.LISTS):
            found = lists.rule(op, own, self.rows, self.sizes)
            return found if found and self.own_lists(zip(op.inputs, found.plan.needs)) else None
        rule = self.table.get(op.type)
        signature = signature_of(rule, op, self.sizes) if rule else None
        if signature is None:
            return None
        matching = Matching(op, signature, placements, self)
        of_sizes = all(p == REPLICATE for p in placements) and not self._behind(op)
        known = matching.dims() if of_sizes else signature.dims or ()
        for output, dims in zip(op.outputs, known):
            self.sizes.know(output, dims)
        return matching.division()

    def own_lists(self, given: Iterable[tuple[tf.Tensor, object]]) -> bool:
        """Lets each tower make the empty lists that it's given as its own; False if it can't."""
        for tensor, need in given:
            if need == OWN and tensor.dtype == tf.variant and self.seen(tensor) == REPLICATE:
                if tensor.op.type not in kinds.EMPTY_LISTS:
                    return False
                self.ops[tensor.op.name] = lists.made_empty(tensor.op)
        return True

    def divide(self, op: tf.Operation, found: Division) -> None:
        """Lets an op run in towers."""
        self.ops[op.name] = found.plan
        for output, placement in zip(op.outputs, found.placements):
            if placement is not None:
                self.placements[output.name] = placement
            if isinstance(placement, Partial) and placement.reduce == 'mean':
                self.reduced.add(output.name)
        for output, dims in zip(op.outputs, found.dims):
            self.sizes.know(output, dims)

    def whole(self, op: tf.Operation, placements: list[Placement], reason: str) -> None:
        """Lets an op run once."""
        self.once |= {t.op.name for t, p in zip(op.inputs, placements) if isinstance(p, KEPT)}
        behind = self._behind(op)
        if op.type in kinds.SIZES or (not behind and all(p == REPLICATE for p in placements)):
            return
        own = {t for t, p in zip(op.inputs, placements) if p != REPLICATE and t.op.name in self.ops}
        self.reasons[op.name] = reason, sum(map(bytes_of, own))
        self.reduce(op, placements)
        if behind or any(isinstance(p, Shard) for p in placements):
            for tensor in op.outputs:
                self.again.add(tensor.name)
                self.sizes.begin(tensor)

    def _behind(self, op: tf.Operation) -> bool:
        """Whether it follows from what was made whole of rows."""
        return any(t.name in self.again for t in op.inputs)

    def reduce(self, op: tf.Operation, placements: list[Placement]) -> list[Placement]:
        """Notes that partial results are to be reduced: where they come from, once for all."""
        for tensor in (t for t, p in zip(op.inputs, placements) if isinstance(p, Partial)):
            # Reducing before an op that only passes on what it's given first is as good.
            while tensor.op.type in kinds.VIEWS and self.seen(tensor.op.inputs[0]) != REPLICATE:
                tensor = tensor.op.inputs[0]
            self.reduced.add(tensor.name)
        return [REPLICATE if isinstance(p, Partial) else p for p in placements]

    def seen(self, tensor: tf.Tensor) -> Placement:
        """What those who use a tensor are given."""
        reduced = tensor.name in self.reduced
        return REPLICATE if reduced else self.placements.get(tensor.name, REPLICATE)
