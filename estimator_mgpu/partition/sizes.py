"""Symbolic sizes: dimensions and integers as products of numbers, rows and unknown dimensions.

Where a graph computes with sizes (`Shape`, `StridedSlice`, `Pack`, `Prod`, ...), what comes out is
known as a product such as 4 * batch * T. So a tower can have its own version of a shape, and no
decision ever rests on two numbers merely being equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Union

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.partition.placements import Rows

SIZE_OPS = frozenset(['Shape', 'ShapeN', 'Size', 'Rank'])
"""The ops that look at nothing but a tensor's dimensions."""
_SMALL = 64  # entries of a tensor that may be sizes


class Dim(NamedTuple):
    """A dimension that is known only when the step runs."""

    tensor: str
    axis: int


class Entry(NamedTuple):
    """An entry of an integer tensor that is known only when the step runs."""

    tensor: str
    position: int


Symbol = Union[Rows, Dim, Entry]


class Size(NamedTuple):
    """A number times symbols.

    Attributes:
      number: the integer factor.
      symbols: the other factors, in a fixed order.
    """

    number: int
    symbols: tuple[Symbol, ...] = ()

    def __mul__(self, other: Any) -> Size:
        symbols = tuple(sorted(self.symbols + other.symbols, key=repr))
        return Size(self.number * other.number, symbols)

    @property
    def rows(self) -> Rows | None:
        """The row space that it's a multiple of, if any."""
        return next((s for s in self.symbols if isinstance(s, Rows)), None)

    @property
    def static(self) -> int | None:
        """The number that it is, if the graph knows."""
        number = self.number
        for symbol in self.symbols:
            if not isinstance(symbol, Rows) or symbol.static is None:
                return None
            number *= symbol.static
        return number

    def over(self, other: Size) -> Size | None:
        """The quotient, if it's known to be a whole number."""
        symbols = list(self.symbols)
        for symbol in other.symbols:
            if symbol not in symbols:
                return self._static_over(other)
            symbols.remove(symbol)
        if other.number == 0 or self.number % other.number:
            return self._static_over(other)
        return Size(self.number // other.number, tuple(symbols))

    def _static_over(self, other: Size) -> Size | None:
        one, by = self.static, other.static
        return Size(one // by) if one and by and one % by == 0 else None

    def same_as(self, other: Size) -> bool | None:
        """Whether both are one number; None if that can't be known before the step runs."""
        if self == other:
            return True
        one, two = self.static, other.static
        return None if one is None or two is None else one == two


ONE = Size(1)


def product(sizes: Sequence[Size]) -> Size:
    """The product of sizes."""
    result = ONE
    for size in sizes:
        result = result * size
    return result


def per_row(size: Size, rows: Rows) -> Size | None:
    """How many entries a row has in a dimension; None if it doesn't go by rows."""
    found = size.over(Size(1, (rows,)))
    return found if found is not None and rows not in found.symbols else None


def array(sizes: Sequence[Any], shape: Any = None) -> np.ndarray:
    """An array of Size objects."""
    result = np.empty(len(sizes), object)
    result[:] = list(map(_boxed, sizes))
    return result if shape is None else result.reshape(shape)


class _Box:
    """Keeps NumPy from taking a Size, a tuple, for a dimension."""

    __slots__ = ('size',)

    def __init__(self, size: Size):
        self.size = size


def _boxed(size: Any) -> _Box:
    return size if isinstance(size, _Box) else _Box(size)


def unboxed(values: np.ndarray) -> list[Size]:
    """An array's Size objects, in a flat list."""
    return [box.size for box in values.reshape(-1)]


class Sizes:
    """Knows the dimensions of tensors and the values of integer tensors, as far as a graph tells.

    What divides the graph says the dimensions of what it divides, by `know`.
    """

    def __init__(self, scope: str = '') -> None:
        self._scope = scope  # Tells a function's tensors from others of the same name.
        self._dims: dict[str, list[Size]] = {}
        self._values: dict[str, np.ndarray | None] = {}

    def know(self, tensor: tf.Tensor, dims: Sequence[Size]) -> None:
        """Says what the dimensions of a tensor are."""
        self._dims[tensor.name] = list(dims)

    def know_values(self, tensor: tf.Tensor, values: Sequence[Size]) -> None:
        """Says what the entries of an integer scalar or vector are."""
        self._values[tensor.name] = array(values, [len(values)] * (tensor.shape.rank or 0))

    def dims(self, tensor: tf.Tensor) -> list[Size] | None:
        """The dimensions of the whole tensor; None if its rank is unknown."""
        known = self._dims.get(tensor.name)
        if known is not None:
            return known
        if tensor.shape.rank is None:
            return None
        found = [
            self.unknown(tensor, i) if d is None else Size(d)
            for i, d in enumerate(tensor.shape.as_list())
        ]
        self._dims[tensor.name] = found
        return found

    def unknown(self, tensor: tf.Tensor, axis: int) -> Size:
        """A dimension that is known only when the step runs."""
        return Size(1, (Dim(f'{self._scope}{tensor.name}', axis),))

    def entries(self, tensor: tf.Tensor) -> list[Size] | None:
        """The entries of a whole integer tensor, flat; None if not even their number is known."""
        values = self._array(tensor)
        return None if values is None else unboxed(values)

    def numbers(self, tensor: tf.Tensor) -> list[int] | None:
        """The entries of an integer tensor, if all are known numbers."""
        if tensor.op.type == 'BroadcastGradientArgs':
            return self._gradient_axes(tensor)
        entries = self.entries(tensor)
        if entries is None or any(entry.symbols for entry in entries):
            return None
        return [entry.number for entry in entries]

    def _array(self, tensor: tf.Tensor) -> np.ndarray | None:
        if tensor.name not in self._values:
            self._values[tensor.name] = None  # Where a loop leads here again.
            self._values[tensor.name] = self._found(tensor)
        return self._values[tensor.name]

    def _found(self, tensor: tf.Tensor) -> np.ndarray | None:
        if tensor.dtype.base_dtype not in (tf.int32, tf.int64):
            return None
        shape = tensor.shape.as_list() if tensor.shape.rank is not None else [None]
        known = int(np.prod([d if d is not None else _SMALL + 1 for d in shape]))
        if tensor.op.type == 'Const':
            if known > _SMALL:
                return None
            value = private.constant_value(tensor)
            return array([Size(int(v)) for v in np.ravel(value)], np.shape(value))
        find = _VALUES.get(tensor.op.type)
        found = find(self, tensor) if find else None
        if found is None and known <= _SMALL and None not in shape:
            entries = [Size(1, (Entry(f'{self._scope}{tensor.name}', i),)) for i in range(known)]
            return array(entries, shape)
        return found

    def _inputs(self, tensor: tf.Tensor) -> list[np.ndarray] | None:
        found = [self._array(t) for t in tensor.op.inputs]
        return None if any(v is None for v in found) else found

    def _gradient_axes(self, tensor: tf.Tensor) -> list[int] | None:
        """The dimensions of one operand that a gradient is summed over, after broadcasting."""
        shapes = [entries for t in tensor.op.inputs if (entries := self.entries(t)) is not None]
        if len(shapes) < 2:
            return None
        rank = max(map(len, shapes))
        padded = [[ONE] * (rank - len(shape)) + shape for shape in shapes]
        own, other = padded[tensor.value_index], padded[1 - tensor.value_index]
        axes = []
        for axis, (a, b) in enumerate(zip(own, other)):
            if a == ONE:
                axes.append(axis)
            elif b != ONE and a.same_as(b) is None:
                return None  # One of them may be 1.
        return axes


def _dimensions(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    dims = sizes.dims(tensor.op.inputs[tensor.value_index])
    return None if dims is None else array(dims)


def _size(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    dims = sizes.dims(tensor.op.inputs[0])
    return None if dims is None else array([product(dims)], ())


def _as_is(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    return sizes._array(tensor.op.inputs[0])


def _strided_slice(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    values = sizes._array(tensor.op.inputs[0])
    ends = [sizes.numbers(t) for t in tensor.op.inputs[1:]]
    if values is None or None in ends or values.ndim != 1 or len(ends[0]) != 1:  # type: ignore
        return None
    [begin], [end], [stride] = ends  # type: ignore[misc]
    op = tensor.op
    if op.get_attr('shrink_axis_mask'):
        return values[begin : begin + 1 or None].reshape(())
    if op.get_attr('new_axis_mask') or op.get_attr('ellipsis_mask'):
        return None
    first = None if op.get_attr('begin_mask') else begin
    return values[first : None if op.get_attr('end_mask') else end : stride]


def _slice(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    values = sizes._array(tensor.op.inputs[0])
    ends = [sizes.numbers(t) for t in tensor.op.inputs[1:]]
    if values is None or None in ends or values.ndim != 1:
        return None
    [begin], [size] = ends  # type: ignore[misc]
    return values[begin : None if size < 0 else begin + size]


def _pack(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    found = sizes._inputs(tensor)
    return None if found is None else np.stack(found, tensor.op.get_attr('axis'))


def _concat(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    found = [sizes._array(t) for t in list(tensor.op.inputs)[:-1]]
    if any(v is None or v.ndim != 1 for v in found):
        return None
    return np.concatenate(found)


def _reshape(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    values = sizes._array(tensor.op.inputs[0])
    shape = sizes.numbers(tensor.op.inputs[1])
    return None if values is None or shape is None else values.reshape(shape)


def _expand_dims(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    values = sizes._array(tensor.op.inputs[0])
    axis = sizes.numbers(tensor.op.inputs[1])
    return None if values is None or axis is None else np.expand_dims(values, axis[0])


def _squeeze(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    values = sizes._array(tensor.op.inputs[0])
    axes = tuple(tensor.op.get_attr('squeeze_dims')) or None
    return None if values is None else np.squeeze(values, axes)


def _elementwise(combine: Callable[[Size, Size], Size | None]) -> Any:
    def find(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
        found = sizes._inputs(tensor)
        if found is None:
            return None
        one, two = np.broadcast_arrays(*found)
        result = [combine(a, b) for a, b in zip(unboxed(one), unboxed(two))]
        return None if None in result else array(result, one.shape)

    return find


def _sum(a: Size, b: Size) -> Size | None:
    if a.symbols == b.symbols:
        return Size(a.number + b.number, a.symbols)
    return a if b.number == 0 else b if a.number == 0 else None


def _difference(a: Size, b: Size) -> Size | None:
    return _sum(a, b * Size(-1))


def _maximum(a: Size, b: Size) -> Size | None:
    if a == b:
        return a
    if a.symbols or b.symbols:
        # Sizes are compared with 1 (or 0) to keep a division from failing.
        return None
    return Size(max(a.number, b.number))


def _floor_div(a: Size, b: Size) -> Size | None:
    found = a.over(b)
    if found is None and not a.symbols and not b.symbols and b.number:
        return Size(a.number // b.number)
    return found


def _floor_mod(a: Size, b: Size) -> Size | None:
    if a.symbols or b.symbols or not b.number:
        return None
    return Size(a.number % b.number)


def _prod(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    values = sizes._array(tensor.op.inputs[0])
    axes = sizes.numbers(tensor.op.inputs[1])
    if values is None or axes is None or values.ndim > 1 or len(axes) != values.ndim:
        return None
    shape = [1] * values.ndim if tensor.op.get_attr('keep_dims') else []
    return array([product(unboxed(values))], shape)


def _gather(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    values = sizes._array(tensor.op.inputs[0])
    indices = sizes._array(tensor.op.inputs[1])
    numbers = sizes.numbers(tensor.op.inputs[1])
    if values is None or numbers is None or values.ndim != 1 or indices is None:
        return None
    if any(not -len(values) <= i < len(values) for i in numbers):
        return None
    return array([values[i] for i in numbers], indices.shape)


def _dynamic_stitch(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    inputs = list(tensor.op.inputs)
    half = len(inputs) // 2
    found: dict[int, Size] = {}
    for at, data in zip(inputs[:half], inputs[half:]):
        indices, values = sizes.numbers(at), sizes.entries(data)
        if indices is None or values is None or len(indices) != len(values):
            return None
        found.update(zip(indices, values))
    if sorted(found) != list(range(len(found))):
        return None
    return array([found[i] for i in range(len(found))])


def _concat_offset(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    axis, *shapes = tensor.op.inputs
    found = [sizes.entries(t) for t in shapes]
    numbers = sizes.numbers(axis)
    if numbers is None or None in found:
        return None
    rank = len(found[0])  # type: ignore[arg-type]
    at = numbers[0] % rank
    offset: Size | None = Size(0)
    for shape in found[: tensor.value_index]:
        offset = offset and _sum(offset, shape[at])  # type: ignore[index]
    if offset is None:
        return None
    return array([offset if i == at else Size(0) for i in range(rank)])


def _fill(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    shape, values = sizes.numbers(tensor.op.inputs[0]), sizes.entries(tensor.op.inputs[1])
    if shape is None or values is None or np.prod(shape) > _SMALL:
        return None
    return array(values * int(np.prod(shape)), shape)


def _alike(number: int) -> Any:
    def find(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
        values = sizes._array(tensor.op.inputs[0])
        return None if values is None else array([Size(number)] * values.size, values.shape)

    return find


def _range(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    found = [sizes.numbers(t) for t in tensor.op.inputs]
    if None in found:
        return None
    [start], [limit], [delta] = found  # type: ignore[misc]
    values = range(start, limit, delta) if delta else range(0)
    return array([Size(v) for v in values]) if len(values) <= _SMALL else None


def _invert_permutation(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    numbers = sizes.numbers(tensor.op.inputs[0])
    return None if numbers is None else array([Size(int(i)) for i in np.argsort(numbers)])


def _rank(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    rank = tensor.op.inputs[0].shape.rank
    return None if rank is None else array([Size(rank)], ())


def _unpack(sizes: Sizes, tensor: tf.Tensor) -> np.ndarray | None:
    values = sizes._array(tensor.op.inputs[0])
    if values is None or values.ndim != 1:
        return None
    return values[tensor.value_index : tensor.value_index + 1].reshape(())


_VALUES: dict[str, Callable[[Sizes, tf.Tensor], np.ndarray | None]] = {
    'Shape': _dimensions,
    'ShapeN': _dimensions,
    'Size': _size,
    'Rank': _rank,
    'Identity': _as_is,
    'StopGradient': _as_is,
    'Cast': _as_is,
    'StridedSlice': _strided_slice,
    'Slice': _slice,
    'Pack': _pack,
    'Unpack': _unpack,
    'ConcatV2': _concat,
    'Reshape': _reshape,
    'ExpandDims': _expand_dims,
    'Squeeze': _squeeze,
    'Mul': _elementwise(lambda a, b: a * b),
    'Add': _elementwise(_sum),
    'AddV2': _elementwise(_sum),
    'Sub': _elementwise(_difference),
    'FloorDiv': _elementwise(_floor_div),
    'FloorMod': _elementwise(_floor_mod),
    'Maximum': _elementwise(_maximum),
    'Prod': _prod,
    'GatherV2': _gather,
    'DynamicStitch': _dynamic_stitch,
    'ConcatOffset': _concat_offset,
    'Fill': _fill,
    'ZerosLike': _alike(0),
    'OnesLike': _alike(1),
    'Range': _range,
    'InvertPermutation': _invert_permutation,
}
