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

from estimator_mgpu.partition.placements import Shard
from estimator_mgpu.partition.plan import LocalShape
from estimator_mgpu.partition.sizes import ONE, Dim, Entry, RowSpace, Size, per_row, product
from estimator_mgpu.tf_internals import op_types

_RANDOM = ('RandomStandardNormal', 'RandomUniform', 'RandomUniformInt', 'TruncatedNormal')
_STATELESS = ('StatelessRandomNormalV2', 'StatelessRandomUniformV2', 'StatelessTruncatedNormalV2')
_SHAPES = {'ScatterNd': 2, 'SparseToDense': 1, **dict.fromkeys(('Fill', *_RANDOM, *_STATELESS), 0)}
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
        shape = -1 if tensor.shape.rank else ()
        self._values[tensor.name] = np.array(values, object).reshape(shape)

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
            self.know(tensor, [Size(1, (RowSpace(tensor.name, None),)), *dims[1:]])

    def unknown(self, tensor: tf.Tensor, axis: int) -> Size:
        """A dimension that is known only when the step runs."""
        return Size(1, (Dim(f'{self._scope}{tensor.name}', axis),))

    def per_row(self, tensor: tf.Tensor, axis: int, rows: RowSpace) -> Size | None:
        """How many entries a row has in a dimension; None if that isn't known."""
        dims = self.dims(tensor)
        return None if dims is None else per_row(dims[axis], rows)

    def entries(self, tensor: tf.Tensor) -> list[Size] | None:
        """The entries of a whole integer tensor, flat; None if not even their number is known."""
        values = self._value(tensor)
        return None if values is None else list(values.flat)

    def local(self, tensor: tf.Tensor, position: int, rows: RowSpace) -> LocalShape | None:
        """A shape whose entry at a position goes by rows; None if it isn't known to."""
        entries = self.entries(tensor) or []
        size = entries[position] if position < len(entries) else Size(-1)
        unknown = size == Size(-1) or per_row(size, rows) is None
        return None if unknown else LocalShape(tuple(entries), position, rows)

    def numbers(self, tensor: tf.Tensor) -> list[int] | None:
        """The entries of an integer tensor, if all are known numbers."""
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
        op, given = tensor.op, []
        if op.type in op_types.SHAPE_QUERIES:
            given = [self.dims(op.inputs[tensor.value_index])]
        elif op.type in _VALUES:
            given = [self._value(t) for t in op.inputs]
        if given and not any(value is None for value in given):
            with contextlib.suppress(ArithmeticError, LookupError, ValueError):
                found = np.asarray(_VALUES[op.type](tensor, *given), object)
                if found.size <= _SMALL and all(
                    _fits(size, tensor.dtype.base_dtype) for size in found.flat
                ):
                    return found
        count = tensor.shape.num_elements()
        if count is None or count > _SMALL:
            return None
        if op.type == op_types.CONST:
            return _sizes(tf.make_ndarray(op.get_attr('value')))
        name = f'{self._scope}{tensor.name}'
        entries = [Size(1, (Entry(name, i),)) for i in range(count)]
        return np.array(entries, object).reshape(tensor.shape)


_sizes = np.vectorize(lambda number: Size(int(number)), [object])  # of numbers


def _fits(size: Size, dtype: tf.DType) -> bool:
    """Whether a model can have this number, rather than what is left of it in this type."""
    number = size.number if size.static is None else size.static
    return dtype.min <= number <= dtype.max


def _numbers(values: ndarray) -> Any:
    """Known numbers: an int of a scalar, else lists."""
    return np.vectorize(lambda size: size.known, [int])(values).tolist()


def _strided_slice(tensor: tf.Tensor, x: ndarray, *ends: ndarray) -> Any:
    op = tensor.op
    if op.get_attr('new_axis_mask') or op.get_attr('ellipsis_mask'):
        raise ValueError('it brings in dimensions')
    (begin,), (end,), (stride,) = map(_numbers, ends)
    if op.get_attr('shrink_axis_mask'):
        return x[begin]
    first = None if op.get_attr('begin_mask') else begin
    return x[first : None if op.get_attr('end_mask') else end : stride]


