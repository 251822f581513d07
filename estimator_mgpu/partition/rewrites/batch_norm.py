"""Fused batch normalization in training, written by sums that can be divided.

A fused op normalizes by the statistics of all that it's given. Here they become ordinary sums, and
are given to an op that only applies them. The op itself stays, for whoever fetches it. Where each
device takes its own statistics, the rules `OF_DEVICE` stand in place of this.

The gradients are those of Ioffe & Szegedy (2015), section 3, with n entries a channel:

    dx = scale * rsqrt(variance + epsilon) * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n)

The first term is the gradient where statistics are given; the others normalize x.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs, op_types, private


def expand_batch_norm(graph: tf.Graph, before: Set[str]) -> dict[str, tf.Tensor]:
    """Lets whoever uses a fused op's outputs use sums; not in loops or of unknown rank.

    Returns, by the names of outputs, what is used in place of ops that nothing else needs then.
    """
    replaced: dict[str, tf.Tensor] = {}
    for op in graph.get_operations():
        trains = (
            op.type in op_types.BATCH_NORMS and op.name not in before and op.get_attr('is_training')
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
    # Identities: all that depends on what is differentiated by is looked at.
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
