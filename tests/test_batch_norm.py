"""Batch normalization: each tower normalizes by its shard; the moving averages are over all."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import floats, spec_of, step
from towers import assert_close, evaluate, train

MOMENTUM = 0.8


def images(*sizes, seed=0):
    return [
        (floats(rows, 4, 4, 3, seed=seed + i) + 1, floats(rows, 1, seed=100 + i) + 2)
        for i, rows in enumerate(sizes)
    ]


def tf_layer(x, **options):
    return tf.layers.batch_normalization(
        x, momentum=MOMENTUM, training=True, name='norm', **options
    )


def fused(x):
    return tf_layer(x, fused=True)


def unfused(x):
    return tf_layer(x, fused=False)


def of_vectors(x):
    return tf_layer(tf.reduce_mean(x, [1, 2]))


def by_placeholder(x):
    training = tf.placeholder_with_default(True, [])
    return tf.layers.batch_normalization(x, momentum=MOMENTUM, training=training, name='norm')


def keras_layer(x):
    layer = tf.keras.layers.BatchNormalization(momentum=MOMENTUM, name='norm')
    output = layer(x, training=True)
    for update in layer.updates or layer.get_updates_for(x):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return output


def by_hand(x):
    """Averages of tensors, as old code keeps them, in the branch of a `cond`."""
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    average = tf.get_variable('norm/moving_mean', [3], initializer=tf.zeros_initializer())
    other = tf.get_variable('norm/moving_variance', [3], initializer=tf.ones_initializer())
    for variable, value in ((average, mean), (other, variance)):
        update = variable.assign(variable * MOMENTUM + value * (1 - MOMENTUM))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def in_a_branch(x):
    """Averages of tensors, kept in the branch of a `cond`, as old code does."""
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    average = tf.get_variable('norm/moving_mean', [3], initializer=tf.zeros_initializer())

    def update():
        return average.assign(average * MOMENTUM + mean * (1 - MOMENTUM))

    update = tf.cond(tf.equal(step() % 2, 0), update, lambda: tf.identity(average))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


def in_a_used_branch(x):
    """A `cond` keeps the averages and gives moments, or gives averages, as old code does, too."""
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    average = tf.get_variable('norm/moving_mean', [3], initializer=tf.zeros_initializer())
    other = tf.get_variable('norm/moving_variance', [3], initializer=tf.ones_initializer())

    def updated():
        updates = [
            variable.assign(variable * MOMENTUM + value * (1 - MOMENTUM))
            for variable, value in ((average, mean), (other, variance))
        ]
        with tf.control_dependencies(updates):
            return tf.identity(mean), tf.identity(variance)

    training = tf.placeholder_with_default(True, [])
    moments = tf.cond(training, updated, lambda: (tf.identity(average), tf.identity(other)))
    return tf.nn.batch_normalization(x, *moments, None, None, 1e-3)


def in_a_function(x):
    """A function keeps the averages and gives what is normalized by moments."""
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    average = tf.get_variable(
        'norm/moving_mean', [3], initializer=tf.zeros_initializer(), use_resource=True
    )

    @tf.function
    def updated(mean, variance):
        average.assign(average * MOMENTUM + mean * (1 - MOMENTUM))
        return mean, tf.sqrt(variance + 1e-3)

    mean, deviation = updated(mean, variance)
    return (x - mean) / deviation


NORMS = [
    fused,
    unfused,
    of_vectors,
    by_placeholder,
    keras_layer,
    by_hand,
    in_a_branch,
    in_a_used_branch,
    in_a_function,
]


def model_of(norm):
    def model_fn(features, labels, mode):
        output = tf.layers.dense(tf.layers.flatten(norm(features)), 1)
        loss = tf.losses.mean_squared_error(labels, output)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train_op = tf.train.GradientDescentOptimizer(0.0).minimize(loss, step())
        return spec_of(mode, loss, train_op)

    return model_fn


@pytest.mark.core
@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('norm', NORMS, ids=lambda f: f.__name__)
def test_moving_mean_is_that_of_one_device(norm, towers, static, behavior, caplog):
    batches = images(12, 12, 12) if static else images(12, 10, 2)
    one = train(model_of(norm), batches, 0, static=static)
    ours = train(model_of(norm), batches, towers, static=static)
    found, expected = (run.values['norm/moving_mean'] for run in (ours, one))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.abs(expected).min() > 0.1
    assert 'of the first shard only' not in caplog.text
    if norm not in (by_placeholder, in_a_branch, in_a_used_branch):
        assert 'happens once a step' not in caplog.text


def by_averages(features, labels, mode):
    """The recipe of many: ExponentialMovingAverage in a `cond` whose results are used."""
    training = tf.placeholder_with_default(mode == tf.estimator.ModeKeys.TRAIN, [])
    x = features
    for name in ('first', 'second'):
        with tf.variable_scope(name):
            mean, variance = tf.nn.moments(x, [0, 1, 2])
            averages = tf.train.ExponentialMovingAverage(MOMENTUM)

            def updated(mean=mean, variance=variance, averages=averages):
                with tf.control_dependencies([averages.apply([mean, variance])]):
                    return tf.identity(mean), tf.identity(variance)

            def kept(mean=mean, variance=variance, averages=averages):
                return averages.average(mean), averages.average(variance)

            x = tf.nn.batch_normalization(x, *tf.cond(training, updated, kept), None, None, 1e-3)
    output = tf.layers.dense(tf.layers.flatten(x), 1)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=output)
    loss = tf.losses.mean_squared_error(labels, output)
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode, loss=loss, predictions=output)
    return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.0).minimize(loss, step()))


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_averages_in_a_branch_that_is_used(static, behavior, caplog):
    batches = images(12, 12) if static else images(12, 10, 2)
    one = train(by_averages, batches, 0, static=static)
    ours = train(by_averages, batches, 3, static=static)
    assert set(ours.values) == set(one.values)
    [name] = [name for name in one.values if 'first/moments/Squeeze/' in name]
    np.testing.assert_allclose(ours.values[name], one.values[name], rtol=1e-6)
    assert np.abs(one.values[name]).min() > 0.1
    assert 'of the first shard only' not in caplog.text
    for mode in (tf.estimator.ModeKeys.EVAL, tf.estimator.ModeKeys.PREDICT):
        found = [
            evaluate(by_averages, batches, n, mode=mode, values=one.values, static=static)
            for n in (0, 3)
        ]
        assert_close(found[1], found[0], 1e-5)


@pytest.mark.parametrize('weight', [None, lambda x, y: tf.reduce_sum(y)], ids=['rows', 'units'])
@pytest.mark.parametrize('fused', [True, False], ids=['fused', 'unfused'])
def test_moving_variance_is_an_average_weighted_by_rows(fused, weight):
    def model_fn(features, labels, mode):
        x = tf.layers.batch_normalization(
            features, momentum=0.5, fused=fused, training=True, name='norm'
        )
        loss = tf.reduce_mean(tf.square(x - labels[:, None, None]))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss))

    features = np.reshape([0.0, 2.0, 7.0, 8.0, 12.0], [5, 1, 1, 1]).astype('float32')
    labels = np.ones([5, 1], 'float32')
    run = train(model_fn, [(features, labels)], 2, static=False, loss_weight=weight)
    # Shards 0, 2, 7 and 8, 12: means 3 and 10, variances 26/3 and 4, or 13 and 8 with Bessel's
    # correction, which fused ones have. Variances start from 1, means from 0.
    variance = (3 * 13 + 2 * 8) / 5 if fused else (3 * 26 / 3 + 2 * 4) / 5
    np.testing.assert_allclose(run.values['norm/moving_variance'], [(1 + variance) / 2], rtol=1e-6)
    np.testing.assert_allclose(run.values['norm/moving_mean'], [29 / 5 / 2], rtol=1e-6)
