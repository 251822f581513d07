"""`python -m estimator_mgpu`: what it finds, and what it says where something is wrong."""

import glob
import importlib.metadata
import itertools
import os
import subprocess
import sys
import types

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import compat, environment, private

FINE = {'memory': {}, 'layers': '', 'step': '', 'exact': True, 'differs': ''}


@pytest.fixture
def probed(monkeypatch):
    """What the process that uses the devices says."""
    found = dict(FINE)
    monkeypatch.setattr(environment, 'run_probe', lambda: found)
    return found


@pytest.fixture
def report(probed):
    return lambda: {finding.what: finding for finding in environment.report()}


def wrong(findings):
    return {what for what, finding in findings.items() if finding.advice}


def test_the_command():
    """As a user calls it, from the sources or installed."""
    source = os.path.dirname(os.path.dirname(estimator_mgpu.__file__))
    done = subprocess.run(
        [sys.executable, '-m', 'estimator_mgpu'],
        env={**os.environ, 'CUDA_VISIBLE_DEVICES': '-1', 'PYTHONPATH': source},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert done.returncode == ('WRONG' in done.stdout), done.stderr
    assert lines['TensorFlow'] == tf.__version__
    assert lines['tensorflow-estimator'].startswith('2.15')
    assert '(/device:CPU:0, /device:CPU:1)' in lines['CPU']
    assert 'on /device:CPU:0, /device:CPU:1: equals that of one device' in lines['one']


def test_its_help():
    source = os.path.dirname(os.path.dirname(estimator_mgpu.__file__))
    done = subprocess.run(
        [sys.executable, '-m', 'estimator_mgpu', '--help'],
        env={**os.environ, 'PYTHONPATH': source},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert 'to paste into a bug' in done.stdout
    assert 'tensorflow-estimator' not in done.stdout  # It's no report.


@pytest.mark.core
def test_all_is_found(report, capsys):
    findings = report()
    assert wrong(findings) - {'estimator_mgpu'} == set()
    assert findings['estimator_mgpu'].found == estimator_mgpu.__version__
    assert findings['numpy'].found == importlib.metadata.version('numpy')
    assert 'tensorflow_estimator' in findings['tf.estimator'].found
    assert findings['tf.layers'].found == 'works'


def test_the_exit_status(monkeypatch, capsys):
    findings = [environment.Finding('this', 'is so')]
    monkeypatch.setattr(environment, 'report', lambda: findings)
    assert environment.main() == 0
    assert capsys.readouterr().out == 'this  is so\nNothing is wrong.\n'
    findings.append(environment.Finding('that', 'is not', 'do this'))
    assert environment.main() == 1
    assert capsys.readouterr().out == 'this  is so\nthat  is not\nWRONG: that: do this\n'


@pytest.mark.core
def test_the_probe_uses_the_devices(capsys):
    if environment.devices.resolve(None) != ['/device:CPU:0']:
        pytest.skip('tests leave GPUs alone')
    assert environment.probe() == FINE


def test_a_step_that_is_not_exact(monkeypatch):
    def model_fn(features, labels, mode):
        spec = original(features, labels, mode)
        return spec._replace(loss=spec.loss * next(calls))

    original, calls = environment._model_fn, itertools.count(1)
    monkeypatch.setattr(environment, '_model_fn', model_fn)
    found = environment.probe()
    assert found['exact'] is False and 'train loss' in found['differs']
    finding = environment._step(found)
    assert finding.found.endswith('differs from one device')
    assert 'DIFFERS' in finding.advice


def test_a_step_that_fails(monkeypatch, probed, report):
    def model_fn(features, labels, mode):
        raise tf.errors.InternalError(None, None, 'no kernel image is available\nand more')

    monkeypatch.setattr(environment, '_model_fn', model_fn)
    found = environment.probe()
    assert found['step'] == 'InternalError: no kernel image is available'
    probed.update(found)
    assert wrong(report()) == {'one training step'}
    assert 'no kernel image' in report()['one training step'].advice


def test_tf_layers_without_keras_2(monkeypatch, probed, report, capsys):
    def dense(*args, **kwargs):
        raise AttributeError('`dense` is not available with Keras 3.')

    monkeypatch.setattr(environment, 'tf', Instead(tf, layers=types.SimpleNamespace(dense=dense)))
    probed.update(environment.probe())
    findings = report()
    assert wrong(findings) == {'tf.layers'}
    assert findings['tf.layers'].found == 'fails'
    assert 'pip install "tf-keras~=' in findings['tf.layers'].advice
    assert findings['tf.layers'].optional
    assert environment.main() == 0  # Not all models need it.
    assert 'NOTE: tf.layers: tf.layers, and tf.keras as Keras 2, need' in capsys.readouterr().out


def test_tf_layers_that_fail_otherwise(monkeypatch, probed, report):
    def dense(*args, **kwargs):
        raise ValueError('Something else.')

    monkeypatch.setattr(environment, 'tf', Instead(tf, layers=types.SimpleNamespace(dense=dense)))
    probed.update(environment.probe())
    assert report()['tf.layers'].advice == 'ValueError: Something else.'
    assert environment.main() == 1


@pytest.mark.parametrize(
    'code, message',
    [
        ('print("no"); import sys; print("CUDA driver", file=sys.stderr); sys.exit(3)', '3: CUDA'),
        ('import sys; sys.exit(1)', '1: It said nothing.'),
        ('import time; time.sleep(60)', 'did not end in 1 seconds'),
    ],
)
def test_a_process_that_fails(code, message, monkeypatch):
    monkeypatch.setattr(environment, '_PROBE', code)
    monkeypatch.setattr(environment, '_SECONDS', 1 if 'sleep' in code else 60)
    found = environment.run_probe()
    assert message in found['error']
    monkeypatch.setattr(environment, 'run_probe', lambda: found)
    findings = {finding.what: finding for finding in environment.report()}
    assert message in findings['one training step'].advice
    assert findings['tf.layers'].found == 'unknown'


def test_the_process_lets_memory_grow(monkeypatch):
    code = 'import json, os; print(json.dumps(os.environ["TF_FORCE_GPU_ALLOW_GROWTH"]))'
    monkeypatch.setattr(environment, '_PROBE', code)
    assert environment.run_probe() == 'true'


class Instead:
    """A module with other attributes in the place of some of its own."""

    def __init__(self, module, **own):
        self._module = module
        self.__dict__.update(own)

    def __getattr__(self, name):
        return getattr(self._module, name)


@pytest.fixture
def gpus(monkeypatch):
    """Makes it seem that TensorFlow has so many GPUs."""

    def make(count):
        found = [types.SimpleNamespace(name=f'/physical_device:GPU:{i}') for i in range(count)]
        monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: found)
        details = {'device_name': 'Tesla T4'}
        monkeypatch.setattr(tf.config.experimental, 'get_device_details', lambda gpu: details)

    return make


def test_gpus_with_memory(gpus, probed, report):
    gpus(2)
    probed['memory'] = {'/device:GPU:0': 14 << 30}
    assert report()['GPUs'][:3] == ('GPUs', 'Tesla T4 (14.0 GiB), Tesla T4 (memory unknown)', '')
    assert report()['CPU towers'].found == '0'
    step = report()['one training step'].found
    assert step == 'on /device:GPU:0, /device:GPU:1: equals that of one device'


def test_one_gpu_gets_two_towers(gpus):
    gpus(1)
    assert environment.towers() == ['/device:GPU:0'] * 2


@pytest.mark.parametrize('cuda, advice', [(True, 'does not find the driver'), (False, 'without')])
def test_gpus_that_tensorflow_does_not_see(cuda, advice, gpus, report, monkeypatch):
    gpus(0)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    monkeypatch.setattr(glob, 'glob', lambda pattern: ['/dev/nvidia0'])
    monkeypatch.setattr(tf.test, 'is_built_with_cuda', lambda: cuda)
    info = {'cuda_version': '12.2', 'cudnn_version': '8'}
    monkeypatch.setattr(tf.sysconfig, 'get_build_info', lambda: info)
    findings = report()
    assert wrong(findings) == {'GPUs'}
    assert advice in findings['GPUs'].advice and 'tensorflow[and-cuda]' in findings['GPUs'].advice
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '-1')
    assert report()['GPUs'][:3] == ('GPUs', "none, as CUDA_VISIBLE_DEVICES='-1' hides them", '')


