"""From the batch's placement to every tensor's: one pass over the graph, until nothing changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.partition.placements import (
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
from estimator_mgpu.partition.sizes import Dim, Size, Sizes


def propagate(sources: Sequence[tf.Tensor], rows: Rows, table: dict[str, Rule]) -> Plan:
    """Finds out what may run in towers.

    Args:
      sources: tensors of one graph that have the rows along dimension 0.
      rows: the batch's rows.
      table: the rules, by the type of op.

    Returns:
      The `Plan`.

    Raises:
      RuntimeError: if a rule fails, rather than says no.
    """
    order = _order(sources)
    reduced: set[str] = set()
    while True:
        found = _Pass(sources, rows, table, reduced)
        for op in order:
            found.visit(op)
        if found.reduced == reduced:
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
        reduced = found.reduced


def _order(sources: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """All ops that depend on the sources, each after those that it depends on."""
    reached: set[tf.Operation] = set()
    stack = [op for t in sources for op in t.consumers()]
    while stack:
        op = stack.pop()
        if op not in reached:
            reached.add(op)
            stack += private.followers(op)
    order: list[tf.Operation] = []
    done: dict[tf.Operation, bool] = {}
    for root in sorted(reached, key=lambda op: op._id):
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
            before = [t.op for t in op.inputs] + list(op.control_inputs)
            stack += [o for o in before if o in reached and o not in done]
    return order


class _Pass:
    """One pass over the ops, with what earlier ones found has to be reduced."""

    def __init__(
        self,
        sources: Sequence[tf.Tensor],
        rows: Rows,
        table: dict[str, Rule],
        reduced: set[str],
    ):
        self.rows = rows
        self.table = table
        self.reduced = set(reduced)
        self.sizes = Sizes()
        self.ops: dict[str, OpPlan] = {}
        self.placements: dict[str, Placement] = {}
        self.reasons: dict[str, str] = {}
        for tensor in sources:
            self.placements[tensor.name] = Shard(0, rows)
            dims = self.sizes.dims(tensor) or []
            self.sizes.know(tensor, [Size(1, (rows,)), *dims[1:]])

    def visit(self, op: tf.Operation) -> None:
        """Decides how an op runs."""
        if op.type == 'NoOp':  # Stands for the control edges into it, tower by tower.
            if any(c.name in self.ops for c in op.control_inputs):
                self.ops[op.name] = OpPlan((), {})
            return
        placements = [self._seen(t) for t in op.inputs]
        if op.type in _SIZES or private.in_control_flow(op):
            self._whole(op, placements, 'it computes with sizes' if op.type in _SIZES else '')
            return
        if any(isinstance(p, Partial) for p in placements):
            made = linear(op, placements)
            if made is not None:
                needs = tuple(OWN if p == made else WHOLE for p in placements)
                self._divided(op, OpPlan(needs, {}), [made], [None])
                return
            placements = self._reduce(op, placements)
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
                dims.append(size or Size(1, (Dim(output.name, i),)))
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
        self, op: tf.Operation, planned: OpPlan, made: Sequence[Placement], dims: Sequence[Any]
    ) -> None:
        self.ops[op.name] = planned
        for output, placement, own in zip(op.outputs, made, dims):
            self.placements[output.name] = placement
            if own is not None:
                self.sizes.know(output, own)
            if placement == Partial('mean'):
                self.reduced.add(output.name)

    def _whole(self, op: tf.Operation, placements: list[Placement], reason: str) -> None:
        """Lets an op run once."""
        if any(p != REPLICATE for p in placements):
            self.reasons[op.name] = reason
            if op.type not in _SIZES:
                self._reduce(op, placements)

    def _reduce(self, op: tf.Operation, placements: list[Placement]) -> list[Placement]:
        """Notes that partial results are to be reduced, where they come from."""
        for tensor, placement in zip(op.inputs, placements):
            if isinstance(placement, Partial):
                while is_forwarding(tensor.op) and isinstance(
                    self._seen(tensor.op.inputs[0]), Partial
                ):
                    tensor = tensor.op.inputs[0]
                self.reduced.add(tensor.name)
        return [REPLICATE if isinstance(p, Partial) else p for p in placements]

    def _seen(self, tensor: tf.Tensor) -> Placement:
        """What those who use a tensor are given."""
        if tensor.name in self.reduced:
            return REPLICATE
        return self.placements.get(tensor.name, REPLICATE)


_SIZES = frozenset(['Shape', 'ShapeN', 'Size', 'Rank'])


def per_row(size: Size, rows: Rows) -> Size | None:
    """How many entries a row has in a dimension; None if it doesn't go by rows."""
    found = size.over(Size(1, (rows,)))
    return found if found is not None and rows not in found.symbols else None
