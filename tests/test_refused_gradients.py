"""`tf.gradients` after the model_fn has returned: an error if it goes through the model."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import floats, sgd, spec_of
from towers import MODES, TRAIN, assert_close, session

pytestmark = pytest.mark.core
X, Y = floats(7, 4), floats(7, 1)
REFUSED = 'after the model_fn had returned, .* Call tf.gradients in the model_fn'


def linear(features, labels, mode):
    w = tf.get_variable('w', [1, 4], initializer=tf.ones_initializer())
    middle = tf.identity(features * w, 'middle')
    loss = tf.reduce_mean(middle)
    train_op = sgd(loss) if mode == TRAIN else None
    return tf.estimator.EstimatorSpec(mode, {'middle': middle}, loss, train_op)


@contextlib.contextmanager
def built(devices=2, mode=TRAIN, **options):
    """A replicated model_fn's EstimatorSpec, and a function that returns what a tensor is."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        replicated = estimator_mgpu.replicate(linear, devices=devices, **options)
        features = tf.placeholder_with_default(X, [None, 4], 'x')
        spec = replicated(features=features, labels=tf.constant(Y), mode=mode)

        def value_of(tensor):
            with session(devices) as sess:
                sess.run(tf.global_variables_initializer())
                return sess.run(tensor)

        yield spec, value_of


class GradientHook(tf.train.SessionRunHook):
    """Takes the gradient of the loss with respect to the weight."""

    def begin(self):
        [loss] = tf.get_collection(tf.GraphKeys.LOSSES)
        tf.gradients(loss, tf.trainable_variables())


def test_a_hook():
    estimator = estimator_mgpu.Estimator(linear, devices=2)
    with pytest.raises(ValueError, match=REFUSED):
        estimator.train(lambda: tf.data.Dataset.from_tensors((X, Y)), [GradientHook()])


WITH_RESPECT_TO = {
    'variable': lambda graph: tf.trainable_variables()[0],
    'middle': lambda graph: graph.get_tensor_by_name('middle:0'),
    'features': lambda graph: graph.get_tensor_by_name('x:0'),
}


@pytest.mark.parametrize('options', [{}, {'devices': 1, 'recompute': True}], ids=['', 'recompute'])
@pytest.mark.parametrize('x_of', WITH_RESPECT_TO.values(), ids=WITH_RESPECT_TO)
def test_gradients_through_the_model(x_of, options, behavior):
    """Of the loss, and of what follows from it, also in a function, or with another tensor."""
    with built(**options) as (spec, _):
        x = x_of(tf.get_default_graph())
        new = tf.get_variable('new', [])
        loss = spec.loss
        for take in (
            lambda: tf.gradients(loss, x),
            lambda: tf.gradients([new, 2 * loss], [new, x]),
            lambda: tf.train.GradientDescentOptimizer(1).compute_gradients(loss * new, [new, x]),
            lambda: tf.cond(loss < 9, lambda: tf.gradients(loss * 2, x)[0], lambda: x + 0),
        ):
            with pytest.raises(ValueError, match=REFUSED):
                take()


def test_what_a_second_model_follows_from():
    def second(features, labels, mode):
        loss = tf.reduce_mean(tf.square(features))
        return spec_of(mode, loss, sgd(loss, 1.0))

    with built() as (spec, _), pytest.raises(ValueError, match=REFUSED):
        replicated = estimator_mgpu.replicate(second, devices=2)
        replicated(features=spec.predictions['middle'], labels=None, mode=TRAIN)


@pytest.mark.parametrize('mode', [TRAIN, MODES.EVAL])
def test_gradients_beside_the_model(mode, behavior):
    """With respect to what is newer than the model, or of its variable directly; in a loop, too."""
    with built(mode=mode) as (spec, value_of):
        [w] = tf.trainable_variables()
        new = tf.get_variable('new', initializer=3.0)
        total = tf.reduce_sum(spec.predictions['middle'])
        of_new = tf.gradients(total * new**2, new)[0]
        of_weight = tf.gradients(tf.reduce_sum(w**2) * new, w)[0]
        looped = tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y * total), (0, new))[1]
        of_loop = tf.gradients(looped, new)[0]
        found = value_of([of_new, of_weight, of_loop])
    for gradient, expected in zip(found, (6 * X.sum(), np.full([1, 4], 6.0), X.sum() ** 2)):
        np.testing.assert_allclose(gradient, expected, 1e-4)


def test_gradients_that_stop_before_the_model(behavior):
    """With respect to all variables: nothing but what the hook adds has a gradient."""
    with built() as (spec, value_of):
        [w] = tf.trainable_variables()
        new = tf.get_variable('new', initializer=3.0)
        total = tf.reduce_sum(spec.predictions['middle'])
        count = tf.reduce_sum(tf.cast(spec.predictions['middle'] > 0, tf.float32))
        found = value_of(
            [
                tf.gradients(tf.stop_gradient(total) * new**2, [new, w])[0],
                tf.gradients(total * new**2, [new, w], stop_gradients=[total])[0],
                tf.gradients(count * new**2, [new, w])[0],
            ]
        )
    np.testing.assert_allclose(found, [6 * X.sum(), 6 * X.sum(), 6 * (X > 0).sum()], 1e-4)


def test_one_device():
    """Its graph stays as the model_fn made it: the mean of a feature, by 4."""
    with built(devices=1) as (spec, value_of):
        gradient = value_of(tf.gradients(spec.loss, tf.trainable_variables()))
    assert_close(gradient, [X.mean(0, keepdims=True) / 4], 1e-5)
