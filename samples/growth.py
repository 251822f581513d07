"""Plots how the time to divide a model grows with its number of ops, and of devices.

    python samples/growth.py --ops=1000,2000,5000,10000 --devices=2,4,8,16

The time is what propagation and building add to the model_fn, and is also given relative to the
time of the model_fn alone. No step is run. The first plot is for eight devices. The second is for
a model of 5,000 ops: dense layers, their gradients and updates.
"""

from __future__ import annotations

import time

import matplotlib
import tensorflow.compat.v1 as tf
from absl import app, flags

import estimator_mgpu

FLAGS = flags.FLAGS
flags.DEFINE_list(
    'ops',
    ['1000', '2000', '5000', '10000', '20000', '50000'],
    'Numbers of ops of the model on one device.',
)
flags.DEFINE_list('devices', ['2', '4', '8', '16', '32', '64'], 'Numbers of logical CPU devices.')
flags.DEFINE_string('output', 'growth.svg', 'Output file of the plot.')
for flag in ('ops', 'devices'):
    flags.register_validator(
        flag,
        lambda given: given and all(count.isdigit() and int(count) > 1 for count in given),
        'give numbers of 2 or more, such as 2,4,8',
    )
OPS_OF_A_LAYER = 48
MANY_DEVICES, MANY_OPS = 8, 5000


def measure(ops, devices):
    """Builds a model; returns its ops, the seconds that takes, and those to divide it."""
    built = []

    def model_fn(features, mode):
        start = time.perf_counter()
        net = features
        for _ in range(ops // OPS_OF_A_LAYER):
            net = tf.layers.dense(net, 8, tf.nn.relu)
        loss = tf.reduce_mean(tf.square(net))
        train_op = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, tf.train.get_global_step())
        built.append((len(tf.get_default_graph().get_operations()), time.perf_counter() - start))
        return estimator_mgpu.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        features = tf.placeholder(tf.float32, [256, 8])
        start = time.perf_counter()
        estimator_mgpu.replicate(model_fn, devices=devices)(features, mode='train')
        [(count, own)] = built
        return count, own, time.perf_counter() - start - own


def main(argv):
    tf.logging.set_verbosity(tf.logging.ERROR)
    measure(OPS_OF_A_LAYER, 2)  # What TensorFlow does once.
    by_ops = [(n, MANY_DEVICES) for n in map(int, FLAGS.ops)]
    by_devices = [(MANY_OPS, n) for n in map(int, FLAGS.devices)]
    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout='constrained')
    print('   ops  devices  model_fn, s  dividing, s  of the model_fn')
    for axis, series, along in zip(axes, (by_ops, by_devices), ('ops', 'devices')):
        points = []
        for ops, devices in series:
            count, built, divided = measure(ops, devices)
            points.append((count if along == 'ops' else devices, divided))
            print(
                f'{count:6} {devices:8} {built:12.2f} {divided:12.2f} {divided / built:16.2f}',
                flush=True,
            )
        axis.plot(*zip(*points), 'o-')
        axis.set(xlabel=along, ylabel='dividing, s', xlim=(0, None), ylim=(0, None))
    axes[0].set_title(f'{MANY_DEVICES} devices')
    axes[1].set_title(f'{MANY_OPS} ops')
    figure.savefig(FLAGS.output)


if __name__ == '__main__':
    app.run(main)
