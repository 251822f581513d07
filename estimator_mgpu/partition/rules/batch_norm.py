"""Fused batch normalization in training, by sums that can be divided.

A fused op normalizes by the statistics of all that it's given. Here they become ordinary sums, and
are given to an op that only applies them. The op itself stays, for whoever fetches it.

The gradients are those of Ioffe & Szegedy (2015), section 3, with n entries a channel:

    dx = scale * rsqrt(variance + epsilon) * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n)

The first term is the gradient where statistics are given; the others normalize x.
"""

from __future__ import annotations

import functools

import tensorflow.compat.v1 as tf

from estimator_mgpu import private

_FORWARD = ('FusedBatchNorm', 'FusedBatchNormV2', 'FusedBatchNormV3')
_BACKWARD = tuple(f'{t[:14]}Grad{t[14:]}' for t in _FORWARD)


def expand(graph: tf.Graph) -> dict[str, tf.Tensor]:
    """Lets whoever uses a fused op's outputs use sums; not in loops or of unknown rank.

    Returns, by the names of outputs, what is used in place of ops that nothing else needs then.
    """
    replaced: dict[str, tf.Tensor] = {}
    for op in graph.get_operations():
        trains = op.type in _FORWARD and op.get_attr('is_training')
        if not trains or op.inputs[0].shape.rank is None or private.in_control_flow(op):
            continue
        users = [u for u in op.outputs[3].consumers() if u.type in _BACKWARD]
        with tf.control_dependencies(None), tf.device(op.device):
            with tf.name_scope(None), tf.name_scope(f'{op.name}/sums'):
                forward = _Forward(op)
                gradients = [(user, forward.gradients(user)) for user in users]
        for fused, outputs in [(op, forward.outputs), *gradients]:
            private.replace(fused, outputs, outputs[0].op)
            others = {u for t in fused.outputs for u in t.consumers()} - {*users}
            if not any(map(private.followers, others)):
                replaced.update((fused.outputs[i].name, t) for i, t in outputs.items())
    return replaced


class _Forward:
    """A normalization by sums."""

    def __init__(self, op: tf.Operation):
        x, scale, offset, *moving = op.inputs
        self._attrs = {name: op.get_attr(name) for name in ('epsilon', 'data_format')}
        last = self._attrs['data_format'] in (b'NHWC', b'NDHWC')
        channels = x.shape.rank - 1 if last else 1
        x = tf.cast(x, tf.float32)
        axes = [i for i in range(x.shape.rank) if i != channels]
        self._n = tf.cast(tf.reduce_prod(tf.gather(tf.shape(x), axes)), tf.float32)
        total = functools.partial(tf.raw_ops.BiasAddGrad, data_format='NHWC' if last else 'NCHW')
        mean = total(out_backprop=x) / self._n
        spread = tf.reshape(mean, [-1] + [1] * (x.shape.rank - 1 - channels))
        variance = total(out_backprop=tf.squared_difference(x, spread)) / self._n
        self._statistics = mean, variance
        # Identities: all that depends on what is differentiated by is looked at.
        self._inputs = [tf.identity(t) for t in (x, scale, offset)]
        self._y = self._apply(*self._inputs)
        unbiased = variance * (self._n / tf.maximum(self._n - 1, 1))
        new = op.get_attr('exponential_avg_factor') if op.type == 'FusedBatchNormV3' else 1.0
        if new != 1:
            mean = moving[0] * (1 - new) + mean * new
            unbiased = moving[1] * (1 - new) + unbiased * new
        self.outputs = {0: tf.cast(self._y, op.inputs[0].dtype), 1: mean, 2: unbiased}

    def _apply(self, x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
        """(x - mean) * rsqrt(variance + epsilon) * scale + offset."""
        mean, variance = self._statistics
        given = dict(x=x, scale=scale, offset=offset, mean=mean, variance=variance)
        return tf.raw_ops.FusedBatchNormV3(**given, **self._attrs, is_training=False).y

    def gradients(self, op: tf.Operation) -> dict[int, tf.Tensor]:
        """What a gradient op comes to."""
        with tf.device(op.device):
            dx, *sums = tf.gradients(self._y, self._inputs, tf.cast(op.inputs[0], tf.float32))
            by = self._inputs[1] * tf.rsqrt(self._statistics[1] + self._attrs['epsilon']) / self._n
            dx -= self._apply(self._inputs[0], *(by * total for total in sums))
            return {0: tf.cast(dx, op.inputs[0].dtype), 1: sums[0], 2: sums[1]}
