"""A rule's labels matched with what towers have: along which dimension an op can be divided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition import plan
from estimator_mgpu.partition.placements import REPLICATE, Partial, Placement, Shard
from estimator_mgpu.partition.plan import (
    FULL,
    LOCAL,
    Constant,
    Decision,
    Label,
    Need,
    SizesOf,
)
from estimator_mgpu.partition.propagation.accepted_shapes import takes
from estimator_mgpu.partition.rules.notation import Operand, Signature, labels_of
from estimator_mgpu.partition.sizes import ONE, RowSpace, Size, per_row

if TYPE_CHECKING:
    from estimator_mgpu.partition.propagation.engine import Pass


class Way(NamedTuple):
    """How to divide an op: along the dimensions of a label, with `factor` entries a row."""

    label: Label
    rows: RowSpace
    factor: Size


class Matching:
    """An op, its signature, the placements of its inputs, and what the pass knows of others."""

    def __init__(self, op: tf.Operation, signature: Signature, has: list[Placement], outer: Pass):
        self.op, self.signature, self.outer, self.sizes = op, signature, outer, outer.sizes
        self._inputs = list(zip(op.inputs, signature.inputs, has))

    def division(self) -> Decision | None:
        """In the first way that can be; None if there is none."""
        return next(filter(None, map(self._divided, self._ways())), None)

    def _ways(self) -> Iterator[Way]:
        """Yields ways to divide the op.

        They are along what inputs have their rows along. If none has rows, they are along what has
        a size by rows, as where tensors are made, or what was made whole, of rows.
        """
        batch, sharded = self.outer.rows, any(isinstance(p, Shard) for _, _, p in self._inputs)
        for tensor, operand, placement in self._inputs:
            labelled, dims = labels_of(operand), self.sizes.dims(tensor)
            found: list[tuple[Label, Size, RowSpace]] = []
            if isinstance(placement, Shard) and labelled and dims:
                found = [(labelled[placement.axis], dims[placement.axis], placement.rows)]
            elif not sharded and isinstance(operand, SizesOf):
                sizes = zip(operand.labels, self.sizes.entries(tensor) or [])
                found = [(i, size, batch) for i, size in sizes if batch in size.symbols]
            elif not sharded and labelled and dims and tensor.name in self.outer.again:
                rows = dims[0].rows or batch
                if rows is batch or self.op.type in self.outer.products:  # These are worth it.
                    found = [(labelled[0], dims[0], rows)]
            for label, size, rows in found:
                factor = per_row(size, rows)
                if label is not None and factor is not None:
                    yield Way(label, rows, factor)

    def _divided(self, way: Way) -> Decision | None:
        """What the op comes to if it's divided in a way; None if it can't be."""
        needs = [self._need(*given, way) for given in self._inputs]
        outputs = self.signature.outputs
        dims = self.dims(way)
        if None in needs or any(way.label in o and d is None for o, d in zip(outputs, dims)):
            return None
        reduce = self.signature.reduce
        other = Partial(reduce, way.rows) if reduce else REPLICATE
        made = [Shard(o.index(way.label), way.rows) if way.label in o else other for o in outputs]
        return Decision(plan.OpPlan(tuple(needs), self.signature.attrs), made, dims)  # type: ignore

    def _need(self, tensor: tf.Tensor, operand: Operand, has: Placement, way: Way) -> Need | None:
        """What towers are given for an operand; None if that can't be had."""
        if isinstance(operand, (plan.Form, Constant)):
            return operand if operand != LOCAL or tensor.name in self.outer.placements else None
        labelled = operand.labels if isinstance(operand, SizesOf) else operand
        if way.label not in labelled:
            return FULL
        axis = labelled.index(way.label)
        if isinstance(operand, SizesOf):
            entries = self.sizes.entries(tensor) or []
            if entries and entries[axis] == Size(-1):
                # What is left, for a tower as for the whole batch.
                return None if any(way.rows in entry.symbols for entry in entries) else FULL
            return self.sizes.local(tensor, axis, way.rows)
        if has == Shard(axis, way.rows):
            return LOCAL
        dims = self.sizes.dims(tensor)
        if dims is None:
            return None
        if dims[axis] == ONE:
            return FULL  # It's repeated for all rows.
        factor = per_row(dims[axis], way.rows)
        if factor is None and not self._are_as_many(tensor, way.label):
            return None  # It may have one entry, which the op would repeat.
        return plan.Slice(axis, way.rows, factor or way.factor)

    def _are_as_many(self, tensor: tf.Tensor, label: Label) -> bool:
        """Whether a tensor has as many entries in a dimension as others, or else the op fails.

        That they have one letter isn't enough: of one entry, they may be repeated. TensorFlow says
        so where it takes two entries beside two, but neither one beside two nor two beside one.
        """

        if isinstance(label, str) and label[0].isupper():
            return False  # These are there to be repeated.

        def is_taken(own: int, others: int) -> bool:
            counts = [own if t is tensor else others for t, *_ in self._inputs]
            given = zip(self._inputs, counts)
            return takes(self.op, [self._shape(t, o, label, count) for (t, o, _), count in given])

        return is_taken(2, 2) and not is_taken(1, 2) and not is_taken(2, 1)

    def _shape(self, tensor: tf.Tensor, operand: Operand, label: Label, count: int) -> Any:
        """An input's shape, with so many entries in a dimension; of known numbers, these."""
        labels = labels_of(operand)
        if label in labels:
            dims = [None] * len(labels) if tensor.shape.rank is None else tensor.shape.as_list()
            dims[labels.index(label)] = count
            return dims
        numbers = self.sizes.numbers(tensor)
        if numbers is None or tensor.shape.rank is None:
            return tensor.shape
        return np.reshape(numbers, tensor.shape.as_list())

    def dims(self, way: Way | None = None) -> list[list[Size] | None]:
        """The dimensions of the outputs, as far as they are known."""
        outputs = self.signature.outputs
        told = self.signature.dims or [None] * len(outputs)
        return [self._dims(*given, way) for given in zip(self.op.outputs, outputs, told)]

    def _dims(
        self, output: tf.Tensor, labels: Sequence[Label], told: list[Size] | None, way: Way | None
    ) -> list[Size] | None:
        if output.shape.rank is None and told is None and not labels:
            return None
        dims: list[Size] = []
        static = self.sizes.static_dims(output, len(labels))
        for label, known, size in zip(labels, static, told or repeat(None)):
            if way and label == way.label:
                factor = per_row(size, way.rows) if size else way.factor
                if factor is None:
                    return None
                dims.append(factor * Size(1, (way.rows,)))
            else:
                dims.append((size or self._size_of(label) or known) if known.symbols else known)
        return dims

    def _size_of(self, label: Label) -> Size | None:
        """The size that all inputs agree that a dimension has."""
        found = {
            (self.sizes.dims(tensor) or [])[labels_of(operand).index(label)]
            for tensor, operand, _ in self._inputs
            if label is not None and label in labels_of(operand)
        }
        return found.pop() if len(found) == 1 else None
