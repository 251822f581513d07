"""Averages of variables, written after these are and used in evaluation: as on one device."""

import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import adam, away_from_0, predict, spec_of


def averages_for_evaluation(features, labels, mode):
    """Trains on variables and evaluates on their averages."""
    output = predict(features)
    average = tf.train.ExponentialMovingAverage(0.7)
    loss = None if labels is None else tf.losses.mean_squared_error(labels, output)
    if mode != tf.estimator.ModeKeys.TRAIN:
        scaffold = tf.train.Scaffold(saver=tf.train.Saver(average.variables_to_restore()))
        predictions = {'output': output}
        return tf.estimator.EstimatorSpec(mode, predictions, loss, scaffold=scaffold)
    with tf.control_dependencies([adam(loss)]):
        return spec_of(mode, loss, average.apply(tf.trainable_variables()))


def test_evaluates_averages(tmp_path):
    def input_fn():
        x, y = map(np.stack, zip(*away_from_0()))
        return tf.data.Dataset.from_tensor_slices((x, y))

    def run(name, towers):
        made = averages_for_evaluation, tmp_path / name, tf.estimator.RunConfig(tf_random_seed=1)
        estimator = estimator_mgpu.Estimator(*made, devices=towers)
        estimator.train(input_fn)
        predicted = [p['output'] for p in estimator.predict(input_fn)]
        return estimator.evaluate(input_fn)['loss'], predicted

    run('one', 1)
    shutil.copytree(tmp_path / 'one', tmp_path / 'several')
    one, ours = run('one', 1), run('several', 3)
    assert ours[0] == pytest.approx(one[0], rel=1e-5)
    assert [float(p[0]) for p in ours[1]] == pytest.approx([float(p[0]) for p in one[1]], rel=1e-4)