def _slice(_: tf.Tensor, x: ndarray, begin: ndarray, size: ndarray) -> ndarray:
    (first,), (count,) = _numbers(begin), _numbers(size)
    return x[first : None if count < 0 else first + count]


def _prod(tensor: tf.Tensor, x: ndarray, axes: ndarray) -> Any:
    keeps = tensor.op.get_attr('keep_dims')
    return np.prod(x, tuple(_numbers(axes.flatten())), keepdims=keeps, initial=ONE)


def _gather(_: tf.Tensor, x: ndarray, indices: ndarray, *axis: ndarray) -> ndarray:
    numbers = np.array(_numbers(indices), int)
    if x.ndim != 1 or (numbers < 0).any():
        raise ValueError('it takes rows, or what is out of range')
    return x[numbers]


def _dynamic_stitch(_: tf.Tensor, *given: ndarray) -> list[Size]:
    half = len(given) // 2
    pairs = list(zip(given[:half], given[half:]))
    if any(at.shape != data.shape for at, data in pairs):
        raise ValueError('it stitches rows')
    found = {at.known: n for ats, data in pairs for at, n in zip(ats.flat, data.flat)}
    return [found[i] for i in range(len(found))]


def _concat_offset(tensor: tf.Tensor, axis: ndarray, *shapes: ndarray) -> ndarray:
    at, result = _numbers(axis), _sizes(np.zeros(len(shapes[0])))
    result[at] = sum((shape[at] for shape in shapes[: tensor.value_index]), Size(0))
    return result


def _gradient_axes(tensor: tf.Tensor, *shapes: ndarray) -> list[Size]:
    """The dimensions of one operand that a gradient is summed over, after broadcasting."""
    rank = max(map(len, shapes))
    padded = [[ONE] * (rank - len(shape)) + list(shape) for shape in shapes]
    if any(ONE not in sizes and sizes[0].same_as(sizes[1]) is None for sizes in zip(*padded)):
        raise ValueError('one of them may be 1')
    return [Size(axis) for axis, size in enumerate(padded[tensor.value_index]) if size == ONE]


_VALUES: dict[str, Callable[..., Any]] = {  # (output, *inputs' values or dims) -> value
    **dict.fromkeys(['Shape', 'ShapeN'], lambda _, dims: dims),
    'Rank': lambda _, dims: Size(len(dims)),
    'Size': lambda _, dims: product(dims),
    **dict.fromkeys(['Cast', 'Identity', 'StopGradient'], lambda _, x: x),
    'StridedSlice': _strided_slice,
    'Slice': _slice,
    'Pack': lambda t, *x: np.stack(x, t.op.get_attr('axis')),
    'Unpack': lambda t, x: np.take(x, t.value_index, t.op.get_attr('axis')),
    'ConcatV2': lambda _, *x: np.concatenate(x[:-1], _numbers(x[-1])),
    'Reshape': lambda _, x, shape: x.reshape(_numbers(shape)),
    'ExpandDims': lambda _, x, axis: np.expand_dims(x, _numbers(axis.reshape(()))),
    'Squeeze': lambda t, x: np.squeeze(x, tuple(t.op.get_attr('squeeze_dims')) or None),
    'Mul': lambda _, a, b: a * b,
    **dict.fromkeys(['Add', 'AddV2'], lambda _, a, b: a + b),
    'Sub': lambda _, a, b: a + b * Size(-1),
    'FloorDiv': lambda _, a, b: a // b,
    'FloorMod': lambda _, a, b: a % b,
    'Maximum': lambda _, a, b: np.maximum(a, b),
    'Prod': _prod,
    'GatherV2': _gather,
    'DynamicStitch': _dynamic_stitch,
    'ConcatOffset': _concat_offset,
    'Fill': lambda _, shape, value: np.broadcast_to(value, _numbers(shape)),
    'ZerosLike': lambda _, x: np.full_like(x, Size(0)),
    'OnesLike': lambda _, x: np.full_like(x, ONE),
    'Range': lambda _, *ends: _sizes(range(*map(_numbers, ends))[: _SMALL + 1]),
    op_types.BROADCAST_GRADIENT_ARGS: _gradient_axes,
    'InvertPermutation': lambda _, x: _sizes(np.argsort(_numbers(x))),
}
