"""Fused batch normalization in training, by sums that can be divided.

A fused op normalizes by the statistics of all that it's given. Here it becomes ordinary ops, whose
sums over rows are divided like any other's. The op itself stays, for whoever fetches it.

The gradients are those of Ioffe & Szegedy (2015), section 3, with n entries a channel:

    dx = scale * rsqrt(variance + epsilon) * (dy - mean(dy) - xhat * mean(dy * xhat))
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu import private

_FORWARD = ('FusedBatchNorm', 'FusedBatchNormV2', 'FusedBatchNormV3')
_BACKWARD = tuple(f'{t[:14]}Grad{t[14:]}' for t in _FORWARD)


def expand(graph: tf.Graph) -> None:
    """Lets whoever uses a fused op's outputs use sums instead; not in loops or of unknown rank."""
    for op in graph.get_operations():
        if op.type not in _FORWARD or not op.get_attr('is_training'):
            continue
        if op.inputs[0].shape.rank is None or private.in_control_flow(op):
            continue
        users = [u for u in op.outputs[3].consumers() if u.type in _BACKWARD]
        with tf.control_dependencies(None), tf.device(op.device):
            with tf.name_scope(None), tf.name_scope(f'{op.name}/sums'):
                forward = _Forward(op)
                gradients = [(user, forward.gradients(user)) for user in users]
        for fused, outputs in [(op, forward.outputs), *gradients]:
            private.replace(fused, outputs, outputs[0].op)


class _Forward:
    """A normalization by sums."""

    def __init__(self, op: tf.Operation):
        x, scale, offset, moving_mean, moving_variance = op.inputs
        last = op.get_attr('data_format') in (b'NHWC', b'NDHWC')
        self._rank = x.shape.rank
        self._channels = self._rank - 1 if last else 1
        self._axes = [i for i in range(self._rank) if i != self._channels]
        self._type = x.dtype
        x = tf.cast(x, tf.float32)
        mean = tf.reduce_mean(x, self._axes)
        centered = x - self._spread(mean)
        variance = tf.reduce_mean(tf.square(centered), self._axes)
        self._factor = tf.rsqrt(variance + op.get_attr('epsilon'))
        self._normalized = centered * self._spread(self._factor)
        y = self._normalized * self._spread(scale) + self._spread(offset)
        n = tf.cast(tf.reduce_prod(tf.gather(tf.shape(x), self._axes)), tf.float32)
        unbiased = variance * (n / tf.maximum(n - 1, 1))
        new = op.get_attr('exponential_avg_factor') if op.type == 'FusedBatchNormV3' else 1.0
        if new != 1:
            mean = moving_mean * (1 - new) + mean * new
            unbiased = moving_variance * (1 - new) + unbiased * new
        self.outputs = {0: tf.cast(y, self._type), 1: mean, 2: unbiased}

    def _spread(self, vector: tf.Tensor) -> tf.Tensor:
        """A number for each channel, as something to be broadcast."""
        return tf.reshape(vector, [-1 if i == self._channels else 1 for i in range(self._rank)])

    def gradients(self, op: tf.Operation) -> dict[int, tf.Tensor]:
        """What a gradient op comes to."""
        with tf.device(op.device):
            dy, scale = tf.cast(op.inputs[0], tf.float32), op.inputs[2]
            along = dy * self._normalized
            means = [self._spread(tf.reduce_mean(t, self._axes)) for t in (dy, along)]
            dx = dy - means[0] - self._normalized * means[1]
            dx *= self._spread(scale * self._factor)
            sums = [tf.reduce_sum(t, self._axes) for t in (along, dy)]
            return {0: tf.cast(dx, self._type), 1: sums[0], 2: sums[1]}
