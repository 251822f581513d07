"""Models of public libraries, unchanged: several devices do as one."""

import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
import libraries
from models import floats
from towers import assert_close, assert_same, compare_modes, evaluate, train


@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
def test_slim(towers):
    compare_modes(libraries.LENET, libraries.images, towers)


def test_slim_resnet():
    """Batch normalization by moving averages, so that shards don't matter."""
    compare_modes(libraries.RESNET, libraries.images, 4)


@pytest.mark.parametrize('towers', [4], ids='towers={}'.format)
def test_bert(towers):
    """Biases start away from 0: the gradients of some are 0 up to rounding."""
    batches = libraries.sentences()
    values = train(libraries.bert, batches, 0, steps=0).values
    values = {n: v + 0.1 if n.endswith('/bias') else v for n, v in values.items()}
    runs = [train(libraries.bert, batches, n, values=values) for n in (towers, 0)]
    for run in runs:  # The gradient of the keys' biases is 0: a softmax ignores what they add.
        for name in [n for n in run.values if '/key/bias/' in n]:
            np.testing.assert_allclose(run.values.pop(name), 0.0, atol=1e-9)
    assert_same(*runs)
    found, expected = (evaluate(libraries.bert, batches, n, values=values) for n in (towers, 0))
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize('towers', [3, 4], ids='towers={}'.format)
def test_deepctr(towers):
    compare_modes(libraries.DEEP_FM, libraries.clicks, towers)


@pytest.mark.parametrize('towers', [3, 4], ids='towers={}'.format)
def test_ranking(towers):
    compare_modes(libraries.SOFTMAX, libraries.queries, towers)


def test_ranking_by_lists():
    compare_modes(libraries.LIST_MLE, libraries.queries, 4)


def gan_input(rows):
    data = floats(120, 2), floats(120, 3, seed=1) + 1
    return lambda: tf.data.Dataset.from_tensor_slices(data).repeat().batch(rows, rows == 12)


@pytest.mark.parametrize('towers, rows', [(3, 12), (4, 10)])
def test_gan(towers, rows, tmp_path):
    """Hooks run the train_ops, of two networks in turn, each on a batch of its own."""
    start, one_dir, our_dir = (str(tmp_path / d) for d in ('start', 'one', 'ours'))
    libraries.gan(start).train(gan_input(rows), max_steps=1)
    shutil.copytree(start, one_dir)
    shutil.copytree(start, our_dir)
    one = libraries.gan(one_dir)
    ours = estimator_mgpu.replicate_estimator(libraries.gan(our_dir), devices=towers)
    results = []
    for estimator in (ours, one):
        estimator.train(gan_input(rows), max_steps=5)
        evaluation = estimator.evaluate(gan_input(rows), steps=3)
        predict = estimator.predict(
            lambda: tf.data.Dataset.from_tensor_slices(floats(25, 2)).batch(rows)
        )
        values = {n: estimator.get_variable_value(n) for n in estimator.get_variable_names()}
        results.append([values, evaluation, np.array(list(predict))])
    assert results[1][0]['global_step'] == 5
    assert_close(*results, 1e-5)
