"""`python -m estimator_mgpu`: what it finds, and what it says where something is wrong."""

import importlib.metadata
import itertools
import pathlib
import runpy
import subprocess
import sys
import types

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import __main__ as environment
from estimator_mgpu import quiet_tensorflow


@pytest.fixture
def on_cpus(monkeypatch):
    monkeypatch.setattr(environment, 'towers', lambda: ['/device:CPU:0', '/device:CPU:1'])
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: [])
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '-1')
    monkeypatch.setenv('TF_FORCE_GPU_ALLOW_GROWTH', 'false')  # for main() to change


@pytest.mark.core
def test_nothing_is_wrong(on_cpus, capsys):
    assert environment.main() == 0
    told = capsys.readouterr().out
    lines = dict(line.split(None, 1) for line in told.splitlines())
    assert lines['estimator_mgpu'] == estimator_mgpu.__version__
    assert lines['TensorFlow'] == tf.__version__
    assert lines['numpy'] == importlib.metadata.version('numpy')
    assert lines['tensorflow-estimator'].startswith('2.15')
    assert lines['tf.layers'] == 'work'
    assert lines['GPUs'].startswith('none.') and lines['CUDA_VISIBLE_DEVICES'] == '-1'
    assert 'on /device:CPU:0, /device:CPU:1: equals that of one device' in lines['one']
    assert told.endswith('Nothing is wrong.\n')


PROGRAM = """
import tensorflow.compat.v1 as tf


def model_fn(features, labels, mode, params):
    net = tf.layers.dense(tf.sort(features, 0, name='order'), params['units'], name='net')
    loss = tf.reduce_mean(tf.square(net - labels))
    train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def input_fn():
    return tf.ones([8, 3]), tf.ones([8, 1])
"""


@pytest.fixture
def explain(tmp_path, monkeypatch):
    """Calls the command in a directory with a program; returns its exit status."""
    (tmp_path / 'program.py').write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def called(*arguments):
        for name in ('program', 'estimator_mgpu.__main__'):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, 'argv', ['', 'explain', *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module('estimator_mgpu', run_name='__main__')
        return ended.value.code

    return called


GIVEN = ['program:model_fn', '--input_fn=program:input_fn']


@pytest.mark.parametrize('devices', ['2', '/cpu:0,/cpu:1'])
def test_explain(explain, devices, capsys):
    options = ['--devices', devices, '--params', '{"units": 5}']
    drawn = ['--draw', 'plan.svg'] if devices == '2' else []
    assert explain(*GIVEN, *options, *drawn) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ['towers', '  /device:CPU:0: 4 examples', '  /device:CPU:1: 4 examples']
    assert '  net/kernel: 60.0B, summed on /device:CPU:0' in lines  # 3 * 5 * 4 bytes
    assert any('order/TopKV2' in line and 'program.py:6' in line for line in lines)
    assert pathlib.Path('plan.svg').exists() == bool(drawn)
    assert not drawn or '<!-- order -->' in pathlib.Path('plan.svg').read_text()


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (GIVEN[:1], 'required: --input_fn'),
        (['program:model', GIVEN[1]], "no attribute 'model'. Give module:"),
        (['programs:model_fn', GIVEN[1]], "No module named 'programs'"),
        (['program:model_fn', '--input_fn=0'], 'Give module:function'),
        ([*GIVEN, '--params={'], '--params'),
    ],
)
def test_explain_what_is_not_there(explain, arguments, message, capsys):
    assert explain(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_step_that_is_not_exact(monkeypatch, on_cpus, capsys):
    def model_fn(features, labels, mode):
        spec = original(features, labels, mode)
        return spec._replace(loss=spec.loss * next(calls))

    original, calls = environment._model_fn, itertools.count(1)
    monkeypatch.setattr(environment, '_model_fn', model_fn)
    assert environment.main() == 1
    told = capsys.readouterr().out
    assert 'on /device:CPU:0, /device:CPU:1: differs from one device' in told
    assert 'train loss' in told and 'DIFFERS' in told and 'WRONG: report this' in told


def test_a_step_that_fails(monkeypatch, on_cpus, gpus, capsys):
    def model_fn(features, labels, mode):
        raise tf.errors.InternalError(None, None, 'no kernel image is available')

    details = {'device_name': 'Tesla T4'}
    gpus(None, None)
    monkeypatch.setattr(tf.config.experimental, 'get_device_details', lambda gpu: details)
    monkeypatch.setattr(environment, '_model_fn', model_fn)
    assert environment.main() == 1
    told = capsys.readouterr().out
    assert 'on /device:CPU:0, /device:CPU:1: fails: InternalError: ' in told
    assert 'no kernel image is available' in told and 'WRONG' in told
    assert f'{"GPUs":20}  Tesla T4, Tesla T4' in told


def test_tf_layers_that_fail(monkeypatch, on_cpus, capsys):
    def dense(*args, **kwargs):
        raise ValueError(message)

    instead = types.SimpleNamespace(**{**vars(tf), 'layers': types.SimpleNamespace(dense=dense)})
    monkeypatch.setattr(environment, 'tf', instead)
    message = 'Something else.'
    assert environment.tf_layers() == 'fail: Something else.'
    message = '`dense` is not available with Keras 3.'
    assert environment.main() == 0  # Not all models need them.
    told = capsys.readouterr().out
    assert 'tf.layers             fail: tf.layers, and tf.keras as Keras 2, need' in told
    assert told.endswith(
        'The step is right, but tf.layers fail: see above, if your model uses them.\n'
    )


def test_two_towers_at_least(gpus):
    gpus(None, None)
    assert environment.towers() == ['/device:GPU:0', '/device:GPU:1']
    gpus(None)
    assert environment.towers() == ['/device:GPU:0'] * 2
    gpus()
    assert environment.towers() == ['/device:CPU:0', '/device:CPU:1']


@pytest.mark.parametrize(
    'last, printed',
    [('pass', b''), ('os.abort()', b'fatal\n'), ('raise SystemExit("end")', b'fatal\nend\n')],
    ids=['succeeds', 'is ended', 'raises'],
)
def test_the_log_of_an_import_is_printed_if_it_fails(last, printed):
    program = f"""
import os, runpy
log_if_it_fails = runpy.run_path({quiet_tensorflow.__file__!r})['_log_if_it_fails']
with log_if_it_fails():
    os.write(2, b'fatal\\n')
    {last}
"""
    done = subprocess.run([sys.executable, '-c', program], stderr=subprocess.PIPE)
    assert done.stderr == printed


@pytest.mark.parametrize(
    'flag',
    [
        '-O',
        pytest.param(
            '-OO',
            marks=pytest.mark.skipif(
                tf.__version__.startswith('2.15'), reason='TensorFlow 2.15 needs its docstrings'
            ),
        ),
    ],
)
def test_without_asserts_and_docstrings(flag, monkeypatch):
    """tf-keras needs docstrings, so it's left out."""
    monkeypatch.setenv('TF_USE_LEGACY_KERAS', '0')
    command = [sys.executable, flag, '-B', '-m', 'estimator_mgpu']
    done = subprocess.run(command, capture_output=True, text=True)
    assert 'equals that of one device' in done.stdout, done.stderr
