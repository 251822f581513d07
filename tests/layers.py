"""Layers, and model_fns of losses that gradients stand in."""

import tensorflow.compat.v1 as tf

from models import adam, spec_of


def mean_square(labels, output):
    return tf.reduce_mean(tf.square(output - labels))


def of_losses(losses):
    """Returns a model_fn of all modes with what `losses(features, labels)` gives.

    That's the loss, the output and, if it isn't Adam's, the train_op.
    """

    def model_fn(features, labels, mode):
        if mode == tf.estimator.ModeKeys.PREDICT:
            labels = features[:, :1]
        loss, output, *train_op = losses(features, labels)
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions={'output': output})
        if mode == tf.estimator.ModeKeys.TRAIN:
            return spec_of(mode, loss, *(train_op or [adam(loss)]))
        metrics = {'error': tf.metrics.mean_absolute_error(labels, output)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    model_fn.__name__ = losses.__name__
    return model_fn


def hidden_layer(features, name='hidden', size=4):
    w = tf.get_variable(name, [features.shape[1], size], use_resource=True)
    return tf.nn.tanh(tf.matmul(features, w))


def output_layer(hidden, name='output'):
    w = tf.get_variable(name, [hidden.shape[1], 1], use_resource=True)
    return tf.matmul(hidden, w)
