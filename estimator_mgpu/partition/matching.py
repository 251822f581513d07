"""A rule's labels matched with what towers have: along which dimension an op can be divided."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import REPLICATE, Partial, Placement, Shard
from estimator_mgpu.partition.plan import (
    OWN,
    WHOLE,
    Division,
    Local,
    Need,
    Numbers,
    OpPlan,
    Slice,
)
from estimator_mgpu.partition.rules.signature import (
    Entries,
    Fixed,
    Label,
    Operand,
    Part,
    Signature,
)
from estimator_mgpu.partition.sizes import ONE, Rows, Size, Sizes, per_row


def match(
    op: tf.Operation,
    signature: Signature,
    placements: Sequence[Placement],
    made: Container[str],
    rows: Rows,
    sizes: Sizes,
) -> Division | None:
    """Divides an op along the first dimension that can be.

    Args:
      op: the op.
      signature: what it does along which dimensions.
      placements: of its inputs, none of them `Partial`.
      made: names of the tensors that towers make.
      rows: which rows.
      sizes: what is known of sizes.

    Returns:
      None if there is no such dimension.
    """
    matching = _Matching(op, signature, placements, made, rows, sizes)
    return next(filter(None, map(matching.along, matching.candidates())), None)


class _Along(NamedTuple):
    """A dimension, by its label, and how many entries a row has there."""

    label: Label
    factor: Size


class _Matching(NamedTuple):
    """The arguments of `match`."""

    op: tf.Operation
    signature: Signature
    placements: Sequence[Placement]
    made: Container[str]
    rows: Rows
    sizes: Sizes

    def candidates(self) -> Iterator[_Along]:
        """Yields dimensions to divide along: those that inputs have their rows along.

        If none has rows, as where tensors are made, those whose size is given by rows.
        """
        inputs = list(zip(self.op.inputs, self.signature.inputs, self.placements))
        for tensor, operand, placement in inputs:
            if isinstance(placement, Shard) and _is_labels(operand):
                label = operand[placement.axis] if operand else None
                factor = self.sizes.per_row(tensor, placement.axis, self.rows)
                if label is not None and factor is not None:
                    yield _Along(label, factor)
        if any(isinstance(p, Shard) for p in self.placements):
            return
        for tensor, operand, _ in inputs:
            if isinstance(operand, Entries):
                for label, size in zip(operand.labels, self.sizes.entries(tensor) or []):
                    factor = per_row(size, self.rows) if self.rows in size.symbols else None
                    if label is not None and factor is not None:
                        yield _Along(label, factor)

    def along(self, way: _Along) -> Division | None:
        """What the op comes to if it's divided along a dimension; None if it can't be."""
        inputs = zip(self.op.inputs, self.signature.inputs, self.placements)
        needs = [self._need(*given, way) for given in inputs]
        dims = [self._dims(i, way) for i in range(len(self.signature.outputs))]
        placements: list[Placement] = []
        for labels, own in zip(self.signature.outputs, dims):
            if way.label in labels:
                if own is None:
                    return None
                placements.append(Shard(labels.index(way.label), self.rows))
            else:
                reduce = self.signature.reduce
                placements.append(Partial(reduce) if reduce else REPLICATE)
        if None in needs:
            return None
        plan = OpPlan(tuple(needs), self.signature.attrs)  # type: ignore[arg-type]
        return Division(plan, placements, dims)

    def _need(
        self, tensor: tf.Tensor, operand: Operand, placement: Placement, way: _Along
    ) -> Need | None:
        """What towers are given for an operand; None if that can't be had."""
        if isinstance(operand, Fixed):
            return Numbers(operand.numbers)
        if isinstance(operand, Part):
            return OWN if tensor.name in self.made else None
        if isinstance(operand, Entries):
            return self._size_need(tensor, operand, way)
        if way.label not in operand:
            return WHOLE
        axis = operand.index(way.label)
        if placement == Shard(axis, self.rows):
            return OWN
        dims = self.sizes.dims(tensor) or []
        if dims[axis] == ONE:
            return WHOLE  # It's repeated for all rows.
        return Slice(axis, per_row(dims[axis], self.rows) or way.factor)

    def _size_need(self, tensor: tf.Tensor, operand: Entries, way: _Along) -> Need | None:
        if way.label not in operand.labels:
            return WHOLE
        position = operand.labels.index(way.label)
        entries = self.sizes.entries(tensor)
        if entries is None:
            return None
        if entries[position] == Size(-1):
            # What is left, for a tower as for the whole batch.
            return WHOLE if not any(entry.rows for entry in entries) else None
        factor = per_row(entries[position], self.rows)
        return None if factor is None else Local(tuple(entries), position, factor)

    def _dims(self, index: int, way: _Along) -> list[Size] | None:
        """The dimensions of an output, as far as they are known."""
        output, labels = self.op.outputs[index], self.signature.outputs[index]
        given = self.signature.dims[index] if self.signature.dims else None
        if output.shape.rank is None and given is None and not labels:
            return None
        static = output.shape.as_list() if output.shape.rank is not None else [None] * len(labels)
        dims = []
        for i, (known, label) in enumerate(zip(static, labels)):
            size = given[i] if given else None
            if label == way.label:
                factor = way.factor if size is None else per_row(size, self.rows)
                if factor is None:
                    return None
                dims.append(factor * Size(1, (self.rows,)))
            elif known is not None:
                dims.append(Size(known))
            else:
                dims.append(size or self._size_of(label) or self.sizes.unknown(output, i))
        return dims

    def _size_of(self, label: Label) -> Size | None:
        """The size that all inputs agree that a dimension has."""
        found = {
            (self.sizes.dims(tensor) or [])[operand.index(label)]
            for tensor, operand in zip(self.op.inputs, self.signature.inputs)
            if label is not None and _is_labels(operand) and label in operand
        }
        return found.pop() if len(found) == 1 else None


def _is_labels(operand: Operand) -> bool:
    return not isinstance(operand, (Entries, Fixed, Part))
