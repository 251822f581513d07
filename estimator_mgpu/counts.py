"""Numbers that come from shapes alone: how they go with the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.places import Places

_AS_GIVEN = frozenset(
    ['Identity', 'Cast', 'Reshape', 'Squeeze', 'ExpandDims', 'StopGradient', 'Enter', 'Switch']
)
_QUOTIENTS = frozenset(['RealDiv', 'Div', 'DivNoNan', 'FloorDiv', 'TruncateDiv'])
_EITHER = frozenset(['Maximum', 'Minimum', 'Add', 'AddV2', 'Sub'])
# Which input has the numbers that are repeated.
_REPEATS = {'Tile': 0, 'BroadcastTo': 0, 'Fill': 1}
FACTORS = {'Sqrt': 0.5, 'Rsqrt': -0.5, 'Square': 2.0, 'Reciprocal': -1.0, 'Inv': -1.0}
# What goes by signs, or by shapes.
_ALIKE = frozenset(['Sign', 'ZerosLike', 'OnesLike'])
_COMPARES = frozenset(['Equal', 'NotEqual', 'Less', 'LessEqual', 'Greater', 'GreaterEqual'])
# What is added so that nobody divides by zero makes no difference.
EPSILON = 1e-3


def is_count(tensor: tf.Tensor, rows: Places) -> bool:
    """Whether a value of a tower comes from shapes alone."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        op = tensor.op
        if op.name in seen or op.type in ('Shape', 'Size') or tensor.name in rows.shapes:
            continue
        seen.add(op.name)
        inputs = rows.dependent_inputs(op)
        if not inputs or any(map(rows.has, inputs)):
            return False
        waiting += inputs
    return True


def growth(tensor: tf.Tensor, rows: Places) -> float | None:
    """Returns the power of the number of rows that a scalar goes with.

    It's 0 for the size of another dimension, 1 for the number of rows and multiples of it, 0.5 for
    its root; None for what is no power of it, such as its logarithm.

    Args:
      tensor: a value that `is_count`.
      rows: which tensors have rows, and along which dimension.
    """
    return same(Growths(rows).of(tensor))


class Growths:
    """The growth of each entry of scalars and of vectors such as shapes.

    Args:
      rows: which tensors have rows, and along which dimension.
      of: of(tensor) -> whether the rows of a tensor are the ones that count; by default, all are.
      known: what's known of others already, by their names.
    """

    def __init__(
        self,
        rows: Places,
        of: Callable[[tf.Tensor], bool] = lambda tensor: True,
        known: Mapping[str, list[float | None]] | None = None,
    ):
        self._rows = rows
        self._of_rows = of
        self._found = dict(known or {})

    def of(self, tensor: tf.Tensor) -> list[float | None]:
        if tensor.name not in self._found:
            self._found[tensor.name] = [None]  # For a loop, which comes back here.
            self._found[tensor.name] = self._of(tensor)
        return self._found[tensor.name]

    def _of(self, tensor: tf.Tensor) -> list[float | None]:
        op, size = tensor.op, tensor.shape.num_elements() or 1
        if not self._rows.depends(op):
            return [0.0] * size
        if op.type == 'Shape' or tensor.name in self._rows.shapes:
            sparse = tensor.name in self._rows.shapes
            counts = self._of_rows(tensor if sparse else op.inputs[0])
            axis = self._rows.axis_in(tensor) if counts else None
            return [float(i == axis) for i in range(tensor.shape.num_elements() or 0)] or [None]
        if op.type == 'Size':
            return [float(self._rows.has(op.inputs[0]) and self._of_rows(op.inputs[0]))]
        if op.type in _ALIKE or op.type in _COMPARES and any(map(_is_0, op.inputs)):
            return [0.0] * size
        given = [self.of(t) for t in op.inputs]
        if op.type in _AS_GIVEN:
            return given[0]
        if op.type in ('StridedSlice', 'GatherV2'):
            return _chosen(op, given[0])
        if op.type == 'Unpack':
            entries = given[0]
            return entries[tensor.value_index :][:1] if len(entries) == len(op.outputs) else [None]
        if op.type in ('Pack', 'ConcatV2'):
            parts = given if op.type == 'Pack' else given[:-1]
            return [entry for part in parts for entry in part]
        if op.type in _REPEATS:
            return [same(given[_REPEATS[op.type]])]
        if op.type == 'Prod':
            known = [entry for entry in given[0] if entry is not None]
            return [sum(known) if len(known) == len(given[0]) else None]
        return [_power(op, [same(entries) for entries in given])] * size


def same(entries: list[float | None]) -> float | None:
    """Returns the growth of all of something, if all of it has the same."""
    return entries[0] if len(set(entries)) == 1 else None


def _chosen(op: tf.Operation, entries: list[float | None]) -> list[float | None]:
    """Returns the entries that a slice or a gather takes from a vector."""
    if len(entries) != op.inputs[0].shape.num_elements():
        return [None]
    if op.type == 'GatherV2':
        places = private.constant_value(op.inputs[1])
        return [None] if places is None else [entries[int(i)] for i in places.flat]
    begin, end, stride = (private.constant_value(t) for t in op.inputs[1:])
    if begin is None or end is None or stride is None or len(begin) != 1:
        return [None]
    if op.get_attr('shrink_axis_mask'):
        return [entries[begin[0]]]
    first = None if op.get_attr('begin_mask') else begin[0]
    last = None if op.get_attr('end_mask') else end[0]
    return entries[first : last : stride[0]]


def _power(op: tf.Operation, given: list[float | None]) -> float | None:
    """Returns the growth of what an op gives, by that of what it is given."""
    powers = [power for power in given if power is not None]
    if len(powers) < len(given):
        return None
    if not any(powers):
        return 0.0
    factor = FACTORS.get(op.type)
    if factor is not None:
        return factor * powers[0]
    if op.type == 'Mul':
        return sum(powers)
    if op.type in _QUOTIENTS:
        return powers[0] - powers[1]
    if op.type in _EITHER and len(set(powers)) == 1:
        return powers[0]
    if op.type in _EITHER and _is_guard(op, powers):
        return max(powers)
    return None


def _is_0(tensor: tf.Tensor) -> bool:
    value = private.constant_value(tensor)
    return value is not None and value.dtype.kind in 'iuf' and not value.any()


def _is_guard(op: tf.Operation, powers: list[float]) -> bool:
    """Whether something only sees to it that nobody divides by 0."""
    value = private.constant_value(op.inputs[powers.index(0.0)]) if 0.0 in powers else None
    least = 1 if op.type == 'Maximum' and max(powers) > 0 else EPSILON
    return value is not None and op.type != 'Minimum' and bool(abs(value).max() <= least)
