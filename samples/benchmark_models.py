"""The models that benchmark.py measures: an ordinary model_fn and a batch for each."""

from __future__ import annotations

import math
from typing import Callable, NamedTuple

import tensorflow.compat.v1 as tf

import estimator_mgpu

column = tf.feature_column
Spec = estimator_mgpu.estimator.EstimatorSpec


class Model(NamedTuple):
    """A model and its batch.

    Attributes:
      logits: a function of the features that builds the forward pass.
      optimizer: a function that makes the optimizer.
      features: a function of a number of examples and a seed that draws features.
      classes: labels are in [0, classes).
      batch: the number of examples in the global batch.
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

    def dataset(self, rows, seed=0):
        """Returns the same batch over and over, so that steps don't wait for input."""

        def draw(seed):
            labels = tf.random.stateless_uniform([rows], [seed, 1], 0, self.classes, tf.int32)
            return self.features(rows, seed), labels

        return tf.data.Dataset.range(seed, seed + 1).map(draw).cache().repeat()


def _momentum():
    return tf.train.MomentumOptimizer(0.001, 0.9)


def _images(*shape):
    return lambda rows, seed: tf.random.stateless_normal([rows, *shape], [seed, 0])


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


def _embed(rows):
    def logits(ids):
        initializer = tf.random_normal_initializer(stddev=0.1)
        table = tf.get_variable('table', [rows, 64], initializer=initializer)
        net = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1)
        return tf.layers.dense(tf.layers.dense(net, 64, tf.nn.relu), 10)

    return logits


def _lstm(features):
    cell = tf.nn.rnn_cell.LSTMCell(64)
    _, state = tf.nn.dynamic_rnn(cell, features['sequence'], features['length'], dtype=tf.float32)
    return tf.layers.dense(state.h, 10)


def _sequences(rows, seed):
    return {
        'sequence': tf.random.stateless_normal([rows, 32, 64], [seed, 0]),
        'length': tf.random.stateless_uniform([rows], [seed, 1], 1, 33, tf.int32),
    }


def _layer_norm(name, net):
    with tf.variable_scope(name):
        scale = tf.get_variable('scale', [net.shape[-1]], initializer=tf.ones_initializer())
        offset = tf.get_variable('offset', [net.shape[-1]], initializer=tf.zeros_initializer())
    mean, variance = tf.nn.moments(net, [-1], keepdims=True)
    return tf.nn.batch_normalization(net, mean, variance, offset, scale, 1e-6)


def _attention(net, heads=4):
    _, length, width = net.shape.as_list()
    split = tf.reshape(tf.layers.dense(net, 3 * width), [-1, length, 3, heads, width // heads])
    queries, keys, values = tf.unstack(tf.transpose(split, [2, 0, 3, 1, 4]))
    scores = tf.matmul(queries, keys, transpose_b=True) / (width // heads) ** 0.5
    seen = tf.transpose(tf.matmul(tf.nn.softmax(scores), values), [0, 2, 1, 3])
    return tf.layers.dense(tf.reshape(seen, [-1, length, width]), width)


def _transformer(ids):
    table = tf.get_variable('table', [1000, 64])
    positions = tf.get_variable('positions', [32, 64])
    net = tf.nn.embedding_lookup(table, ids) + positions
    for layer in range(12):
        net += tf.nn.dropout(_attention(_layer_norm(f'attention{layer}', net)), rate=0.1)
        wide = tf.layers.dense(_layer_norm(f'wide{layer}', net), 256, tf.nn.relu)
        net += tf.nn.dropout(tf.layers.dense(wide, 64), rate=0.1)
    return tf.layers.dense(tf.reduce_mean(_layer_norm('end', net), 1), 10)


WORDS, NUMBERS = 26, 13  # The columns of a log of clicks, as in the data of Criteo.


def click_features(words):
    """Draws features of clicks: how often words are found has a Zipf distribution.

    Args:
      words: how many different ones each column has.
    """

    def draw(rows, seed):
        uniform = tf.random.stateless_uniform([rows, WORDS], [seed, 0])
        # The k-th word of n is as frequent as log(1 + 1/k) / log(1 + n).
        numbers = tf.cast(tf.exp(uniform * math.log(1 + words)), tf.int32)
        found = tf.strings.as_string(numbers, width=8, fill='0')
        counts = tf.exp(tf.random.stateless_normal([rows, NUMBERS], [seed, 2]))
        return {
            **{f'word{i}': found[:, i : i + 1] for i in range(WORDS)},
            **{f'number{i}': counts[:, i : i + 1] for i in range(NUMBERS)},
        }

    return draw


def deepfm(buckets, width=16, layers=(400, 400, 400)):
    """DeepFM: a linear model, the products of all pairs of embeddings, and a network of them.

    Args:
      buckets: each word is hashed to one of so many, which are the rows of its column's tables.
      width: of an embedding.
      layers: their units.
    """

    def logits(features):
        words = [
            column.categorical_column_with_hash_bucket(f'word{i}', buckets) for i in range(WORDS)
        ]
        numbers = [
            column.numeric_column(f'number{i}', normalizer_fn=tf.math.log1p) for i in range(NUMBERS)
        ]
        linear = column.linear_model(features, [*words, *numbers])

        embedded = [column.embedding_column(word, width) for word in words]
        net = column.input_layer(features, embedded)
        vectors = tf.reshape(net, [-1, WORDS, width])
        # All pairs: the square of the sum has them twice, and each with itself.
        square_of_sum = tf.square(tf.reduce_sum(vectors, 1))
        sum_of_squares = tf.reduce_sum(tf.square(vectors), 1)
        pairs = tf.reduce_sum(square_of_sum - sum_of_squares, 1, keepdims=True) / 2

        net = tf.concat([net, column.input_layer(features, numbers)], 1)
        for units in layers:
            net = tf.layers.dense(net, units, tf.nn.relu)
        clicked = linear + pairs + tf.layers.dense(net, 1)
        return tf.concat([tf.zeros_like(clicked), clicked], 1)

    return logits


def _adagrad():
    return tf.train.AdagradOptimizer(0.05)


def _ids(length, tokens):
    def draw(rows, seed):
        return tf.random.stateless_uniform([rows, length], [seed, 0], 0, tokens, tf.int32)

    return draw


MODELS = {
    'mlp': Model(_dense(3, 512, 10), _momentum, _images(784), 10, 256),
    'cnn': Model(_cnn, _momentum, _images(32, 32, 3), 10, 64),
    'deep': Model(_dense(150, 64, 10), _momentum, _images(64), 10, 64),
    'embed': Model(_embed(200_000), _adagrad, _ids(20, 200_000), 10, 512),
    'wide': Model(_dense(4, 2048, 10), _momentum, _images(2048), 10, 64),
    'lstm': Model(_lstm, _momentum, _sequences, 10, 64),
    'deepfm': Model(deepfm(100_000), _adagrad, click_features(1_000_000), 2, 2048),
    'transformer': Model(_transformer, tf.train.AdamOptimizer, _ids(32, 1000), 10, 32),
}

LARGE = {  # Those that are timed only if they're asked for.
    'layers1000': Model(_dense(1000, 64, 10), _momentum, _images(64), 10, 64),
    'table2gb': Model(_embed(8_400_000), _adagrad, _ids(20, 8_400_000), 10, 512),
}
