"""Gradients that nobody uses: towers don't compute them, and who fetches one has the batch's."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import floats

X, Y = floats(7, 3), floats(7, 1)


def gradients_of(devices, as_prediction=False):
    """Runs a step; returns the names of all ops, and values of gradients.

    The model is `scale * (x @ w)`. The gradient of the scale, which is a constant, is used by
    nobody, if it isn't a prediction.
    """

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [3, 1], initializer=tf.ones_initializer())
        scale = tf.constant(3.0, name='scale')
        net = tf.multiply(scale, tf.matmul(features, w), name='net')
        loss = tf.reduce_mean(tf.square(net - labels))
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        train_op = optimizer.minimize(loss, tf.train.get_or_create_global_step())
        of_scale = tf.get_default_graph().get_tensor_by_name('gradients/net_grad/Reshape:0')
        predictions = {'gradient': of_scale} if as_prediction else None
        return tf.estimator.EstimatorSpec(
            mode, predictions=predictions, loss=loss, train_op=train_op
        )

    with tf.Graph().as_default() as graph:
        rows = [tf.placeholder_with_default(array, [None, *array.shape[1:]]) for array in (X, Y)]
        spec = estimator_mgpu.replicate(model_fn, devices=devices)(*rows, mode='train')
        names = [op.name for op in graph.get_operations()]
        fetched = 'gradients/net_grad/Reshape:0', 'gradients/net_grad/Mul:0', 'w/read:0'
        if as_prediction:
            fetched = (spec.predictions['gradient'].name,)
        fetched = [name for name in fetched if name[:-2] in names]
        with tf.Session(config=estimator_mgpu.session_config(3)) as session:
            session.run(tf.global_variables_initializer())
            return names, session.run([*fetched, spec.loss])


@pytest.mark.core
def test_nobody_computes_them_unless_they_are_fetched(behavior):
    names, found = gradients_of(3)
    _, expected = gradients_of(1)
    for value, of_one_device in zip(found, expected):
        np.testing.assert_allclose(value, of_one_device, rtol=1e-5)

    of_tower = 'gradients/replicate/tower_2/net_grad'
    assert f'{of_tower}/Mul_1' in names  # The gradient of the product is used, and is sharded.
    assert f'{of_tower}/Mul' not in names and f'{of_tower}/Sum' not in names


def test_a_result_is_used(behavior):
    names, found = gradients_of(3, as_prediction=True)
    _, expected = gradients_of(1, as_prediction=True)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert 'gradients/replicate/tower_2/net_grad/Mul' in names
