"""What is known of sizes before the step runs: dimensions, and integers computed from them.

Comes in: the graph, and what propagation says of the dimensions of sharded tensors. Comes out:
symbolic sizes (`sizes.py`). For example, if `x` has the shape [batch, 3, 5], then
`tf.stack([tf.shape(x)[0], 15])` has the entries [batch, 15], and a tower's version of it can be
made from these. What cannot be worked out becomes a symbol of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from numpy import ndarray

from estimator_mgpu.partition.placements import Shard
from estimator_mgpu.partition.sizes import (
    ONE,
    Dim,
    Entry,
    PartRows,
    RowSpace,
    Size,
    UnknownSize,
    per_row,
    product,
)
from estimator_mgpu.tf_internals import op_types

_RANDOM = ('RandomStandardNormal', 'RandomUniform', 'RandomUniformInt', 'TruncatedNormal')
_STATELESS = ('StatelessRandomNormalV2', 'StatelessRandomUniformV2', 'StatelessTruncatedNormalV2')
# By type of op, which input is the shape of the output.
_SHAPE_INPUTS = {
    'Empty': 0,
    'ScatterNd': 2,
    'SparseToDense': 1,
    'Fill': 0,
    **dict.fromkeys(_RANDOM, 0),
    **dict.fromkeys(_STATELESS, 0),
}
_SPLITS_OF_STRINGS = ('StringSplit', 'StringSplitV2')
_LARGEST = 64  # entries of a tensor: larger ones aren't sizes


class Sizes:
    """The symbolic dimensions of tensors, and the symbolic entries of integer tensors.

    They are inferred from the graph when they are asked for, or set. All are those of full values,
    not of a tower's.

    Args:
      scope: tells the tensors of a function from those of the same name elsewhere.
    """

    def __init__(self, scope: str = '') -> None:
        self._scope = scope
        self._dims: dict[str, list[Size]] = {}
        self._values: dict[str, ndarray | None] = {}  # arrays of `Size`
        # By the tensor that says in which part each row is, the type of op and the number of parts.
        self._parts: dict[tuple[str, str, int], tuple[PartRows, ...]] = {}

    def set_dims(self, tensor: tf.Tensor, dims: Sequence[Size] | None) -> None:
        """Sets the dimensions of a tensor; None leaves them as they are."""
        if dims is not None:
            self._dims[tensor.name] = list(dims)

    def set_entries(self, tensor: tf.Tensor, entries: Sequence[Size]) -> None:
        """Sets the entries of an integer scalar or vector."""
        shape = -1 if tensor.shape.rank else ()
        self._values[tensor.name] = np.array(entries, object).reshape(shape)

    def dims(self, tensor: tf.Tensor) -> list[Size] | None:
        """The dimensions of a tensor; None if its rank is unknown."""
        if tensor.name not in self._dims and tensor.shape.rank is not None:
            self._dims[tensor.name] = self._infer_dims(tensor)
        return self._dims.get(tensor.name)

    def static_dims(self, tensor: tf.Tensor, rank: int = 0) -> list[Size]:
        """The dimensions as TensorFlow knows them, and a symbol for each that it doesn't know.

        Args:
          tensor: the tensor.
          rank: the number of dimensions, if TensorFlow doesn't know it either.
        """
        if tensor.shape.rank is None:
            return [self.unknown_dim(tensor, axis) for axis in range(rank)]
        return [
            self.unknown_dim(tensor, axis) if length is None else Size(length)
            for axis, length in enumerate(tensor.shape.as_list())
        ]

    def dims_of_shard(self, tensor: tf.Tensor, shard: Shard, factor: Size, rank: int) -> list[Size]:
        """The dimensions of the full value of a sharded tensor.

        Args:
          tensor: the tensor.
          shard: its placement.
          factor: how many entries each row has along the axis of the shard.
          rank: the number of dimensions, if TensorFlow doesn't know it.
        """
        dims = self.static_dims(tensor, rank)
        dims[shard.axis] = factor * Size(1, (shard.rows,))
        return dims

    def start_row_space(self, tensor: tf.Tensor) -> None:
        """Starts a row space with dimension 0 of a tensor, if nothing is known of its size.

        So what is computed from `tf.boolean_mask(x, mask)` can be sharded by the entries that are
        left. Integers start none: they are indices, as those of `tf.where`, or sizes.
        """
        if not tensor.dtype.is_floating:
            return
        dims = self.dims(tensor)
        if dims and dims[0] == self.unknown_dim(tensor, 0):
            rows = RowSpace(tensor.name, None)
            self.set_dims(tensor, [Size(1, (rows,)), *dims[1:]])

    def parts(
        self, which: tf.Tensor, outputs: Sequence[tf.Tensor], rows: RowSpace
    ) -> tuple[PartRows, ...]:
        """The row spaces of the parts that an op makes of rows.

        Ops that put rows into the same parts have the same.

        Args:
          which: says in which part each row is: a number, or by a mask whether it's in the part.
          outputs: of the op, one for each part.
          rows: what the parts are made of.
        """
        key = which.name, outputs[0].op.type, len(outputs)
        if key not in self._parts:
            origin = rows.origin if isinstance(rows, PartRows) else rows
            self._parts[key] = tuple(PartRows(part.name, None, origin) for part in outputs)
        return self._parts[key]

    def unknown_dim(self, tensor: tf.Tensor, axis: int) -> Size:
        """The symbol for a dimension that is known only when the step runs."""
        return Size(1, (Dim(f'{self._scope}{tensor.name}', axis),))

    def per_row(self, tensor: tf.Tensor, axis: int, rows: RowSpace) -> Size | None:
        """How many entries each row has in a dimension; None if they aren't known to be as many."""
        dims = self.dims(tensor)
        return None if dims is None else per_row(dims[axis], rows)

    def entries(self, tensor: tf.Tensor) -> list[Size] | None:
        """The entries of an integer tensor, flat; None if not even their number is known."""
        value = self._value(tensor)
        return None if value is None else list(value.flat)

    def numbers(self, tensor: tf.Tensor) -> list[int] | None:
        """The entries of an integer tensor, if no one of them depends on the batch or the step."""
        entries = self.entries(tensor)
        if entries is None or any(entry.symbols for entry in entries):
            return None
        return [entry.number for entry in entries]

    def _infer_dims(self, tensor: tf.Tensor) -> list[Size]:
        """The dimensions of a tensor of known rank."""
        dims = self.static_dims(tensor)
        shape: Sequence[Size | None] | None = None
        if tensor.op.type in _SHAPE_INPUTS:
            shape = self.entries(tensor.op.inputs[_SHAPE_INPUTS[tensor.op.type]])
        elif tensor.op.type in _SHAPE_FUNCTIONS:
            shape = _SHAPE_FUNCTIONS[tensor.op.type](self, tensor.op)
        if shape is None:
            return dims
        told = [size if size and dim.symbols else dim for dim, size in zip(dims, shape)]
        return [*told, *dims[len(told) :]]

    def _value(self, tensor: tf.Tensor) -> ndarray | None:
        """An array of the entries, in the tensor's shape; None if even the shape is unknown."""
        if tensor.name not in self._values:
            self._values[tensor.name] = None  # for a loop, which leads here again
            if tensor.dtype.base_dtype in (tf.int32, tf.int64):
                self._values[tensor.name] = self._infer_value(tensor)
        return self._values[tensor.name]

    def _infer_value(self, tensor: tf.Tensor) -> ndarray | None:
        try:
            return self._compute_value(tensor)
        except UnknownSize:
            return self._symbols(tensor)

    def _compute_value(self, tensor: tf.Tensor) -> ndarray:
        """The value as the tensor's op computes it; raises UnknownSize if that can't be told."""
        op = tensor.op
        if op.type == op_types.CONST:
            return _constant(tensor)
        inputs: list[Any]
        if op.type in op_types.SHAPE_QUERIES:
            inputs = [self.dims(op.inputs[tensor.value_index])]
        elif op.type in op_types.SWITCH:
            inputs = [self._value(op.inputs[0])]  # Whichever output it goes to.
        elif op.type in _SPLITS_OF_STRINGS:
            inputs = [self.dims(op.inputs[0])]
        elif op.type == 'SparseReshape':
            inputs = [self._value(operand) for operand in op.inputs[1:]]
        elif op.type in _VALUE_FUNCTIONS and op.inputs:
            inputs = [self._value(operand) for operand in op.inputs]
        else:
            raise UnknownSize(f'{op.type} computes no sizes')
        if any(operand is None for operand in inputs):
            raise UnknownSize(f'an input of {op.name} is unknown')

        value = np.array(_VALUE_FUNCTIONS[op.type](tensor, *inputs), object)
        if value.size > _LARGEST:
            raise UnknownSize(f'{tensor.name} is too large')
        for position, entry in enumerate(value.flat):
            if entry is None:
                value.flat[position] = self._symbol(tensor, position)
        if not all(_fits(size, tensor.dtype.base_dtype) for size in value.flat):
            raise UnknownSize(f'{tensor.name} overflows')
        return value

    def _symbols(self, tensor: tf.Tensor) -> ndarray | None:
        """A symbol for each entry of a small tensor; None if it may be a large one."""
        count = tensor.shape.num_elements()
        if count is None or count > _LARGEST:
            return None
        entries = [self._symbol(tensor, position) for position in range(count)]
        return np.array(entries, object).reshape(tensor.shape)

    def _symbol(self, tensor: tf.Tensor, position: int) -> Size:
        """The symbol for an entry that is known only when the step runs."""
        return Size(1, (Entry(f'{self._scope}{tensor.name}', position),))


