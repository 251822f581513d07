"""A report on the environment, to paste into a bug; or `explain`: how a model_fn is sharded."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pkgutil
import platform
import sys
import warnings
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import devices
from estimator_mgpu.tf_internals import tf_estimator

# Packages whose versions are reported.
PACKAGES = ['tensorflow-estimator', 'tf-keras', 'keras', 'protobuf', 'numpy', 'absl-py', 'tqdm']

_LAYERS_WORK = 'work'
_NO_GPU = 'none. If there is one, set TF_CPP_MIN_LOG_LEVEL=0, and TensorFlow says what is missing'


def main() -> int:
    """Prints the report, and returns the exit status: 1 if the training step is wrong, else 0."""
    os.environ['TF_FORCE_GPU_ALLOW_GROWTH'] = 'true'  # The step needs little of a GPU's memory.
    found = environment()
    for what, value in found.items():
        print(f'{what:20}  {value}', flush=True)

    is_exact = False
    try:
        # TensorFloat-32 rounds factors, which gives other results on other numbers of devices.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        is_exact = estimator_mgpu.verify(_model_fn, _input_fn, devices=towers(), steps=1).exact
        result = 'equals that of one device' if is_exact else 'differs from one device'
    except Exception as error:
        result = f'fails: {type(error).__name__}: {error}'

    print(f'{"one step":20}  on {", ".join(towers())}: {result}')
    if not is_exact:
        print('WRONG: report this, with all that is printed.')
    elif found['tf.layers'] != _LAYERS_WORK:
        print('The step is right, but tf.layers fail: see above, if your model uses them.')
    else:
        print('Nothing is wrong.')
    return 0 if is_exact else 1


def environment() -> dict[str, str]:
    """What the report says of this machine and its packages, by what it is."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata['Name'].lower().replace('_', '-')
        versions.setdefault(name, distribution.version)  # Python imports the first one.

    gpus = []
    for gpu in tf.config.list_physical_devices('GPU'):
        details = tf.config.experimental.get_device_details(gpu)
        gpus.append(details.get('device_name', 'unknown'))

    return {
        'estimator_mgpu': estimator_mgpu.__version__,
        'Python': f'{platform.python_version()}, {sys.executable}',
        'OS': f'{platform.platform()}, {os.cpu_count()} CPU cores',
        'TensorFlow': tf.__version__,
        **{package: versions.get(package, 'not installed') for package in PACKAGES},
        'tf.layers': tf_layers(),
        'GPUs': ', '.join(gpus) or _NO_GPU,
        'CUDA_VISIBLE_DEVICES': os.environ.get('CUDA_VISIBLE_DEVICES', 'not set'),
    }


def tf_layers() -> str:
    """Says whether `tf.layers`, which not all models need, work, or what is wrong with them."""
    try:
        with tf.Graph().as_default(), warnings.catch_warnings():
            warnings.simplefilter('ignore')  # They are deprecated.
            tf.layers.dense(tf.zeros([2, 3]), 1)
    except Exception as error:
        return f'fail: {tf_estimator.legacy_keras_remedy(error) or error}'
    return _LAYERS_WORK


def towers() -> list[str]:
    """Returns the devices to train a step on: all GPUs, but two towers at least."""
    found = devices.resolve(None)
    if len(found) > 1:
        return found
    if devices.device_spec(found[0]).device_type == 'GPU':
        return [*found, *found]  # two towers on one GPU
    return devices.resolve(2)


def _model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
    """A network with one hidden layer."""
    hidden = tf.nn.tanh(features @ tf.get_variable('w', [3, 4]))
    loss = tf.reduce_mean(tf.square(hidden @ tf.get_variable('v', [4, 1]) - labels))
    train_op = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, tf.train.get_global_step())
    return tf_estimator.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def _input_fn() -> Any:
    """One batch, of as many examples that the towers get shards of different sizes."""
    examples = 4 * len(towers()) + 1
    numbers = np.random.RandomState(0).randn(examples, 4).astype(np.float32)
    return tf.data.Dataset.from_tensors((numbers[:, :3], numbers[:, 3:]))


def explain(options: argparse.Namespace) -> int:
    """Prints how a model_fn would be sharded."""
    estimator = estimator_mgpu.Estimator(
        options.model_fn, params=options.params, devices=options.devices
    )
    explanation = estimator.explain(options.input_fn)
    if options.draw:
        explanation.draw(options.draw)
    return 0


def _options() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser('python -m estimator_mgpu', description=__doc__)
    commands = parser.add_subparsers(dest='command')

    command = commands.add_parser('explain', help=explain.__doc__)
    command.add_argument('model_fn', type=_named, help='module:function')
    command.add_argument('--input_fn', type=_named, required=True, help='module:function')
    command.add_argument('--params', type=json.loads, help="the model_fn's, as JSON")
    command.add_argument(
        '--devices', type=_devices, help='how many, or names with commas; default: all GPUs'
    )
    command.add_argument('--draw', metavar='plan.svg', help='also draws it, with Matplotlib')
    return parser.parse_args()


def _named(name: str) -> Any:
    """Imports what an option names: `module:function`."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f'{error}. Give module:function') from error


def _devices(text: str) -> int | list[str]:
    """What `Estimator` takes for an option such as '2' or '/cpu:0,/cpu:1'."""
    return int(text) if text.isdigit() else text.split(',')


if __name__ == '__main__':
    options = _options()
    sys.exit(explain(options) if options.command else main())
