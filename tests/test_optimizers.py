"""Every optimizer, and every way to use one, gives the variables and slots of one device."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import batches, regression, spec_of, step, with_loss
from towers import compare


class DecayingSGD(tf.train.GradientDescentOptimizer):
    """Overrides apply_gradients and assigns by itself, as BERT's AdamWeightDecay does."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        assignments = []
        for grad, variable in grads_and_vars:
            momentum = tf.get_variable(
                variable.op.name + '/momentum',
                variable.shape.as_list(),
                variable.dtype.base_dtype,
                tf.zeros_initializer(),
                trainable=False,
            )
            new = 0.9 * momentum + grad
            assignments += [momentum.assign(new), variable.assign(variable * 0.99 - 0.1 * new)]
        if global_step is not None:
            assignments.append(global_step.assign_add(1))
        return tf.group(*assignments, name=name)


OPTIMIZERS = {
    'sgd': lambda: tf.train.GradientDescentOptimizer(0.1),
    'momentum': lambda: tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    'adam': lambda: tf.train.AdamOptimizer(0.05, epsilon=1e-3),
    'adagrad': lambda: tf.train.AdagradOptimizer(0.1),
    'adadelta': lambda: tf.train.AdadeltaOptimizer(0.5, epsilon=1e-3),
    'adagrad_da': lambda: tf.train.AdagradDAOptimizer(0.1, step()),
    'ftrl': lambda: tf.train.FtrlOptimizer(0.1, l1_regularization_strength=1e-3),
    'proximal_adagrad': lambda: tf.train.ProximalAdagradOptimizer(0.1),
    'proximal_sgd': lambda: tf.train.ProximalGradientDescentOptimizer(0.1),
    'rmsprop': lambda: tf.train.RMSPropOptimizer(0.01, momentum=0.5, centered=True, epsilon=1e-2),
    'own': lambda: DecayingSGD(0.1),
}


@pytest.mark.parametrize('optimizer', OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizer(optimizer):
    model_fn = regression(lambda loss: optimizer().minimize(loss, step()))
    ours, _ = compare(model_fn, batches(24), 3)
    assert ours.values['global_step'] == 10


@pytest.mark.parametrize('towers', [2, 7], ids='towers={}'.format)
@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_float64_is_exact_to_its_rounding(towers, static):
    # Not tf.losses, which compute in float32 whatever they are given.
    model_fn = with_loss(lambda labels, output: tf.reduce_mean(tf.square(output - labels)))
    compare(model_fn, batches(24, dtype=np.float64), towers, static=static, rtol=1e-12)


def colocated(loss):
    optimizer = tf.train.AdamOptimizer(0.05)
    return optimizer.minimize(loss, step(), colocate_gradients_with_ops=True)


def two_optimizers(loss):
    """Of one class, each for a part of the variables, on losses that share the forward pass."""
    first = tf.train.AdamOptimizer(0.05).minimize(loss, var_list=tf.trainable_variables('net/w'))
    rest = tf.trainable_variables('net/[bv]')
    return tf.group(first, tf.train.AdamOptimizer(0.01).minimize(loss * 2, step(), rest))


USES = [
    colocated,
    two_optimizers,
]


@pytest.mark.parametrize('use', USES, ids=lambda f: f.__name__)
def test_use(use):
    compare(regression(use), batches(), 5)


def test_sparse_none_and_mixed_gradients():
    """Sparse stays sparse, None stays None, and each dtype is reduced in its own."""
    seen = {}

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', [6, 3])
        dense = tf.get_variable('dense', [3, 1], tf.float64)
        half = tf.get_variable('half', [3, 1], tf.float16)
        tf.get_variable('unused', [2])
        ids = tf.cast(tf.abs(features) * 10, tf.int32) % 6
        rows = tf.reduce_sum(tf.gather(table, ids), 1)
        output = tf.cast(tf.matmul(tf.cast(rows, tf.float64), dense), tf.float32)
        output += tf.cast(tf.matmul(tf.cast(features, tf.float16), half), tf.float32)
        loss = tf.losses.mean_squared_error(labels, output)
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        grads = optimizer.compute_gradients(loss)
        seen.update({v.op.name: g for g, v in grads})
        return spec_of(mode, loss, optimizer.apply_gradients(grads, step()))

    # float16 has 11 bits, and towers round their shares to it: 2**-10 relative.
    compare(model_fn, batches(steps=3), 3, rtol=2e-3)
    assert isinstance(seen['table'], tf.IndexedSlices)
    assert seen['unused'] is None
    assert seen['dense'].dtype == tf.float64
    assert seen['half'].dtype == tf.float16
