"""A report on the environment, to paste into a bug."""

from __future__ import annotations

import glob
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf
from packaging.requirements import Requirement

import estimator_mgpu
from estimator_mgpu import compat, devices, private

_PACKAGES = (
    'tensorflow-estimator',
    'tf-keras',
    'keras',
    'protobuf',
    'numpy',
    'absl-py',
    'tqdm',
)
_PROBE = 'from estimator_mgpu import environment; environment.print_probe()'
_SECONDS = 600  # of the probe, after which it hangs
_STEP = 'one training step'
_TELL = 'Report that, with all that is printed here.'
_LIBRARIES = ('CUDA', 'cuda_version'), ('cuDNN', 'cudnn_version'), ('ROCm', 'rocm_version')


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
      what: such as 'TensorFlow'.
      found: what there is.
      advice: what to do about it; empty where nothing is wrong.
      optional: whether that's wrong only for those who need it.
    """

    what: str
    found: str
    advice: str = ''
    optional: bool = False


def main() -> int:
    """Prints the report.

    Returns:
      The exit status: 1 if anything is wrong, else 0.
    """
    findings = report()
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f'{finding.what:{width}}  {finding.found}')
    advised = [finding for finding in findings if finding.advice]
    for finding in advised:
        print(f'{"NOTE" if finding.optional else "WRONG"}: {finding.what}: {finding.advice}')
    wrong = any(not finding.optional for finding in advised)
    if not wrong:
        print('Nothing is wrong.')
    return int(wrong)


def report() -> list[Finding]:
    """Returns all that there is to say. What may take memory of a GPU is done by a subprocess."""
    probed = run_probe()
    return [
        Finding('estimator_mgpu', estimator_mgpu.__version__, _unmet_requirements()),
        Finding('Python', f'{platform.python_version()}, {sys.executable}'),
        Finding('OS', f'{platform.platform()}, {os.cpu_count()} CPU cores'),
        Finding('TensorFlow', tf.__version__),
        *(Finding(name, _version(name) or 'not installed') for name in _PACKAGES),
        _estimator(),
        _layers(probed),
        _gpus(probed),
        _cpu_towers(),
        _nccl(),
        _step(probed),
    ]


def run_probe() -> dict[str, Any]:
    """Returns what `probe()` finds in a process of its own, which reserves no GPU memory.

    If that process fails, the value is an 'error' only.
    """
    environment = {**os.environ, 'TF_FORCE_GPU_ALLOW_GROWTH': 'true'}
    command = [sys.executable, '-c', _PROBE]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {'error': f'It did not end in {_SECONDS} seconds.'}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ['It said nothing.']
        return {'error': f'The process ended with {done.returncode}: {lines[-1]}'}
    return json.loads(done.stdout.splitlines()[-1])


def print_probe() -> None:
    """Prints, as its last line, what `probe()` finds, as JSON."""
    found = probe()  # prints, too
    print(json.dumps(found))


def probe() -> dict[str, Any]:
    """Uses the devices: looks at their memory, builds a layer and trains for a step.

    Returns:
      A dict of 'layers', why `tf.layers` doesn't work, or ''; where it doesn't, 'keras_3', whether
      it's for want of Keras 2, which not all need; 'memory', the bytes that TensorFlow
      may use of each GPU; 'step', why the step failed, or ''; and where it didn't, 'exact', whether
      the result is that of one device, and 'differs', a table.
    """
    with tf.Graph().as_default(), tf.Session() as session:
        memory = {
            device.name.partition('/task:0')[2]: device.memory_limit_bytes
            for device in session.list_devices()
            if device.device_type == 'GPU'
        }
    found: dict[str, Any] = {'memory': memory, 'layers': '', 'step': ''}
    try:
        with tf.Graph().as_default():
            tf.layers.dense(tf.zeros([2, 3]), 1)
    except Exception as error:
        remedy = compat.legacy_keras_remedy(error)
        found['layers'] = remedy or _describe(error)
        found['keras_3'] = remedy is not None
    try:
        # It rounds what is multiplied, by other amounts on other numbers of devices.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        result = estimator_mgpu.verify(_model_fn, _input_fn, devices=towers(), steps=1)
        differs = [str(result)] if not result.exact else []
        found.update(exact=result.exact, differs='\n'.join(differs))
    except Exception as error:
        found['step'] = _describe(error)
    return found


def towers() -> list[str]:
    """Returns the devices to train a step on: all GPUs, but two towers at least."""
    found = devices.resolve(None)
    if len(found) > 1:
        return found
    return found * 2 if devices.spec_of(found[0]).device_type == 'GPU' else devices.resolve(2)


def _model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
    hidden = tf.nn.tanh(features @ tf.get_variable('w', [3, 4]) + tf.get_variable('b', [4]))
    output = hidden @ tf.get_variable('v', [4, 1])
    loss = tf.reduce_mean(tf.square(output - labels))
    optimizer = tf.train.MomentumOptimizer(0.1, 0.9)
    train_op = optimizer.minimize(loss, tf.train.get_global_step())
    return compat.estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, predictions={'output': output}
    )


def _input_fn() -> Any:
    rows = 4 * len(towers()) + 1  # which the towers don't divide
    numbers = np.random.RandomState(0).randn(rows, 4).astype(np.float32)
    return tf.data.Dataset.from_tensors((numbers[:, :3], numbers[:, 3:]))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unmet_requirements() -> str:
    """Returns what to install where what this package requires is missing or of a wrong version.

    TensorFlow's version was checked as this package was imported.
    """
    if _version('estimator-mgpu') is None:  # It's run from its sources, which say nothing.
        return ''
    required = [Requirement(r) for r in importlib.metadata.requires('estimator-mgpu') or []]
    unmet = [
        requirement
        for requirement in required
        if requirement.name != 'tensorflow'
        and (requirement.marker is None or requirement.marker.evaluate({'extra': ''}))
        and not requirement.specifier.contains(_version(requirement.name) or '0', prereleases=True)
    ]
    return _install(*map(str, unmet)) if unmet else ''


def _estimator() -> Finding:
    used = compat.estimator.Estimator
    own = sys.modules['tensorflow_estimator'].__file__ or ''
    module = sys.modules[used.__module__]
    where = getattr(module, '__file__', None) or used.__module__
    advice = ''
    if not where.startswith(os.path.dirname(own)):
        advice = (
            f'tf.estimator.Estimator is not that of tensorflow-estimator ({own}), but something '
            'else was put in its place. Import estimator_mgpu before what did so, or leave it out.'
        )
    return Finding('tf.estimator', where, advice)


def _layers(probed: dict[str, Any]) -> Finding:
    if 'layers' not in probed:
        return Finding('tf.layers', 'unknown')
    found = 'fails' if probed['layers'] else 'works'
    return Finding('tf.layers', found, probed['layers'], probed.get('keras_3', False))


def _gpus(probed: dict[str, Any]) -> Finding:
    # Listing them reserves nothing.
    gpus = tf.config.list_physical_devices('GPU')
    if gpus:
        memory = probed.get('memory', {})
        told = [_describe_gpu(g, memory.get(f'/device:GPU:{i}')) for i, g in enumerate(gpus)]
        return Finding('GPUs', ', '.join(told))
    hidden = os.environ.get('CUDA_VISIBLE_DEVICES')
    if hidden in ('', '-1'):
        return Finding('GPUs', f'none, as CUDA_VISIBLE_DEVICES={hidden!r} hides them')
    if not glob.glob('/dev/nvidia[0-9]*'):
        return Finding('GPUs', 'none')
    if not tf.test.is_built_with_cuda():
        advice = f'this TensorFlow is built without CUDA. {_install("tensorflow[and-cuda]")}'
    else:
        info = tf.sysconfig.get_build_info()
        advice = (
            f'TensorFlow does not find the driver or the libraries (CUDA {info["cuda_version"]}, '
            f'cuDNN {info["cudnn_version"]}); what it prints as it starts says which. '
            f'See what `nvidia-smi` says. {_install(f"tensorflow[and-cuda]=={tf.__version__}")}'
        )
    return Finding('GPUs', 'there are some, but TensorFlow has none', advice)


def _describe_gpu(gpu: Any, memory: int | None) -> str:
    name = tf.config.experimental.get_device_details(gpu).get('device_name', gpu.name)
    return f'{name} ({"memory unknown" if memory is None else f"{memory / 2**30:.1f} GiB"})'


def _cpu_towers() -> Finding:
    used = [name for name in towers() if devices.spec_of(name).device_type == 'CPU']
    return Finding('CPU towers', f'{len(used)} ({", ".join(used)})' if used else '0')


def _nccl() -> Finding:
    """Whether there is NCCL; nothing is wrong where there's none, as this package does without."""
    info = tf.sysconfig.get_build_info()
    found = 'in this build' if private.has_kernel('NcclAllReduce') else 'not in this build'
    versions = [f'{name} {info[key]}' for name, key in _LIBRARIES if info.get(key)]
    return Finding('NCCL', ', '.join([found, *versions]))


def _step(probed: dict[str, Any]) -> Finding:
    where = ', '.join(towers())
    error = probed.get('error') or probed['step']
    if error:
        return Finding(_STEP, f'fails on {where}', f'{error} {_TELL}')
    if not probed['exact']:
        advice = f'the result on {where} is not that of one device. {_TELL}\n{probed["differs"]}'
        return Finding(_STEP, f'on {where}: differs from one device', advice)
    return Finding(_STEP, f'on {where}: equals that of one device')


def _describe(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ['']
    return f'{type(error).__name__}: {lines[0]}'


def _install(*requirements: str) -> str:
    return f'Remedy: {sys.executable} -m pip install ' + ' '.join(f'"{r}"' for r in requirements)
