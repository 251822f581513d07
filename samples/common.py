"""The flags that all samples have."""

from __future__ import annotations

import re

import tensorflow.compat.v1 as tf
from absl import app, flags

import estimator_mgpu

FLAGS = flags.FLAGS

flags.DEFINE_string(
    'devices',
    '',
    'How many devices, or which: 2, or /device:GPU:0,/device:GPU:1. Every GPU if empty, or one CPU '
    'device where there is none.',
)
flags.DEFINE_string('model_dir', None, 'Where checkpoints go; a temporary directory if not given.')
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


def start(argv):
    """Shows TensorFlow's log down to INFO, each line once: absl's app.run would print it, too.

    Raises:
      app.UsageError: if there's anything but flags, which nobody would look at.
    """
    if len(argv) > 1:
        raise app.UsageError(f'{argv[1]!r} is no flag, such as --devices=2 is.')
    tf.logging.set_verbosity(tf.logging.INFO)
    tf.get_logger().propagate = False
