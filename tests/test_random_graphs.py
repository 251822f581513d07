"""Random model_fns train, evaluate and predict on several devices as on one."""

import hypothesis
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import random_graphs
import towers
from random_graphs import OPS, Case

RTOL = 1e-10


def check(case):
    """Compares several devices with one, from the same values."""
    model_fn = random_graphs.model_fn_of(case)
    batches = random_graphs.batches_of(case)
    values = towers.train(model_fn, batches, 0, steps=0, static=case.static).values
    one = towers.train(model_fn, batches, 0, values=values, static=case.static)
    if not all(np.isfinite(v).all() for v in one.values.values()):
        return  # Trained too far on one device, too.
    ours = towers.train(model_fn, batches, case.towers, values=values, static=case.static)
    towers.assert_same(ours, one, RTOL)
    predict = tf.estimator.ModeKeys.PREDICT
    for mode in (tf.estimator.ModeKeys.EVAL, predict):
        shared = {'values': one.values, 'static': case.static, 'mode': mode}
        data = [(x, None) for x, _ in batches] if mode == predict else batches
        found, expected = (towers.evaluate(model_fn, data, n, **shared) for n in (case.towers, 0))
        towers.assert_close(found, expected, RTOL)


@hypothesis.given(random_graphs.cases)
def test_random_model(case):
    check(case)


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('name', sorted(OPS))
def test_each_op(name, static):
    sizes = [7, 7] if static else [7, 2]
    check(Case([name, 'dense'], ['mean'], ['momentum'], 'none', ['mean'], sizes, static, 3, 1))
