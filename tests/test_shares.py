"""Models of many kinds: their numbers, and which share of the work the busiest device has."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from test_samples import SAMPLES

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SAMPLES))
    import shares
    import shares_models

WHOLE = {'greedy_decoder': 0.75}  # Its loop ends when all rows are finished.


@pytest.mark.parametrize('name', shares_models.MODELS)
def test_the_busiest_of_four_devices(name):
    kernels, _ = shares.kernels_of(name, 4)
    assert len(kernels) == 4
    assert 0.25 <= max(kernels.values()) / sum(kernels.values()) <= WHOLE.get(name, 0.35)


def found(name, devices, static, values=None):
    """What a step gives, and the variables before and after it."""
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        spec, feed = shares.spec_of(name, devices, static)
        variables = {v.op.name: v for v in tf.global_variables()}
        with towers.session(devices) as session:
            session.run([tf.global_variables_initializer(), tf.tables_initializer()])
            towers._load(session, {variables[own]: value for own, value in (values or {}).items()})
            before = session.run(variables)
            if spec.train_op is None:
                return before, session.run(spec.predictions, feed)
            loss = session.run([spec.loss, spec.train_op], feed)[0]
            return before, {'loss': loss, **session.run(variables)}


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('name', shares_models.MODELS)
def test_as_on_one_device(name, static):
    values, expected = found(name, 1, static)
    _, ours = found(name, 3, static, values)
    towers.assert_close(ours, expected, 1e-5)
    assert expected and all(np.isfinite(value).all() for value in expected.values())
