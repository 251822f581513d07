"""Symbolic sizes: dimensions and integers as products of numbers, rows and unknown dimensions.

What a graph computes of sizes (`Shape`, `StridedSlice`, `Prod`, ...) is such as 4 * batch * T. So a
tower can have its own version of a shape, and no decision rests on numbers merely being equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from numpy import ndarray

from estimator_mgpu.partition.plan import Local, Shard
from estimator_mgpu.partition.symbols import ONE, Dim, Entry, Rows, Size, Unknown, per_row, product
from . import kinds

_RANDOM = ('RandomStandardNormal', 'RandomUniform', 'RandomUniformInt', 'TruncatedNormal')
_STATELESS = ('StatelessRandomNormalV2', 'StatelessRandomUniformV2', 'StatelessTruncatedNormalV2')
_SHAPES = {'ScatterNd': 2, 'SparseToDense': 1, **dict.fromkeys(_RANDOM + _STATELESS, 0)}
"""By type of op, which input says the shape of what it makes."""
_SMALL = 64  # entries of a tensor that may be sizes


class Sizes:
    """Knows tensors' dimensions and integer tensors' values: from the graph, or told by `know`."""

    def __init__(self, scope: str = '') -> None:
        self._scope = scope  # Tells a function's tensors from others of the same name.
        self._dims: dict[str, list[Size]] = {}
        self._values: dict[str, ndarray | None] = {}

    def know(self, tensor: tf.Tensor, dims: Sequence[Size] | None) -> None:
        """Says what the dimensions of a tensor are, if they are known."""
        if dims is not None:
            self._dims[tensor.name] = list(dims)

    def know_values(self, tensor: tf.Tensor, values: Sequence[Size]) -> None:
        """Says what the entries of an integer scalar or vector are."""
        self._values[tensor.name] = _array(values, [len(values)] * (tensor.shape.rank or 0))

    def dims(self, tensor: tf.Tensor) -> list[Size] | None:
        """The dimensions of the whole tensor; None if its rank is unknown."""
        if tensor.name not in self._dims and tensor.shape.rank is not None:
            dims, at = self.static_dims(tensor), _SHAPES.get(tensor.op.type)
            told = None if at is None else self.entries(tensor.op.inputs[at])
            if told is not None:
                dims = [size if dim.symbols else dim for dim, size in zip(dims, told)]
            self._dims[tensor.name] = dims
        return self._dims.get(tensor.name)

    def static_dims(self, tensor: tf.Tensor, rank: int = 0) -> list[Size]:
        """Its dimensions as the graph itself has them; so many if even their number is unknown."""
        dims = [None] * rank if tensor.shape.rank is None else tensor.shape.as_list()
        return [self.unknown(tensor, i) if d is None else Size(d) for i, d in enumerate(dims)]

    def dims_of_rows(self, tensor: tf.Tensor, own: Shard, factor: Size, rank: int) -> list[Size]:
        """Its dimensions, with rows along one; so many if even their number is unknown."""
        dims = self.static_dims(tensor, rank)
        dims[own.axis] = factor * Size(1, (own.rows,))
        return dims

    def begin(self, tensor: tf.Tensor) -> None:
        """Begins a row space with a tensor, if it's of floats and nobody knows how many rows."""
        dims = self.dims(tensor) if tensor.dtype.is_floating else None
        if dims and dims[0] == self.unknown(tensor, 0):
            self.know(tensor, [Size(1, (Rows(tensor.name, None),)), *dims[1:]])

    def unknown(self, tensor: tf.Tensor, axis: int) -> Size:
        """A dimension that is known only when the step runs."""
        return Size(1, (Dim(f'{self._scope}{tensor.name}', axis),))

    def per_row(self, tensor: tf.Tensor, axis: int, rows: Rows) -> Size | None:
        """How many entries a row has in a dimension; None if that isn't known."""
        dims = self.dims(tensor)
        return None if dims is None else per_row(dims[axis], rows)

    def entries(self, tensor: tf.Tensor) -> list[Size] | None:
        """The entries of a whole integer tensor, flat; None if not even their number is known."""
        values = self._value(tensor)
        return None if values is None else list(values.flat)

    def local(self, tensor: tf.Tensor, position: int, rows: Rows) -> Local | None:
        """A shape whose entry at a position goes by rows; None if it isn't known to."""
        entries = self.entries(tensor) or []
        size = entries[position] if position < len(entries) else Size(-1)
        unknown = size == Size(-1) or per_row(size, rows) is None
        return None if unknown else Local(tuple(entries), position, rows)

    def numbers(self, tensor: tf.Tensor) -> list[int] | None:
        """The entries of an integer tensor, if all are known numbers."""
        if tensor.op.type == kinds.BROADCAST_AXES:
            return self._gradient_axes(tensor)
        entries = self.entries(tensor)
        if entries is None or any(entry.symbols for entry in entries):
            return None
        return [entry.number for entry in entries]

    def _value(self, tensor: tf.Tensor) -> ndarray | None:
        if tensor.name not in self._values:
            self._values[tensor.name] = None  # Where a loop leads here again.
            if tensor.dtype.base_dtype in (tf.int32, tf.int64):
                self._values[tensor.name] = self._found(tensor)
        return self._values[tensor.name]

    def _found(self, tensor: tf.Tensor) -> ndarray | None:
        op, index = tensor.op, tensor.value_index
        given: list[Any] = []
        if op.type in kinds.SIZES:
            given = [self.dims(op.inputs[index])]
        elif op.type in _VALUES:
            given = [self._value(t) for t in op.inputs]
        with contextlib.suppress(Unknown, ZeroDivisionError):
            if given and not any(value is None for value in given):
                return np.asarray(_VALUES[op.type](op, index, *given), object)
        count = tensor.shape.num_elements()
        if count is None or count > _SMALL:
            return None
        if op.type == kinds.CONST:
            values = tf.make_ndarray(op.get_attr('value'))
            return _array([Size(int(value)) for value in values.flat], values.shape)
        name = f'{self._scope}{tensor.name}'
        return _array([Size(1, (Entry(name, i),)) for i in range(count)], tensor.shape)

    def _gradient_axes(self, tensor: tf.Tensor) -> list[int] | None:
        """The dimensions of one operand that a gradient is summed over, after broadcasting."""
        shapes = [entries for t in tensor.op.inputs if (entries := self.entries(t)) is not None]
        if len(shapes) < 2:
            return None
        padded = [[ONE] * (max(map(len, shapes)) - len(shape)) + shape for shape in shapes]
        own, other = padded[tensor.value_index], padded[1 - tensor.value_index]
        if any(ONE not in (a, b) and a.same_as(b) is None for a, b in zip(own, other)):
            return None  # One of them may be 1.
        return [axis for axis, size in enumerate(own) if size == ONE]