@pytest.mark.parametrize('has, found', [(True, 'in this build'), (False, 'not in this build')])
def test_nccl_is_no_need(has, found, report, monkeypatch):
    monkeypatch.setattr(private, 'has_kernel', lambda op_type: has)
    monkeypatch.setattr(tf.sysconfig, 'get_build_info', lambda: {'cuda_version': '12.2'})
    assert report()['NCCL'][:3] == ('NCCL', f'{found}, CUDA 12.2', '')


@pytest.mark.core
def test_kernels():
    assert private.has_kernel('MatMul') and not private.has_kernel('NoSuchOp')


def test_another_estimator_in_its_place(monkeypatch, report):
    other = types.SimpleNamespace(Estimator=type('Estimator', (), {'__module__': __name__}))
    monkeypatch.setattr(compat, 'estimator', Instead(compat.estimator, **vars(other)))
    findings = report()
    assert wrong(findings) == {'tf.estimator'}
    assert findings['tf.estimator'].found == __file__
    assert 'was put in its place' in findings['tf.estimator'].advice


def test_versions_that_do_not_fit(monkeypatch, report):
    versions = {'estimator-mgpu': '0.1.0', 'protobuf': '7.35', 'absl-py': '2.0', 'tqdm': None}
    requires = [
        'absl-py>=1.0',
        'protobuf<7',
        'tqdm>=4.60',
        'tensorflow<2.22,>=2.15',  # also by tensorflow-cpu; importing checks it
        'tf-keras<2.22; extra == "keras"',
    ]
    monkeypatch.setattr(environment, '_version', versions.get)
    monkeypatch.setattr(importlib.metadata, 'requires', lambda name: requires)
    findings = report()
    assert wrong(findings) == {'estimator_mgpu'}
    advice = findings['estimator_mgpu'].advice
    assert advice.endswith(' -m pip install "protobuf<7" "tqdm>=4.60"')
    assert findings['tqdm'].found == 'not installed'
    versions['estimator-mgpu'] = None  # from its sources
    assert wrong(report()) == set()
