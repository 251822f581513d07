"""Plots how the time to divide a model grows with its number of ops, of devices, and of columns.

    python samples/growth.py --ops=1000,2000,5000,10000 --devices=2,4,8,16 --columns=100,200,400

The time is what propagation and building add to the model_fn, and is also given relative to the
time of the model_fn alone. Both are times of the processor. No step is run.

The first plot is for eight devices. The second is for a model of 5,000 ops: dense layers, their
gradients and updates. The third is for two devices, and models of feature columns, numeric ones and
embeddings.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict

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
flags.DEFINE_list('columns', ['100', '200', '400', '800'], 'Numbers of feature columns.')
flags.DEFINE_string('output', 'growth.svg', 'Output file of the plot.')
for flag in ('ops', 'devices', 'columns'):
    flags.register_validator(
        flag,
        lambda given: given and all(count.isdigit() and int(count) > 1 for count in given),
        'give numbers of 2 or more, such as 2,4,8',
    )
OPS_OF_A_LAYER = 48
MANY_DEVICES, MANY_OPS = 8, 5000


column = tf.feature_column

# Each is a function of a size, which gives features, and a function that makes a net of them.


def dense(ops):
    """Dense layers, which have about as many ops with their gradients and updates."""
    features = tf.placeholder(tf.float32, [256, 8])

    def forward():
        net = features
        for _ in range(ops // OPS_OF_A_LAYER):
            net = tf.layers.dense(net, 8, tf.nn.relu)
        return net

    return features, forward


def numeric(columns):
    """Numeric columns."""
    names = [f'x{i}' for i in range(columns)]
    features = {name: tf.placeholder(tf.float32, [None, 1]) for name in names}
    return features, _layer_on(features, [column.numeric_column(name) for name in names])


def embedding(columns):
    """Words, which are hashed and looked up, in a table for each column."""
    names = [f'x{i}' for i in range(columns)]
    features = {name: tf.placeholder(tf.string, [None, 1]) for name in names}
    embedded = [
        column.embedding_column(column.categorical_column_with_hash_bucket(name, 100), 8)
        for name in names
    ]
    return features, _layer_on(features, embedded)


def _layer_on(features, columns):
    return lambda: tf.layers.dense(column.input_layer(features, columns), 8, tf.nn.relu)


def measure(model, size, devices):
    """Builds a model; returns its ops, the seconds that takes, and those to divide it."""
    gc.collect()  # The graph that was measured before.
    built = []

    def model_fn(features, mode):
        start = time.process_time()
        loss = tf.reduce_mean(tf.square(forward()))
        train_op = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, tf.train.get_global_step())
        built.append((len(tf.get_default_graph().get_operations()), time.process_time() - start))
        return estimator_mgpu.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        features, forward = model(size)
        start = time.process_time()
        estimator_mgpu.replicate(model_fn, devices=devices)(features, mode='train')
        [(count, own)] = built
        return count, own, time.process_time() - start - own


def main(argv):
    tf.logging.set_verbosity(tf.logging.ERROR)
    measure(dense, OPS_OF_A_LAYER, 2)  # What TensorFlow does once.
    sizes = list(map(int, FLAGS.columns))
    series_of = {
        'ops': [(dense, ops, MANY_DEVICES) for ops in map(int, FLAGS.ops)],
        'devices': [(dense, MANY_OPS, devices) for devices in map(int, FLAGS.devices)],
        'columns': [(model, size, 2) for model in (numeric, embedding) for size in sizes],
    }
    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.5), layout='constrained')
    print('    model   size     ops  devices  model_fn, s  dividing, s  of the model_fn')
    for axis, (along, series) in zip(axes, series_of.items()):
        points = defaultdict(list)  # by model
        for model, size, devices in series:
            count, built, divided = measure(model, size, devices)
            place = {'ops': count, 'devices': devices, 'columns': size}[along]
            points[model.__name__].append((place, divided))
            print(
                f'{model.__name__:>9} {size:6} {count:7} {devices:8} {built:12.2f} '
                f'{divided:12.2f} {divided / built:16.2f}',
                flush=True,
            )
        for name, line in points.items():
            axis.plot(*zip(*line), 'o-', label=name)
        axis.set(xlabel=along, ylabel='dividing, s', xlim=(0, None), ylim=(0, None))
    axes[0].set_title(f'{MANY_DEVICES} devices')
    axes[1].set_title(f'{MANY_OPS} ops')
    axes[2].set_title('2 devices')
    axes[2].legend()
    figure.savefig(FLAGS.output)


if __name__ == '__main__':
    app.run(main)
