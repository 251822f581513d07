"""What random models are stacked from: each takes rows of three float64 and returns such rows.

Nothing decides by a number's last digits, so that one device and several agree to 1e-9.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

WIDTH = 3
IDS = 7


class Inputs(NamedTuple):
    """What layers are given besides the rows of the layer before.

    Attributes:
      ids: two int64 in [0, IDS) a row.
      lengths: one int32 in [1, WIDTH] a row.
      scalar: a float64 scalar, the same for all rows.
    """

    ids: tf.Tensor
    lengths: tf.Tensor
    scalar: tf.Tensor


def variable(name: str, *shape: int, **options: Any) -> Any:
    return tf.get_variable(name, shape, tf.float64, **options)


def matrix(x: tf.Tensor, name: str = 'w') -> tf.Tensor:
    return tf.nn.tanh(tf.matmul(x, variable(name, WIDTH, WIDTH)))


def step() -> tf.Tensor:
    return tf.convert_to_tensor(tf.train.get_global_step())


def dense(x, inputs):
    return tf.layers.dense(x, WIDTH, tf.nn.tanh)


def twice(x, inputs):
    layer = tf.layers.Dense(WIDTH, tf.nn.tanh, dtype=tf.float64)
    return layer(layer(x))


def reused_scope(x, inputs):
    with tf.variable_scope('shared'):
        first = matrix(x)
    with tf.variable_scope('shared', reuse=True):
        return matrix(first + 1)


def residual(x, inputs):
    return x + matrix(x)


def keras_dense(x, inputs):
    return tf.keras.layers.Dense(WIDTH, activation='tanh', dtype='float64')(x)


def keras_normalized(x, inputs):
    return tf.keras.layers.LayerNormalization(epsilon=0.1, dtype='float64')(x)


def tf_variable(x, inputs):
    return x * tf.Variable([0.5, 1.0, 2.0], dtype=tf.float64, name='scale')


def partitioned(x, inputs):
    partitioner = tf.fixed_size_partitioner(2)
    table = tf.get_variable('parts', [IDS, WIDTH], tf.float64, partitioner=partitioner)
    return x + tf.nn.embedding_lookup(table, inputs.ids[:, 0])


def convolution_1d(x, inputs):
    hidden = tf.layers.conv1d(x[:, :, None], 2, 2, padding='same', activation=tf.nn.tanh)
    return tf.layers.dense(tf.layers.flatten(hidden), WIDTH)


def convolution_2d(x, inputs):
    image = tf.matmul(x[:, :, None], x[:, None, :])[..., None]
    hidden = tf.layers.conv2d(image, 2, 2, padding='same', activation=tf.nn.softplus)
    hidden = tf.layers.average_pooling2d(hidden, 2, 1)
    return tf.layers.dense(tf.reshape(hidden, [-1, 8]), WIDTH, tf.nn.tanh)


def embedding(x, inputs):
    return x + tf.reduce_sum(tf.nn.embedding_lookup(variable('table', IDS, WIDTH), inputs.ids), 1)


def tied(x, inputs):
    """A table that is looked up in and multiplied by, as that of a language model."""
    table = variable('table', IDS, WIDTH)
    hidden = tf.nn.tanh(x + tf.gather(table, inputs.ids[:, 0]))
    return tf.matmul(tf.nn.softmax(tf.matmul(hidden, table, transpose_b=True)), table)


def regularized(x, inputs):
    table = variable('table', IDS, WIDTH)
    tf.losses.add_loss(0.01 * tf.nn.l2_loss(table), tf.GraphKeys.REGULARIZATION_LOSSES)
    return x + tf.gather(table, inputs.ids[:, 1])


def unique_ids(x, inputs):
    ids, places = tf.unique(tf.reshape(inputs.ids, [-1]))
    rows = tf.gather(tf.gather(variable('table', IDS, WIDTH), ids), places)
    return x + tf.reduce_mean(tf.reshape(rows, [-1, 2, WIDTH]), 1)


def sparse_lookup(x, inputs):
    ids = tf.sparse.from_dense(inputs.ids + 1)
    table = variable('table', IDS + 1, WIDTH)
    return x + tf.nn.embedding_lookup_sparse(table, ids, None, combiner='mean')


def one_hot(x, inputs):
    hot = tf.one_hot(inputs.ids, IDS, dtype=tf.float64)
    return x + tf.einsum('bij,jk->bk', hot, variable('w', IDS, WIDTH))


def gru(x, inputs):
    sequence = tf.tile(x[:, :, None], [1, 1, 2])
    cell = tf.nn.rnn_cell.GRUCell(WIDTH, dtype=tf.float64)
    return tf.nn.dynamic_rnn(cell, sequence, inputs.lengths, dtype=tf.float64)[1]


def lstm(x, inputs):
    sequence = tf.matmul(x[:, :, None], variable('w', 1, 2)[None] + tf.zeros_like(x)[:, :1, None])
    cell = tf.nn.rnn_cell.BasicLSTMCell(WIDTH, dtype=tf.float64)
    outputs, _ = tf.nn.dynamic_rnn(cell, sequence, dtype=tf.float64, swap_memory=True)
    return tf.reduce_mean(outputs, 1)


def bidirectional(x, inputs):
    cells = [tf.nn.rnn_cell.GRUCell(2, dtype=tf.float64) for _ in range(2)]
    outputs, _ = tf.nn.bidirectional_dynamic_rnn(
        *cells, x[:, :, None], inputs.lengths, dtype=tf.float64
    )
    return tf.layers.dense(tf.reduce_sum(tf.concat(outputs, 2), 1), WIDTH)


def map_rows(x, inputs):
    w = variable('w', WIDTH, WIDTH)
    return tf.map_fn(lambda row: tf.nn.tanh(tf.linalg.matvec(w, row)), x)


def map_columns(x, inputs):
    w = variable('w', 1, 1)
    columns = tf.map_fn(lambda c: tf.matmul(c[:, None], w)[:, 0], tf.transpose(x))
    return tf.transpose(columns)


def scan(x, inputs):
    return tf.transpose(tf.scan(lambda a, b: tf.nn.tanh(a + b), tf.transpose(x)))


def loop(x, inputs):
    w = variable('w', WIDTH, WIDTH)
    turns = tf.cast(step() % 3, tf.int32) + 1
    body = lambda i, x: (i + 1, x + tf.nn.tanh(tf.matmul(x, w)))  # noqa: E731
    return tf.while_loop(lambda i, x: i < turns, body, [0, x])[1]


def loop_with_lookup(x, inputs):
    table = variable('table', IDS, WIDTH)
    body = lambda i, x: (i + 1, tf.nn.tanh(x + tf.gather(table, inputs.ids[:, i])))  # noqa: E731
    return tf.while_loop(lambda i, x: i < 2, body, [0, x])[1]


def branch_of_step(x, inputs):
    w = variable('w', WIDTH, WIDTH)
    return tf.cond(tf.equal(step() % 2, 0), lambda: tf.matmul(x, w), lambda: x * 2)


def branch_of_batch(x, inputs):
    """Of the batch's data, and the same in all shards."""
    small = tf.reduce_all(tf.abs(x) < 1e3)
    return tf.cond(small, lambda: matrix(x), lambda: x)


