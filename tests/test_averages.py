"""Averages, counters and normalisations that are written as a model trains: as on one device."""

import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import adam, away_from_0, batches, of_all_modes, predict, spec_of, step
from towers import compare, compare_modes


def linear(x):
    return tf.layers.dense(x, 1, name='output', reuse=tf.AUTO_REUSE)


def hidden(features):
    return linear(tf.layers.dense(features, 4, tf.nn.tanh))


def averaged(loss):
    """Averages of all variables, after they have changed."""
    average = tf.train.ExponentialMovingAverage(0.9, step())
    with tf.control_dependencies([adam(loss)]):
        return average.apply(tf.trainable_variables())


def test_written_after_gradients(behavior):
    compare_modes(of_all_modes(hidden, averaged), away_from_0, 3)


def normalized(features, write):
    """Divides a matrix by its largest singular value, of which a vector is kept."""
    w = tf.get_variable('w', [3, 4])
    u = tf.get_variable('u', [1, 4], initializer=tf.ones_initializer(), trainable=False)
    v = tf.nn.l2_normalize(tf.matmul(u, w, transpose_b=True))
    new = tf.stop_gradient(tf.nn.l2_normalize(tf.matmul(v, w)))
    new, w = write(u, new, w)
    sigma = tf.matmul(tf.matmul(tf.stop_gradient(v), w), new, transpose_b=True)
    return linear(tf.nn.tanh(tf.matmul(features, w / sigma[0, 0])))


def spectral_norm_by_output(features):
    return normalized(features, lambda u, new, w: (tf.assign(u, new), w))


def spectral_norm_by_dependency(features):
    def write(u, new, w):
        with tf.control_dependencies([tf.assign(u, new)]):
            return new, tf.identity(w)

    return normalized(features, write)


SPECTRAL = [of_all_modes(spectral_norm_by_output), of_all_modes(spectral_norm_by_dependency)]


@pytest.mark.parametrize('model_fn', SPECTRAL, ids=lambda f: f.__name__)
def test_spectral_normalization(model_fn, behavior):
    compare_modes(model_fn, away_from_0, 3)


def examples_seen(features, labels, mode):
    """How many examples there were, counted in the forward pass, sets the learning rate."""
    seen = tf.get_variable('seen', [], tf.int32, tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([tf.assign_add(seen, tf.shape(features)[0])]):
        features = tf.identity(features)
    loss = tf.reduce_mean(tf.square(predict(features) - labels))
    with tf.control_dependencies([loss]):
        rate = 1.0 / (10.0 + tf.cast(seen.read_value(), tf.float32))
    return spec_of(mode, loss, tf.train.GradientDescentOptimizer(rate).minimize(loss, step()))


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_counts_of_examples(static, behavior):
    compare(examples_seen, [(x, y + 2) for x, y in batches(10, 5)], 3, static=static)


def averages_for_evaluation(features, labels, mode):
    """Trains on variables and evaluates on their averages."""
    output = predict(features)
    average = tf.train.ExponentialMovingAverage(0.7)
    if mode == tf.estimator.ModeKeys.PREDICT:
        saver = tf.train.Saver(average.variables_to_restore())
        predictions = {'output': output}
        scaffold = tf.train.Scaffold(saver=saver)
        return tf.estimator.EstimatorSpec(mode, predictions=predictions, scaffold=scaffold)
    loss = tf.losses.mean_squared_error(labels, output)
    if mode == tf.estimator.ModeKeys.EVAL:
        scaffold = tf.train.Scaffold(saver=tf.train.Saver(average.variables_to_restore()))
        return tf.estimator.EstimatorSpec(mode, loss=loss, scaffold=scaffold)
    with tf.control_dependencies([adam(loss)]):
        return spec_of(mode, loss, average.apply(tf.trainable_variables()))


def test_evaluates_averages(tmp_path):
    def input_fn():
        x, y = map(np.stack, zip(*away_from_0()))
        return tf.data.Dataset.from_tensor_slices((x, y))

    def run(name, towers):
        estimator = estimator_mgpu.Estimator(
            averages_for_evaluation,
            str(tmp_path / name),
            tf.estimator.RunConfig(tf_random_seed=1),
            devices=towers,
        )
        estimator.train(input_fn)
        predicted = [p['output'] for p in estimator.predict(input_fn)]
        return estimator.evaluate(input_fn)['loss'], predicted

    run('one', 1)
    shutil.copytree(tmp_path / 'one', tmp_path / 'several')
    one, ours = run('one', 1), run('several', 3)
    assert ours[0] == pytest.approx(one[0], rel=1e-5)
    assert [float(p[0]) for p in ours[1]] == pytest.approx([float(p[0]) for p in one[1]], rel=1e-4)
