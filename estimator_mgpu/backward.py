"""Gradients of a user's own that combine what all rows of a shard have, as clipping does."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.divisors import QUOTIENTS
from estimator_mgpu.rows import ELEMENTWISE, LINEAR, Rows
from estimator_mgpu.walks import walk

# Linear in all of their inputs at once.
_LINEAR = LINEAR | {'Pack', 'ConcatV2', 'StopGradient', 'CheckNumerics'}


def has_custom_gradients(graph: tf.Graph) -> bool:
    """Whether an op's gradient is by `tf.custom_gradient` or `gradient_override_map`."""
    return any(map(_is_custom, graph.get_operations()))


def _is_custom(op: tf.Operation) -> bool:
    try:
        return bool(op.get_attr('_gradient_op_type'))
    except ValueError:
        return False


def combining(gradients: Sequence[tf.Tensor], rows: Rows, made: Collection[str]) -> list[str]:
    """Lists the ops for which gradients of shards don't add up to that of the batch.

    Args:
      gradients: of a loss of tower 0, with respect to weights.
      rows: which tensors have rows.
      made: the names of the ops that the gradients are made of.

    Returns:
      The ops, as `'name' (type)`.
    """

    def onward(op: tf.Operation) -> list[tf.Operation]:
        return [t.op for t in rows.dependent_inputs(op) if t.op.name in made]

    def is_reduced(value: tf.Tensor) -> bool:
        reduced = value.dtype.is_floating and not rows.has(value)
        return reduced and any(op.name in made for op in rows.reductions(value))

    def combines(op: tf.Operation) -> bool:
        values = [i for i, t in enumerate(op.inputs) if is_reduced(t)]
        scales = values == [0] and op.type in QUOTIENTS or len(values) == 1 and op.type == 'Mul'
        linear = op.type in _LINEAR or scales
        return bool(values) and (any(map(rows.has, op.inputs)) or not linear)

    ops = walk([gradient.op for gradient in gradients], onward)
    return [f'{op.name!r} ({op.type})' for op in ops if op.type in ELEMENTWISE and combines(op)]
