"""A rule's labels matched with what towers have: along which dimension an op can be divided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import tensorflow.compat.v1 as tf

from . import plan
from .plan import OWN, REPLICATE, WHOLE, Division, Entries, Label, Need, Numbers, Placement, Shard
from .symbols import ONE, Size, per_row

if TYPE_CHECKING:
    from .propagation import Pass
    from .rules.signature import Operand, Signature
    from .symbols import Rows


class Way(NamedTuple):
    """How to divide an op: along the dimensions of a label, with `factor` entries a row."""

    label: Label
    rows: Rows
    factor: Size


@dataclass
class Matching:
    """An op, its signature, the placements of its inputs, and what the pass knows of others."""

    op: tf.Operation
    signature: Signature
    placements: Sequence[Placement]
    outer: Pass

    def __post_init__(self) -> None:
        self.rows, self.sizes = self.outer.rows, self.outer.sizes
        self._inputs = list(zip(self.op.inputs, self.signature.inputs, self.placements))

    def division(self) -> Division | None:
        """In the first way that can be; None if there is none."""
        return next(filter(None, map(self._divided, self._ways())), None)

    def _ways(self) -> Iterator[Way]:
        """Yields ways to divide the op.

        They are along what inputs have their rows along. If none has rows, they are along what has
        a size by rows, as where tensors are made, or what was made whole, of rows.
        """
        sharded = [(t, _labels(o), p) for t, o, p in self._inputs if isinstance(p, Shard)]
        for tensor, labelled, placement in sharded:
            if labelled and labelled[placement.axis] is not None:
                factor = self.sizes.per_row(tensor, placement.axis, placement.rows)
                if factor is not None:
                    yield Way(labelled[placement.axis], placement.rows, factor)
        for tensor, operand, _ in self._inputs if not sharded else ():
            if isinstance(operand, Entries):
                for label, size in zip(operand.labels, self.sizes.entries(tensor) or []):
                    factor = per_row(size, self.rows) if self.rows in size.symbols else None
                    if label is not None and factor is not None:
                        yield Way(label, self.rows, factor)
            elif tensor.name in self.outer.again:
                first = next(iter(_labels(operand)), None)
                size = (self.sizes.dims(tensor) or [ONE])[0]
                rows = size.rows or self.rows
                factor = per_row(size, rows) if first is not None else None
                begins = self.op.type in self.outer.products
                if factor is not None and (begins or rows is self.rows):
                    yield Way(first, rows, factor)

    def _divided(self, way: Way) -> Division | None:
        """What the op comes to if it's divided in a way; None if it can't be."""
        needs = [self._need(*given, way) for given in self._inputs]
        outputs = self.signature.outputs
        dims = self.dims(way)
        if None in needs or any(way.label in o and d is None for o, d in zip(outputs, dims)):
            return None
        reduce = self.signature.reduce
        other = plan.Partial(reduce, way.rows) if reduce else REPLICATE
        made = [Shard(o.index(way.label), way.rows) if way.label in o else other for o in outputs]
        return Division(plan.OpPlan(tuple(needs), self.signature.attrs), made, dims)  # type: ignore

    def _need(self, tensor: tf.Tensor, operand: Operand, has: Placement, way: Way) -> Need | None:
        """What towers are given for an operand; None if that can't be had."""
        if isinstance(operand, (plan.Given, Numbers)):
            return operand if operand != OWN or tensor.name in self.outer.placements else None
        labelled = operand.labels if isinstance(operand, Entries) else operand
        if way.label not in labelled:
            return WHOLE
        axis = labelled.index(way.label)
        if isinstance(operand, Entries):
            entries = self.sizes.entries(tensor) or []
            if entries and entries[axis] == Size(-1):
                # What is left, for a tower as for the whole batch.
                return None if any(way.rows in entry.symbols for entry in entries) else WHOLE
            return self.sizes.local(tensor, axis, way.rows)
        if has == Shard(axis, way.rows):
            return OWN
        dims = self.sizes.dims(tensor)
        if dims is None:
            return None
        if dims[axis] == ONE:
            return WHOLE  # It's repeated for all rows.
        factor = per_row(dims[axis], way.rows)
        if factor is None and isinstance(way.label, str) and way.label[0].isupper():
            return None  # One of them may be 1, and repeated.
        return plan.Slice(axis, way.rows, factor or way.factor)

    def dims(self, way: Way | None = None) -> list[list[Size] | None]:
        """The dimensions of the outputs, as far as they are known."""
        return [self._dims(i, way) for i in range(len(self.signature.outputs))]

    def _dims(self, index: int, way: Way | None) -> list[Size] | None:
        output, labels = self.op.outputs[index], self.signature.outputs[index]
        given = self.signature.dims[index] if self.signature.dims else None
        if output.shape.rank is None and given is None and not labels:
            return None
        static = self.sizes.static_dims(output, len(labels))
        dims = []
        for i, (known, own) in enumerate(zip(static, labels)):
            size = given[i] if given else None
            if way and own == way.label:
                factor = way.factor if size is None else per_row(size, way.rows)
                if factor is None:
                    return None
                dims.append(factor * Size(1, (way.rows,)))
            elif known.symbols:
                dims.append(size or self._size_of(own) or known)
            else:
                dims.append(known)
        return dims

    def _size_of(self, label: Label) -> Size | None:
        """The size that all inputs agree that a dimension has."""
        found = {
            (self.sizes.dims(tensor) or [])[_labels(operand).index(label)]
            for tensor, operand, _ in self._inputs
            if label is not None and label in _labels(operand)
        }
        return found.pop() if len(found) == 1 else None


def _labels(operand: Operand) -> tuple[Label, ...]:
    """Those of its dimensions."""
    return () if isinstance(operand, (Entries, plan.Given, Numbers)) else operand
