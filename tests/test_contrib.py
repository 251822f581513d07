"""Code that was written for tf.contrib.estimator.replicate_model_fn runs as it is."""

import inspect

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu import TowerOptimizer, replicate_model_fn, session_config
from models import batches, floats, predict, with_loss
from towers import compare

REDUCTION = tf.losses.Reduction
FEATURES, LABELS = floats(36, 3), floats(36, 1, seed=1)


def run_config(towers, **options):
    return tf.estimator.RunConfig(
        session_config=session_config(towers), tf_random_seed=7, **options
    )


def input_fn():
    return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).batch(12).repeat()


def with_optimizer(optimizer_of):
    """A model_fn with contrib's two rules: a TowerOptimizer, and variables that are reused."""

    def model_fn(features, labels, mode, params, config):
        assert params == {'rate': 0.05} and config.tf_random_seed == 7
        with tf.variable_scope('', reuse=tf.AUTO_REUSE):
            output = predict(features)
        loss = tf.losses.mean_squared_error(labels, output)
        optimizer = optimizer_of(params['rate'])
        train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def momentum(rate):
    return tf.train.MomentumOptimizer(rate, 0.9)


def tower_momentum(rate):
    return TowerOptimizer(momentum(rate))


def of_function(rate):
    return TowerOptimizer(optimizer_or_optimizer_fn=lambda: momentum(rate))


def twice(rate):
    return TowerOptimizer(TowerOptimizer(momentum(rate)))


def trained(model_fn, path, towers):
    """The variables by name after 4 steps."""
    estimator = tf.estimator.Estimator(
        model_fn, str(path), run_config(towers), params={'rate': 0.05}
    )
    estimator.train(input_fn, steps=4)
    return {name: estimator.get_variable_value(name) for name in estimator.get_variable_names()}


@pytest.mark.core
@pytest.mark.parametrize('towers', [1, 3], ids='towers={}'.format)
@pytest.mark.parametrize(
    'optimizer', [tower_momentum, of_function, twice, momentum], ids=lambda f: f.__name__
)
def test_as_without_contrib(optimizer, towers, tmp_path, behavior):
    devices = [f'/cpu:{i}' for i in range(towers)]
    one = trained(with_optimizer(momentum), tmp_path / 'one', 1)
    ours = trained(
        replicate_model_fn(with_optimizer(optimizer), devices=devices), tmp_path / 'ours', towers
    )
    assert set(ours) == set(one)
    for name, expected in one.items():
        np.testing.assert_allclose(ours[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize('optimizer', [tower_momentum, of_function], ids=lambda f: f.__name__)
def test_tower_optimizer_where_nothing_is_replicated(optimizer, tmp_path):
    plain, wrapped = (
        trained(with_optimizer(f), tmp_path / f.__name__, 1) for f in (momentum, optimizer)
    )
    assert set(plain) == set(wrapped)
    for name, expected in plain.items():
        np.testing.assert_array_equal(wrapped[name], expected)


def test_signatures_are_those_of_contrib():
    parameters = inspect.signature(replicate_model_fn).parameters
    assert list(parameters) == ['model_fn', 'loss_reduction', 'devices']
    assert parameters['loss_reduction'].default == REDUCTION.SUM_BY_NONZERO_WEIGHTS
    assert parameters['devices'].default is None
    model_fn = replicate_model_fn(with_loss(square), devices=['/cpu:0'])
    names = ['features', 'labels', 'mode', 'params', 'config']
    assert list(inspect.signature(model_fn).parameters) == names


def on_cpus(model_fn, devices, **options):
    return replicate_model_fn(model_fn, devices=[f'/cpu:{i}' for i in range(devices)], **options)


def synchronised(wrap):
    """A linear model, whose variables start from 0."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [3, 1], initializer=tf.zeros_initializer())
        loss = tf.reduce_mean(tf.square(tf.matmul(features, w) - labels))
        inner = tf.train.SyncReplicasOptimizer(momentum(0.05), 1, total_num_replicas=1)
        optimizer = wrap(inner)
        train_op = optimizer.minimize(loss, tf.train.get_global_step())
        hook = optimizer.make_session_run_hook(is_chief=True, num_tokens=0)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[hook])

    return model_fn


def after_4_steps(model_fn, towers):
    """All variables' values; the threads of a SyncReplicasOptimizer don't stop by themselves."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        data = (tf.constant(FEATURES), tf.constant(LABELS))
        spec = model_fn(*data, mode=tf.estimator.ModeKeys.TRAIN)
        values = {v.op.name: v for v in tf.global_variables()}
        creator = tf.train.ChiefSessionCreator(config=session_config(towers))
        with tf.train.MonitoredSession(
            creator, spec.training_hooks, stop_grace_period_secs=1
        ) as session:
            for _ in range(4):
                session.run(spec.train_op)
            return session.run(values)


@pytest.mark.parametrize('towers', [1, 2, 4], ids='towers={}'.format)
def test_around_a_sync_replicas_optimizer(towers):
    """The hook is the inner optimizer's, had from the wrapper; nothing is reduced twice."""
    one = after_4_steps(synchronised(lambda optimizer: optimizer), 1)
    replicated = on_cpus(synchronised(TowerOptimizer), towers)
    ours = after_4_steps(replicated, towers)
    assert {'w', 'w/Momentum', 'global_step'} <= set(one) == set(ours)
    assert one['global_step'] == 4 and np.abs(one['w']).min() > 1e-3
    for name, expected in one.items():
        np.testing.assert_allclose(ours[name], expected, rtol=1e-5, err_msg=name)


def square(labels, output):
    return tf.reduce_mean(tf.square(output - labels))


def total(labels, output):
    return tf.reduce_sum(tf.square(output - labels)) / 100


@pytest.mark.parametrize('reduction', [REDUCTION.MEAN, REDUCTION.SUM])
def test_reductions_change_nothing(reduction):
    """contrib averaged a sum, too, so that its gradients were too small by the devices."""
    compare(with_loss(total), batches(), 3, replicate=on_cpus, loss_reduction=reduction)


@pytest.mark.parametrize('towers', [1, 2], ids='towers={}'.format)
def test_params_that_a_model_fn_has_no_use_for(towers, tmp_path):
    model_fn = on_cpus(with_loss(square), towers)
    estimator = tf.estimator.Estimator(
        model_fn, str(tmp_path), run_config(towers), params={'rate': 0.05}
    )
    estimator.train(input_fn, steps=1)


def test_bad_arguments():
    with pytest.raises(TypeError, match='not a function'):
        replicate_model_fn(None)
    with pytest.raises(TypeError, match='It takes a tf.train.Optimizer'):
        TowerOptimizer(lambda: 0.1)
