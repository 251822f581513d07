"""Trains on three machines, kills one of them, and compares the result with one device.

    python samples/machines.py

The machines are three processes on this machine: a chief and two workers, each with its
TF_CONFIG. A worker is killed and started again; the chief restores the last checkpoint and
continues. Then one device trains on the same batches. If TF_CONFIG is already set, this script
runs as one task of that cluster; all tasks need the same --model_dir.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import common
import loopback
import numpy as np
import tensorflow.compat.v1 as tf
from absl import app, flags

import estimator_mgpu

FLAGS = flags.FLAGS

flags.adopt_module_key_flags(common)  # Its flags stand in --help, too.
flags.DEFINE_integer('train_steps', 300, 'Steps to train.', lower_bound=12)
flags.DEFINE_bool('kill', True, 'Whether to kill a worker during training.')


def model_fn(features, labels, mode):
    """An ordinary model_fn. Which units are dropped depends on the step: so it can be repeated."""
    step = tf.train.get_global_step()
    net = features
    for layer in range(2):
        kernel = tf.get_variable(f'kernel{layer}', [net.shape[-1], 64])
        bias = tf.get_variable(f'bias{layer}', [64], initializer=tf.zeros_initializer())
        seed = tf.stack([step, FLAGS.seed + layer])
        net = tf.nn.experimental.stateless_dropout(tf.nn.relu(net @ kernel + bias), 0.2, seed)
    loss = tf.losses.mean_squared_error(labels, net @ tf.get_variable('out', [64, 1]))
    train_op = tf.train.MomentumOptimizer(0.02, momentum=0.9).minimize(loss, step)
    return estimator_mgpu.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def input_fn():
    rows = np.random.RandomState(FLAGS.seed).normal(size=[1000, 16]).astype('float32')
    dataset = tf.data.Dataset.from_tensor_slices((rows, np.sin(rows.sum(axis=1, keepdims=True))))
    dataset = dataset.shuffle(1000, seed=FLAGS.seed).repeat().batch(60)
    iterator = tf.data.make_one_shot_iterator(dataset)
    # Checkpoints have its place, too: else the input would begin anew after a fault.
    place = tf.data.experimental.make_saveable_from_iterator(iterator)
    tf.add_to_collection(tf.GraphKeys.SAVEABLE_OBJECTS, place)
    return iterator.get_next()


class Tell(tf.train.SessionRunHook):
    """Prints where training is."""

    def after_create_session(self, session, coord):
        print(f'starts at step {session.run(tf.train.get_global_step())}', flush=True)

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(tf.losses.get_losses()[0])

    def after_run(self, run_context, run_values):
        step = run_context.session.run(tf.train.get_global_step())
        if step % (FLAGS.train_steps // 6) == 0:
            print(f'step {step} of {FLAGS.train_steps}, loss {run_values.results:.3f}', flush=True)


def train():
    """Trains in this process; where TF_CONFIG says that it's a worker, it serves the chief."""
    options = dict(tf_random_seed=FLAGS.seed, save_checkpoints_steps=FLAGS.train_steps // 4)
    options['session_creation_timeout_secs'] = 120  # So long, others are waited for.
    config = estimator_mgpu.estimator.RunConfig(FLAGS.model_dir, **options)
    estimator = estimator_mgpu.Estimator(model_fn, config=config, devices=common.devices())
    estimator.train(input_fn, [Tell()], max_steps=FLAGS.train_steps)


def start(name, root, tf_config, *options, script=__file__):
    """Starts a script as a process that sees no GPU: all would take the same one."""
    command = [sys.executable, script, f'--seed={FLAGS.seed}', *options]
    command += [f'--train_steps={FLAGS.train_steps}', '--verbosity=info']
    env = {**os.environ, 'TF_CONFIG': json.dumps(tf_config), 'CUDA_VISIBLE_DEVICES': '-1'}
    with open(root / f'{name}.log', 'a') as log:
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)


def lines_of(process, name):
    """Prints and yields what a process prints, and ends with an error if that does."""
    for line in process.stdout:
        print(f'{name}: {line}', end='')
        yield line
    if process.wait():
        sys.exit(f'{name} has failed ({process.returncode}): see its log.')


def train_on_machines(root, running):
    """Starts a chief and two workers, kills one of these, and returns when all have ended."""
    chief, *workers = loopback.free_addresses(3)

    def start_task(job, index):
        task = {'type': job, 'index': index}
        tf_config = {'cluster': {'chief': [chief], 'worker': workers}, 'task': task}
        options = f'--model_dir={root / "machines"}', f'--devices={FLAGS.devices}'
        running[f'{job}{index}'] = start(f'{job}{index}', root, tf_config, *options)

    for job, index in ('chief', 0), ('worker', 0), ('worker', 1):
        start_task(job, index)
    for line in lines_of(running['chief0'], 'chief'):
        if FLAGS.kill and line.startswith(f'step {FLAGS.train_steps // 6 * 4} '):
            FLAGS.kill = False
            running['worker1'].kill()
            print(f'worker1 was killed ({running["worker1"].wait()}), and is started again')
            start_task('worker', 1)
    print('ended:', ', '.join(f'{name} with {one.wait(60)}' for name, one in running.items()))
    if any(process.returncode for process in running.values()):
        sys.exit('All should have ended with 0.')


def compare_with_one_device(root):
    """Prints how far variables are from those of one device, and ends with 1 if that's far."""
    several, one = (tf.train.load_checkpoint(str(root / n)) for n in ('machines', 'alone'))
    names = [n for n, kind in one.get_variable_to_dtype_map().items() if kind != tf.variant]
    largest = np.max([abs(several.get_tensor(n) - one.get_tensor(n)).max() for n in names])
    print(f'largest difference of {len(names)} variables from one device: {largest:.1e}')
    sys.exit(int(not largest < 1e-4))  # More isn't rounding.


def main(argv):
    common.start(argv)
    if 'TF_CONFIG' in os.environ:
        return train()
    root = pathlib.Path(FLAGS.model_dir or tempfile.mkdtemp())
    root.mkdir(parents=True, exist_ok=True)
    print(f'Checkpoints and logs are in {root}.')
    running = {}  # processes, by their names
    try:
        train_on_machines(root, running)
        running['alone'] = start('alone', root, {}, f'--model_dir={root / "alone"}')
        list(lines_of(running['alone'], 'alone'))
    finally:
        for process in running.values():
            process.kill()
    compare_with_one_device(root)


if __name__ == '__main__':
    app.run(main)
