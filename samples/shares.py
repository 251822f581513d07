"""Tells which share of a step's heavy kernels the busiest device runs, model by model.

    python samples/shares.py
    python samples/shares.py --models=lstm,gan --devices=4 --whole

Heavy are matrix products, convolutions, softmax, tanh, sigmoid and lookups, with their gradients.
They are counted as TensorFlow traced them (`RunMetadata`), those inside of functions and loops each
time that they ran. Of four devices each has 25% if all is divided.
"""

from __future__ import annotations

import collections
import re

import shares_models
import tensorflow.compat.v1 as tf
from absl import app, flags

import estimator_mgpu
from estimator_mgpu import steps

FLAGS = flags.FLAGS
flags.DEFINE_list('models', list(shares_models.MODELS), 'Which models.')
flags.DEFINE_integer('devices', 4, 'How many logical CPU devices.', lower_bound=2)
flags.DEFINE_bool('whole', False, 'Whether to list the ops that run once, and why.')
flags.register_validator(
    'models',
    lambda models: set(models) <= set(shares_models.MODELS),
    f'Legal are {", ".join(shares_models.MODELS)}.',
)

HEAVY = re.compile(
    'MatMul|Einsum|Conv|Softmax|Tanh|Sigmoid|ResourceGather|LookupTableFind|LSTM|CropAndResize|'
    'NonMaxSuppression'
)


def spec_of(name, devices, static=False):
    """Builds a model: its EstimatorSpec, and what feeds it."""
    forward, batch = shares_models.MODELS[name]
    rows = shares_models.ROWS if static else None
    features, feed = {}, {}
    for key, value in batch.items():
        if isinstance(value, tf.SparseTensorValue):
            shape = [rows, *value.dense_shape[1:]]
            features[key] = tf.sparse_placeholder(value.values.dtype, shape)
        elif isinstance(value, tf.ragged.RaggedTensorValue):
            features[key] = tf.ragged.placeholder(value.dtype, 1, [])
        else:
            features[key] = tf.placeholder(tf.as_dtype(value.dtype), [rows, *value.shape[1:]])
        feed[features[key]] = value

    def model_fn(features):
        found = forward(dict(features))
        if isinstance(found, dict):
            return estimator_mgpu.estimator.EstimatorSpec('infer', predictions=found)
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        train_op = optimizer.minimize(found, tf.train.get_or_create_global_step())
        return estimator_mgpu.estimator.EstimatorSpec('train', loss=found, train_op=train_op)

    return estimator_mgpu.replicate(model_fn, devices=devices)(features), feed


def kernels_of(name, devices):
    """Runs a step of a model; returns how many heavy kernels each device ran, and the graph."""
    metadata = tf.RunMetadata()
    options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    config = tf.ConfigProto(device_count={'CPU': devices}, allow_soft_placement=False)
    with tf.Graph().as_default() as graph:
        spec, feed = spec_of(name, devices)
        with tf.Session(config=config) as session:
            session.run([tf.global_variables_initializer(), tf.tables_initializer()])
            fetches = spec.predictions if spec.train_op is None else spec.train_op
            session.run(fetches, feed, options, metadata)
    kernels = collections.Counter()
    for stats in metadata.step_stats.dev_stats:
        for node in stats.node_stats:
            kind = node.timeline_label.partition(' = ')[2].partition('(')[0]
            kernels[stats.device] += bool(HEAVY.search(kind))
    return kernels, graph


def main(argv):
    print(f'{"model":22} heavy kernels  of which on the busiest of {FLAGS.devices} devices')
    for name in FLAGS.models:
        kernels, graph = kernels_of(name, FLAGS.devices)
        count = sum(kernels.values())
        print(f'{name:22} {count:13}  {max(kernels.values()) / count:4.0%}', flush=True)
        for op, why in steps.of_graph(graph).whole.items() if FLAGS.whole else ():
            print(f'  {op}: {why}')


if __name__ == '__main__':
    app.run(main)
