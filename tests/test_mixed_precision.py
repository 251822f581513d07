"""Half precision and loss scaling: several devices give the variables of one."""

import pytest
import tensorflow.compat.v1 as tf

from layers import mean_square, of_losses
from models import away_from_0, of_all_modes, predict, step
from towers import compare_modes, train


def momentum():
    return tf.train.MomentumOptimizer(0.05, 0.9)


def flag_finite(grads):
    return tf.reduce_all([tf.reduce_all(tf.is_finite(g)) for g in grads])


class Scaling(tf.train.Optimizer):
    """Around another: a scale that falls where gradients overflow, and else grows."""

    def __init__(self, optimizer, first, limit):
        super().__init__(False, 'Scaling')
        self._optimizer = optimizer
        self._limit = limit
        options = {'trainable': False, 'use_resource': True}
        self._scale = tf.get_variable('scale', initializer=tf.constant(first), **options)
        self._good = tf.get_variable('good_steps', initializer=tf.constant(0), **options)

    def compute_gradients(self, loss, *args, **kwargs):
        pairs = self._optimizer.compute_gradients(loss * self._scale, *args, **kwargs)
        # As if of float16, which overflows.
        over = [tf.where(tf.abs(g) > self._limit, g / 0.0, g) for g, _ in pairs]
        return [(g / self._scale, v) for g, (_, v) in zip(over, pairs)]

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = list(grads_and_vars)
        finite = flag_finite([g for g, _ in pairs])

        def good():
            return self._optimizer.apply_gradients(pairs)

        apply = tf.cond(finite, good, tf.no_op)
        with tf.control_dependencies([apply]):
            count = tf.where(finite, self._good + 1, 0)
            grown = tf.equal(count, 2)
            factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
            updates = [
                self._scale.assign(self._scale * factor),
                self._good.assign(tf.where(grown, 0, count)),
            ]
        with tf.control_dependencies(updates):
            return tf.assign_add(global_step, 1, name=name)


def dynamic(loss):
    return Scaling(momentum(), 64.0, 64.0).minimize(loss, step())


def loss_scale_optimizer(scale):
    """TensorFlow's own, where there is one."""

    def train_op(loss):
        optimizer = tf.train.experimental.MixedPrecisionLossScaleOptimizer(momentum(), scale())
        return optimizer.minimize(loss, step())

    return train_op


TRAINS = {'dynamic': dynamic}
if hasattr(tf.train.experimental, 'MixedPrecisionLossScaleOptimizer'):
    fixed = lambda: tf.train.experimental.FixedLossScale(64)  # noqa: E731
    moving = lambda: tf.train.experimental.DynamicLossScale(64.0, 3)  # noqa: E731
    TRAINS['loss_scale_fixed'] = loss_scale_optimizer(fixed)
    TRAINS['loss_scale_dynamic'] = loss_scale_optimizer(moving)


def models_of(trains):
    return [of_all_modes(predict, train, name) for name, train in trains.items()]


@pytest.mark.parametrize('model_fn', models_of(TRAINS), ids=lambda f: f.__name__)
def test_loss_scale(model_fn, behavior):
    compare_modes(model_fn, away_from_0, 3)


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

    losses.__name__ = dtype.name
    return of_losses(losses)


# A number has 11 or 8 bits. To these, a tower rounds its share of a gradient, one device the sum.
HALVES = [(in_half(tf.float16), 2**-10), (in_half(tf.bfloat16), 2**-7)]


@pytest.mark.parametrize(('model_fn', 'rtol'), HALVES, ids=['float16', 'bfloat16'])
def test_half_precision(model_fn, rtol, behavior):
    compare_modes(model_fn, away_from_0, 3, rtol=rtol)


def test_scale_falls_and_grows():
    """Else the comparison above would show less than it's meant to."""
    model_fn = of_all_modes(predict, dynamic)
    values = train(model_fn, away_from_0(), 3, steps=0).values
    scales = [
        train(model_fn, away_from_0(), 3, values=values, steps=steps).values['scale']
        for steps in (1, 10)
    ]
    assert scales[0] < values['scale']
    assert scales[1] > scales[0]
