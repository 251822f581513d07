"""`ZerosLike` and `OnesLike` become fills, which need a tensor's shape and not its values.

For example, if a loss is `sum(losses) / sum(ones_like(losses))`, each tower's share of it would
wait for the losses of all towers, though only their number is needed:

    losses --> OnesLike        =>        losses --> Shape --> Fill
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.tf_internals import graphs, op_types, tracebacks

_NOT_FILLED = (tf.string, tf.resource, tf.variant)


def replace_likes_by_fills(division: Division) -> None:
    """Replaces the outputs of `ZerosLike` and `OnesLike` by fills, but in v1 control flow.

    In a branch that isn't taken, a fill would give a value, as shapes are known there, too.
    """
    liveness = division.order.liveness
    for op in division.model_ops():
        if op.type not in op_types.ZEROS_ONES_LIKE:
            continue
        output = op.outputs[0]
        is_used = bool(output.consumers())
        if not is_used or output.dtype in _NOT_FILLED or not liveness.always_runs(op):
            continue

        value = op_types.ZEROS_ONES_LIKE[op.type]
        with tf.control_dependencies(op.control_inputs), tf.device(op.device), tf.name_scope(None):
            with tracebacks.made_for(op):
                # Unlike tf.shape(), this isn't a constant if the graph knows the shape.
                shape = tf.raw_ops.Shape(input=op.inputs[0], name=f'{op.name}/shape')
                filled = tf.fill(shape, tf.cast(value, output.dtype), f'{op.name}/fill')
        graphs.redirect_consumers(op, {0: filled}, op)
        division.replaced[output.name] = filled
