"""Random model_fns train, evaluate and predict on several devices as on one, in float64."""

from unittest import mock

import hypothesis
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import random_graphs
import towers
from estimator_mgpu import register_rule
from estimator_mgpu.partition.rules import RULES
from random_graphs import OPS, Case

RTOL = 1e-10
FLOOR = 1e-3  # What is smaller may be rounding of what isn't.


def assert_close(found, expected):
    """Asserts equal nests of arrays: within `RTOL` of the largest entry of each."""
    tf.nest.assert_same_structure(found, expected)
    for one, other in zip(tf.nest.flatten(expected), tf.nest.flatten(found)):
        one, other = np.asarray(one), np.asarray(other)
        assert one.shape == other.shape and one.dtype == other.dtype
        if one.dtype.kind == 'f':
            # What is float32 among float64, as tf.metrics is, has its own tolerance.
            rtol = 1e-5 if one.dtype == np.float32 else RTOL
            scale = max(np.abs(one).max(), FLOOR) if one.size else 0
            np.testing.assert_allclose(other, one, rtol=rtol, atol=rtol * scale)
        else:
            np.testing.assert_array_equal(other, one)


def check(case):
    """Compares several devices with one, from the same values."""
    with mock.patch.dict(RULES):
        register_rule('Dawsn', 'elementwise')
        compare(case)


def compare(case):
    model_fn = random_graphs.model_fn_of(case)
    batches = random_graphs.batches_of(case)
    values = towers.train(model_fn, batches, 0, steps=0, static=case.static).values
    try:
        one = towers.train(model_fn, batches, 0, values=values, static=case.static)
    except tf.errors.UnknownError as error:
        assert 'pyfunc' in str(error)
        return  # TensorFlow differentiates a Python function once, and this has two losses.
    if not all(np.isfinite(v).all() for v in one.values.values()):
        return  # One device diverges.
    ours = towers.train(model_fn, batches, case.towers, values=values, static=case.static)
    assert_close(ours.values, one.values)
    assert_close(ours.losses, one.losses)
    for mode in (tf.estimator.ModeKeys.EVAL, tf.estimator.ModeKeys.PREDICT):
        shared = {'values': one.values, 'static': case.static, 'mode': mode}
        data = batches
        if mode == tf.estimator.ModeKeys.PREDICT:
            data = [(features, None) for features, _ in batches]
        found, expected = (towers.evaluate(model_fn, data, n, **shared) for n in (case.towers, 0))
        assert_close(found, expected)


@pytest.mark.core
@hypothesis.given(random_graphs.cases)
def test_random_model(case):
    check(case)


@pytest.mark.parametrize('name', sorted(OPS))
def test_each_op(name):
    check(Case([name, 'dense'], ['mean'], ['momentum'], 'none', ['mean'], [7, 2], False, 3, 1))
