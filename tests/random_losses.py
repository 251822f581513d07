"""Losses that random models are trained on: sums and means over rows of all kinds, in float64."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow.compat.v1 as tf


class Labels(NamedTuple):
    """What losses and metrics compare an output with.

    Attributes:
      targets: rows of numbers around 4, away from what is predicted.
      mask: 1 or 0 a row, of shape [rows, 1]; 1 for the first of a batch.
      weights: positive numbers, of shape [rows, 1].
      classes: 1 or 0 a row, int32 of shape [rows].
    """

    targets: tf.Tensor
    mask: tf.Tensor
    weights: tf.Tensor
    classes: tf.Tensor

    @classmethod
    def of(cls, labels: tf.Tensor) -> Labels:
        first = labels[:, :1]
        mask = tf.cast(first > 4, tf.float64)
        classes = tf.cast(labels[:, 0] > 4.2, tf.int32)
        # By a number that no shard has rows.
        return cls(labels, mask, tf.abs(first) / 4.3, classes)


def squares(y, p):
    return tf.square(y.targets - p)


def per_row(y, p):
    return tf.reduce_mean(squares(y, p), 1)


def as_float(count):
    return tf.cast(count, tf.float64)


def masked_mean(y, p):
    return tf.reduce_sum(y.mask[:, 0] * per_row(y, p)) / (tf.reduce_sum(y.mask) + 1e-8)


def weighted_mean(y, p):
    return tf.reduce_sum(y.weights * squares(y, p)) / tf.reduce_sum(y.weights)


def boolean_mask(y, p):
    return tf.boolean_mask(per_row(y, p), y.mask[:, 0] > 0)


def gathered(y, p):
    return tf.gather_nd(squares(y, p), tf.where(tf.equal(y.classes, 0) | (y.mask[:, 0] > 0)))


def cross_entropy(y, p):
    logits = tf.concat([p, -p], 1)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y.classes, logits=logits)


def keras(reduction):
    def loss(y, p):
        return tf.cast(
            tf.keras.losses.MeanSquaredError(reduction=reduction)(y.targets, p), tf.float64
        )

    return loss


LOSSES = {
    'mean': lambda y, p: tf.reduce_mean(squares(y, p)),
    'sum': lambda y, p: tf.reduce_sum(squares(y, p)),
    'mean of sums': lambda y, p: tf.reduce_mean(tf.reduce_sum(squares(y, p), 1)),
    'sum of means': lambda y, p: tf.reduce_sum(per_row(y, p)),
    'columns first': lambda y, p: tf.reduce_sum(tf.reduce_mean(squares(y, p), 0)),
    'columns first, sum': lambda y, p: tf.reduce_mean(tf.reduce_sum(squares(y, p), 0)),
    'sum by tf.shape': lambda y, p: tf.reduce_sum(squares(y, p)) / as_float(tf.shape(p)[0]),
    'sum by tf.size': lambda y, p: tf.reduce_sum(squares(y, p)) / as_float(tf.size(p)),
    'sum by a number': lambda y, p: tf.reduce_sum(squares(y, p)) / 23,
    'mean times rows': lambda y, p: tf.reduce_mean(per_row(y, p)) * as_float(tf.shape(p)[0]),
    'scaled': lambda y, p: (
        0.3 * tf.reduce_mean(per_row(y, p)) + 0.05 * tf.reduce_sum(squares(y, p))
    ),
    'masked mean': masked_mean,
    'weighted mean': weighted_mean,
    'mean by mean': lambda y, p: (
        tf.reduce_mean(y.weights * squares(y, p)) / tf.reduce_mean(y.weights)
    ),
    'mask mean': lambda y, p: tf.reduce_mean(boolean_mask(y, p)),
    'mask sum': lambda y, p: tf.reduce_sum(boolean_mask(y, p)),
    'gathered mean': lambda y, p: tf.reduce_mean(gathered(y, p)),
    'root': lambda y, p: tf.sqrt(tf.reduce_mean(squares(y, p))),
    'norm': lambda y, p: tf.norm(y.targets - p),
    'log': lambda y, p: tf.log(tf.reduce_mean(tf.exp(0.1 * per_row(y, p)))),
    'l2_loss': lambda y, p: tf.nn.l2_loss(y.targets - p),
    'absolute': lambda y, p: tf.reduce_mean(tf.abs(y.targets - p)),
    'softmax': lambda y, p: tf.reduce_mean(cross_entropy(y, p)),
    'softmax sum': lambda y, p: tf.reduce_sum(cross_entropy(y, p) * y.weights[:, 0]),
    'where': lambda y, p: tf.reduce_mean(tf.where(y.classes > 0, per_row(y, p), y.targets[:, 0])),
    'stacked': lambda y, p: tf.reduce_sum(
        tf.stack([tf.reduce_mean(squares(y, p)), tf.reduce_sum(p * p)]) * [0.3, 0.05]
    ),
    'keras mean': keras('sum_over_batch_size'),
    'keras sum': keras('sum'),
}

TF_LOSSES = {
    'squared': lambda y, p, **o: tf.losses.mean_squared_error(y.targets, p, **o),
    'absolute': lambda y, p, **o: tf.losses.absolute_difference(y.targets, p, **o),
    'huber': lambda y, p, **o: tf.losses.huber_loss(y.targets, p, delta=0.5, **o),
    'sigmoid': lambda y, p, **o: tf.losses.sigmoid_cross_entropy(y.classes[:, None], p[:, :1], **o),
    'log': lambda y, p, **o: tf.losses.log_loss(y.classes[:, None], tf.sigmoid(p[:, :1]), **o),
    'softmax': lambda y, p, **o: tf.losses.softmax_cross_entropy(
        tf.one_hot(y.classes, 2), tf.concat([p[:, :1], 1 - p[:, :1]], 1), **_as_vector(o)
    ),
    'sparse softmax': lambda y, p, **o: tf.losses.sparse_softmax_cross_entropy(
        y.classes, tf.concat([p, -p], 1), **_as_vector(o)
    ),
    'rows': lambda y, p, **o: tf.losses.compute_weighted_loss(per_row(y, p), **_as_vector(o)),
}

WEIGHTS = {
    'one': lambda y: 1.0,
    'half': lambda y: 0.5,
    'mask': lambda y: y.mask,
    'weights': lambda y: y.weights,
}


def _as_vector(options):
    weights = options['weights']
    return {**options, 'weights': weights if isinstance(weights, float) else weights[:, 0]}


def tf_loss(y: Labels, p: tf.Tensor, name: str, reduction: str, weights: str) -> tf.Tensor:
    """Returns a loss of tf.losses, computed in float32."""
    return TF_LOSSES[name](y, p, weights=WEIGHTS[weights](y), reduction=reduction)
