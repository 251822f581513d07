"""Products of matrices: which dimensions of what they're given go where."""

from __future__ import annotations

import tensorflow.compat.v1 as tf


def is_product(op: tf.Operation, given: tf.Tensor) -> bool:
    """Whether an op is a product of matrices whose dimensions are known one by one."""
    if given.shape.rank is None or op.outputs[0].shape.rank is None:
        return False
    if op.type == 'Einsum':
        return b'.' not in op.get_attr('equation')
    return op.type in ('MatMul', 'BatchMatMulV2', 'BatchMatMulV3')


def product_axis(op: tf.Operation, index: int, axis: int) -> int | None:
    """Returns which dimension of a product is one of an input; None where it's summed over.

    Args:
      op: an op that `is_product`.
      index: which input.
      axis: the dimension of that.
    """
    rank, first = op.inputs[index].shape.rank, index == 0
    if op.type == 'Einsum':
        terms, _, output = op.get_attr('equation').decode().partition('->')
        label = terms.split(',')[index][axis]
        return output.index(label) if label in output else None
    if axis < rank - 2:
        return axis + op.outputs[0].shape.rank - rank
    names = ('transpose_a', 'transpose_b') if op.type == 'MatMul' else ('adj_x', 'adj_y')
    summed = rank - 1 if first != op.get_attr(names[not first]) else rank - 2
    return None if axis == summed else op.outputs[0].shape.rank - (2 if first else 1)


def product_label(op: tf.Operation, index: int, axis: int) -> str | int | None:
    """Returns what is the same for dimensions of two inputs only if they're matched."""
    if op.type == 'Einsum':
        return str(op.get_attr('equation').decode().split(',')[index][axis])
    return product_axis(op, index, axis)