def _array(sizes: Sequence[Size], shape: Any = -1) -> ndarray:
    return np.array(sizes, object).reshape(shape)


def _numbers(values: ndarray) -> Any:
    """Known numbers: an int of a scalar, else lists."""
    return np.vectorize(lambda size: size.known, [int])(values).tolist()


def _strided_slice(op: tf.Operation, _: int, x: ndarray, *ends: ndarray) -> ndarray:
    new = op.get_attr('new_axis_mask') or op.get_attr('ellipsis_mask')
    if new or x.ndim != 1 or any(end.size != 1 for end in ends):
        raise Unknown
    (begin,), (end,), (stride,) = map(_numbers, ends)
    if op.get_attr('shrink_axis_mask'):
        return x[begin : begin + 1 or None].reshape(())
    first = None if op.get_attr('begin_mask') else begin
    return x[first : None if op.get_attr('end_mask') else end : stride]


def _slice(op: tf.Operation, _: int, x: ndarray, begin: ndarray, size: ndarray) -> ndarray:
    if x.ndim != 1:
        raise Unknown
    (first,), (count,) = _numbers(begin), _numbers(size)
    return x[first : None if count < 0 else first + count]


def _prod(op: tf.Operation, _: int, x: ndarray, axes: ndarray) -> ndarray:
    if x.ndim > 1 or axes.size != x.ndim:
        raise Unknown
    return _array([product(list(x.flat))], [1] * x.ndim if op.get_attr('keep_dims') else [])


