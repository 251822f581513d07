"""Networks of all kinds: several devices train them to the variables of one."""

import pytest
import tensorflow.compat.v1 as tf

from models import away_from_0, spec_of, step
from towers import compare

pytestmark = pytest.mark.core


def train(loss):
    return tf.train.AdamOptimizer(0.01, epsilon=1e-3).minimize(loss, step())


def dense_layers(features, labels, mode):
    hidden = tf.layers.dense(features, 5, tf.nn.tanh)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(hidden, 1))
    return spec_of(mode, loss, train(loss))


def tf_variables(features, labels, mode):
    w = tf.Variable(tf.random_normal([3, 1]), name='w')
    b = tf.Variable(0.5, name='b')
    loss = tf.reduce_mean(tf.square(tf.matmul(features, w) + b - labels))
    return spec_of(mode, loss, train(loss))


def keras_layers(features, labels, mode):
    hidden = tf.keras.layers.Dense(5, activation='tanh')(features)
    output = tf.keras.layers.Dense(1)(hidden)
    loss = tf.losses.mean_squared_error(labels, output)
    return spec_of(mode, loss, train(loss))


def keras_model(features, labels, mode):
    model = tf.keras.Sequential(
        [tf.keras.layers.Dense(5, activation='tanh'), tf.keras.layers.Dense(1)]
    )
    output = model(features, training=True)
    loss = tf.reduce_mean(tf.keras.losses.mean_squared_error(labels, output))
    train_op = tf.train.AdamOptimizer(0.01).minimize(
        loss, step(), var_list=model.trainable_variables
    )
    return spec_of(mode, loss, train_op)


def convolution(features, labels, mode):
    image = tf.pad(tf.reshape(features, [-1, 3, 1, 1]), [[0, 0], [2, 3], [4, 3], [0, 0]])
    hidden = tf.layers.conv2d(image, 3, 3, padding='same', activation=tf.nn.relu)
    hidden = tf.layers.max_pooling2d(hidden, 2, 2)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(tf.layers.flatten(hidden), 1))
    return spec_of(mode, loss, train(loss))


def embedding(features, labels, mode):
    ids = tf.cast(tf.abs(features) * 10, tf.int32) % 7
    table = tf.get_variable('table', [7, 4])
    loss = tf.losses.mean_squared_error(
        labels, tf.layers.dense(tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1), 1)
    )
    return spec_of(mode, loss, train(loss))


def dynamic_rnn(features, labels, mode):
    sequence = tf.tile(features[:, :, None], [1, 2, 2])
    cell = tf.nn.rnn_cell.GRUCell(4)
    _, state = tf.nn.dynamic_rnn(cell, sequence, dtype=tf.float32)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(state, 1))
    return spec_of(mode, loss, train(loss))


def loop(features, labels, mode):
    w = tf.get_variable('w', [3, 3])

    def body(i, x):
        return i + 1, tf.nn.tanh(tf.matmul(x, w)) + x

    _, x = tf.while_loop(lambda i, x: i < 4, body, [0, features])
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(x, 1))
    return spec_of(mode, loss, train(loss))


def branch(features, labels, mode):
    w = tf.get_variable('w', [3, 3])
    positive = tf.equal(step() % 2, 0)
    x = tf.cond(positive, lambda: tf.matmul(features, w), lambda: features * 2.0)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(x, 1))
    return spec_of(mode, loss, train(loss))


def function(features, labels, mode):
    w = tf.get_variable('w', [3, 1])

    @tf.function
    def call(x):
        return tf.nn.tanh(tf.matmul(x, w))

    loss = tf.losses.mean_squared_error(labels, call(features))
    return spec_of(mode, loss, train(loss))


def tensor_arrays(features, labels, mode):
    w = tf.get_variable('w', [1, 2])
    x = tf.map_fn(lambda column: tf.matmul(column[:, None], w), tf.transpose(features))
    x = tf.scan(lambda a, b: a + tf.nn.tanh(b), x)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(x[-1], 1))
    return spec_of(mode, loss, train(loss))


def gan(features, labels, mode):
    del labels

    def generator():
        noise = tf.concat([features[:, :2], features[:, :1] * 2], 1)
        return tf.layers.dense(noise, 3, name='generator', reuse=tf.AUTO_REUSE)

    def discriminator(x):
        hidden = tf.layers.dense(x, 4, tf.nn.tanh, name='discriminator', reuse=tf.AUTO_REUSE)
        ones = tf.ones_initializer()
        return tf.layers.dense(
            hidden, 1, bias_initializer=ones, name='discriminator_1', reuse=tf.AUTO_REUSE
        )

    fake = generator()
    real, faked = discriminator(features), discriminator(fake)
    d_loss = tf.reduce_mean(tf.nn.softplus(-real)) + tf.reduce_mean(tf.nn.softplus(faked))
    g_loss = tf.reduce_mean(tf.nn.softplus(-faked))
    # Gradient penalty: the gradient of an activation, differentiated again.
    slope = tf.gradients(tf.reduce_sum(real), features)[0]
    d_loss += 0.1 * tf.reduce_mean(tf.reduce_sum(tf.square(slope), 1))
    d_optimizer = tf.train.AdamOptimizer(0.01, epsilon=1e-3, name='d_adam')
    g_optimizer = tf.train.AdamOptimizer(0.01, epsilon=1e-3, name='g_adam')
    d_grads = d_optimizer.compute_gradients(d_loss, tf.trainable_variables('discriminator'))
    g_grads = g_optimizer.compute_gradients(g_loss, tf.trainable_variables('generator'))
    with tf.control_dependencies([g for g, _ in d_grads + g_grads]):
        d_train = d_optimizer.apply_gradients(d_grads)
        g_train = g_optimizer.apply_gradients(g_grads, step())
    return spec_of(mode, d_loss + g_loss, d_train, g_train)


