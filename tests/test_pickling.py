"""Replicated model_fns, estimators and optimizers are pickled and copied as without us."""

import copy
import inspect
import pickle

import cloudpickle
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
import pickled
from estimator_mgpu import TowerOptimizer, optimizer
from forks import output_of
from models import batches, spec_of
from towers import assert_same, tower_of, train

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
COPIES = {
    'copy': copy.copy,
    'deepcopy': copy.deepcopy,
    'cloudpickle': lambda value: pickle.loads(cloudpickle.dumps(value)),
    **{
        f'protocol {protocol}': lambda value, protocol=protocol: pickle.loads(
            pickle.dumps(value, protocol)
        )
        for protocol in PROTOCOLS
    },
}
copied = pytest.mark.parametrize('copy_of', COPIES.values(), ids=COPIES)


def towers_of(model_fn):
    """The towers that a model_fn builds. It gets along without some of its arguments."""
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        model_fn(features=tf.zeros([4, 3]), labels=tf.zeros([4, 1]), mode='train')
        return {tower_of(op.name) for op in graph.get_operations()} - {None}


@copied
@pytest.mark.parametrize('name', pickled.ALL)
def test_model_fns(name, copy_of):
    model_fn = pickled.ALL[name]
    again = copy_of(model_fn)
    assert towers_of(again) == {0, 1}
    assert again.replicate_options == model_fn.replicate_options
    assert inspect.signature(again) == inspect.signature(model_fn)
    if name in pickled.BY_NAME:  # As of any function.
        assert again is model_fn


def test_what_a_replicated_model_fn_has_of_a_function():
    plain, several = pickled.plain, pickled.several
    assert several.__wrapped__ is plain
    assert several.__name__ == several.__qualname__ == 'plain'
    assert several.__module__ == 'pickled' and repr(several).startswith('<function plain at')
    assert pickled.decorated.__doc__ == 'Has one name only.'
    assert list(inspect.signature(several).parameters) == ['features', 'labels', 'mode', 'config']
    assert pickled.Model.method.__get__(None, pickled.Model) is pickled.Model.method


def test_a_model_fn_that_has_no_name():
    """No more than without us."""
    with pytest.raises((AttributeError, pickle.PicklingError), match='local object|not found'):
        pickle.dumps(estimator_mgpu.replicate(lambda features: None))


ESTIMATORS = {
    'ours': lambda path: estimator_mgpu.Estimator(pickled.plain, path, devices=2),
    'decorated': lambda path: estimator_mgpu.Estimator(pickled.decorated, path),
    'plain': lambda path: tf.estimator.Estimator(
        pickled.several,
        path,
        tf.estimator.RunConfig(session_config=estimator_mgpu.session_config(2)),
    ),
}


@pytest.mark.parametrize('make', ESTIMATORS.values(), ids=ESTIMATORS)
def test_estimators(make, tmp_path):
    """Before training and after it: each copy goes on from the checkpoint."""
    estimator = make(str(tmp_path / 'copied'))
    alone = make(str(tmp_path / 'alone'))
    for copy_of in pickle_default, copy.deepcopy, COPIES['cloudpickle']:
        estimator = copy_of(estimator)
        found = pickled.trained(estimator, None)
        np.testing.assert_allclose(found, pickled.trained(alone, None), rtol=1e-5)
    assert estimator.get_variable_value('global_step') == 6


def pickle_default(value):
    return pickle.loads(pickle.dumps(value))


# In a notebook or a script, of which another process knows nothing, cloudpickle takes it along.
NOTEBOOK = """
import sys
import cloudpickle
import estimator_mgpu
import pickled

@estimator_mgpu.replicate(devices=2)
def decorated(features, labels, mode):
    return pickled.plain(features, labels, mode)

def bound(features, labels, mode):
    return pickled.plain(features, labels, mode)

several = estimator_mgpu.replicate(bound, devices=2)
bound = estimator_mgpu.replicate(bound, devices=2)

with open(sys.argv[1], 'wb') as file:
    cloudpickle.dump([decorated, bound, several], file)
"""
LOADS = """
import pickle, sys
import estimator_mgpu
import pickled
with open(sys.argv[1], 'rb') as file:
    for i, model_fn in enumerate(pickle.load(file)):
        assert model_fn.replicate_options['devices'] in (2, ['/cpu:0', '/cpu:1'])
        print(*pickled.trained(model_fn, sys.argv[1] + str(i)).ravel())
"""


@pytest.mark.parametrize('notebook', [False, True], ids=['module', 'notebook'])
def test_another_process(notebook, tmp_path):
    """It trains what it's given as this one does."""
    path, given = tmp_path / 'given', list(pickled.ALL.values())
    if notebook:
        output_of(['-c', NOTEBOOK, path])
    else:
        path.write_bytes(pickle.dumps(given))
    lines = output_of(['-c', LOADS, path]).splitlines()
    found = [list(map(float, line.split())) for line in lines]
    expected = pickled.trained(pickled.plain, str(tmp_path / 'one')).ravel()
    assert len(found) == (3 if notebook else len(given))
    for weights in found:
        np.testing.assert_allclose(weights, expected, rtol=1e-5)


class Own(tf.train.MomentumOptimizer):
    """Has an attribute of its own, and pickles it by a method of its own."""

    def __init__(self, rate):
        super().__init__(rate, 0.9)
        self.factor = {'of': 2.0}

    def __getstate__(self):
        return {**vars(self), 'pickled': True}


@copied
@pytest.mark.parametrize('make', [lambda: tf.train.AdamOptimizer(0.1), lambda: Own(0.1)])
def test_optimizers(make, copy_of):
    """A copy is of the optimizer's own class and a `TowerOptimizer`, with its own attributes."""
    plain, original = make(), TowerOptimizer(make())
    again, expected = copy_of(original), copy_of(plain)
    assert type(again) is type(original)
    assert again.__class__ is type(plain) and isinstance(again, TowerOptimizer)
    assert again is not original
    assert {**vars(expected), '_tower_optimizer': True} == vars(again)


def test_an_optimizer_that_a_model_fn_copies():
    """The copy is the one that applies, by its own attributes, and what it applies is recorded."""
    made = []

    def model_fn(features, labels, mode):
        first = tf.train.GradientDescentOptimizer(0.1)
        made.append(copy.deepcopy(first))
        made[-1]._learning_rate = 0.2
        w = tf.get_variable('w', initializer=pickled.START)
        loss = tf.losses.mean_squared_error(labels, features @ w)
        return spec_of(mode, loss, made[-1].minimize(loss, tf.train.get_global_step()))

    steps = batches(6, steps=2)
    one, ours = (train(model_fn, steps, towers) for towers in (0, 2))
    assert_same(ours, one)
    assert type(made[0]) is tf.train.GradientDescentOptimizer
    assert [v.op.name for _, v in optimizer.applied(ours.graph)] == ['w']