def branch_of_scalar(x, inputs):
    w = variable('w', WIDTH, WIDTH)
    return tf.cond(inputs.scalar > 0, lambda: tf.matmul(x, w), lambda: x * inputs.scalar)


def branch_in_loop(x, inputs):
    w = variable('w', WIDTH, WIDTH)

    def body(i, x):
        return i + 1, tf.cond(i < 1, lambda: tf.nn.tanh(tf.matmul(x, w)), lambda: x + 0.5)

    return tf.while_loop(lambda i, x: i < 3, body, [0, x])[1]


def function(x, inputs):
    w = variable('w', WIDTH, WIDTH, use_resource=True)
    return tf.function(lambda x: tf.nn.tanh(tf.matmul(x, w)))(x)


def custom_gradient(x, inputs):
    @tf.custom_gradient
    def reversed_gradient(x):
        return x * 2, lambda grad: -0.5 * grad

    return reversed_gradient(matrix(x))


def layer_norm(x, inputs):
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    scale = variable('scale', WIDTH, initializer=tf.ones_initializer())
    return (x - mean) * tf.math.rsqrt(variance + 0.1) * scale


def rows_merged(x, inputs):
    hidden = tf.layers.dense(tf.reshape(x, [-1, 1]), 2, tf.nn.tanh)
    return tf.layers.dense(tf.reshape(hidden, [-1, 2 * WIDTH]), WIDTH)


def attention(x, inputs):
    tokens = x[:, :, None] * variable('w', 1, 1, 2)
    weights = tf.nn.softmax(tf.matmul(tokens, tokens, transpose_b=True))
    return tf.reduce_mean(tf.matmul(weights, tokens), 2)


def parted_rows(x, inputs):
    """Rows go different ways by their own data, and come together again in order."""
    first = tf.cast(inputs.ids[:, 0] > 2, tf.int32)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), first, 2)
    low, high = tf.dynamic_partition(x, first, 2)
    rows = tf.dynamic_stitch(places, [matrix(low, 'low'), matrix(high, 'high')])
    return tf.reshape(rows, [-1, WIDTH])


def selected(x, inputs):
    return tf.where(inputs.ids[:, 0] > 2, matrix(x, 'a'), matrix(x, 'b') + inputs.scalar)


def columns_split(x, inputs):
    first, *rest = tf.split(x, WIDTH, 1)
    return tf.concat([tf.cumsum(tf.concat(rest, 1), 1), tf.layers.dense(first, 1)], 1)


LAYERS = {
    f.__name__: f
    for f in [dense, twice, reused_scope, residual, keras_dense, keras_normalized, tf_variable]
    + [partitioned, convolution_1d, convolution_2d, embedding, tied, regularized, unique_ids]
    + [sparse_lookup, one_hot, gru, lstm, bidirectional, map_rows, map_columns, scan, loop]
    + [loop_with_lookup, branch_of_step, branch_of_batch, branch_of_scalar, branch_in_loop]
    + [function, custom_gradient, layer_norm, rows_merged, attention, parted_rows, selected]
    + [columns_split]
}
