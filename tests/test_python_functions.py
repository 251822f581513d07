"""Python functions in a model_fn: each is called once a step, with the whole batch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import adam, batches, predict, spec_of
from towers import compare, evaluate, train


def py_func(function, inputs):
    return tf.py_func(function, inputs, tf.float32)


def numpy_function(function, inputs):
    return tf.numpy_function(function, inputs, tf.float32)


def of_batches(x):
    return np.float32(x.max())


@pytest.mark.parametrize('known', [True, False], ids=['known', 'unknown'])
@pytest.mark.parametrize('call', [py_func, numpy_function], ids=lambda f: f.__name__)
def test_metrics_and_predictions(call, known):
    def model_fn(features, labels, mode):
        values = call(of_batches, [features])
        if known:
            values.set_shape([])
        loss = tf.reduce_mean(labels)
        metrics = {'metric': tf.metrics.mean(values)}
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, predictions={'values': values}, eval_metric_ops=metrics
        )

    one, ours = (evaluate(model_fn, batches(7, steps=3), n, static=False) for n in (0, 3))
    np.testing.assert_allclose(ours.metrics['metric'], one.metrics['metric'], rtol=1e-5)
    for found, expected in zip(ours.predictions, one.predictions):
        np.testing.assert_allclose(found['values'], expected['values'], rtol=1e-5)


@pytest.mark.parametrize('call', [py_func, numpy_function], ids=lambda f: f.__name__)
def test_called_once_a_step(call, behavior):
    given = []

    def keep(x):
        given.append(x)
        return x * 2

    def model_fn(features, labels, mode):
        doubled = call(keep, [features])
        doubled.set_shape(features.shape)
        loss = tf.reduce_mean(tf.square(predict(doubled) - labels))
        return spec_of(mode, loss, adam(loss))

    data = batches(7, steps=3)
    train(model_fn, data, 3)
    assert len(given) == 3
    for found, (features, _) in zip(given, data):
        np.testing.assert_array_equal(found, features)


def test_what_is_written():
    def model_fn(features, labels, mode):
        seen = tf.get_variable('seen', [], trainable=False)
        values = py_func(of_batches, [features])
        loss = tf.reduce_mean(tf.square(predict(features) - labels))
        return spec_of(mode, loss, adam(loss), seen.assign(tf.reduce_mean(values)))

    compare(model_fn, batches(7, steps=2), 3)
