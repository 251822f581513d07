"""From the batch's placement to every tensor's: one pass over the graph, until nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.partition import lists
from estimator_mgpu.partition.placements import (
    KEPT,
    REPLICATE,
    Partial,
    Placement,
    Rows,
    Shard,
)
from estimator_mgpu.partition.plan import (
    OWN,
    WHOLE,
    Local,
    Need,
    Numbers,
    OpPlan,
    Own,
    Plan,
    Slice,
)
from estimator_mgpu.partition.rules.linear import is_forwarding, linear
from estimator_mgpu.partition.rules.signature import (
    Entries,
    Fixed,
    Label,
    Operand,
    Part,
    Rule,
    Signature,
    UnknownRank,
)
from estimator_mgpu.partition.sizes import ONE, SIZE_OPS, Dim, Size, Sizes, per_row

Caller = Callable[[Any, tf.Operation, list[Placement]], Any]
"""(pass, op, placements of the inputs) -> (OpPlan, placements of the outputs, their dimensions)."""


def propagate(
    sources: Sequence[tf.Tensor],
    rows: Rows,
    table: dict[str, Rule],
    callers: dict[str, Caller],
    before: Set[str],
) -> Plan:
    """Finds out what may run in towers.

    Args:
      sources: tensors of one graph that have the rows along dimension 0.
      rows: the batch's rows.
      table: the rules, by the type of op.
      callers: what divides ops that call functions, by the type of op.
      before: names of ops that aren't the model's.

    Returns:
      The `Plan`.

    Raises:
      RuntimeError: if a rule fails, rather than says no.
    """
    order = _order(sources, before)
    reduced: set[str] = set()
    once: set[str] = set()
    while True:
        found = Pass(rows, table, callers, Sizes(), reduced, once)
        for tensor in sources:
            found.begin(tensor, Shard(0, rows), [Size(1, (rows,))])
        for op in order:
            found.visit(op)
        if found.reduced == reduced and found.once == once:
            return Plan(
                rows,
                sources,
                order,
                found.ops,
                found.placements,
                reduced,
                found.reasons,
                found.sizes,
            )
        reduced, once = found.reduced, found.once


def _order(sources: Sequence[tf.Tensor], before: Set[str]) -> list[tf.Operation]:
    """All of the model's ops that depend on the sources, each after those that it depends on."""
    reached: set[tf.Operation] = set()
    stack = [op for t in sources for op in t.consumers()]
    while stack:
        op = stack.pop()
        if op not in reached and op.name not in before:
            reached.add(op)
            stack += private.followers(op)
    order: list[tf.Operation] = []
    done: dict[tf.Operation, bool] = {}
    for root in sorted(reached, key=private.number):
        stack = [root]
        while stack:
            op = stack[-1]
            if op in done:
                stack.pop()
                if not done[op]:
                    done[op] = True
                    order.append(op)
                continue
            done[op] = False
            if op.type in ('NextIteration', 'RefNextIteration'):
                continue  # A loop's way back.
            given = [t.op for t in op.inputs] + list(op.control_inputs)
            stack += [o for o in given if o in reached and o not in done]
    return order


