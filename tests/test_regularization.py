"""Losses that a model adds to collections, and what's kept in a session only."""

import pytest
import tensorflow.compat.v1 as tf

from models import adam, away_from_0, of_all_modes, predict, spec_of
from towers import compare, compare_modes

TOWERS = pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)


def l2(weights):
    return 0.1 * tf.nn.l2_loss(weights)


def of_kernels(features):
    hidden = tf.layers.dense(features, 4, tf.nn.tanh, kernel_regularizer=l2, bias_regularizer=l2)
    return tf.layers.dense(hidden, 1, kernel_regularizer=tf.keras.regularizers.l1(0.1))


def of_scopes(features):
    with tf.variable_scope('scope', regularizer=l2, partitioner=tf.fixed_size_partitioner(2)):
        w = tf.get_variable('w', [3, 4])
        return tf.layers.dense(tf.nn.tanh(tf.matmul(features, w)), 1)


def of_activities(features):
    """Keras divides what a regularizer sums up by the batch's size."""
    hidden = tf.layers.dense(features, 4, tf.nn.tanh, activity_regularizer=l2)
    return tf.layers.dense(hidden, 1, activity_regularizer=tf.keras.regularizers.l1(0.1))


def in_the_collection(features):
    """A mean over rows, a sum over rows by hand, and one of weights."""
    w = tf.get_variable('w', [3, 4])
    hidden = tf.nn.tanh(tf.matmul(features, w))
    tf.add_to_collection(tf.GraphKeys.LOSSES, 0.1 * tf.reduce_mean(tf.square(hidden)))
    tf.losses.add_loss(0.01 * tf.reduce_sum(tf.abs(hidden)))
    tf.losses.add_loss(0.1 * tf.norm(w))
    return tf.layers.dense(hidden, 1)


def several_losses(features):
    hidden = tf.layers.dense(features, 4, tf.nn.tanh)
    tf.losses.absolute_difference(features[:, :1], hidden[:, :1], weights=0.3)
    tf.losses.huber_loss(features, hidden[:, :3], reduction=tf.losses.Reduction.SUM)
    return tf.layers.dense(hidden, 1)


FORWARD = [of_kernels, of_scopes, of_activities, in_the_collection, several_losses]


@TOWERS
@pytest.mark.parametrize('model_fn', map(of_all_modes, FORWARD), ids=lambda f: f.__name__)
def test_total_loss(model_fn, towers, behavior):
    compare_modes(model_fn, away_from_0, towers)


@pytest.mark.parametrize('model_fn', map(of_all_modes, FORWARD), ids=lambda f: f.__name__)
def test_total_loss_of_unknown_sizes(model_fn):
    compare_modes(model_fn, away_from_0, 3, static=False)


def regularization_loss(features, labels, mode):
    with tf.variable_scope('', regularizer=l2):
        output = predict(features)
    loss = tf.reduce_mean(tf.square(output - labels))
    return spec_of(mode, loss, adam(loss + 0.3 * tf.losses.get_regularization_loss()))


@TOWERS
def test_regularization_that_is_not_reported(towers, behavior):
    compare(regularization_loss, away_from_0(), towers)


def with_local_variables(features, labels, mode):
    """Metrics by hand, of variables that checkpoints don't hold."""
    output = predict(features)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={'output': output})
    loss = tf.reduce_mean(tf.square(output - labels))
    if mode == tf.estimator.ModeKeys.TRAIN:
        return spec_of(mode, loss, adam(loss))
    collections = [tf.GraphKeys.LOCAL_VARIABLES]
    options = {'initializer': tf.zeros_initializer(), 'collections': collections}
    total = tf.get_variable('total', [], trainable=False, use_resource=True, **options)
    most = tf.get_variable('most', [], trainable=False, use_resource=True, **options)
    metrics = {
        'total': (total, tf.assign_add(total, tf.reduce_sum(tf.abs(output)))),
        'most': (most, tf.assign(most, tf.maximum(most, tf.reduce_max(output)))),
    }
    predictions = {'output': output}
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, predictions=predictions, eval_metric_ops=metrics
    )


@TOWERS
def test_local_variables(towers, behavior):
    compare_modes(with_local_variables, away_from_0, towers)
