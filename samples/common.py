"""What all samples share: flags for devices, and the log."""

from __future__ import annotations

import os
import re

os.environ.setdefault(
    'TF_CPP_MIN_LOG_LEVEL', '3'
)  # Hides the log of TensorFlow's C++ code, except crashes.

import tensorflow.compat.v1 as tf  # noqa: E402
from absl import app, flags, logging  # noqa: E402

import estimator_mgpu  # noqa: E402
from estimator_mgpu.devices import resolve  # noqa: E402

FLAGS = flags.FLAGS

flags.DEFINE_string(
    'devices',
    '',
    'A number of devices, such as 2, or a list, such as /device:GPU:0,/device:GPU:1. If empty: '
    'every GPU, or one CPU device if there is no GPU.',
)
flags.DEFINE_string('model_dir', None, 'Directory for checkpoints. Default: a temporary directory.')
flags.DEFINE_integer('seed', 1, 'Random seed.')


def devices():
    """Returns what --devices says: None for '', a count for '2', otherwise device strings."""
    return _parse(FLAGS.devices)


def _parse(text):
    if not text:
        return None
    return int(text) if re.fullmatch(r'[-+]?\d+', text) else text.split(',')


@flags.validator('devices')
def _check_devices(text):
    try:
        estimator_mgpu.session_config(_parse(text))
    except ValueError as error:
        raise flags.ValidationError(str(error)) from None
    return True


class _Level(flags.IntegerParser):
    """absl's levels, by their names, too."""

    def parse(self, argument):
        return super().parse({'error': -2, 'warning': -1, 'info': 0}.get(argument, argument))


FLAGS['verbosity'].parser = _Level()


def start(argv):
    """Says which devices are used, and shows TensorFlow's log as far as --verbosity asks for it.

    Each line once: absl's app.run would print it, too.

    Raises:
      app.UsageError: if there's anything but flags, which nobody would look at.
    """
    if len(argv) > 1:
        raise app.UsageError(f'{argv[1]!r} is no flag, such as --devices=2 is.')
    level = FLAGS.verbosity if FLAGS['verbosity'].present else logging.ERROR
    tf.logging.set_verbosity(logging.converter.absl_to_standard(level))
    tf.get_logger().propagate = False
    print(f'Devices: {", ".join(resolve(devices()))}', flush=True)