# An array of `Size`, of an array of numbers.
_sizes = np.vectorize(lambda number: Size(int(number)), [object])


def _constant(tensor: tf.Tensor) -> ndarray:
    count = tensor.shape.num_elements()
    if count is None or count > _LARGEST:
        raise UnknownSize(f'{tensor.name} is too large')
    return _sizes(tf.make_ndarray(tensor.op.get_attr('value')))


def _fits(size: Size, dtype: tf.DType) -> bool:
    """Whether a size can be computed in this type, without overflow."""
    number = size.number if size.static is None else size.static
    return dtype.min <= number <= dtype.max


def _numbers(values: ndarray) -> Any:
    """The sizes as integers: one of a scalar, otherwise nested lists.

    Raises:
      UnknownSize: if any of them has symbols.
    """
    return np.vectorize(lambda size: size.as_integer(), [int])(values).tolist()


def _only_number(values: ndarray) -> int:
    """The entry of a vector of one; raises UnknownSize for another number of entries."""
    if values.shape != (1,):
        raise UnknownSize('several dimensions are sliced')
    [number] = _numbers(values)
    return number


def _numpy(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a NumPy function; raises UnknownSize if it refuses its arguments.

    It refuses shapes or positions that don't fit. Then TensorFlow's op fails as well, when it runs;
    in a branch that isn't taken it never does.
    """
    try:
        return function(*args, **kwargs)
    except (IndexError, ValueError) as error:
        raise UnknownSize(str(error)) from error


# Shape functions: the first dimensions of an op's output, where its inputs tell them.


def _shape_of_range(sizes: Sizes, op: tf.Operation) -> Sequence[Size | None] | None:
    """From 0 on, `limit` numbers."""
    start, limit, delta = (sizes.entries(operand) for operand in op.inputs)
    return limit if start == [Size(0)] and delta == [ONE] else None


def _shape_of_segments(sizes: Sizes, op: tf.Operation) -> Sequence[Size | None] | None:
    """The number of segments, and what the data has behind the dimensions that the ids have."""
    data, ids, count = op.inputs
    number = sizes.entries(count)
    dims = sizes.dims(data)
    if number is None or dims is None or ids.shape.rank is None:
        return None
    return [*number, *dims[ids.shape.rank :]]


def _shape_of_ragged(sizes: Sizes, op: tf.Operation) -> Sequence[Size | None] | None:
    """As many rows as the ragged tensor has, unless another number of rows is asked for."""
    shape = sizes.entries(op.inputs[0])
    if shape is None or shape[0] != Size(-1):
        return None
    partition = op.inputs[3]
    kind = op.get_attr('row_partition_types')[0]
    try:
        if kind == b'FIRST_DIM_SIZE':
            return sizes.entries(partition)
        splits = sizes.dims(partition)
        return [splits[0] + Size(-1)] if kind == b'ROW_SPLITS' and splits else None
    except UnknownSize:
        return None


def _shape_of_slice(sizes: Sizes, op: tf.Operation) -> Sequence[Size | None] | None:
    """Of a vector, `x[1:]` and `x[:-1]` have one entry less, as row splits less an end are rows."""
    dims = sizes.dims(op.inputs[0])
    begin, end, stride = (sizes.entries(operand) for operand in op.inputs[1:])
    masks = [op.get_attr(f'{name}_mask') for name in ('ellipsis', 'new_axis', 'shrink_axis')]
    if any(masks) or len(dims or []) != 1 or not begin or not end or stride != [ONE]:
        return None
    assert dims is not None
    # How many entries are left out before and behind; a negative number counts from the end.
    before = Size(0) if op.get_attr('begin_mask') else begin[0]
    behind = Size(0) if op.get_attr('end_mask') else end[0] * Size(-1)
    try:
        if before.as_integer() < 0 or behind.as_integer() < 0:
            return None
        return [dims[0] + (before + behind) * Size(-1)]
    except UnknownSize:
        return None


def _shape_of_concat(sizes: Sizes, op: tf.Operation) -> Sequence[Size | None] | None:
    """What is filled up to n entries has n: x, which has m entries, and n - m zeros."""
    *values, axis = op.inputs
    if len(values) != 2 or sizes.numbers(axis) != [0]:
        return None
    x, filler = values
    dims = sizes.dims(x)
    if filler.op.type != op_types.FILL or filler.op.inputs[0].op.type != 'Sub' or not dims:
        return None
    count, count_of_x = filler.op.inputs[0].op.inputs
    if sizes.entries(count_of_x) != dims:
        return None
    return sizes.entries(count)


_SHAPE_FUNCTIONS: dict[str, Callable[[Sizes, tf.Operation], Sequence[Size | None] | None]] = {
    'ConcatV2': _shape_of_concat,
    'RaggedTensorToTensor': _shape_of_ragged,
    'Range': _shape_of_range,
    'StridedSlice': _shape_of_slice,
    **dict.fromkeys(
        [f'UnsortedSegment{reduction}' for reduction in ('Max', 'Min', 'Prod', 'Sum')],
        _shape_of_segments,
    ),
}

# Value functions: what an op computes of sizes. The first argument is the output; the others are
# the values of the op's inputs, as arrays of `Size`. An entry of the result that can't be told is
# None.


def _strided_slice(
    tensor: tf.Tensor, x: ndarray, begin: ndarray, end: ndarray, stride: ndarray
) -> Any:
    """`x[begin:end:stride]` along the first dimension, or `x[begin]`."""
    op = tensor.op
    if op.get_attr('new_axis_mask') or op.get_attr('ellipsis_mask'):
        raise UnknownSize('the slice adds dimensions')
    first: int | None = _only_number(begin)
    last: int | None = _only_number(end)
    step = _only_number(stride)
    if op.get_attr('shrink_axis_mask'):
        return _numpy(x.__getitem__, first)
    if op.get_attr('begin_mask'):
        first = None
    if op.get_attr('end_mask'):
        last = None
    return _numpy(x.__getitem__, slice(first, last, step))


def _slice(_: tf.Tensor, x: ndarray, begin: ndarray, size: ndarray) -> Any:
    slices = []
    for first, count in zip(_numbers(begin), _numbers(size)):
        # -1 stands for all that are left.
        slices.append(slice(first, None if count < 0 else first + count))
    return _numpy(x.__getitem__, tuple(slices))


def _pack(tensor: tf.Tensor, *values: ndarray) -> ndarray:
    return _numpy(np.stack, values, tensor.op.get_attr('axis'))


def _unpack(tensor: tf.Tensor, x: ndarray) -> Any:
    return _numpy(np.take, x, tensor.value_index, tensor.op.get_attr('axis'))


def _concat(_: tf.Tensor, *values_and_axis: ndarray) -> ndarray:
    *values, axis = values_and_axis
    return _numpy(np.concatenate, values, _numbers(axis))


def _reshape(_: tf.Tensor, x: ndarray, shape: ndarray) -> ndarray:
    return _numpy(np.reshape, x, _numbers(shape))


def _expand_dims(_: tf.Tensor, x: ndarray, axis: ndarray) -> ndarray:
    return _numpy(np.expand_dims, x, _numbers(_numpy(np.reshape, axis, ())))


def _split(tensor: tf.Tensor, axis: ndarray, x: ndarray) -> Any:
    return _numpy(np.split, x, tensor.op.get_attr('num_split'), _numbers(axis))[tensor.value_index]


def _split_by_sizes(tensor: tf.Tensor, x: ndarray, lengths: ndarray, axis: ndarray) -> Any:
    ends = np.cumsum(_numbers(lengths))[:-1]
    if min(_numbers(lengths)) < 0:
        raise UnknownSize('a part takes what is left')
    return _numpy(np.split, x, ends, _numbers(axis))[tensor.value_index]


def _sparse_reshape(tensor: tf.Tensor, shape: ndarray, new_shape: ndarray) -> list[Size | None]:
    """Output 1, the new shape of a sparse tensor, in which -1 stands for what is left."""
    if tensor.value_index != 1:
        raise UnknownSize('these are indices')
    entries: list[Size | None] = list(new_shape)
    if Size(-1) in entries:
        others = product(list(new_shape)) * Size(-1)
        entries[entries.index(Size(-1))] = product(list(shape)).over(others)
    return entries


def _shape_of_split_strings(tensor: tf.Tensor, dims: list[Size]) -> list[Size | None]:
    """Output 2, the shape of a sparse tensor with a row for each string."""
    if tensor.value_index != 2:
        raise UnknownSize('these are indices, or strings')
    return [dims[0], None]


def _transpose(_: tf.Tensor, x: ndarray, permutation: ndarray) -> Any:
    return _numpy(np.transpose, x, _numbers(permutation))


def _squeeze(tensor: tf.Tensor, x: ndarray) -> ndarray:
    axes = tuple(tensor.op.get_attr('squeeze_dims')) or None
    return _numpy(np.squeeze, x, axes)


def _prod(tensor: tf.Tensor, x: ndarray, axes: ndarray) -> Any:
    keep_dims = tensor.op.get_attr('keep_dims')
    return _numpy(np.prod, x, tuple(_numbers(axes.flatten())), keepdims=keep_dims, initial=ONE)


def _gather(_: tf.Tensor, x: ndarray, indices: ndarray, *axis: ndarray) -> ndarray:
    positions = np.array(_numbers(indices), int)
    if x.ndim != 1 or (positions < 0).any():
        raise UnknownSize('entries of a vector are needed')
    return _numpy(x.__getitem__, positions)


def _dynamic_stitch(_: tf.Tensor, *indices_and_data: ndarray) -> list[Size]:
    """Entry by entry, `result[indices[k]] = data[k]`; where several say so, the last one counts."""
    half = len(indices_and_data) // 2
    entries: dict[int, Size] = {}
    for indices, data in zip(indices_and_data[:half], indices_and_data[half:]):
        if indices.shape != data.shape:
            raise UnknownSize('vectors are stitched, rather than their entries')
        for position, entry in zip(indices.flat, data.flat):
            entries[position.as_integer()] = entry
    if set(entries) != set(range(len(entries))):
        raise UnknownSize('nothing says what some entries are')
    return [entries[position] for position in range(len(entries))]


def _concat_offset(tensor: tf.Tensor, axis: ndarray, *shapes: ndarray) -> ndarray:
    """Where a value begins in a concatenation: behind those before it, along the axis."""
    result = _sizes(np.zeros(len(shapes[0])))
    position = _numbers(axis)
    before = shapes[: tensor.value_index]
    lengths = [_numpy(shape.__getitem__, position) for shape in before]
    try:
        offset = sum(lengths, Size(0))
    except UnknownSize:
        offset = None
    _numpy(result.__setitem__, position, offset)
    return result


def _fill(_: tf.Tensor, shape: ndarray, value: ndarray) -> ndarray:
    return _numpy(np.broadcast_to, value, _numbers(shape))


def _range(_: tf.Tensor, *start_limit_delta: ndarray) -> ndarray:
    numbers = _numpy(range, *(_numbers(end) for end in start_limit_delta))
    return _sizes(numbers[: _LARGEST + 1])


def _broadcast_axes(tensor: tf.Tensor, *shapes: ndarray) -> list[Size]:
    """The dimensions of an operand over which its gradient is summed, as it was broadcast in them.

    For shapes [batch, 3] and [3], output 0 is [] and output 1 is [0].
    """
    rank = max(len(shape) for shape in shapes)
    padded = [[ONE] * (rank - len(shape)) + list(shape) for shape in shapes]
    for one, other in zip(*padded):
        if ONE not in (one, other) and one.same_as(other) is None:
            raise UnknownSize('one of them may be 1')
    operand = padded[tensor.value_index]
    return [Size(axis) for axis, size in enumerate(operand) if size == ONE]


_VALUE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    # Of the dimensions of a tensor:
    'Shape': lambda _, dims: dims,
    'ShapeN': lambda _, dims: dims,
    'Rank': lambda _, dims: Size(len(dims)),
    'Size': lambda _, dims: product(dims),
    # Arithmetic:
    'Add': lambda _, x, y: _numpy(np.add, x, y),
    'AddV2': lambda _, x, y: _numpy(np.add, x, y),
    'FloorDiv': lambda _, x, y: _numpy(np.floor_divide, x, y),
    'FloorMod': lambda _, x, y: _numpy(np.remainder, x, y),
    'Maximum': lambda _, x, y: _numpy(np.maximum, x, y),
    'Mul': lambda _, x, y: _numpy(np.multiply, x, y),
    'Prod': _prod,
    'Sub': lambda _, x, y: _numpy(np.add, x, y * Size(-1)),
    # Values that are arranged anew:
    'Cast': lambda _, x: x,
    'ConcatV2': _concat,
    'DynamicStitch': _dynamic_stitch,
    'ExpandDims': _expand_dims,
    'GatherV2': _gather,
    'Identity': lambda _, x: x,
    'Pack': _pack,
    'Reshape': _reshape,
    'Slice': _slice,
    'SparseReshape': _sparse_reshape,
    'Split': _split,
    **dict.fromkeys(_SPLITS_OF_STRINGS, _shape_of_split_strings),
    'SplitV': _split_by_sizes,
    'Squeeze': _squeeze,
    'StopGradient': lambda _, x: x,
    'StridedSlice': _strided_slice,
    'Switch': lambda _, x: x,
    'Transpose': _transpose,
    'Unpack': _unpack,
    # New values:
    'ConcatOffset': _concat_offset,
    'Fill': _fill,
    'InvertPermutation': lambda _, x: _sizes(np.argsort(_numbers(x))),
    'OnesLike': lambda _, x: np.full_like(x, ONE),
    'Range': _range,
    'ZerosLike': lambda _, x: np.full_like(x, Size(0)),
    op_types.BROADCAST_GRADIENT_ARGS: _broadcast_axes,
}
