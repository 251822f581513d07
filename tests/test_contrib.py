"""Code that was written for tf.contrib.estimator.replicate_model_fn runs as it is."""

import functools
import inspect

import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu import TowerOptimizer, replicate_model_fn, session_config
from models import batches, floats, predict, with_loss
from towers import assert_close, compare

REDUCTION = tf.losses.Reduction
FEATURES, LABELS = floats(36, 3), floats(36, 1, seed=1)


def input_fn():
    return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).batch(12).repeat()


def momentum(rate=0.05):
    return tf.train.MomentumOptimizer(rate, 0.9)


OPTIMIZERS = {
    'wrapped': lambda rate: TowerOptimizer(momentum(rate)),
    'of a function': lambda rate: TowerOptimizer(lambda: momentum(rate)),
    'plain': momentum,
}


def trained(optimizer_of, towers):
    """The variables by name after 4 steps, by contrib's two rules: variables are reused, too."""

    def model_fn(features, labels, mode, params, config):
        assert params == {'rate': 0.05} and config.tf_random_seed == 7
        with tf.variable_scope('', reuse=tf.AUTO_REUSE):
            output = predict(features)
        loss = tf.losses.mean_squared_error(labels, output)
        optimizer = optimizer_of(params['rate'])
        train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    config = tf.estimator.RunConfig(session_config=session_config(towers or 1), tf_random_seed=7)
    fn = on_cpus(model_fn, towers) if towers else model_fn
    estimator = tf.estimator.Estimator(fn, config=config, params={'rate': 0.05})
    estimator.train(input_fn, steps=4)
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


def on_cpus(model_fn, devices, **options):
    return replicate_model_fn(model_fn, devices=[f'/cpu:{i}' for i in range(devices)], **options)


@functools.cache
def trained_without_contrib(behavior):
    del behavior  # Tells the results of each from those of the other.
    return trained(momentum, 0)


@pytest.mark.core
@pytest.mark.parametrize('optimizer', OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize('towers', [0, 1, 3], ids='towers={}'.format)
def test_as_without_contrib(towers, optimizer, behavior):
    """Also where nothing is replicated, and `TowerOptimizer` is what it wraps."""
    assert_close(trained(optimizer, towers), trained_without_contrib(behavior), 1e-5)


def test_signatures_are_those_of_contrib():
    parameters = inspect.signature(replicate_model_fn).parameters
    assert list(parameters) == ['model_fn', 'loss_reduction', 'devices']
    assert parameters['loss_reduction'].default == REDUCTION.SUM_BY_NONZERO_WEIGHTS
    assert parameters['devices'].default is None
    model_fn = replicate_model_fn(with_loss(total), devices=['/cpu:0'])
    names = ['features', 'labels', 'mode', 'params', 'config']
    parameters = inspect.signature(model_fn).parameters
    assert list(parameters) == names
    assert parameters['params'].default is parameters['config'].default is None


def total(labels, output):
    return tf.reduce_sum(tf.square(output - labels)) / 100


@pytest.mark.parametrize('reduction', [REDUCTION.MEAN, REDUCTION.SUM])
def test_reductions_change_nothing(reduction):
    """contrib averaged a sum, too, so that its gradients were too small by the devices."""
    compare(with_loss(total), batches(), 3, replicate=on_cpus, loss_reduction=reduction)


def test_params_that_a_model_fn_has_no_use_for(tmp_path):
    config = tf.estimator.RunConfig(session_config=session_config(2))
    model_fn = on_cpus(with_loss(total), 2)
    estimator = tf.estimator.Estimator(model_fn, str(tmp_path), config, params={'rate': 0.05})
    estimator.train(input_fn, steps=1)
