"""The largest and the smallest integers of a shard's rows are those of the whole batch.

Sequences are cut, masked or padded to the longest of the batch, which is a maximum of integers over
rows, and no gradient goes through it. So every tower takes the greatest of all towers' instead. So
it does for how often a loop runs until all rows are finished.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import counts, loops, private, ragged
from estimator_mgpu.copying import Copies
from estimator_mgpu.importing import absolute_scope
from estimator_mgpu.places import LOOPS
from estimator_mgpu.rows import ELEMENTWISE, Rows
from estimator_mgpu.walks import walk

_PADS = 'RaggedTensorToTensor'
# What says where something is, and what it goes on to be that through.
_PLACES = re.compile('Where$|Unique|Ragged|Sparse|Cumsum|Cumprod|TopK|InvertPermutation')
_PASSING = ELEMENTWISE | {
    'StridedSlice',
    'GatherV2',
    'GatherNd',
    'Tile',
    'BroadcastTo',
    'Max',
    'Min',
}
_EXTREMES = {'Max': tf.maximum, 'Min': tf.minimum}
# Through which the greatest stays the greatest.
_ROUNDS = frozenset(['Ceil', 'Floor', 'Round', 'Rint', 'Cast', 'Identity'])
_SHIFTS = frozenset(['Add', 'AddV2', 'Sub', 'Maximum', 'Minimum'])
_SCALES = frozenset(['Mul', 'RealDiv', 'FloorDiv'])


def _extreme(op: tf.Operation) -> tf.Operation:
    """Returns the maximum or minimum that an integer is one of, or else what it's computed from."""
    if op.type != 'Cast' or not op.outputs[0].dtype.is_integer:
        return op
    while op.type in _ROUNDS | _SHIFTS | _SCALES:
        value, *others = op.inputs
        if op.type in ('Add', 'AddV2', 'Mul', 'Maximum', 'Minimum') and _number(value) is not None:
            value, others = others[0], [value]
        numbers = [_number(other) for other in others]
        if any(n is None or op.type in _SCALES and n <= 0 for n in numbers):
            break
        op = value.op
    return op


def _number(value: tf.Tensor) -> float | None:
    constant = None if value.dtype.is_complex else private.constant_value(value)
    return None if constant is None or constant.size != 1 else float(constant.item())


def _is_known(op: tf.Operation) -> bool:
    """Whether an op may give something that is to be the whole batch's."""
    if _extreme(op).type in _EXTREMES:
        [value] = op.outputs
        if not (value.dtype.is_integer and value.shape.is_fully_defined()):
            return False
    elif op.type != _PADS and op.type not in ragged.MAKES_SPARSE | LOOPS:
        return False
    return not private.in_control_flow(op)


