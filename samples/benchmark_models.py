"""The models that benchmark.py times: ordinary model_fns, and a batch for each."""

from __future__ import annotations

from typing import Callable, NamedTuple

import tensorflow.compat.v1 as tf

import estimator_mgpu

Spec = estimator_mgpu.estimator.EstimatorSpec


class Model(NamedTuple):
    """What is timed.

    Attributes:
      logits: a function of the features that builds the forward pass.
      optimizer: a function that makes the optimizer.
      features: a function of a number of rows that draws features.
      classes: labels are in [0, classes).
      batch: rows of the global batch.
    """

    logits: Callable
    optimizer: Callable
    features: Callable
    classes: int
    batch: int

    def model_fn(self, features, labels, mode):
        logits = self.logits(features)
        loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
        step = tf.train.get_or_create_global_step()
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        with tf.control_dependencies(updates):
            train_op = self.optimizer().minimize(loss, global_step=step)
        return Spec(mode, loss=loss, train_op=train_op)

    def dataset(self, rows):
        """Returns the same batch over and over, so that steps don't wait for input."""

        def draw(seed):
            labels = tf.random.stateless_uniform([rows], [seed, 1], 0, self.classes, tf.int32)
            return self.features(rows), labels

        return tf.data.Dataset.range(1).map(draw).cache().repeat()


def _momentum():
    return tf.train.MomentumOptimizer(0.001, 0.9)


def _images(*shape):
    return lambda rows: tf.random.stateless_normal([rows, *shape], [0, 0])


def _dense(layers, units, classes):
    def logits(net):
        for _ in range(layers):
            net = tf.layers.dense(net, units, tf.nn.relu)
        return tf.layers.dense(net, classes)

    return logits


def _cnn(net):
    for filters, strides in (32, 1), (32, 1), (64, 2), (64, 1), (128, 2), (128, 1):
        net = tf.layers.conv2d(net, filters, 3, strides, 'same', use_bias=False)
        net = tf.nn.relu(tf.layers.batch_normalization(net, training=True))
    return tf.layers.dense(tf.reduce_mean(net, [1, 2]), 10)


def _embed(ids):
    table = tf.get_variable(
        'table', [200_000, 64], initializer=tf.random_normal_initializer(stddev=0.1)
    )
    net = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1)
    return tf.layers.dense(tf.layers.dense(net, 64, tf.nn.relu), 10)


MODELS = {
    'mlp': Model(_dense(3, 512, 10), _momentum, _images(784), 10, 256),
    'cnn': Model(_cnn, _momentum, _images(32, 32, 3), 10, 64),
    'deep': Model(_dense(150, 64, 10), _momentum, _images(64), 10, 64),
    'embed': Model(
        _embed,
        lambda: tf.train.AdagradOptimizer(0.05),
        lambda rows: tf.random.stateless_uniform([rows, 20], [0, 0], 0, 200_000, tf.int32),
        10,
        512,
    ),
    'wide': Model(_dense(4, 2048, 10), _momentum, _images(2048), 10, 64),
}
