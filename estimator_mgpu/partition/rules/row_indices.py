"""Tells from the graph whether indices begin with the rows in which they stand.

So do these, which say which step of each example is its last one:

    rows = tf.range(tf.shape(lengths)[0])
    indices = tf.stack([rows, lengths - 1], 1)  # [[0, 3], [1, 5], ...]

Whoever looks them up in a tensor with as many rows, or puts something there, only reaches the row
in which the index stands, whatever the other numbers are. So a tower needs no rows but its own.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules import elementwise, shapes
from estimator_mgpu.partition.rules.notation import NotSharded, labels_of, signature_of
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import ONE, Size

_TYPE_CHANGES = ('Cast', 'Identity')
# Ops whose output has entries of the input, as they are.
_ARRANGEMENTS = (
    *('BroadcastTo', 'ExpandDims', 'Reshape', 'Squeeze', 'StridedSlice', 'Tile', 'Transpose'),
    *_TYPE_CHANGES,
)
_RULES = {**elementwise.RULES, **shapes.RULES}


def begin_with_rows(indices: tf.Tensor, rows: Size, sizes: Sizes) -> bool:
    """Whether each index in row i of the indices, which are as many rows, begins with i.

    Args:
      indices: a tensor of integers, whose last dimension is an index.
      rows: how many rows the tensor has that the indices are for.
      sizes: of tensors.
    """
    dims = sizes.dims(indices)
    if not dims or len(dims) < 2 or dims[-1].static is None or not dims[0].same_as(rows):
        return False
    return _first_is_row(indices, sizes)


def _first_is_row(indices: tf.Tensor, sizes: Sizes) -> bool:
    """Whether the first number of each index is its row."""
    while indices.op.type in _TYPE_CHANGES:
        indices = indices.op.inputs[0]
    op = indices.op
    last = len(sizes.dims(indices) or []) - 1
    if op.type == 'Pack':
        return op.get_attr('axis') in (-1, last) and _is_position(op.inputs[0], 0, sizes)
    if op.type == 'ConcatV2':
        first = op.inputs[0]
        dims = sizes.dims(first) or []
        is_along_last = sizes.numbers(op.inputs[-1]) in ([-1], [last])
        return is_along_last and dims[-1:] == [ONE] and _is_position(first, 0, sizes)
    return False


def _is_position(tensor: tf.Tensor, axis: int, sizes: Sizes) -> bool:
    """Whether each entry is its position along an axis, as in `tf.range(n)[:, None]` along 0.

    The rules of ops that only arrange entries tell where a dimension goes: if the input and the
    output can be sharded along it together, they have the same entries at each place of it.
    """
    op = tensor.op
    if op.type == 'Range':
        start, _, delta = op.inputs
        return sizes.entries(start) == [Size(0)] and sizes.entries(delta) == [ONE]
    if op.type not in _ARRANGEMENTS or not tensor.dtype.is_integer:
        return False
    try:
        signature = signature_of(_RULES[op.type], op, sizes)
    except NotSharded:
        return False

    source = op.inputs[0]
    [output_labels] = signature.outputs
    source_labels = labels_of(signature.inputs[0])
    label = output_labels[axis]
    if label is None or label not in source_labels or label in signature.in_blocks:
        return False
    axis_before = source_labels.index(label)
    before = (sizes.dims(source) or [])[axis_before]
    after = (sizes.dims(tensor) or [])[axis]
    return bool(before.same_as(after)) and _is_position(source, axis_before, sizes)
