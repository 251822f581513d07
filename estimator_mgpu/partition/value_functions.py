"""What ops compute of sizes, an op type at a time: each is a function of arrays of `Size`.

For example, `tf.stack([tf.shape(x)[0], 15])` is a `Shape`, a `StridedSlice` and a `Pack`. If `x`
has the shape [batch, 3, 5], their values are [batch, 3, 5], batch, and [batch, 15].

In: an op's output, and the values of the op's inputs. Out: the value of the output, in which an
entry that can't be told is None; or UnknownSize, if no entry can be told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from numpy import ndarray

from estimator_mgpu.partition.sizes import ONE, Size, UnknownSize, known, product
from estimator_mgpu.tf_internals import op_types
from estimator_mgpu.tf_internals.node_defs import slice_masks

SPLITS_OF_STRINGS = ('StringSplit', 'StringSplitV2')
LARGEST = 64  # entries of a tensor: larger ones aren't sizes
LARGEST_COMPUTED = 4096  # entries computed of sizes, such as those of all features' dimensions


def to_sizes(numbers: Any) -> ndarray:
    """An array of `Size`, of an array of integers."""
    array = np.asarray(numbers)
    sizes = [known(int(number)) for number in array.ravel().tolist()]
    return np.array(sizes, object).reshape(array.shape)


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
    return values[0].as_integer()


def _numpy(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a NumPy function; raises UnknownSize if it refuses its arguments.

    It refuses shapes or positions that don't fit. Then TensorFlow's op fails as well, when it runs;
    in a branch that isn't taken it never does.
    """
    try:
        return function(*args, **kwargs)
    except (IndexError, ValueError) as error:
        raise UnknownSize(str(error)) from error


def _strided_slice(
    tensor: tf.Tensor, x: ndarray, begin: ndarray, end: ndarray, stride: ndarray
) -> Any:
    """`x[begin:end:stride]` along the first dimension, or `x[begin]`; of a scalar, `x[None]`."""
    masks = slice_masks(tensor.op)
    if x.ndim == 0 and masks['new_axis'] == 1 and tensor.shape.rank == 1:
        return _numpy(np.reshape, x, 1)
    if masks['new_axis'] or masks['ellipsis']:
        raise UnknownSize('the slice adds dimensions')
    first = _only_number(begin)
    last = _only_number(end)
    step = _only_number(stride)
    if masks['shrink_axis']:
        return _numpy(x.__getitem__, first)
    part = slice(None if masks['begin'] else first, None if masks['end'] else last, step)
    return _numpy(x.__getitem__, part)


def _slice(_: tf.Tensor, x: ndarray, begin: ndarray, size: ndarray) -> Any:
    slices = []
    for first, count in zip(_numbers(begin), _numbers(size)):
        # -1 stands for all that are left.
        slices.append(slice(first, None if count < 0 else first + count))
    return _numpy(x.__getitem__, tuple(slices))


def _concat(_: tf.Tensor, *values_and_axis: ndarray) -> ndarray:
    *values, axis = values_and_axis
    return _numpy(np.concatenate, values, _numbers(axis))


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
    result = to_sizes(np.zeros(len(shapes[0])))
    position = _numbers(axis)
    before = shapes[: tensor.value_index]
    lengths = [_numpy(shape.__getitem__, position) for shape in before]
    try:
        offset = sum(lengths, Size(0))
    except UnknownSize:
        offset = None
    _numpy(result.__setitem__, position, offset)
    return result


def _range(_: tf.Tensor, *start_limit_delta: ndarray) -> ndarray:
    numbers = _numpy(range, *(_numbers(end) for end in start_limit_delta))
    return to_sizes(numbers[: LARGEST + 1])


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


VALUE_FUNCTIONS: dict[str, Callable[..., Any]] = {
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
    'Pack': lambda tensor, *values: _numpy(np.stack, values, tensor.op.get_attr('axis')),
    'Reshape': lambda _, x, shape: _numpy(np.reshape, x, _numbers(shape)),
    'Slice': _slice,
    'SparseReshape': _sparse_reshape,
    'Split': _split,
    **dict.fromkeys(SPLITS_OF_STRINGS, _shape_of_split_strings),
    'SplitV': _split_by_sizes,
    'Squeeze': _squeeze,
    'StopGradient': lambda _, x: x,
    'StridedSlice': _strided_slice,
    'Switch': lambda _, x: x,
    'Transpose': lambda _, x, permutation: _numpy(np.transpose, x, _numbers(permutation)),
    'Unpack': lambda part, x: _numpy(np.take, x, part.value_index, part.op.get_attr('axis')),
    # New values:
    'ConcatOffset': _concat_offset,
    'Fill': lambda _, shape, value: _numpy(np.broadcast_to, value, _numbers(shape)),
    'InvertPermutation': lambda _, x: to_sizes(np.argsort(_numbers(x))),
    'OnesLike': lambda _, x: np.full_like(x, ONE),
    'Range': _range,
    'ZerosLike': lambda _, x: np.full_like(x, Size(0)),
    op_types.BROADCAST_GRADIENT_ARGS: _broadcast_axes,
}
