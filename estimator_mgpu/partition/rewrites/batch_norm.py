"""Fused batch normalization in training, written as sums, which can be sharded.

A fused op normalizes by the statistics of its whole input. Here these become ordinary sums, which
are given to an op that only applies them. The op itself stays, for whoever fetches it. If each
device takes its own statistics, the rules `OF_DEVICE` are used instead.

The gradients are those of Ioffe & Szegedy (2015), section 3, with n entries a channel:

    dx = scale * rsqrt(variance + epsilon) * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n)

The first term is the gradient where statistics are given; the others normalize x.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs, op_types, private


def expand_batch_norm(graph: tf.Graph, existing_ops: Set[str]) -> dict[str, tf.Tensor]:
    """Replaces the outputs of fused batch normalizations by sums.

    Those in v1 control flow, or of inputs of unknown rank, stay as they are.

    Args:
      graph: the graph that the model_fn has built.
      existing_ops: names of ops that were there before the model_fn, which stay as they are.

    Returns:
      By the name of an output, the tensor that is used in its place, if nothing but fetches needs
      the fused op any more.
    """
    replaced: dict[str, tf.Tensor] = {}
    for op in graph.get_operations():
        trains = (
            op.type in op_types.BATCH_NORMS
            and op.name not in existing_ops
            and op.get_attr('is_training')
        )
        if not trains or op.inputs[0].shape.rank is None or private.in_v1_control_flow(op):
            continue
        users = [u for u in op.outputs[3].consumers() if u.type in op_types.BATCH_NORMS.values()]
        with tf.control_dependencies(None), tf.device(op.device):
            with tf.name_scope(None), tf.name_scope(f'{op.name}/sums'):
                by_sums = _by_sums(op, users)
        for fused, outputs in by_sums.items():
            graphs.redirect_consumers(fused, outputs, outputs[0].op)
            others = {u for t in fused.outputs for u in t.consumers()} - {*users}
            if not any(map(graphs.consumers_of, others)):
                replaced.update((fused.outputs[i].name, t) for i, t in outputs.items())
    return replaced


def _by_sums(
    op: tf.Operation, users: Sequence[tf.Operation]
) -> dict[tf.Operation, dict[int, tf.Tensor]]:
    """What a fused op and its gradients come to: outputs, by their indices."""
    x, scale, offset, *moving = op.inputs
    attrs = {name: op.get_attr(name) for name in ('epsilon', 'data_format')}
    last = attrs['data_format'] in (b'NHWC', b'NDHWC')
    channels = x.shape.rank - 1 if last else 1
    x = tf.cast(x, tf.float32)
    axes = [i for i in range(x.shape.rank) if i != channels]
    n = tf.cast(tf.reduce_prod(tf.gather(tf.shape(x), axes)), tf.float32)
    total = functools.partial(tf.raw_ops.BiasAddGrad, data_format='NHWC' if last else 'NCHW')
    mean = total(out_backprop=x) / n
    spread = tf.reshape(mean, [-1] + [1] * (x.shape.rank - 1 - channels))
    variance = total(out_backprop=tf.squared_difference(x, spread)) / n
    attrs.update(mean=mean, variance=variance, is_training=False)
    # Identities, since tf.gradients visits everything downstream of what it differentiates by.
    inputs = x, scale, offset = [tf.identity(t) for t in (x, scale, offset)]
    y = tf.raw_ops.FusedBatchNormV3(x=x, scale=scale, offset=offset, **attrs).y
    unbiased = variance * (n / tf.maximum(n - 1, 1))
    new = op.get_attr('exponential_avg_factor') if op.type == 'FusedBatchNormV3' else 1.0
    if new != 1:
        mean = moving[0] * (1 - new) + mean * new
        unbiased = moving[1] * (1 - new) + unbiased * new
    made = {op: {0: tf.cast(y, op.inputs[0].dtype), 1: mean, 2: unbiased}}
    for user in users:
        with tf.device(user.device):
            dx, *sums = tf.gradients(y, inputs, tf.cast(user.inputs[0], tf.float32))
            by = scale * tf.rsqrt(variance + attrs['epsilon']) / n
            others = dict(scale=by * sums[0], offset=by * sums[1])
            dx -= tf.raw_ops.FusedBatchNormV3(x=x, **others, **attrs).y
            made[user] = {0: tf.cast(dx, user.inputs[0].dtype), 1: sums[0], 2: sums[1]}
    return made
