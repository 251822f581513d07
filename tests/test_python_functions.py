"""Python functions in a model_fn: each is called once a step, with the whole batch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import adam, batches, predict, spec_of
from towers import train


@pytest.mark.parametrize('call', [tf.py_func, tf.numpy_function], ids=lambda f: f.__name__)
def test_called_once_a_step(call, behavior):
    given = []

    def keep(x):
        given.append(x)
        return x * 2

    def model_fn(features, labels, mode):
        doubled = call(keep, [features], tf.float32)
        doubled.set_shape(features.shape)
        loss = tf.reduce_mean(tf.square(predict(doubled) - labels))
        return spec_of(mode, loss, adam(loss))

    data = batches(7, steps=3)
    train(model_fn, data, 3)
    np.testing.assert_array_equal(given, [features for features, _ in data])