class Pass:
    """One pass over the ops.

    Args:
      rows: the batch's rows.
      table: the rules, by the type of op.
      callers: what divides ops that call functions, by the type of op.
      sizes: what is known of sizes.
      reduced: names of tensors that earlier passes found have to be reduced.
      once: names of ops that earlier passes found have to run once.
    """

    def __init__(
        self,
        rows: Rows,
        table: dict[str, Rule],
        callers: dict[str, Caller],
        sizes: Sizes,
        reduced: set[str],
        once: set[str],
    ):
        self.rows = rows
        self.table = table
        self.callers = callers
        self.sizes = sizes
        self.reduced = set(reduced)
        self.once = set(once)
        self.ops: dict[str, OpPlan] = {}
        self.placements: dict[str, Placement] = {}
        self.reasons: dict[str, str] = {}
        self._asked: dict[str, set[str]] = {}  # partial results that are asked for, by their origin

    def begin(self, tensor: tf.Tensor, placement: Placement, first: Sequence[Size] = ()) -> None:
        """Says what towers have of a tensor to begin with, and its first dimensions."""
        self.placements[tensor.name] = placement
        dims = self.sizes.dims(tensor) or []
        self.sizes.know(tensor, [*first, *dims[len(first) :]])

    def visit(self, op: tf.Operation) -> None:
        """Decides how an op runs."""
        if op.type == 'NoOp':  # Stands for the control edges into it, tower by tower.
            if any(c.name in self.ops for c in op.control_inputs):
                self.ops[op.name] = OpPlan((), {})
            return
        placements = [self.seen(t) for t in op.inputs]
        if op.name in self.once:
            self._whole(op, placements, 'its lists are used whole')
            return
        if op.type in SIZE_OPS or private.in_control_flow(op):
            self._whole(op, placements, 'it computes with sizes' if op.type in SIZE_OPS else '')
            return
        if any(isinstance(p, Partial) for p in placements):
            made = linear(op, placements)
            if made is not None:
                needs = tuple(OWN if p == made else WHOLE for p in placements)
                self._divided(op, OpPlan(needs, {}), [made], [None])
                return
            placements = self._reduce(op, placements)
        self.by_rule(op, placements)

    def by_rule(self, op: tf.Operation, placements: list[Placement]) -> None:
        """Divides an op by the rule for its type, or lets it run once."""
        if op.type in self.callers or lists.concerns(op, placements):
            if op.type in self.callers:
                made = self.callers[op.type](self, op, placements)
            else:
                made = self._with_lists(op, placements)
            if made is None:
                self._whole(op, placements, f'this {op.type} is not row by row')
            else:
                self._divided(op, *made)
            return
        [first, *_] = placements or [REPLICATE]
        numeric = op.type in _ALIKE and op.outputs[0].dtype.base_dtype != tf.string
        if numeric and isinstance(first, Shard) and self._fill(op, first):
            return
        rule = self.table.get(op.type)
        if rule is None:
            self._whole(op, placements, f'no rule for {op.type}')
            return
        try:
            signature = rule(op, self.sizes)
        except UnknownRank as error:
            self._whole(op, placements, f'the rank of {error} is unknown')
            return
        except Exception as error:
            raise RuntimeError(
                f'Dividing {op.name!r} (a {op.type}) over the devices failed: '
                f'{type(error).__name__}: {error}. Please report the model; meanwhile '
                'replicate(devices=1) trains it on one device.'
            ) from error
        if signature is None or not self._by(op, signature, placements):
            self._whole(op, placements, f'this {op.type} is not row by row')

    def _fill(self, op: tf.Operation, placement: Shard) -> bool:
        """Makes ones or zeros by the tower's number of rows, without waiting for whose shape it is.

        Else each tower's loss waits for all losses where it's divided by how many there are.
        """
        dims = self.sizes.dims(op.inputs[0])
        if dims is None or any(isinstance(s, Dim) for size in dims for s in size.symbols):
            return False
        factor = per_row(dims[placement.axis], self.rows)
        if factor is None:
            return False
        needs = (Local(tuple(dims), placement.axis, factor),)
        self._divided(op, OpPlan(needs, {}, fill=_ALIKE[op.type]), [placement], [dims])
        return True

    def _with_lists(
        self, op: tf.Operation, placements: list[Placement]
    ) -> tuple[OpPlan, Sequence[Any], Sequence[Any]] | None:
        """What an op with TensorLists comes to."""
        made = lists.rule(op, placements, self.rows, self.sizes)
        if made is None or not self.own(zip(op.inputs, made.needs)):
            return None
        if made.entries is not None:
            self.sizes.know_values(op.outputs[-1], made.entries)
        dims = [None] * (len(op.outputs) - 1) + [made.elements]
        return OpPlan(made.needs, {}), made.placements, dims

    def own(self, given: Iterable[tuple[tf.Tensor, Need]]) -> bool:
        """Lets each tower make the empty lists that it's given as its own; False if it can't."""
        for tensor, need in given:
            if isinstance(need, Own) and tensor.name not in self.placements:
                if tensor.op.type not in lists.MAKERS:
                    return False
                shape = lists.any_shape(tensor.op.inputs[0])
                self.ops[tensor.op.name] = OpPlan((shape, WHOLE), {})
        return True

    def _by(self, op: tf.Operation, signature: Signature, placements: list[Placement]) -> bool:
        """Divides an op along the first dimension that can be."""
        for label, factor in self._candidates(op, signature, placements):
            needs = self._needs(op, signature, placements, label, factor)
            if needs is None:
                continue
            made: list[Placement] = []
            dims = []
            for i, labels in enumerate(signature.outputs):
                if label in labels:
                    made.append(Shard(labels.index(label), self.rows))
                else:
                    made.append(Partial(signature.reduce) if signature.reduce else REPLICATE)
                own = self._dims(op, signature, i, label, factor)
                dims.append(own)
                if own is None and label in labels:
                    break
            else:
                self._divided(op, OpPlan(needs, signature.attrs), made, dims)
                return True
        return False

    def _candidates(
        self, op: tf.Operation, signature: Signature, placements: list[Placement]
    ) -> Iterator[tuple[Label, Size]]:
        """Yields labels to divide along, each with how many entries a row has there."""
        for tensor, operand, placement in zip(op.inputs, signature.inputs, placements):
            if not isinstance(placement, Shard) or isinstance(operand, (Entries, Fixed, Part)):
                continue
            if operand and operand[placement.axis] is not None:
                dims = self.sizes.dims(tensor) or []
                factor = per_row(dims[placement.axis], self.rows)
                if factor is not None:
                    yield operand[placement.axis], factor
        if any(isinstance(p, Shard) for p in placements):
            return
        for tensor, operand in zip(op.inputs, signature.inputs):
            if isinstance(operand, Entries):
                for label, size in zip(operand.labels, self.sizes.entries(tensor) or []):
                    if label is not None and self.rows in size.symbols:
                        factor = per_row(size, self.rows)
                        if factor is not None:
                            yield label, factor

    def _needs(
        self,
        op: tf.Operation,
        signature: Signature,
        placements: list[Placement],
        label: Label,
        factor: Size,
    ) -> tuple[Need, ...] | None:
        """What towers' ops are given; None if that can't be had."""
        needs = [
            self._need(tensor, operand, placement, label, factor)
            for tensor, operand, placement in zip(op.inputs, signature.inputs, placements)
        ]
        return None if None in needs else tuple(needs)  # type: ignore[arg-type]

    def _need(
        self,
        tensor: tf.Tensor,
        operand: Operand,
        placement: Placement,
        label: Label,
        factor: Size,
    ) -> Need | None:
        if isinstance(operand, Fixed):
            return Numbers(operand.numbers)
        if isinstance(operand, Part):
            return OWN if tensor.name in self.placements else None
        if isinstance(operand, Entries):
            if label not in operand.labels:
                return WHOLE
            index = operand.labels.index(label)
            entries = self.sizes.entries(tensor)
            if entries is None:
                return None
            if entries[index] == Size(-1):
                # What is left, for a tower as for the whole batch.
                return WHOLE if not any(e.rows for e in entries) else None
            own = per_row(entries[index], self.rows)
            return None if own is None else Local(tuple(entries), index, own)
        if label not in operand:
            return WHOLE
        axis = operand.index(label)
        if placement == Shard(axis, self.rows):
            return OWN
        dims = self.sizes.dims(tensor) or []
        if dims[axis] == ONE:
            return WHOLE  # It's repeated for all rows.
        return Slice(axis, per_row(dims[axis], self.rows) or factor)

    def _dims(
        self, op: tf.Operation, signature: Signature, index: int, label: Label, factor: Size
    ) -> list[Size] | None:
        """The dimensions of an output, as far as they are known."""
        output = op.outputs[index]
        labels = signature.outputs[index]
        given = signature.dims[index] if signature.dims else None
        if output.shape.rank is None and given is None and not labels:
            return None
        static = output.shape.as_list() if output.shape.rank is not None else [None] * len(labels)
        dims = []
        for i, (known, own) in enumerate(zip(static, labels)):
            size = given[i] if given else None
            if own == label:
                rows = factor if size is None else per_row(size, self.rows)
                if rows is None:
                    return None
                dims.append(rows * Size(1, (self.rows,)))
            elif known is not None:
                dims.append(Size(known))
            else:
                size = size or self._size_of(op, signature, own)
                dims.append(size or self.sizes.unknown(output, i))
        return dims

    def _size_of(self, op: tf.Operation, signature: Signature, label: Label) -> Size | None:
        """The size that all inputs agree that a dimension has."""
        if label is None:
            return None
        found = {
            (self.sizes.dims(tensor) or [])[operand.index(label)]
            for tensor, operand in zip(op.inputs, signature.inputs)
            if not isinstance(operand, (Entries, Fixed, Part)) and label in operand
        }
        return found.pop() if len(found) == 1 else None

    def _divided(
        self, op: tf.Operation, planned: OpPlan, made: Sequence[Any], dims: Sequence[Any]
    ) -> None:
        self.ops[op.name] = planned
        for output, placement, own in zip(op.outputs, made, dims):
            if placement is None:
                continue
            self.placements[output.name] = placement
            if own is not None:
                self.sizes.know(output, own)
            if placement == Partial('mean'):
                self.reduced.add(output.name)

    def _whole(self, op: tf.Operation, placements: list[Placement], reason: str) -> None:
        """Lets an op run once."""
        if any(p != REPLICATE for p in placements):
            self.reasons[op.name] = reason
            if op.type not in SIZE_OPS:
                self._reduce(op, placements)
            for tensor, placement in zip(op.inputs, placements):
                if isinstance(placement, KEPT):
                    self.once.add(tensor.op.name)

    def _reduce(self, op: tf.Operation, placements: list[Placement]) -> list[Placement]:
        """Notes that partial results are to be reduced, where they come from."""
        for tensor, placement in zip(op.inputs, placements):
            if isinstance(placement, Partial):
                self.reduced.add(tensor.name)
                origin = tensor
                while is_forwarding(origin.op) and isinstance(
                    self.seen(origin.op.inputs[0]), Partial
                ):
                    origin = origin.op.inputs[0]
                self._asked.setdefault(origin.name, set()).add(tensor.name)
                if len(self._asked[origin.name]) > 1:
                    self.reduced.add(origin.name)  # One sum is enough.
        return [REPLICATE if isinstance(p, Partial) else p for p in placements]

    def seen(self, tensor: tf.Tensor) -> Placement:
        """What those who use a tensor are given."""
        if tensor.name in self.reduced:
            return REPLICATE
        return self.placements.get(tensor.name, REPLICATE)


_ALIKE = {'ZerosLike': 0, 'OnesLike': 1}
