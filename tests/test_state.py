"""Variables of all kinds, and what is kept from step to step: several devices do as one."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.ops import lookup_ops

from models import away_from_0, of_all_modes
from towers import compare_modes


def ids_of(features):
    """Ids below 7, three a row."""
    return tf.cast(tf.abs(features) * 10, tf.int64) % 7


def linear(x):
    return tf.layers.dense(x, 1, name='output', reuse=tf.AUTO_REUSE)


def partitioned(strategy, partitioner, name):
    """A table in parts, and a matrix in parts that's used as a whole."""

    def forward(features):
        with tf.variable_scope('parts', partitioner=partitioner):
            table = tf.get_variable('table', [7, 4])
            matrix = tf.get_variable('matrix', [3, 4])
        rows = tf.nn.embedding_lookup(table, ids_of(features), partition_strategy=strategy)
        return linear(tf.nn.tanh(tf.reduce_sum(rows, 1) + tf.matmul(features, matrix)))

    forward.__name__ = name
    return forward


def variable_class(features):
    w = tf.Variable(tf.random_normal([3, 4], seed=1), name='w')
    b = tf.Variable(np.full([4], 0.5, np.float32), name='b', trainable=True)
    scale = tf.Variable(2.0, name='scale', trainable=False)
    return linear(tf.nn.tanh(tf.matmul(features, w) + b) * scale)


def ref_variables(features):
    with tf.variable_scope('ref', use_resource=False):
        w = tf.get_variable('w', [3, 4])
        table = tf.get_variable('table', [7, 4])
    rows = tf.gather(table, ids_of(features)[:, 0])
    return linear(tf.nn.tanh(tf.matmul(features, w) + rows))


def tied(features):
    """An embedding whose transpose makes the logits."""
    table = tf.get_variable('table', [7, 4])
    hidden = tf.reduce_mean(tf.nn.embedding_lookup(table, ids_of(features)), 1)
    return linear(tf.nn.softmax(tf.matmul(hidden, table, transpose_b=True)))


def on_the_cpu(features):
    with tf.device('/cpu:0'):
        table = tf.get_variable('table', [7, 4])
        rows = tf.nn.embedding_lookup(table, ids_of(features))
    return linear(tf.nn.tanh(tf.reduce_mean(rows, 1)))


def mixed_dtypes(features):
    wide = tf.get_variable('wide', [3, 4], tf.float64)
    chosen = tf.get_variable(
        'chosen', [2], tf.int64, tf.constant_initializer([2, 0]), trainable=False
    )
    x = tf.matmul(tf.cast(features, tf.float64), wide)
    x = tf.cast(tf.nn.tanh(x), tf.float32)
    return linear(tf.concat([x, tf.gather(features, chosen, axis=1)], 1))


def static_hash_table(features):
    keys = tf.constant(['a', 'b', 'c'])
    values = tf.constant([2, 0, 1], tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 3)
    words = tf.gather(['a', 'b', 'c', 'd'], ids_of(features) % 4)
    weights = tf.get_variable('weights', [4, 2])
    rows = tf.gather(weights, table.lookup(words))
    return linear(tf.reduce_sum(rows, 1) / tf.cast(table.size(), tf.float32))


def index_tables(features):
    """Words to ids and back, and once more."""
    vocabulary = tf.constant(['0', '3', '5', '1'])
    to_ids = lookup_ops.index_table_from_tensor(vocabulary, num_oov_buckets=1)
    to_words = lookup_ops.index_to_string_table_from_tensor(vocabulary, '1')
    words = to_words.lookup(to_ids.lookup(tf.as_string(ids_of(features))))
    weights = tf.get_variable('weights', [5, 2])
    return linear(tf.reduce_sum(tf.gather(weights, to_ids.lookup(words)), 1))


FORWARD = [
    partitioned('mod', tf.fixed_size_partitioner(3), 'partitioned_mod'),
    partitioned('div', tf.min_max_variable_partitioner(3, min_slice_size=16), 'partitioned_size'),
    variable_class,
    ref_variables,
    tied,
    on_the_cpu,
    mixed_dtypes,
    static_hash_table,
    index_tables,
]


@pytest.mark.parametrize('model_fn', map(of_all_modes, FORWARD), ids=lambda f: f.__name__)
def test_variables_as_on_one_device(model_fn, behavior):
    compare_modes(model_fn, away_from_0, 3)
