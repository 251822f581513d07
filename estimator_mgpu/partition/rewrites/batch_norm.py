"""Fused batch normalization in training, in two steps, which can be sharded.

A fused op normalizes by the statistics of its whole input. Here these come from an op of their own,
of which towers have partial results, and are given to an op that only applies them. The op itself
stays, for whoever fetches it. If each device takes its own statistics, the rules `OF_DEVICE` are
used instead.

The gradients are those of Ioffe & Szegedy (2015), section 3, with n entries a channel:

    dx = scale * rsqrt(variance + epsilon) * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n)

The first term is the gradient where statistics are given; the others normalize x.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.tf_internals import graphs, op_types, private, tracebacks
from estimator_mgpu.tf_internals.liveness import Liveness


def expand_batch_norm(division: Division) -> None:
    """Replaces the outputs of fused batch normalizations by those of ops that can be sharded.

    Those in v1 loops, or of inputs of unknown rank, stay as they are; so do all of them if each
    device takes its own statistics.
    """
    if division.batch_norm == 'device':
        return
    batch_norms = [
        op for op in division.model_ops(op_types.BATCH_NORMS) if op.get_attr('is_training')
    ]
    if not batch_norms:
        return

    liveness = Liveness(division.graph.get_operations())
    for op in batch_norms:
        if op.inputs[0].shape.rank is None or liveness.is_in_loop(op):
            continue
        users = [u for u in op.outputs[3].consumers() if u.type in op_types.BATCH_NORMS.values()]
        with tf.control_dependencies(None), tf.device(op.device), tracebacks.made_for(op):
            with tf.name_scope(None), tf.name_scope(f'{op.name}/moments'):
                in_two_steps = _in_two_steps(op, users)
        for fused, outputs in in_two_steps.items():
            graphs.redirect_consumers(fused, outputs, outputs[0].op)
            # If only fetches need the fused op any more, they get what is used in its place.
            others = {u for t in fused.outputs for u in t.consumers()} - {*users}
            if not any(map(graphs.consumers_of, others)):
                division.replaced.update((fused.outputs[i].name, t) for i, t in outputs.items())


def _in_two_steps(
    op: tf.Operation, gradients: Sequence[tf.Operation]
) -> dict[tf.Operation, dict[int, tf.Tensor]]:
    """Adds the ops that compute a fused op's outputs, and those of its gradients.

    Returns:
      By op, its outputs, by their indices.
    """
    x, scale, offset, *moving = op.inputs
    rank = x.shape.rank
    epsilon = op.get_attr('epsilon')
    data_format = op.get_attr('data_format')
    channels_last = data_format in (b'NHWC', b'NDHWC')
    channel_axis = rank - 1 if channels_last else 1
    x = tf.cast(x, tf.float32)

    # The number of entries of a channel, and the mean and the variance of these. The variance that
    # the op gives is the unbiased one.
    other_axes = [axis for axis in range(rank) if axis != channel_axis]
    n = tf.cast(tf.reduce_prod(tf.gather(tf.shape(x), other_axes)), tf.float32)
    moments = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=tf.ones_like(scale),  # Constants, so that it needn't wait for variables.
        offset=tf.zeros_like(offset),
        mean=[],
        variance=[],
        epsilon=epsilon,
        data_format=data_format,
        is_training=True,
    )
    private.set_attribute(moments.y.op, op_types.GIVES_MOMENTS, tf.AttrValue(b=True))
    mean = moments.batch_mean
    unbiased_variance = moments.batch_variance
    variance = tf.raw_ops.MulNoNan(x=unbiased_variance, y=(n - 1) / n)

    # An op that applies these statistics, as in evaluation: it's elementwise but for channels.
    normalize = functools.partial(
        tf.raw_ops.FusedBatchNormV3,
        epsilon=epsilon,
        data_format=data_format,
        mean=mean,
        variance=variance,
        is_training=False,
    )
    # Identities, since tf.gradients visits everything downstream of what it differentiates by.
    x, scale, offset = [tf.identity(tensor) for tensor in (x, scale, offset)]
    y = normalize(x=x, scale=scale, offset=offset).y

    # The statistics that the op gives, averaged with earlier ones if it's told to.
    batch_mean = mean
    batch_variance = unbiased_variance
    new = op.get_attr('exponential_avg_factor') if op.type == 'FusedBatchNormV3' else 1.0
    if new != 1:
        moving_mean, moving_variance = moving
        batch_mean = moving_mean * (1 - new) + batch_mean * new
        batch_variance = moving_variance * (1 - new) + batch_variance * new
    outputs = {op: {0: tf.cast(y, op.inputs[0].dtype), 1: batch_mean, 2: batch_variance}}

    # See the formula above: the gradient for given statistics, less the two terms that depend on
    # them, which are normalized as x is.
    for gradient in gradients:
        with tf.device(gradient.device):
            dy = tf.cast(gradient.inputs[0], tf.float32)
            dx, d_scale, d_offset = tf.gradients(y, [x, scale, offset], dy)
            scale_over_n = scale * tf.rsqrt(variance + epsilon) / n
            dx -= normalize(x=x, scale=scale_over_n * d_scale, offset=scale_over_n * d_offset).y
            dx = tf.cast(dx, gradient.inputs[0].dtype)
            outputs[gradient] = {0: dx, 1: d_scale, 2: d_offset}
    return outputs