def hash_table(features, labels, mode):
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant(['a', 'b']), tf.constant([0, 1])), -1
    )
    words = tf.gather(['a', 'b'], tf.cast(features[:, 0] > 0, tf.int32))
    w = tf.get_variable('w', [2, 1])
    loss = tf.losses.mean_squared_error(labels, tf.gather(w, table.lookup(words)))
    return spec_of(mode, loss, train(loss))


def tape(features, labels, mode):
    w = tf.get_variable('w', [3, 1], use_resource=True)  # A tape knows no others.
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.matmul(features, w) - labels)) + tf.nn.l2_loss(w)
    grads = tape.gradient(loss, [w])
    train_op = tf.train.AdamOptimizer(0.01).apply_gradients(zip(grads, [w]), step())
    return spec_of(mode, loss, train_op)


def adversarial(features, labels, mode):
    """FGM: the loss again, where the gradient of an embedding says it's largest."""
    table = tf.get_variable('table', [3, 4])

    def loss_with(table):
        hidden = tf.nn.tanh(tf.matmul(features, table))
        output = tf.layers.dense(hidden, 1, name='output', reuse=tf.AUTO_REUSE)
        return tf.reduce_mean(tf.square(output - labels))

    loss = loss_with(table)
    slope = tf.stop_gradient(tf.gradients(loss, table)[0])
    loss += loss_with(table + 0.5 * slope / tf.norm(slope))
    return spec_of(mode, loss, train(loss))


def gradient_penalty_of_a_mean(features, labels, mode):
    """The gradient of a mean over the batch with respect to a row is that row's share."""
    output = tf.layers.dense(tf.layers.dense(features, 4, tf.nn.tanh), 1)
    slope = tf.gradients(tf.reduce_mean(output), features)[0]
    loss = tf.reduce_mean(tf.square(output - labels)) + 100 * tf.reduce_sum(tf.square(slope))
    return spec_of(mode, loss, train(loss))


def recomputed(features, labels, mode):
    w = tf.get_variable('w', [3, 4], use_resource=True)
    layer = tf.recompute_grad(lambda x: tf.nn.tanh(tf.matmul(x, w)))
    output = tf.layers.dense(layer(features), 1)
    slope = tf.stop_gradient(tf.gradients(output, features)[0])
    slope = tf.reduce_sum(slope, 1, keepdims=True)
    loss = tf.reduce_mean(tf.square(output - labels) + 0.1 * output * slope)
    return spec_of(mode, loss, train(loss))


def placeholder_with_default(features, labels, mode):
    rate = tf.placeholder_with_default(0.5, [])
    features = tf.placeholder_with_default(features, [None, 3])
    loss = tf.reduce_mean(tf.square(rate * tf.layers.dense(features, 1) - labels))
    return spec_of(mode, loss, train(loss))


def clipped_embedding(features, labels, mode):
    """The norm of a sparse gradient depends on whether ids stand in it several times."""
    ids = tf.sparse.from_dense(1 + tf.cast(tf.abs(features) * 10, tf.int32) % 4)
    table = tf.get_variable('table', [5, 3])
    rows = tf.nn.embedding_lookup_sparse(table, ids, None, combiner='sum')
    loss = tf.reduce_mean(tf.square(tf.layers.dense(rows, 1) - labels))
    optimizer = tf.train.AdamOptimizer(0.01, epsilon=1e-3)
    grads, variables = zip(*optimizer.compute_gradients(loss))
    clipped, _ = tf.clip_by_global_norm(grads, 0.1)
    return spec_of(mode, loss, optimizer.apply_gradients(zip(clipped, variables), step()))


NETWORKS = [
    adversarial,
    gradient_penalty_of_a_mean,
    recomputed,
    placeholder_with_default,
    clipped_embedding,
    dense_layers,
    tf_variables,
    keras_layers,
    keras_model,
    convolution,
    embedding,
    dynamic_rnn,
    loop,
    branch,
    function,
    tensor_arrays,
    gan,
    hash_table,
    tape,
]


@pytest.mark.parametrize('towers', [2, 5], ids='towers={}'.format)
@pytest.mark.parametrize('network', NETWORKS, ids=lambda f: f.__name__)
def test_trains_as_on_one_device(network, towers, behavior):
    compare(network, away_from_0(), towers)