class Extremes:
    """Those of one model_fn's call, found as it goes on.

    Args:
      graph: the graph the model is built in.
      copies: the towers'.
      examine: examine(rows, value) warns of rows that are combined for a value. That is done before
        the whole batch's takes its place, behind which nothing is found any more.
    """

    def __init__(self, graph: tf.Graph, copies: Copies, examine: Callable[[Rows, tf.Tensor], None]):
        self._graph = graph
        self._copies = copies
        self._examine = examine
        self._version = 0
        self._looked = 0  # How many of the graph's ops were looked at.
        self._wholes: list[tuple[tf.Tensor, tf.Tensor]] = []
        self.shapes: set[str] = set()  # The names of those of sparse tensors that have rows.
        self.continued: list[tf.Operation] = []  # Loops which another one goes on from.

    def settle(self, rows_of: Callable[[], Rows]) -> None:
        """Puts the whole batch's in the place of tower 0's, in all ops that there are.

        Args:
          rows_of: rows_of() -> which tensors of tower 0 have rows.
        """
        if self._graph.version == self._version:
            return
        ops = self._graph.get_operations()
        new, self._looked = [op for op in ops[self._looked :] if _is_known(op)], len(ops)
        rows = None
        for op in new:
            known = len(self._wholes)
            if op.name not in self._copies.names():
                rows = rows or rows_of()
                self._add(op, rows)
                rows = rows if len(self._wholes) == known else None  # What depends has changed.
        for value, whole in self._wholes:
            self._use(value, whole)
        self._version = self._graph.version

    def known(self) -> dict[str, tf.Tensor]:
        """Returns the whole batch's, by the names of tower 0's."""
        return {value.name: whole for value, whole in self._wholes}

    def _add(self, op: tf.Operation, rows: Rows) -> None:
        if not rows.depends(op):
            return
        if op.type == _PADS:
            self._pad_alike(op, rows)
            return
        if op.type in LOOPS:
            self._go_on(op, rows)
            return
        if op.type in ragged.MAKES_SPARSE:
            for value in ragged.shapes(op):
                wide = self._widen(value)
                if rows.has(op.inputs[0]):
                    self.shapes |= {value.name, wide.name}
            return
        [value] = op.outputs
        reduction = _extreme(op)
        over_rows = rows.has(reduction.inputs[0]) and not rows.has(value)
        if over_rows and not _says_where(reduction.inputs[0], rows):
            self._examine(rows, value)
            self._share(value, _EXTREMES[reduction.type])

    def _go_on(self, op: tf.Operation, rows: Rows) -> None:
        """Lets a loop that ends with the last row run as often as that of the whole batch."""
        if self._copies.writes(op) or not loops.until_all_finished(op, rows):
            return
        whole = self._whole_of(op.outputs[0], tf.maximum)
        if whole is None:
            return
        with absolute_scope(self._graph, 'replicate'), tf.device('/device:CPU:0'):
            more = tf.subtract(whole, op.outputs[0], name='rounds')
        added = loops.go_on(op, more)
        self.continued.append(op)
        for own, value in zip(op.outputs[2:], added.outputs[2:]):
            self._use(own, value, besides=added)

    def _share(self, value: tf.Tensor, extreme: Callable[..., Any]) -> None:
        """Puts the whole batch's value in the place of tower 0's, from now on."""
        whole = self._whole_of(value, extreme)
        if whole is not None:
            self._replace(value, whole)

    def _replace(self, value: tf.Tensor, whole: tf.Tensor) -> None:
        self._wholes.append((value, whole))
        self._use(value, whole)

    def _whole_of(self, value: tf.Tensor, extreme: Callable[..., Any]) -> tf.Tensor | None:
        """Returns the greatest or the least of all towers' values."""
        if not self._copies.can_have([value]):
            return None
        copies = [own for [own] in self._copies.copy([value])]
        with absolute_scope(self._graph, 'replicate'), tf.device('/device:CPU:0'):
            whole = value
            for own in copies:
                whole = extreme(whole, own)
            whole = tf.identity(whole, name='extreme')
        self._copies.share([whole])
        return whole

    def _widen(self, shape: tf.Tensor) -> tf.Tensor:
        """Lets a sparse tensor be as wide as the widest of all towers, and returns its shape."""
        with absolute_scope(self._graph, 'replicate'), tf.device('/device:CPU:0'):
            widths = tf.slice(shape, [1], [-1])
        defined = shape.shape.is_fully_defined()
        widest = self._whole_of(widths, tf.maximum) if defined else None
        if widest is None:
            return shape
        with absolute_scope(self._graph, 'replicate'), tf.device('/device:CPU:0'):
            wide = tf.concat([tf.slice(shape, [0], [1]), widest], 0)
        self._replace(shape, wide)
        return wide

    def _use(self, value: tf.Tensor, whole: tf.Tensor, besides: tf.Operation | None = None) -> None:
        for op in value.consumers():
            if op.name.startswith('replicate/') or op is besides:
                continue
            for i, given in enumerate(op.inputs):
                if given.name == value.name:
                    private.set_input(op, i, whole)

    def _pad_alike(self, op: tf.Operation, rows: Rows) -> None:
        """Lets rows of a ragged tensor be as long as the longest of the whole batch."""
        sizes, values, _, *partitions = op.inputs
        told = private.constant_value(sizes)
        rank = op.outputs[0].shape.rank
        if told is None or None in (rank, values.shape.rank):
            return
        outer = rank - values.shape.rank + 1
        told = [-1] * rank if told.ndim == 0 else [int(size) for size in told]
        if -1 not in told[1:outer] or not any(map(rows.has, op.inputs)):
            return
        with absolute_scope(self._graph, 'replicate'), tf.device(op.device):
            # One number for each entry, to know how long the rows are.
            padded = tf.raw_ops.RaggedTensorToTensor(
                shape=tf.constant([-1] * outer, sizes.dtype),
                values=tf.zeros(tf.shape(values)[:1], tf.int32),
                default_value=tf.constant(0),
                row_partition_tensors=partitions,
                row_partition_types=op.get_attr('row_partition_types'),
            )
            longest = tf.shape(padded, out_type=tf.int64)[1:]
        whole = self._whole_of(longest, tf.maximum)
        if whole is None:
            return
        with absolute_scope(self._graph, 'replicate'), tf.device(op.device):
            given = tf.constant(told[1:outer], tf.int64)
            size = tf.where(tf.equal(given, -1), whole, given)
            shape = tf.cast(tf.concat([told[:1], size, told[outer:]], 0), sizes.dtype)
            # Of unknown rank, for it takes the place of a scalar.
            shape = tf.placeholder_with_default(shape, None)
        self._copies.share([shape])
        private.set_input(op, 0, shape)


def _says_where(numbers: tf.Tensor, rows: Rows) -> bool:
    """Whether integers tell where the rows of a shard are, so that each device has its own."""

    def onward(op: tf.Operation) -> list[tf.Operation]:
        own = [t.op for t in rows.dependent_inputs(op)]
        # The difference of two places is a length, and so is a place in a row.
        length = op.type == 'Sub' and len(own) > 1 or _takes_column(op)
        return own if op.type in _PASSING and not length else []

    return any(_is_place(op, rows) for op in walk([numbers.op], onward))


def _is_place(op: tf.Operation, rows: Rows) -> bool:
    if op.type == 'Range':
        limit = op.inputs[1]
        other = counts.is_count(limit, rows) and counts.growth(limit, rows) == 0
        return rows.depends(limit.op) and not other
    if op.type in ('ArgMax', 'ArgMin'):
        return rows.has(op.inputs[0]) and not rows.has(op.outputs[0])
    named = any(t.name in rows.indices or rows.are_bounds(t) for t in op.outputs)
    return named or op.type in ragged.MAKES_SPARSE or _PLACES.match(op.type) is not None


def _takes_column(op: tf.Operation) -> bool:
    """Whether an op takes a column other than the first one, as of the indices of entries."""
    begin = private.constant_value(op.inputs[1]) if op.type == 'StridedSlice' else None
    return begin is not None and begin.size > 1 and begin.flat[1] != 0
