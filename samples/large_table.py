"""Trains, saves and restores a table that no device has room for, in parts.

    python samples/large_table.py --megabytes=4000 --parts=8 --devices=4

For each phase but the restoring, it prints the most bytes that a device has at a time, variables
included: what was there before, and what TensorFlow's trace (`RunMetadata`) says of the outputs and
the scratch space of all ops. With four devices, 25% is a perfect split.
"""

from __future__ import annotations

import os
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf
import traced_memory
from absl import app, flags

import estimator_mgpu
from estimator_mgpu.partition.byte_counts import bytes_of

FLAGS = flags.FLAGS
flags.DEFINE_integer('megabytes', 64, 'The size of the table.', lower_bound=1)
flags.DEFINE_integer('parts', 8, 'How many parts it has.', lower_bound=1)
flags.DEFINE_integer('devices', 4, 'Number of logical CPU devices.', lower_bound=2)
WIDTH = 250  # entries of a row, which are 1,000 bytes
EXAMPLES = 32


def model_fn(features, labels, mode, params):
    """Three rows of the table for each example, and their sum."""
    partitioner = tf.fixed_size_partitioner(params['parts'])
    table = tf.get_variable('table', [params['rows'], WIDTH], partitioner=partitioner)
    rows = tf.nn.embedding_lookup(table, features, partition_strategy='div')
    loss = tf.losses.mean_squared_error(labels, tf.reduce_sum(rows, [1, 2]))
    optimizer = tf.train.GradientDescentOptimizer(0.01)
    train_op = optimizer.minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


class Peaks:
    """Runs fetches in a session, and keeps for each phase the most bytes that a device has."""

    def __init__(self):
        self.of_phases = {}
        self._held = {}  # by device, the bytes of variables that have values

    def run(self, phase, session, fetches, feed=None):
        """Runs a phase, and returns what was fetched."""
        metadata = tf.RunMetadata()
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        fetched = session.run(fetches, feed, options, metadata)
        peaks = [self._peak(stats) for stats in metadata.step_stats.dev_stats]
        self.of_phases[phase] = max([*peaks, self.of_phases.get(phase, 0)])
        return fetched

    def forget_variables(self):
        """Counts no variables, as in a new session."""
        self._held = {}

    def hold_variables(self):
        """Counts the variables of the graph from now on."""
        for variable in tf.global_variables():
            device = variable.device or '/device:CPU:0'
            self._held[device] = self._held.get(device, 0) + bytes_of(variable)

    def _peak(self, stats):
        held = self._held.get(stats.device[stats.device.index('/device') :], 0)
        return held + traced_memory.peak(stats)


def build(params, devices):
    """Builds the model in the default graph; returns its EstimatorSpec, with the scaffold."""
    tf.set_random_seed(1)
    tf.train.get_or_create_global_step()
    random = np.random.RandomState(1)
    ids = tf.constant(random.randint(0, params['rows'], [EXAMPLES, 3]))
    replicated = estimator_mgpu.replicate(model_fn, devices=devices)
    spec = replicated(ids, tf.zeros([EXAMPLES]), tf.estimator.ModeKeys.TRAIN, params)
    spec.scaffold.finalize()
    return spec


def measure(rows, parts, devices, directory):
    """Trains two steps, saves, trains a third one, and restores to train that again.

    Args:
      rows: of the table.
      parts: how many the table has.
      devices: how many logical CPU devices there are.
      directory: where the checkpoint is written.

    Returns:
      By phase, the most bytes that a device has.

    Raises:
      RuntimeError: if the third step isn't the same after restoring.
    """
    peaks = Peaks()
    params = {'rows': rows, 'parts': parts}
    config = estimator_mgpu.session_config(devices)
    path = os.path.join(directory, 'model')

    with tf.Graph().as_default(), tf.Session(config=config) as session:
        spec = build(params, devices)
        saver = spec.scaffold.saver.saver_def
        peaks.run('initialize', session, spec.scaffold.init_op)
        peaks.hold_variables()
        for _ in range(2):
            peaks.run('train', session, spec.train_op)
        peaks.run('save', session, saver.save_tensor_name, {saver.filename_tensor_name: path})
        expected, _ = peaks.run('train', session, [spec.loss, spec.train_op])

    peaks.forget_variables()
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        spec = build(params, devices)
        saver = spec.scaffold.saver.saver_def
        session.run(saver.restore_op_name, {saver.filename_tensor_name: path})
        peaks.hold_variables()
        loss, _ = peaks.run('train', session, [spec.loss, spec.train_op])

    if loss != expected:
        raise RuntimeError(f'after restoring, the loss is {loss}, and without {expected}')
    return peaks.of_phases


def main(_):
    tf.logging.set_verbosity(tf.logging.ERROR)
    size = FLAGS.megabytes * 1_000_000
    with tempfile.TemporaryDirectory() as directory:
        rows = size // (4 * WIDTH)
        peaks = measure(rows, FLAGS.parts, FLAGS.devices, directory)
    for phase, peak in peaks.items():
        print(f'{phase:12} {peak / 1e6:10.1f} MB, {peak / size:4.0%} of the table', flush=True)


if __name__ == '__main__':
    app.run(main)
