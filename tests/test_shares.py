"""Models of many kinds: their numbers, and which share of the work the busiest device has."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from test_samples import SAMPLES, flag_errors, run_python

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SAMPLES))
    import shares_models

pytestmark = pytest.mark.core
WHOLE = {'greedy_decoder': 0.75}  # Its loop ends when all rows are finished.


@pytest.mark.parametrize('name', shares_models.MODELS)
def test_the_busiest_of_four_devices(name):
    kernels, _ = shares_models.kernels_of(name, 4)
    assert len(kernels) == 4
    assert 0.25 <= max(kernels.values()) / sum(kernels.values()) <= WHOLE.get(name, 0.35)


@pytest.mark.parametrize('name', ['lstm', 'scan'])
def test_old_programs_that_enable_new_loops(name, caplog):
    """Those of TensorFlow 1 run once, which the log says with the way out."""
    with towers.behavior_of('v1'):
        caplog.set_level('INFO')
        kernels, _ = shares_models.kernels_of(name, 4)
        assert max(kernels.values()) > 0.7 * sum(kernels.values())
        assert 'v1 control flow: call tf.enable_control_flow_v2() before.' in caplog.text
        tf.enable_control_flow_v2()
        kernels, _ = shares_models.kernels_of(name, 4)
        assert max(kernels.values()) <= 0.35 * sum(kernels.values())


def found(name, devices, static, values=None):
    """What a step gives, and the variables before and after it."""
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        spec, feed = shares_models.spec_of(name, devices, static)
        variables = {v.op.name: v for v in tf.global_variables()}
        with towers.session(devices) as session:
            session.run([tf.global_variables_initializer(), tf.tables_initializer()])
            towers.load(session, {variables[own]: value for own, value in (values or {}).items()})
            before = session.run(variables)
            if spec.train_op is None:
                return before, session.run(spec.predictions, feed)
            loss = session.run([spec.loss, spec.train_op], feed)[0]
            return before, {'loss': loss, **session.run(variables)}


@pytest.mark.parametrize('name', shares_models.MODELS)
def test_as_on_one_device(name):
    """With a batch whose size the graph knows, and with one whose size it doesn't know."""
    values, expected = found(name, 1, static=False)
    assert expected and all(np.isfinite(value).all() for value in expected.values())

    for static in (True, False):
        _, ours = found(name, 3, static, values)
        towers.assert_close(ours, expected, 1e-5)


def test_the_table():
    header, line = run_python('shares.py', '--models=last_step', '--devices=2')[-2:]
    assert header.endswith('on the busiest of 2 devices')
    assert line.split()[0] == 'last_step' and line.endswith('50%')
    lines = run_python('shares.py', '--models=last_step', '--whole')
    assert lines[-1] == '  gradients/GatherNd_grad/ScatterNd: this ScatterNd needs all examples'


def test_models_that_are_none():
    flag = '--models=lstm,rnn'
    errors = flag_errors({'shares': [flag]})
    assert 'Legal are lstm, gru' in errors['shares', flag]
