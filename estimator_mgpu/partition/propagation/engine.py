"""From the batch's placement to every tensor's: one pass over the graph, until nothing changes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition import plan
from estimator_mgpu.partition.costs import bytes_of
from estimator_mgpu.partition.placements import REPLICATE, Kept, Partial, Placement, Shard
from estimator_mgpu.partition.plan import FULL, LOCAL, Decision, Need, OpPlan
from estimator_mgpu.partition.propagation import loops as functions
from estimator_mgpu.partition.propagation.matching import Matching
from estimator_mgpu.partition.rules import lists
from estimator_mgpu.partition.rules.notation import NotSharded, Rule, failure, signature_of
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import Entry, RowSpace, Size, per_row
from estimator_mgpu.tf_internals import op_types, private


def propagate(
    sources: Sequence[tf.Tensor],
    wholes: Sequence[tf.Tensor | tf.SparseTensor],
    order: Sequence[tf.Operation],
    rows: RowSpace,
    table: dict[str, Rule],
    products: Container[str],
    unused: Set[str],
    unknown: Mapping[str, str],
) -> plan.Plan:
    """Finds out what may run in towers.

    Sources have the rows along dimension 0, and so do sparse tensors, which stay whole, as do
    tensors of unknown rank: `unknown` says why, by name. `order` are the ops that depend on all of
    them, but for the `unused` ones; rules are by types of ops, `products` those that begin with
    other rows. A rule that fails, rather than says no, is a RuntimeError.
    """
    reduced: set[str] = set()
    once: set[str] = set()
    while True:
        known = len(reduced), len(once)
        found = Pass(rows, table, Sizes(), products, reduced, once, unknown)
        for tensor in sources:
            found.placements[tensor.name] = Shard(0, rows)
            found.sizes.know(tensor, [Size(1, (rows,)), *(found.sizes.dims(tensor) or [])[1:]])
        for leaf in wholes:
            found.again |= {t.name for t in tf.nest.flatten(leaf, expand_composites=True)}
            shape = leaf.dense_shape if isinstance(leaf, tf.SparseTensor) else None
            if shape is not None and (entries := found.sizes.entries(shape)):
                found.sizes.know_values(shape, [Size(1, (rows,)), *entries[1:]])
        for op in order:
            if op.name not in unused:
                found.visit(op)
        if known == (len(reduced), len(once)):
            made = found.ops, found.placements, found.reasons, found.sizes
            return plan.Plan(rows, sources, order, *made)


@dataclass
class Pass:
    """One pass over the ops.

    It notes for the next, by name, which tensors have to be reduced and which ops have to run once.
    """

    rows: RowSpace
    table: dict[str, Rule]
    sizes: Sizes
    products: Container[str] = ()
    reduced: set[str] = field(default_factory=set)
    once: set[str] = field(default_factory=set)
    unknown: Mapping[str, str] = field(default_factory=dict)  # of which rank: what to tell of them
    ops: dict[str, OpPlan] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)
    reasons: dict[str, tuple[str, int]] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)  # made whole, may be divided again by dimension 0

    def visit(self, op: tf.Operation) -> None:
        """Decides how an op runs."""
        if op.type == op_types.NO_OP:  # Stands for the control edges into it, tower by tower.
            if private.control_consumers(op) and any(c.name in self.ops for c in op.control_inputs):
                self.ops[op.name] = OpPlan()
            return
        placements = [self.seen(t) for t in op.inputs]
        if (
            op.name in self.once or op.type in op_types.SHAPE_QUERIES
        ):  # These need no rows, and no reason.
            self.whole(op, placements, 'its lists are used whole')
        elif private.in_v1_control_flow(op):
            self.whole(op, placements, 'v1 control flow: call tf.enable_control_flow_v2() before')
        else:
            self.decide(op, placements)

    def decide(self, op: tf.Operation, placements: list[Placement]) -> None:
        """Puts a reduction off, or divides an op by the rule for its type, or lets it run once."""
        if any(isinstance(p, Partial) for p in placements):
            if made := self.linear(op, placements):
                needs = tuple(LOCAL if p == made else FULL for p in placements)
                self.divide(op, Decision(OpPlan(needs), [made]))
                return
            placements = self.reduce(op, placements)
        try:
            found = self._division(op, placements)
        except NotSharded as error:
            self.whole(op, placements, str(error) or self._reason(op, placements))
        except Exception as error:
            raise failure(op, error) from error
        else:
            self.divide(op, found)

    def linear(self, op: tf.Operation, placements: list[Placement]) -> Partial | None:
        """What an op makes of partial results; None if it needs the reduced one.

        A product with what is whole isn't made of these: an infinite factor gives inf for the sum,
        but nan where a tower's part is 0. Nor is a quotient.
        """
        parts = op_types.PARTIAL_INPUTS.get(op.type, slice(0))
        first = next(iter(placements[parts]), None)
        if not isinstance(first, Partial) or (
            first.reduce != 'sum' and op.type in op_types.PARTIAL_SUM_INPUTS
        ):
            return None
        expected: list[Placement] = [REPLICATE] * len(placements)
        expected[parts] = [first] * len(placements[parts])
        return first if placements == expected else None

    def _division(self, op: tf.Operation, placements: list[Placement]) -> Decision:
        """What an op comes to; raises Undivided if it has to run once."""
        own = [p if getattr(p, 'rows', self.rows) == self.rows else REPLICATE for p in placements]
        found: Decision | None = None
        if op.type in op_types.FUNCTION_CALLERS:
            found = functions.Call(Inside, self, op, own).division()
        elif op.type.startswith(op_types.LIST_PREFIXES) or any(
            isinstance(p, Kept) for p in placements
        ):
            found = lists.rule(op, own, self.rows, self.sizes)
            if found and not self.own_lists(zip(op.inputs, found.plan.needs)):
                found = None
        elif signature := signature_of(self.table.get(op.type), op, self.sizes):
            matching = Matching(op, signature, placements, self)
            of_sizes = all(p == REPLICATE for p in placements) and not self._behind(op)
            known = matching.dims() if of_sizes else signature.dims or ()
            for output, dims in zip(op.outputs, known):
                self.sizes.know(output, dims)
            found = matching.division()
        if not found:
            raise NotSharded
        return found

    def _reason(self, op: tf.Operation, placements: list[Placement]) -> str:
        """Why an op runs once that no rule divides; what it follows from says so first."""
        before = [self.reasons[t.op.name][0] for t in op.inputs if t.op.name in self.reasons]
        ruled = (
            op.type in self.table
            or op.type in op_types.FUNCTION_CALLERS
            or op.type.startswith(op_types.LIST_PREFIXES)
        )
        if before and (ruled or all(p == REPLICATE for p in placements)):
            return before[0]
        alike = all(getattr(p, 'rows', self.rows) == self.rows for p in placements)
        needs = 'needs all rows' if alike else "is given rows that may not be the batch's"
        return f'this {op.type} {needs}' if ruled else f'no rule for {op.type}'

    def own_lists(self, given: Iterable[tuple[tf.Tensor, Need]]) -> bool:
        """Lets each tower make the empty lists that it's given as its own; False if it can't."""
        for tensor, need in given:
            if need == LOCAL and tensor.dtype == tf.variant and self.seen(tensor) == REPLICATE:
                if tensor.op.type not in op_types.EMPTY_LISTS:
                    return False
                self.ops[tensor.op.name] = lists.made_empty(tensor.op)
        return True

    def divide(self, op: tf.Operation, found: Decision) -> None:
        """Lets an op run in towers."""
        self.ops[op.name] = found.plan
        for output, placement in zip(op.outputs, found.placements):
            if placement is not None:
                self.placements[output.name] = placement
        for output, dims in zip(op.outputs, found.dims):
            self.sizes.know(output, dims)

    def whole(self, op: tf.Operation, placements: list[Placement], reason: str) -> None:
        """Lets an op run once."""
        self.once |= {t.op.name for t, p in zip(op.inputs, placements) if isinstance(p, Kept)}
        behind = self._behind(op)
        if op.type in op_types.SHAPE_QUERIES or (
            not behind and all(p == REPLICATE for p in placements)
        ):
            return
        reason = next((self.unknown[t.name] for t in op.inputs if t.name in self.unknown), reason)
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
            while (
                tensor.op.type in op_types.REARRANGEMENTS
                and self.seen(tensor.op.inputs[0]) != REPLICATE
            ):
                tensor = tensor.op.inputs[0]
            self.reduced.add(tensor.name)
        return [REPLICATE if isinstance(p, Partial) else p for p in placements]

    def seen(self, tensor: tf.Tensor) -> Placement:
        """What those who use a tensor are given."""
        reduced = tensor.name in self.reduced
        return REPLICATE if reduced else self.placements.get(tensor.name, REPLICATE)


class Inside(Pass):
    """A pass over the ops of a function that towers call, where nothing can be made whole.

    Nothing can be summed, gathered or sliced there: if an op asks for that, or has side effects,
    what calls the function runs once. Sizes are each tower's own, as its tensors say them. While it
    isn't known yet what a loop's variables are, it isn't `strict`: what is asked for is taken to be
    there. `wanted` is of which arguments, constants and fills rows are asked for.
    """

    def __init__(self, outer: Pass, graph: Any, strict: bool, wanted: functions.Wanted):
        super().__init__(outer.rows, outer.table, Sizes(f'{graph.name}/'))
        self.graph, self.strict, self.wanted = graph, strict, wanted

    def visit(self, op: tf.Operation) -> None:
        if op in self.wanted:
            self._make(op, self.wanted[op])
            return
        calls = op.type in op_types.FUNCTION_CALLERS
        if op.op_def.is_stateful and op.type not in op_types.VARIABLE_READS and not calls:
            raise NotSharded(f'in it, a {op.type} has effects, or draws numbers')
        placements = [self.seen(t) for t in op.inputs]
        whole = all(p == REPLICATE for p in placements)
        if op.type in op_types.SHAPE_QUERIES:
            if not whole and any(self.sizes.entries(t) is None for t in op.outputs):
                raise NotSharded(f'the sizes of {op.name} are unknown')
        elif whole and not any(map(self.differs, op.inputs)):
            if calls:
                raise NotSharded(f'a {op.type} that is the same on all towers')
        elif whole and (
            op.type == op_types.BROADCAST_GRADIENT_ARGS or all(map(self._is_known, op.outputs))
        ):
            pass  # Sizes, of which each tower computes its own.
        else:
            self.decide(op, placements)

    def linear(self, op: tf.Operation, placements: list[Placement]) -> Partial | None:
        total = Partial('sum', self.rows)
        likely = [total if p == REPLICATE and not self.strict else p for p in placements]
        return super().linear(op, placements) or super().linear(op, likely)

    def differs(self, tensor: tf.Tensor) -> bool:
        """Whether towers have their own versions of a size."""
        return any(self.rows in entry.symbols for entry in self.sizes.entries(tensor) or [])

    def _is_known(self, tensor: tf.Tensor) -> bool:
        sizes = self.sizes.entries(tensor)
        return sizes is not None and not any(isinstance(s, Entry) for e in sizes for s in e.symbols)

    def _make(self, op: tf.Operation, need: plan.Slice) -> None:
        """Lets each tower make its rows of a constant or a fill."""
        dims = list(self.sizes.dims(op.outputs[0]) or [])
        if (own := per_row(dims[need.axis], self.rows)) is None:
            raise NotSharded(f'the size of {op.name} is unknown')
        needs: tuple[Need, ...] = (plan.Slice(need.axis, self.rows, own),)
        if op.type == op_types.FILL:
            needs = (plan.LocalShape(tuple(dims), need.axis, self.rows), FULL)
        dims[need.axis] = own * Size(1, (self.rows,))
        super().divide(op, Decision(OpPlan(needs), [Shard(need.axis, self.rows)], [dims]))

    def own_lists(self, given: Iterable[tuple[tf.Tensor, Need]]) -> bool:
        return not self.strict or super().own_lists(given)

    def whole(self, op: tf.Operation, placements: list[Placement], reason: str) -> NoReturn:
        raise NotSharded(f'in it, {op.name}: {reason}')

    def reduce(self, op: tf.Operation, placements: list[Placement]) -> NoReturn:
        raise NotSharded(f'in it, {op.name} needs a sum over all rows')

    def divide(self, op: tf.Operation, found: Decision) -> None:
        needs = tuple(self._possible(op, *given) for given in zip(op.inputs, found.plan.needs))
        super().divide(op, found._replace(plan=found.plan._replace(needs=needs)))

    def _possible(self, op: tf.Operation, tensor: tf.Tensor, need: Need) -> Need:
        """What an op is given inside for what it needs, if it can be."""
        differs = self.differs(tensor)
        if need == FULL and (differs or self.seen(tensor) != REPLICATE):
            raise NotSharded(f'in it, {op.name} needs all rows')
        if isinstance(need, plan.Slice) and self._may_be_made(tensor):
            self.wanted[tensor.op] = need
        elif self.strict and (isinstance(need, plan.Slice) or need == plan.FULL_ON_FIRST):
            raise NotSharded(f'{op.type} needs rows of {tensor.name}')
        elif isinstance(need, plan.LocalShape):
            more = [self.rows in e.symbols if differs else e.static is None for e in need.entries]
            if sum(more) > int(differs):  # The tower has its own rows.
                raise NotSharded(f'{op.type} needs other sizes')
        whole = isinstance(need, plan.Constant) or (
            isinstance(need, plan.LocalShape) and not differs
        )
        return need if whole else LOCAL

    def _may_be_made(self, tensor: tf.Tensor) -> bool:
        """Whether each tower can have its rows of a tensor: a whole argument, or of known size."""
        if any(tensor is argument for argument in self.graph.inputs):
            return self.seen(tensor) == REPLICATE
        fill = (
            tensor.op.type == op_types.FILL and self.sizes.numbers(tensor.op.inputs[0]) is not None
        )
        return bool(self.rows.static) and (fill or tensor.op.type == op_types.CONST)
