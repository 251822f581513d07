"""Tells from the graph whether indices begin with the rows in which they stand.

So do these, which say which step of each example is its last one:

    rows = tf.range(tf.shape(lengths)[0])
    indices = tf.stack([rows, lengths - 1], 1)  # [[0, 3], [1, 5], ...]

If `tf.gather_nd(steps, indices)` looks them up in a tensor with as many rows, the index in row i
only reaches row i of `steps`, whatever its other numbers are. So a tower needs no rows but its own.
The same holds if an op such as `tf.scatter_nd` puts something there.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules import elementwise, shapes
from estimator_mgpu.partition.rules.notation import NotSharded, labels_of, signature_of
from estimator_mgpu.partition.rules.zeros import is_filled_with
from estimator_mgpu.partition.size_inference import Sizes, counts_from_0
from estimator_mgpu.partition.sizes import ONE, RowSpace, Size
from estimator_mgpu.tf_internals.node_defs import slice_masks

# Ops whose output has entries of the input, as they are.
_ARRANGEMENTS = (
    *('BroadcastTo', 'ExpandDims', 'Reshape', 'Squeeze', 'StridedSlice', 'Tile', 'Transpose'),
    *('Cast', 'Identity'),
)
_RULES = {**elementwise.RULES, **shapes.RULES}

_NUMBERS_OF_ROWS = {tf.int32, tf.int64}  # A cast to `uint8`, say, gives others.


def begin_with_rows(indices: tf.Tensor, rows: Size, sizes: Sizes) -> bool:
    """Whether each index in row i begins with i, and there are indices for all rows.

    Args:
      indices: a tensor of integers, whose last dimension is an index: [rows, 2] or [rows, 4, 2].
      rows: how many rows the tensor has in which the indices are looked up.
    """
    dims = sizes.dims(indices)
    if not dims or len(dims) < 2 or dims[-1].static is None or not dims[0].same_as(rows):
        return False
    return _first_is_row(indices, sizes)


def begin_with_repeated_rows(indices: tf.Tensor, rows: RowSpace, sizes: Sizes) -> bool:
    """Whether a matrix of indices has as many for each row, that begin with it, one after another.

    Such as [[0, 0], [0, 1], [1, 0], [1, 1]], those of a sparse tensor without gaps. `rows` are
    those of which there are all.
    """
    indices = behind_casts(indices)
    first = _first_numbers(indices, sizes)
    if first is None and indices.op.type == 'Transpose':
        columns = indices.op.inputs[0].op
        is_matrix = sizes.numbers(indices.op.inputs[1]) == [1, 0] and columns.type == 'Pack'
        first = columns.inputs[0] if is_matrix and columns.get_attr('axis') == 0 else None
    if first is None or first.op.type != 'Reshape':
        return False
    matrix = first.op.inputs[0]
    dims = sizes.dims(matrix) or []
    return dims[:1] == [rows.size] and len(dims) == 2 and _is_position(matrix, 0, sizes)


def are_rows(indices: tf.Tensor, rows: Size, sizes: Sizes) -> bool:
    """Whether a vector has the number of its own row for each row, once or several times.

    Such as [0, 0, 1, 1], which says of two boxes of each image in which image they are.

    Args:
      indices: a vector of integers.
      rows: how many rows the tensor has in which the indices are looked up.
    """
    indices = behind_casts(indices)
    if indices.op.type == 'Reshape' and sizes.rank(indices) == 1:
        indices = indices.op.inputs[0]  # Of a matrix, say, with the numbers of a row in each row.
    dims = sizes.dims(indices) or [Size(-1)]
    return bool(dims[0].same_as(rows)) and _is_position(indices, 0, sizes)


def column_of(op: tf.Operation, sizes: Sizes) -> int | None:
    """Which column a slice such as `indices[:, 0]` takes of a matrix; None if it takes others."""
    begin = sizes.numbers(op.inputs[1])
    if sizes.rank(op.inputs[0]) != 2 or not begin:
        return None
    masks = slice_masks(op)
    takes_all_rows = masks['begin'] & masks['end'] & 1 and sizes.numbers(op.inputs[3]) == [1, 1]
    is_column = masks['shrink_axis'] == 2 and not masks['ellipsis'] and not masks['new_axis']
    if not takes_all_rows or not is_column:
        return None
    column = begin[1]  # Of a dimension that is in `shrink_axis_mask`, TensorFlow ignores others.
    return None if column < 0 else column


def begins_with_first_column(op: tf.Operation, sizes: Sizes) -> bool:
    """Whether a slice such as `indices[:, :2]` takes the first columns of a matrix, of all rows."""
    masks = slice_masks(op)
    begin = sizes.numbers(op.inputs[1])
    if sizes.rank(op.inputs[0]) != 2 or not begin or sizes.numbers(op.inputs[3]) != [1, 1]:
        return False
    if masks['shrink_axis'] or masks['ellipsis'] or masks['new_axis']:
        return False
    takes_all_rows = masks['begin'] & masks['end'] & 1
    from_first = masks['begin'] & 2 or begin[1] == 0
    count = sizes.static_dims(op.outputs[0])[1].static
    return bool(takes_all_rows and from_first and count)


def behind_casts(numbers: tf.Tensor, may_narrow: bool = True) -> tf.Tensor:
    """What integers were before identities, and casts that keep them.

    Args:
      may_narrow: whether they count rows, so that a cast from int64 to int32 keeps them as well.
    """
    while numbers.op.type in ('Cast', 'Identity'):
        before = numbers.op.inputs[0]
        if not {numbers.dtype, before.dtype} <= _NUMBERS_OF_ROWS:
            break
        if not may_narrow and before.dtype.size > numbers.dtype.size:
            break
        numbers = before
    return numbers


def _first_is_row(indices: tf.Tensor, sizes: Sizes) -> bool:
    """Whether the first number of each index is its row."""
    first = _first_numbers(indices, sizes)
    if first is not None:
        return _is_position(first, 0, sizes)

    if _axis_before(indices, 0, sizes) != 0 or not _keeps_last_axis(indices, sizes):
        return False
    return _first_is_row(indices.op.inputs[0], sizes)


def _first_numbers(indices: tf.Tensor, sizes: Sizes) -> tf.Tensor | None:
    """The first numbers of all indices, if a `Pack` or `ConcatV2` makes the indices; or None."""
    op = indices.op
    last = sizes.rank(indices) - 1
    if op.type == 'Pack' and op.get_attr('axis') in (-1, last):
        return op.inputs[0]
    if op.type == 'ConcatV2' and sizes.numbers(op.inputs[-1]) in ([-1], [last]):
        first = op.inputs[0]
        return first if (sizes.dims(first) or [])[-1:] == [ONE] else None
    return None


def _is_position(tensor: tf.Tensor, axis: int, sizes: Sizes) -> bool:
    """Whether each entry is its position along an axis, as in `tf.range(n)[:, None]` along 0."""
    op = tensor.op
    if counts_from_0(op, sizes):
        return True
    if op.type == 'Mul':
        left, right = op.inputs
        return any(
            is_filled_with(1, ones) and _is_broadcast_position(factor, tensor, axis, sizes)
            for factor, ones in [(left, right), (right, left)]
        )
    axis_before = _axis_before(tensor, axis, sizes)
    return axis_before is not None and _is_position(op.inputs[0], axis_before, sizes)


def _is_broadcast_position(factor: tf.Tensor, product: tf.Tensor, axis: int, sizes: Sizes) -> bool:
    """Whether a factor, broadcast to the product's shape, has its position along an axis."""
    dims = sizes.dims(factor) or []
    product_dims = sizes.dims(product) or []
    own_axis = axis + len(dims) - len(product_dims)
    if own_axis < 0 or not dims[own_axis].same_as(product_dims[axis]):
        return False
    return _is_position(factor, own_axis, sizes)


