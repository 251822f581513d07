"""Prints how many bytes machines send each other in a step.

    python traffic.py

There is one line for each model and number of machines, with two devices each. It gives the
largest number of bytes that a machine sends, and that a machine receives. The larger of both is
also given relative to the bytes of all trained variables. For comparison, a ring all-reduce on M
machines moves 2 (M - 1) / M of them each way. The bytes are counted in the graph; no step is run.
"""

from __future__ import annotations

import collections

import tensorflow.compat.v1 as tf
from absl import app, flags

import estimator_mgpu
from estimator_mgpu.cluster import sessions
from estimator_mgpu.devices import CHIEF, machine_of
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.reports import explain

FLAGS = flags.FLAGS
flags.DEFINE_list('machines', ['2', '3', '4'], 'Numbers of machines.')
ROWS = 12


def dense(features, labels, mode):
    """Layers of many weights, and gradients clipped by their common norm."""
    net = features
    for _ in range(12):
        net = tf.layers.dense(net, 128, tf.nn.relu)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(net, 1))
    optimizer = tf.train.AdamOptimizer()
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    pairs = zip(tf.clip_by_global_norm(gradients, 1.0)[0], variables)
    train_op = optimizer.apply_gradients(pairs, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def embedding(features, labels, mode):
    """Rows looked up in large tables, with sparse gradients."""
    ids = tf.cast(features * 0, tf.int32)
    tables = [tf.get_variable(f'table{i}', [50_000, 16]) for i in range(6)]
    found = [tf.nn.embedding_lookup(table, ids) for table in tables]
    net = tf.layers.dense(tf.reshape(tf.concat(found, 2), [ROWS, 4 * 6 * 16]), 8, tf.nn.relu)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(net, 1))
    train_op = tf.train.AdagradOptimizer(0.1).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


MODELS = {'dense': dense, 'embedding': embedding}


def build(model_fn, machines):
    """Builds a model in the default graph, for two devices of each machine."""
    tasks = [CHIEF, *(f'/job:worker/task:{i}' for i in range(machines - 1))]
    devices = [f'{task}/device:CPU:{i}' for task in tasks for i in range(2)]
    tf.train.get_or_create_global_step()
    batch = tf.placeholder(tf.float32, [ROWS, 4]), tf.placeholder(tf.float32, [ROWS, 1])
    replicated = estimator_mgpu.replicate(model_fn, devices=devices)
    return replicated(*batch, tf.estimator.ModeKeys.TRAIN), batch


def count(model_fn, machines):
    """Returns the bytes that each task sends, that it receives, and those of trained variables."""
    with tf.Graph().as_default() as graph:
        spec, _ = build(model_fn, machines)
        sessions.place_on_chief(graph)
        sent, received = collections.Counter(), collections.Counter()
        for *ends, size in explain.messages([spec.train_op, spec.loss.op], CHIEF):
            source, target = map(machine_of, ends)
            if source != target:
                sent[source] += size
                received[target] += size
        return sent, received, sum(map(bytes_of, tf.trainable_variables()))


def main(_):
    tf.logging.set_verbosity(tf.logging.ERROR)
    print('model      machines  sent, kB  received, kB  of the variables  a ring')
    for name, model_fn in MODELS.items():
        for machines in map(int, FLAGS.machines):
            sent, received, variables = count(model_fn, machines)
            out, into = max(sent.values()), max(received.values())
            part, ring = max(out, into) / variables, 2 * (machines - 1) / machines
            print(
                f'{name:10} {machines:8} {out / 1e3:9.1f} {into / 1e3:13.1f} {part:17.4f} '
                f'{ring:7.4f}'
            )


if __name__ == '__main__':
    app.run(main)
