"""Half precision and loss scaling: several devices give the variables of one."""

import pytest
import tensorflow.compat.v1 as tf

from layers import mean_square, of_losses
from models import away_from_0, of_all_modes, predict, step
from towers import compare, compare_modes, train


def scaled(make_scale, name):
    """A model_fn whose gradients aren't applied where they overflow."""

    def train_op(loss):
        momentum = tf.train.MomentumOptimizer(0.05, 0.9)
        optimizer = tf.train.experimental.MixedPrecisionLossScaleOptimizer(momentum, make_scale())
        return optimizer.minimize(loss, step())

    return of_all_modes(predict, train_op, name)


FIXED = scaled(lambda: tf.train.experimental.FixedLossScale(64), 'fixed')
# The first overflow; then the scale falls, and grows after 2 steps that don't.
DYNAMIC = scaled(lambda: tf.train.experimental.DynamicLossScale(2.0**127, 2), 'dynamic')


@pytest.mark.parametrize('model_fn', [FIXED, DYNAMIC], ids=lambda f: f.__name__)
def test_loss_scale(model_fn, behavior):
    compare_modes(model_fn, away_from_0, 3)


def test_scale_falls_and_grows():
    """Else the comparison above would show less than it's meant to."""
    values = train(DYNAMIC, away_from_0(), 3, steps=0).values
    [name] = [name for name in values if name.endswith('current_loss_scale')]
    scales = [
        train(DYNAMIC, away_from_0(), 3, values=values, steps=steps).values[name]
        for steps in (0, 1, 2, 3, 4, 5, 6)
    ]
    assert scales[1] < scales[0]
    assert any(after > before for before, after in zip(scales, scales[1:]))


def masters(getter, name, *args, dtype=None, trainable=True, **kwargs):
    """A custom getter: float32 variables for those of half precision."""
    variable = getter(name, *args, dtype=tf.float32, trainable=trainable, **kwargs)
    return variable if dtype in (None, tf.float32) else tf.cast(variable, dtype)


def in_half(dtype):
    """Returns a model_fn with a forward pass in `dtype`, variables and loss in float32."""

    def losses(features, labels):
        with tf.variable_scope('model', custom_getter=masters):
            output = tf.cast(predict(tf.cast(features, dtype)), tf.float32)
        loss = mean_square(labels, output)
        optimizer = tf.train.GradientDescentOptimizer(0.01)
        pairs = [(g / 64, v) for g, v in optimizer.compute_gradients(loss * 64)]
        return loss, output, optimizer.apply_gradients(pairs, step())

    return of_losses(losses)


# A number has 11 or 8 bits. To these, a tower rounds its share of a gradient, one device the sum.
@pytest.mark.parametrize(
    ('dtype', 'rtol'), [(tf.float16, 2**-10), (tf.bfloat16, 2**-7)], ids=['float16', 'bfloat16']
)
def test_half_precision(dtype, rtol, behavior):
    compare_modes(in_half(dtype), away_from_0, 3, rtol=rtol)


def keras_layers(policy):
    """Returns a model_fn whose layers compute as Keras' policy says, with float32 variables."""

    def losses(features, labels):
        layers = tf.keras.layers
        hidden = layers.Dense(4, 'tanh', dtype=policy)(features)
        output = tf.cast(layers.Dense(1, dtype=policy)(hidden), tf.float32)
        assert policy == f'mixed_{tf.as_dtype(hidden.dtype).name}'
        loss = mean_square(labels, output)
        optimizer = tf.train.GradientDescentOptimizer(0.01)
        return loss, output, optimizer.minimize(loss, step())

    return of_losses(losses)


@pytest.mark.parametrize(
    ('policy', 'rtol'),
    [('mixed_float16', 2**-10), ('mixed_bfloat16', 2**-7)],
)
def test_keras_policy(policy, rtol):
    compare(keras_layers(policy), away_from_0(), 3, rtol=rtol)
    compare(keras_layers(policy), away_from_0(), 2, rtol=rtol, microbatches=2)
