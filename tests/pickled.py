"""Model functions that a module has under names, which pickle looks for."""

import functools

import numpy as np
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import batches, sgd, spec_of

START = np.full([3, 1], 0.5, np.float32)


def plain(features, labels, mode):
    w = tf.get_variable('w', initializer=START)
    loss = tf.losses.mean_squared_error(labels, features @ w)
    return spec_of(mode, loss, sgd(loss))


def of_rate(rate, features, labels, mode):
    del rate
    return plain(features, labels, mode)


def input_fn():
    return tf.data.Dataset.from_tensors(batches(6, steps=1)[0]).repeat()


several = estimator_mgpu.replicate(plain, devices=2)
contrib = estimator_mgpu.replicate_model_fn(plain, devices=['/cpu:0', '/cpu:1'])
of_a_partial = estimator_mgpu.replicate(functools.partial(of_rate, 0.1), devices=2)


@estimator_mgpu.replicate(devices=2)
def decorated(features, labels, mode):
    """Has one name only."""
    return plain(features, labels, mode)


def bound(features, labels, mode):
    return plain(features, labels, mode)


bound = estimator_mgpu.replicate_model_fn(bound, devices=['/cpu:0', '/cpu:1'])


class Model:
    @estimator_mgpu.replicate(devices=2)
    def method(self, features, labels, mode):
        return plain(features, labels, mode)

    def __call__(self, features, labels, mode):
        return plain(features, labels, mode)


method = Model().method
of_an_object = estimator_mgpu.replicate(Model(), devices=2)
ALL = {
    'decorated': decorated,
    'bound': bound,
    'another name': several,
    'contrib': contrib,
    'partial': of_a_partial,
    'method': method,
    'object': of_an_object,
}
BY_NAME = ['decorated', 'bound']


def trained(model_fn, path, **options):
    """The weights after two steps, by an Estimator of either kind or a model_fn."""
    estimator = model_fn
    if not isinstance(model_fn, tf.estimator.Estimator):
        config = tf.estimator.RunConfig(session_config=estimator_mgpu.session_config(2))
        estimator = tf.estimator.Estimator(model_fn, path, config)
    estimator.train(input_fn, steps=2)
    return estimator.get_variable_value('w')
