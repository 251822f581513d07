"""A report on the environment, to paste into a bug; or `explain`: how a model_fn is divided."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pkgutil
import platform
import sys
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import devices
from estimator_mgpu.tf_internals import tf_estimator

PACKAGES = 'tensorflow-estimator', 'tf-keras', 'keras', 'protobuf', 'numpy', 'absl-py', 'tqdm'


def main() -> int:
    """Prints the report, and returns the exit status: 1 if the training step is wrong, else 0."""
    os.environ['TF_FORCE_GPU_ALLOW_GROWTH'] = 'true'  # The step needs little of a GPU's memory.
    gpus = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices('GPU'))
    found = reversed([*importlib.metadata.distributions()])  # What is imported is the first.
    installed = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in found}
    report = {
        'estimator_mgpu': estimator_mgpu.__version__,
        'Python': f'{platform.python_version()}, {sys.executable}',
        'OS': f'{platform.platform()}, {os.cpu_count()} CPU cores',
        'TensorFlow': tf.__version__,
        **{package: installed.get(package, 'not installed') for package in PACKAGES},
        'tf.layers': tf_layers() or 'work',
        'GPUs': ', '.join(gpu.get('device_name', 'unknown') for gpu in gpus) or 'none',
        'CUDA_VISIBLE_DEVICES': os.environ.get('CUDA_VISIBLE_DEVICES', 'not set'),
    }
    for what, found in report.items():
        print(f'{what:20}  {found}', flush=True)
    try:
        # It rounds what is multiplied, by other amounts on other numbers of devices.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        exact = estimator_mgpu.verify(_model_fn, _input_fn, devices=towers(), steps=1).exact
        told = 'equals that of one device' if exact else 'differs from one device'
    except Exception as error:
        exact, told = False, f'fails: {type(error).__name__}: {error}'
    print(f'{"one step":20}  on {", ".join(towers())}: {told}')
    print('Nothing is wrong.' if exact else 'WRONG: report this, with all that is printed.')
    return int(not exact)


def tf_layers() -> str:
    """Says what is wrong with `tf.layers`, which not all models need."""
    try:
        with tf.Graph().as_default():
            tf.layers.dense(tf.zeros([2, 3]), 1)
    except Exception as error:
        return f'fail: {tf_estimator.legacy_keras_remedy(error) or error}'
    return ''


def towers() -> list[str]:
    """Returns the devices to train a step on: all GPUs, but two towers at least."""
    if len(found := devices.resolve(None)) > 1:
        return found
    return found * 2 if devices.device_spec(found[0]).device_type == 'GPU' else devices.resolve(2)


def _model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
    hidden = tf.nn.tanh(features @ tf.get_variable('w', [3, 4]))
    loss = tf.reduce_mean(tf.square(hidden @ tf.get_variable('v', [4, 1]) - labels))
    train_op = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, tf.train.get_global_step())
    return tf_estimator.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def _input_fn() -> Any:
    rows = 4 * len(towers()) + 1  # which the towers don't divide
    numbers = np.random.RandomState(0).randn(rows, 4).astype(np.float32)
    return tf.data.Dataset.from_tensors((numbers[:, :3], numbers[:, 3:]))


def explain(options: argparse.Namespace) -> int:
    """Prints how a model_fn would be divided."""
    devices = options.devices
    devices = int(devices) if devices and devices.isdigit() else devices and devices.split(',')
    estimator = estimator_mgpu.Estimator(options.model_fn, params=options.params, devices=devices)
    found = estimator.explain(options.input_fn)
    if options.draw:
        found.draw(options.draw)
    return 0


def _named(name: str) -> Any:
    """Imports what a command names: `module:function`."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f'{error}. Give module:function') from error


if __name__ == '__main__':
    parser = argparse.ArgumentParser('python -m estimator_mgpu', description=__doc__)
    command = parser.add_subparsers(dest='command').add_parser('explain', help=explain.__doc__)
    command.add_argument('model_fn', type=_named, help='module:function')
    command.add_argument('--input_fn', type=_named, required=True, help='module:function')
    command.add_argument('--params', type=json.loads, help="the model_fn's, as JSON")
    command.add_argument('--devices', help='how many, or names with commas; default: all GPUs')
    command.add_argument('--draw', metavar='plan.svg', help='also draws it, with Matplotlib')
    options = parser.parse_args()
    sys.exit(explain(options) if options.command else main())
