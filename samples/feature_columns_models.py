"""Models of feature columns, which `feature_columns.py` measures."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

import estimator_mgpu

IDS, WORDS, WIDTH = 10_000, 500, 32

column = tf.feature_column
random = np.random.RandomState(0)


def _ids(rows, count=1):
    return random.randint(0, IDS, [rows, count])


def _words(rows, count=1):
    return np.array([b'word%d' % i for i in range(WORDS)])[random.randint(0, WORDS, [rows, count])]


def _sparse(values):
    """Of each row, some of the values: none, one or more."""
    rows, count = values.shape
    places = np.argwhere(np.arange(count) < random.randint(0, count + 1, [rows, 1]))
    return tf.SparseTensorValue(places, values[tuple(places.T)], np.array(values.shape))


def _embedded(name, weights=None):
    ids = column.categorical_column_with_identity(name, IDS)
    if weights is not None:
        ids = column.weighted_categorical_column(ids, weights)
    return column.embedding_column(ids, WIDTH)


def _embedded_words(name):
    return column.embedding_column(column.categorical_column_with_hash_bucket(name, IDS), WIDTH)


# Each is a function of the number of examples, which gives features and their columns.


def one_table(rows):
    """One table, in which three ids of each example are looked up."""
    return {'ids': _ids(rows, 3)}, [_embedded('ids')]


def many_tables(rows):
    """26 tables, as in a model of advertisements."""
    names = [f'ids{i}' for i in range(26)]
    return {name: _ids(rows) for name in names}, [_embedded(name) for name in names]


def strings(rows):
    """Words, which are hashed, or looked up in a vocabulary."""
    vocabulary = [b'word%d' % i for i in range(WORDS)]
    known = column.categorical_column_with_vocabulary_list('known', vocabulary)
    features = {'some': _words(rows, 2), 'one': _words(rows), 'known': _words(rows)}
    columns = [_embedded_words('some'), _embedded_words('one')]
    return features, [*columns, column.embedding_column(known, WIDTH)]


def weighted(rows):
    """Three ids of each example, with a weight each."""
    weights = random.rand(rows, 3).astype(np.float32)
    return {'ids': _ids(rows, 3), 'weights': weights}, [_embedded('ids', 'weights')]


def sparse(rows):
    """Sparse features, as `tf.io.parse_example` gives them."""
    features = {'ids': _sparse(_ids(rows, 3)), 'words': _sparse(_words(rows, 3))}
    return features, [_embedded('ids'), _embedded_words('words')]


def indicators(rows):
    """Buckets and one-hot vectors, without tables."""
    features = {
        'age': random.uniform(0, 80, [rows, 1]).astype(np.float32),
        'day': random.randint(0, 7, [rows, 1]),
    }
    day = column.categorical_column_with_identity('day', 7)
    age = column.bucketized_column(column.numeric_column('age'), [20.0, 40.0, 60.0])
    crossed = column.crossed_column([age, day], 40)
    return features, [age, column.indicator_column(day), column.indicator_column(crossed)]


MODELS = {
    model.__name__: model
    for model in (one_table, many_tables, strings, weighted, sparse, indicators)
}


def build(name, devices, rows, parts=1):
    """Adds a model to the default graph: three layers on top of the columns.

    Args:
      parts: into how many parts each table is split.

    Returns:
      Its train_op, and what feeds it.
    """
    features, columns = MODELS[name](rows)
    placeholders, feed = {}, {}
    for key, value in features.items():
        if isinstance(value, tf.SparseTensorValue):
            dtype = tf.as_dtype(value.values.dtype)
            placeholders[key] = tf.sparse_placeholder(dtype, [None, value.dense_shape[1]])
        else:
            dtype = tf.as_dtype(value.dtype)
            placeholders[key] = tf.placeholder(dtype, [None, *value.shape[1:]])
        feed[placeholders[key]] = value

    def model_fn(features):
        partitioner = tf.fixed_size_partitioner(parts) if parts > 1 else None
        with tf.variable_scope('columns', partitioner=partitioner):
            net = column.input_layer(features, columns)
        for units in (256, 128):
            net = tf.layers.dense(net, units, tf.nn.relu)
        loss = tf.reduce_mean(tf.square(tf.layers.dense(net, 1) - 1))
        optimizer = tf.train.AdagradOptimizer(0.1)
        train_op = optimizer.minimize(loss, tf.train.get_or_create_global_step())
        return estimator_mgpu.estimator.EstimatorSpec('train', loss=loss, train_op=train_op)

    return estimator_mgpu.replicate(model_fn, devices=devices)(placeholders).train_op, feed
