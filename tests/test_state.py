"""Variables of all kinds, and what is kept from step to step: several devices do as one."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.framework import function
from tensorflow.python.ops import lookup_ops

from models import away_from_0, of_all_modes
from towers import compare_modes


def ids_of(features):
    """Ids below 7, three a row."""
    return tf.cast(tf.abs(features) * 10, tf.int64) % 7


def linear(x):
    return tf.layers.dense(x, 1, name='output', reuse=tf.AUTO_REUSE)


def of_all_dtypes(features):
    """By `tf.Variable`, too, and one that is a reference."""
    w = tf.Variable(tf.random_normal([3, 4], seed=1, dtype=tf.float64), name='w')
    b = tf.Variable(np.full([4], 0.5, np.float32), name='b')
    scale = tf.Variable(2.0, name='scale', trainable=False)
    two = tf.constant_initializer([2, 0])
    chosen = tf.get_variable('chosen', [2], tf.int64, two, trainable=False)
    with tf.variable_scope('reference', use_resource=False):
        table = tf.get_variable('table', [7, 4])
    x = tf.cast(tf.nn.tanh(tf.matmul(tf.cast(features, tf.float64), w)), tf.float32)
    x = (x + b) * scale + tf.gather(table, ids_of(features)[:, 0])
    return linear(tf.concat([x, tf.gather(features, chosen, axis=1)], 1))


def tied(features):
    """An embedding whose transpose makes the logits, on a device of its own."""
    with tf.device('/cpu:0'):
        table = tf.get_variable('table', [7, 4])
        hidden = tf.reduce_mean(tf.nn.embedding_lookup(table, ids_of(features)), 1)
    return linear(tf.nn.softmax(tf.matmul(hidden, table, transpose_b=True)))


def hash_tables(features):
    """Words to numbers, ids to words and back, and once more."""
    vocabulary = tf.constant(['0', '3', '5', '1'])
    to_ids = lookup_ops.index_table_from_tensor(vocabulary, num_oov_buckets=1)
    to_words = lookup_ops.index_to_string_table_from_tensor(vocabulary, '1')
    numbers = tf.lookup.KeyValueTensorInitializer(vocabulary, tf.constant([2, 0, 1, 4], tf.int64))
    table = tf.lookup.StaticHashTable(numbers, 3)
    words = to_words.lookup(to_ids.lookup(tf.as_string(ids_of(features))))
    weights = tf.get_variable('weights', [5, 2])
    found = tf.gather(weights, (to_ids.lookup(words) + table.lookup(words)) % 5)
    return linear(tf.reduce_sum(found, 1) / tf.cast(table.size(), tf.float32))


@function.Defun(tf.float32)
def halved(x):
    return x / 2


def legacy_function(features):
    """An op whose type is a function of the graph, which TensorFlow has no definition of."""
    x = halved(features)
    x.set_shape(features.shape)
    return linear(x)


MODELS = [*map(of_all_modes, [of_all_dtypes, tied, hash_tables, legacy_function])]


@pytest.mark.parametrize('model_fn', MODELS, ids=lambda f: f.__name__)
def test_variables_as_on_one_device(model_fn, behavior):
    compare_modes(model_fn, away_from_0, 3)
