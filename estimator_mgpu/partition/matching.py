"""A rule's labels matched with what towers have: along which dimension an op can be divided."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tensorflow.compat.v1 as tf

from .placements import REPLICATE, Partial, Placement, Shard
from .plan import OWN, WHOLE, Division, Given, Local, Need, Numbers, OpPlan, Slice
from .rules.signature import Entries, Label, Operand, Signature
from .symbols import ONE, Size, per_row

if TYPE_CHECKING:
    from .sizes import Sizes
    from .symbols import Rows


@dataclass
class Matching:
    """An op, its signature, the placements of its inputs, and what is known of others."""

    op: tf.Operation
    signature: Signature
    placements: Sequence[Placement]
    made: Container[str]  # names of the tensors that towers make
    again: Container[str]  # those that are made whole, and may be divided again along dimension 0
    rows: Rows
    sizes: Sizes

    def __post_init__(self) -> None:
        self._inputs = list(zip(self.op.inputs, self.signature.inputs, self.placements))

    def division(self) -> Division | None:
        """Along the first dimension that can be; None if there is none."""
        return next(filter(None, (self._along(*way) for way in self._candidates())), None)

    def _candidates(self) -> Iterator[tuple[Label, Size]]:
        """Yields labels to divide along, each with how many entries a row has there.

        They are of what inputs have their rows along. If none has rows, they are of what has a size
        by rows, as where tensors are made, or of what was made whole, of rows.
        """
        sharded = [(t, _labels(o), p.axis) for t, o, p in self._inputs if isinstance(p, Shard)]
        for tensor, labelled, axis in sharded:
            if labelled and labelled[axis] is not None:
                factor = self.sizes.per_row(tensor, axis, self.rows)
                if factor is not None:
                    yield labelled[axis], factor
        for tensor, operand, _ in self._inputs if not sharded else ():
            if isinstance(operand, Entries):
                for label, size in zip(operand.labels, self.sizes.entries(tensor) or []):
                    factor = per_row(size, self.rows) if self.rows in size.symbols else None
                    if label is not None and factor is not None:
                        yield label, factor
            elif tensor.name in self.again:
                first = next(iter(_labels(operand)), None)
                factor = self.sizes.per_row(tensor, 0, self.rows) if first is not None else None
                if factor is not None:
                    yield first, factor

    def _along(self, label: Label, factor: Size) -> Division | None:
        """What the op comes to if it's divided along a dimension; None if it can't be."""
        needs = [self._need(*given, label, factor) for given in self._inputs]
        outputs = list(enumerate(self.signature.outputs))
        dims = [self._dims(i, label, factor) for i, _ in outputs]
        if None in needs or any(label in own and dims[i] is None for i, own in outputs):
            return None
        reduce = self.signature.reduce
        other = Partial(reduce) if reduce else REPLICATE
        placements = [
            Shard(own.index(label), self.rows) if label in own else other for _, own in outputs
        ]
        return Division(OpPlan(tuple(needs), self.signature.attrs), placements, dims)  # type: ignore

    def _need(
        self, tensor: tf.Tensor, operand: Operand, placement: Placement, label: Label, factor: Size
    ) -> Need | None:
        """What towers are given for an operand; None if that can't be had."""
        if isinstance(operand, (Given, Numbers)):
            return operand if operand != OWN or tensor.name in self.made else None
        if isinstance(operand, Entries):
            return self._size_need(tensor, operand, label)
        if label not in operand:
            return WHOLE
        axis = operand.index(label)
        if placement == Shard(axis, self.rows):
            return OWN
        dims = self.sizes.dims(tensor)
        if dims is None:
            return None
        if dims[axis] == ONE:
            return WHOLE  # It's repeated for all rows.
        return Slice(axis, per_row(dims[axis], self.rows) or factor)

    def _size_need(self, tensor: tf.Tensor, operand: Entries, label: Label) -> Need | None:
        if label not in operand.labels:
            return WHOLE
        position = operand.labels.index(label)
        entries = self.sizes.entries(tensor)
        if entries is None:
            return None
        if entries[position] == Size(-1):
            # What is left, for a tower as for the whole batch.
            return WHOLE if not any(entry.rows for entry in entries) else None
        unknown = per_row(entries[position], self.rows) is None
        return None if unknown else Local(tuple(entries), position)

    def _dims(self, index: int, label: Label, factor: Size) -> list[Size] | None:
        """The dimensions of an output, as far as they are known."""
        output, labels = self.op.outputs[index], self.signature.outputs[index]
        given = self.signature.dims[index] if self.signature.dims else None
        if output.shape.rank is None and given is None and not labels:
            return None
        static = output.shape.as_list() if output.shape.rank is not None else [None] * len(labels)
        dims = []
        for i, (known, own) in enumerate(zip(static, labels)):
            size = given[i] if given else None
            if own == label:
                own_factor = factor if size is None else per_row(size, self.rows)
                if own_factor is None:
                    return None
                dims.append(own_factor * Size(1, (self.rows,)))
            elif known is not None:
                dims.append(Size(known))
            else:
                dims.append(size or self._size_of(own) or self.sizes.unknown(output, i))
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
    return () if isinstance(operand, (Entries, Given, Numbers)) else operand
