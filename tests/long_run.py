"""Trains for 800 steps, then trains and evaluates 12 times; prints the memory in use, in MB."""

from __future__ import annotations

import gc
import json
import pathlib
import sys
import tempfile

import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import floats

ROWS = 32


def model_fn(features, labels, mode):
    net = features
    for _ in range(3):
        net = tf.layers.dense(net, 64, tf.nn.relu)
        net = tf.layers.batch_normalization(net, training=mode == 'train')
    output = tf.layers.dense(net, 1)
    loss = tf.losses.mean_squared_error(labels, output)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        optimizer = tf.train.AdamOptimizer()
        train_op = optimizer.minimize(loss, tf.train.get_global_step()) if mode == 'train' else None
    metrics = {'error': tf.metrics.mean_absolute_error(labels, output)}
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def resident() -> float:
    pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
    return pages * 4096 / 2**20


class Watch(tf.train.SessionRunHook):
    """Keeps how much memory is in use after each step."""

    def __init__(self):
        self.found = []

    def after_run(self, run_context, run_values):
        self.found.append(resident())


def main():
    data = floats(2 * ROWS, 8), floats(2 * ROWS, 1)
    watch = Watch()
    with tempfile.TemporaryDirectory() as model_dir:
        config = tf.estimator.RunConfig(save_checkpoints_steps=1000, keep_checkpoint_max=1)
        estimator = estimator_mgpu.Estimator(model_fn, model_dir, config, devices=3)

        def input_fn():
            return tf.data.Dataset.from_tensor_slices(data).repeat().batch(ROWS)

        estimator.train(input_fn, steps=800, hooks=[watch])
        rounds = []
        for _ in range(12):
            estimator.train(input_fn, steps=2)
            estimator.evaluate(input_fn, steps=2)
            gc.collect()
            rounds.append(resident())
    print(json.dumps({'steps': watch.found, 'rounds': rounds}))


if __name__ == '__main__':
    sys.exit(main())
