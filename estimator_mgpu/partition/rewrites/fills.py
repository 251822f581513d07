"""Zeros and ones of a tensor's shape become fills."""

from __future__ import annotations

from collections.abc import Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs, op_types, private


def replace_likes_by_fills(graph: tf.Graph, before: Set[str]) -> dict[str, tf.Tensor]:
    """Lets whoever uses zeros or ones of a tensor's shape use a fill, that waits for its size.

    Else each tower's loss waits for all losses where it's divided by how many there are.
    """
    replaced = {}
    for op in graph.get_operations():
        value = op_types.ZEROS_ONES_LIKE.get(op.type)
        if op.name in before or value is None or private.in_v1_control_flow(op):
            continue
        [x], [like] = op.inputs, op.outputs
        if like.dtype in (tf.string, tf.resource, tf.variant) or not like.consumers():
            continue
        with tf.control_dependencies(op.control_inputs), tf.device(op.device), tf.name_scope(None):
            # tf.shape() would make a number of a batch's static size.
            shape = tf.raw_ops.Shape(input=x, name=f'{op.name}/shape')
            filled = tf.fill(shape, tf.cast(value, like.dtype), f'{op.name}/fill')
        graphs.redirect_consumers(op, {0: filled}, op)
        replaced[like.name] = filled
    return replaced