def _gather(op: tf.Operation, _: int, x: ndarray, indices: ndarray, *axis: ndarray) -> ndarray:
    numbers = np.asarray(_numbers(indices), int)
    if x.ndim != 1 or (numbers >= x.size).any() or (numbers < 0).any():
        raise Unknown
    return x[numbers]


def _dynamic_stitch(op: tf.Operation, _: int, *given: ndarray) -> ndarray:
    half = len(given) // 2
    found: dict[int, Size] = {}
    for at, data in zip(given[:half], given[half:]):
        if at.shape != data.shape:
            raise Unknown
        found.update(zip((size.known for size in at.flat), data.flat))
    if sorted(found) != list(range(len(found))):
        raise Unknown
    return _array([found[i] for i in range(len(found))])


def _concat_offset(op: tf.Operation, index: int, axis: ndarray, *shapes: ndarray) -> ndarray:
    result = _array([Size(0)] * len(shapes[0]))
    at = _numbers(axis)
    result[at] = sum((shape[at] for shape in shapes[:index]), Size(0))
    return result


def _full(shape: Any, size: Size) -> ndarray:
    if np.prod(shape, dtype=int) > _SMALL:
        raise Unknown
    return np.full(shape, size, object)


def _range(op: tf.Operation, _: int, *ends: ndarray) -> ndarray:
    start, limit, delta = map(_numbers, ends)
    values = range(start, limit, delta) if delta else range(0)
    if len(values) > _SMALL:
        raise Unknown
    return _array([Size(value) for value in values])


_VALUES: dict[str, Callable[..., Any]] = {  # (op, output's index, *inputs' values or dims) -> value
    **dict.fromkeys(['Shape', 'ShapeN'], lambda op, _, dims: dims),
    'Rank': lambda op, _, dims: Size(len(dims)),
    'Size': lambda op, _, dims: product(dims),
    **dict.fromkeys(['Identity', 'StopGradient', 'Cast'], lambda op, _, x: x),
    'StridedSlice': _strided_slice,
    'Slice': _slice,
    'Pack': lambda op, _, *x: np.stack(x, op.get_attr('axis')),
    'Unpack': lambda op, index, x: np.take(x, index, op.get_attr('axis')),
    'ConcatV2': lambda op, _, *x: np.concatenate(x[:-1], _numbers(x[-1])),
    'Reshape': lambda op, _, x, shape: x.reshape(_numbers(shape)),
    'ExpandDims': lambda op, _, x, axis: np.expand_dims(x, _numbers(axis.reshape(()))),
    'Squeeze': lambda op, _, x: np.squeeze(x, tuple(op.get_attr('squeeze_dims')) or None),
    'Mul': lambda op, _, a, b: a * b,
    **dict.fromkeys(['Add', 'AddV2'], lambda op, _, a, b: a + b),
    'Sub': lambda op, _, a, b: a - b,
    'FloorDiv': lambda op, _, a, b: a // b,
    'FloorMod': lambda op, _, a, b: a % b,
    'Maximum': lambda op, _, a, b: np.frompyfunc(Size.larger, 2, 1)(a, b),
    'Prod': _prod,
    'GatherV2': _gather,
    'DynamicStitch': _dynamic_stitch,
    'ConcatOffset': _concat_offset,
    'Fill': lambda op, _, shape, value: _full(_numbers(shape), value.item()),
    'ZerosLike': lambda op, _, x: _full(x.shape, Size(0)),
    'OnesLike': lambda op, _, x: _full(x.shape, ONE),
    'Range': _range,
    'InvertPermutation': lambda op, _, x: _array([Size(int(i)) for i in np.argsort(_numbers(x))]),
}
