"""Matches an op's signature with the placements of its inputs: along which label it's sharded.

For example, a `MatMul` has the signature 'mk kn -> mn (sum)'. If its first input is sharded along
dimension 0, labelled m, so is its output, and each tower needs the full second input, which has no
m. If both inputs are sharded along k, the output is a partial sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import REPLICATE, Partial, Placement, Positions, Shard
from estimator_mgpu.partition.plan import (
    FULL,
    LOCAL,
    Constant,
    CountedFromFirst,
    Decision,
    EntriesOf,
    Form,
    IndicesOfRows,
    Label,
    Need,
    OpPlan,
    SizesOf,
    Slice,
    SparseRows,
    local_shape_of,
)
from estimator_mgpu.partition.propagation.scope import Scope
from estimator_mgpu.partition.rules import HEAVY, selections
from estimator_mgpu.partition.rules.notation import Operand, Signature, check_reduction, labels_of
from estimator_mgpu.partition.sizes import (
    ONE,
    RowSpace,
    SelectedRows,
    Size,
    UniqueRows,
    known,
    may_be_paired,
    per_row,
)
from estimator_mgpu.tf_internals import op_types
from estimator_mgpu.tf_internals.shape_functions import takes


class Way(NamedTuple):
    """A way to shard an op: along the dimensions with a label."""

    label: Label
    rows: RowSpace
    factor: Size  # how many entries an example has in these dimensions
    in_blocks: bool = False  # whether these are in blocks, as in `Shard`

    def shard(self, axis: int, factor: Size) -> Shard:
        """The shard along an axis in which an example has `factor` entries."""
        return Shard(axis, self.rows, self.in_blocks and factor != ONE)


Candidates = list[tuple[Label, Size, RowSpace]]
"""Dimensions along which an op may be sharded: the label, full size and row space of each."""


class Match:
    """An op with its signature.

    Args:
      placements: of the op's inputs; none is partial.

    Attributes:
      dims: those of each output's full value; None for an output of unknown rank.
    """

    def __init__(
        self, op: tf.Operation, signature: Signature, placements: Sequence[Placement], scope: Scope
    ):
        self._op = op
        self._signature = signature
        self._scope = scope
        self._sizes = scope.sizes
        self._inputs = list(zip(op.inputs, signature.inputs, placements))
        self._rule_dims = signature.dims or [None] * len(signature.outputs)
        self.dims = list(map(self._dims_of, op.outputs, signature.outputs, self._rule_dims))

    def decisions(self) -> Iterator[Decision]:
        """Yields how the op is sharded, in each way that is possible, the best first."""
        for way in self._ways():
            decision = self._decision(way)
            if decision is not None:
                yield decision

    # Which ways there are.

    def _ways(self) -> Iterator[Way]:
        """Yields ways to shard the op, the best first.

        They are along the dimensions along which inputs are sharded. If no input is, the op may
        still make its shard by itself, as `tf.zeros([batch, 3])`; or take one of what was gathered.
        """
        any_sharded = any(
            isinstance(placement, Shard) and not isinstance(operand, EntriesOf)
            for _, operand, placement in self._inputs
        )
        for tensor, operand, placement in self._inputs:
            if isinstance(operand, EntriesOf):
                candidates = self._along_entries(operand, placement)
            elif isinstance(placement, Shard):
                candidates = self._along_shard(tensor, operand, placement)
            elif any_sharded:
                candidates = []
            elif isinstance(operand, SizesOf):
                candidates = self._along_sizes(tensor, operand)
            else:
                candidates = self._along_gathered(tensor, operand)

            for label, size, rows in candidates:
                factor = per_row(size, rows)
                if label is None or factor is None or not self._may_have(rows):
                    continue
                in_blocks = self._in_blocks(tensor, label, factor, placement)
                if in_blocks is not None:
                    yield Way(label, rows, factor, in_blocks)

    def _may_have(self, rows: RowSpace) -> bool:
        """Whether the op does with the rows that a tower may have: with none, of a selection."""
        return not isinstance(rows, SelectedRows) or self._op.type in selections.DO_WITHOUT_ROWS

    def _in_blocks(
        self, tensor: tf.Tensor, label: Label, factor: Size, placement: Placement
    ) -> bool | None:
        """Whether entries are in blocks if the op is sharded as an input is; None if it can't be.

        A shard with several entries a row has them in one of two orders: by block, or by row. A
        full value, or a shard with one entry a row, can be taken in either.
        """
        by_rule = self._signature.in_blocks.get(label)
        if isinstance(placement, Shard) and factor != ONE:
            return placement.in_blocks if by_rule in (None, placement.in_blocks) else None
        if by_rule is not None:
            return by_rule
        if factor == ONE:
            return False  # There's one block.
        # What has the size of another tensor is used together with it, as ones are in gradients, or
        # the zeros with which a recurrent network begins.
        others = [self._scope.placement_of(other) for other in self._measured(tensor)]
        return any(isinstance(other, Shard) and other.in_blocks for other in others)

    def _measured(self, shape: tf.Tensor) -> Iterator[tf.Tensor]:
        """Yields the tensors of whose sizes a shape is computed."""
        seen = set()
        stack = [shape]
        while stack:
            tensor = stack.pop()
            if tensor.op.type in op_types.SHAPE_QUERIES:
                yield tensor.op.inputs[tensor.value_index]
            elif tensor.op not in seen and self._sizes.entries(tensor) is not None:
                seen.add(tensor.op)
                stack += tensor.op.inputs

    def _along_shard(self, tensor: tf.Tensor, operand: Operand, placement: Shard) -> Candidates:
        """The dimension along which an input is sharded."""
        labels = labels_of(operand)
        dims = self._sizes.dims(tensor)
        if not labels or not dims:
            return []
        return [(labels[placement.axis], dims[placement.axis], placement.rows)]

    def _along_entries(self, operand: EntriesOf, placement: Placement) -> Candidates:
        """The rows of a sparse tensor of which each tower has its entries.

        By its shape, it may have more rows, the last of them without entries. If these were shared
        over the towers, a tower's rows wouldn't be those in which its entries are counted.
        """
        if not isinstance(placement, Positions):
            return []
        for shape, of_shape, _ in self._inputs:
            if isinstance(of_shape, SizesOf) and operand.label in of_shape.labels:
                heights = self._sizes.entries(shape)
                axis = of_shape.labels.index(operand.label)
                if not heights or not heights[axis].same_as(placement.total):
                    return []
        return [(operand.label, placement.total, placement.rows)]

    def _along_sizes(self, tensor: tf.Tensor, operand: SizesOf) -> Candidates:
        """The dimensions whose size in a shape depends on the number of examples.

        Or on that of rows which towers have selected: what is added to these is made there, too.
        """
        batch = self._scope.batch
        candidates: Candidates = []
        for label, size in zip(operand.labels, self._sizes.entries(tensor) or []):
            rows = batch if batch in size.symbols else size.rows
            if rows is batch or (
                isinstance(rows, SelectedRows) and not isinstance(rows, UniqueRows)
            ):
                candidates.append((label, size, rows))
        return candidates

    def _along_gathered(self, tensor: tf.Tensor, operand: Operand) -> Candidates:
        """Dimension 0 of an input that was gathered.

        If that has another row space than the batch's, as what `tf.boolean_mask` gives, only
        heavy ops such as `MatMul` are worth sharding.
        """
        labels = labels_of(operand)
        dims = self._sizes.dims(tensor)
        if not labels or not dims or tensor.name not in self._scope.reshardable:
            return []
        rows = dims[0].rows or self._scope.batch
        if rows is not self._scope.batch and self._op.type not in HEAVY:
            return []
        return [(labels[0], dims[0], rows)]

    # What follows if the op is sharded in a way.

    def _decision(self, way: Way) -> Decision | None:
        """How the op runs if it's sharded in a way; None if that isn't possible."""
        needs: list[Need] = []
        for tensor, operand, placement in self._inputs:
            need = self._need(tensor, operand, placement, way)
            if need is None:
                return None
            needs.append(need)

        outputs = self._signature.outputs
        output_dims = [self._dims_along(way, index) for index in range(len(outputs))]
        placements: list[Placement | None] = []
        for index, (labels, dims) in enumerate(zip(outputs, output_dims)):
            if index in self._signature.unused:
                placements.append(None)
            elif way.label in labels:
                if dims is None:
                    return None
                axis = labels.index(way.label)
                factor = per_row(dims[axis], way.rows) or way.factor
                placements.append(way.shard(axis, factor))
            elif self._signature.reduce:
                check_reduction(self._signature.reduce, self._op.outputs[index].dtype)
                placements.append(Partial(self._signature.reduce, way.rows))
            else:
                placements.append(REPLICATE)
        return Decision(OpPlan(tuple(needs), self._signature.attrs), placements, output_dims)

    def _need(
        self, tensor: tf.Tensor, operand: Operand, placement: Placement, way: Way
    ) -> Need | None:
        """The form in which towers need an input; None if they can't have it."""
        if isinstance(operand, (Form, Constant)):
            has_local = tensor.name in self._scope.placements
            return operand if operand != LOCAL or has_local else None
        if isinstance(operand, EntriesOf):
            return self._need_of_entries(operand, placement, way)
        if isinstance(operand, IndicesOfRows):
            return self._need_of_indices(tensor, operand, placement, way)
        labels = operand.labels if isinstance(operand, SizesOf) else operand
        if way.label not in labels:
            return FULL
        axis = labels.index(way.label)
        if isinstance(operand, SizesOf):
            return self._need_of_sizes(tensor, axis, way)
        factor = self._sizes.per_row(tensor, axis, way.rows) or way.factor
        if placement == way.shard(axis, factor):
            return LOCAL
        self._note_same_rows(tensor, axis, placement, way)
        return self._need_of_full(tensor, axis, way)

    def _note_same_rows(self, tensor: tf.Tensor, axis: int, placement: Placement, way: Way) -> None:
        """Notes that the rows of an input are used one by one with those of another row space.

        The op fails unless there are as many of both, or broadcasts one of them.
        """
        if not isinstance(placement, Shard) or placement.axis != axis:
            return
        if self._sizes.per_row(tensor, axis, placement.rows) == way.factor:
            self._scope.note_same_rows(way.rows, placement.rows)

    def _need_of_entries(self, operand: EntriesOf, placement: Placement, way: Way) -> Need | None:
        """The form of a sparse tensor's indices or values."""
        if operand.label != way.label:
            return FULL
        if way.in_blocks:
            return None  # A tower's rows don't follow each other.
        _, _, positions = self._inputs[operand.indices]
        expected = way.factor * way.rows.size
        if isinstance(positions, Positions) and positions.total == expected:
            is_indices = placement is positions
            return LOCAL if is_indices else selections.of_positions(positions, placement)
        return SparseRows(self._op.inputs[operand.indices].name, way.rows, way.factor)

    def _need_of_indices(
        self, tensor: tf.Tensor, operand: IndicesOfRows, placement: Placement, way: Way
    ) -> Need | None:
        """The form of indices that begin with their rows."""
        if self._scope.in_function or way.in_blocks or way.label != operand.labels[0]:
            return None  # In a function, a tower doesn't know its first row.
        need = self._need(tensor, operand.labels, placement, way)
        factor = per_row(operand.total, way.rows)
        if need is None or factor is None:
            return None
        assert isinstance(need, (Form, Slice))
        return CountedFromFirst(need, way.rows, factor)

    def _need_of_sizes(self, tensor: tf.Tensor, position: int, way: Way) -> Need | None:
        """The form of a shape whose entry at a position is sharded."""
        entries = self._sizes.entries(tensor) or []
        if entries and entries[position] == Size(-1):
            # -1 stands for what is left. It's the tower's share of that, unless another entry
            # depends on the number of examples as well.
            others_depend = any(way.rows in entry.symbols for entry in entries)
            return None if others_depend else FULL
        return local_shape_of(entries, position, way.rows)

    def _need_of_full(self, tensor: tf.Tensor, axis: int, way: Way) -> Need | None:
        """The form of an input that isn't sharded along the axis, or along another one."""
        dims = self._sizes.dims(tensor)
        if dims is None:
            return None
        if dims[axis] == ONE:
            return FULL  # It's broadcast to all examples.
        factor = per_row(dims[axis], way.rows)
        if way.factor == ONE and may_be_paired(dims[axis], way.rows):
            factor = ONE
        if factor is None:
            if not self._must_be_equal(tensor, way.label):
                return None  # It may have one entry in this step, which the op would broadcast.
            factor = way.factor
        return Slice(axis, way.rows, factor, way.in_blocks and factor != ONE)

    # Whether a dimension of unknown size has as many entries as others with its label.

    def _must_be_equal(self, tensor: tf.Tensor, label: Label) -> bool:
        """Whether the op fails unless a tensor's dimension is as large as others with its label.

        One letter isn't enough to know: a dimension of size 1 may be broadcast. TensorFlow's shape
        functions tell: the op takes sizes 2 and 2, but neither 1 and 2 nor 2 and 1.
        """
        if isinstance(label, str) and label[0].isupper():
            return False  # Capitals are for dimensions that are broadcast.

        def is_taken(size: int, size_of_others: int) -> bool:
            shapes = []
            for other, operand, _ in self._inputs:
                count = size if other is tensor else size_of_others
                shapes.append(self._shape_with(other, operand, label, count))
            return takes(self._op, shapes)

        return is_taken(2, 2) and not is_taken(1, 2) and not is_taken(2, 1)

    def _shape_with(self, tensor: tf.Tensor, operand: Operand, label: Label, size: int) -> Any:
        """An input's shape, with a size for the labelled dimension; or its values, if known."""
        labels = labels_of(operand)
        if label in labels:
            dims = tensor.shape.with_rank(len(labels)).as_list()
            dims[labels.index(label)] = size
            return dims
        numbers = self._sizes.numbers(tensor)
        if numbers is None or tensor.shape.rank is None:
            return tensor.shape
        return np.reshape(numbers, tensor.shape.as_list())

    # The sizes of the outputs.

    def _dims_of(
        self, output: tf.Tensor, labels: Sequence[Label], by_rule: Sequence[Size | None] | None
    ) -> list[Size] | None:
        """One output's dimensions: the rule's rows, numbers of the graph, or other sizes."""
        if output.shape.rank is None and by_rule is None and not labels:
            return None
        inferred = self._sizes.dims(output) or self._sizes.static_dims(output, len(labels))
        static_lengths = (
            [None] * len(labels) if output.shape.rank is None else output.shape.as_list()
        )
        dims: list[Size] = []
        for label, number, inferred_size, rule_size in zip(
            labels, static_lengths, inferred, by_rule or itertools.repeat(None)
        ):
            if number is None or (rule_size and rule_size.rows):
                dims.append(rule_size or self._size_of(label) or inferred_size)
            else:
                dims.append(known(number))
        return dims

    def _dims_along(self, way: Way, index: int) -> list[Size] | None:
        """An output's dimensions if the op is sharded; None if its rows differ in size."""
        labels = self._signature.outputs[index]
        dims = self.dims[index]
        if dims is None or way.label not in labels:
            return dims
        axis = labels.index(way.label)
        by_rule = self._rule_dims[index]
        rule_size = by_rule[axis] if by_rule else None
        factor = per_row(rule_size, way.rows) if rule_size else way.factor
        if factor is None:
            return None
        return [*dims[:axis], factor * way.rows.size, *dims[axis + 1 :]]

    def _size_of(self, label: Label) -> Size | None:
        """The size of the dimensions with a label, if all inputs agree."""
        if label is None:
            return None
        sizes: set[Size | None] = set()
        for tensor, operand, _ in self._inputs:
            labels = labels_of(operand)
            if label in labels:
                dims = self._sizes.dims(tensor)
                sizes.add(None if dims is None else dims[labels.index(label)])
        return sizes.pop() if len(sizes) == 1 else None