def _keeps_last_axis(tensor: tf.Tensor, sizes: Sizes) -> bool:
    """Whether an op only arranges entries, and moves none along the last axis."""
    last = sizes.rank(tensor) - 1
    axis_before = _axis_before(tensor, last, sizes)
    if axis_before is None:
        return False
    return axis_before == sizes.rank(tensor.op.inputs[0]) - 1


def _axis_before(tensor: tf.Tensor, axis: int, sizes: Sizes) -> int | None:
    """The axis of an op's input that became an axis of its output, if the op only arranges entries.

    For axis 0 of `tf.transpose(x)` it's 1, if `x` is a matrix; None if it isn't known.

    The op's rule tells it: if input and output can be sharded together along two axes, they have
    the same entries at each place of these.

    Args:
      tensor: the op's output.
      axis: one of its axes.
    """
    op = tensor.op
    if op.type not in _ARRANGEMENTS or tensor.dtype not in _NUMBERS_OF_ROWS:
        return None
    try:
        signature = signature_of(_RULES[op.type], op, sizes)
    except NotSharded:
        return None

    source = op.inputs[0]
    [output_labels] = signature.outputs
    source_labels = labels_of(signature.inputs[0])
    label = output_labels[axis]
    if label is None or label not in source_labels or label in signature.in_blocks:
        return None
    axis_before = source_labels.index(label)
    before = (sizes.dims(source) or [])[axis_before]
    after = (sizes.dims(tensor) or [])[axis]
    return axis_before if before.same_as(after) else None
