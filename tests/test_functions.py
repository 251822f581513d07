"""tf.function, Python functions and random numbers: several devices do as one."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import away_from_0, of_all_modes, step
from towers import compare_modes, evaluate


def dense(x, units=1):
    return tf.layers.dense(x, units)


def square(name='w'):
    return tf.get_variable(name, [3, 3], use_resource=True)


def called_twice(features):
    w = square()

    @tf.function
    def call(x, factor):
        return tf.nn.tanh(tf.matmul(x, w)) * factor

    return dense(call(call(features, 0.5), tf.constant(2.0)) + call(features, 0.5))


def autograph(features):
    w = square()

    @tf.function
    def call(x, times):
        total = tf.zeros_like(x)
        for i in tf.range(times):
            if i % 2 == 0:
                x = tf.nn.tanh(tf.matmul(x, w))
            total += x
        while tf.reduce_max(tf.abs(total)) > 2.5:
            total = tf.clip_by_value(total, -2.5, 2.5)
        return total

    return dense(call(features, 3))


def cond_in_a_function(features):
    w = square()

    @tf.function
    def call(x, now):
        return tf.cond(now % 2 > 0, lambda: tf.matmul(x, w), lambda: tf.matmul(x, tf.nn.tanh(w)))

    return dense(call(features, step()))


def function_in_a_loop(features):
    w = square()

    @tf.function
    def call(x):
        return tf.nn.tanh(tf.matmul(x, w)) + x

    return dense(tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, call(x)), [0, features])[1])


def input_signature(features):
    w = square()

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32)])
    def call(x):
        return {'a': tf.matmul(x, w), 'rows': tf.shape(x)[0]}

    found = call(features)
    return dense(found['a']) + tf.cast(found['rows'] * 0, tf.float32)


def counter():
    zeros = tf.zeros_initializer()
    return tf.get_variable('calls', [], trainable=False, use_resource=True, initializer=zeros)


def counting(features):
    """A function that writes to a variable."""
    w, calls = square(), counter()

    @tf.function
    def call(x):
        calls.assign_add(1.0)
        return tf.nn.tanh(tf.matmul(x, w))

    return dense(call(features))


def custom_gradient(features):
    w = square()

    @tf.custom_gradient
    def reversed_gradient(x):
        return tf.identity(x), lambda dy: -0.5 * dy

    x = dense(tf.matmul(features, w))
    return dense(reversed_gradient(tf.nn.tanh(tf.matmul(features, w)))) + x


def kept_apart(features):
    """A function that asks not to be made a part of its caller."""
    w = square()

    @tf.function(experimental_attributes={'_noinline': True})
    def call(x):
        return tf.nn.tanh(tf.matmul(x, w))

    return dense(call(features))


def nested_with_effects(features):
    """What a function prints and counts comes before what uses its results."""
    w, calls = square(), counter()

    @tf.function
    def inner(x):
        calls.assign_add(1.0)
        return x * calls.read_value()

    @tf.function
    def outer(x):
        return tf.nn.tanh(inner(tf.matmul(x, w))) + inner(x)

    with tf.control_dependencies([calls.assign_add(0.5)]):
        return dense(outer(features))


MODELS = [
    called_twice,
    kept_apart,
    nested_with_effects,
    autograph,
    cond_in_a_function,
    function_in_a_loop,
    input_signature,
    counting,
    custom_gradient,
]


@pytest.mark.parametrize('model_fn', map(of_all_modes, MODELS), ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn, behavior):
    compare_modes(model_fn, away_from_0, 3)


def noise(features):
    return tf.random.uniform(tf.shape(features))


def noise_in_a_loop(features):
    def body(i, x):
        return i + 1, x + noise(features)

    return tf.while_loop(lambda i, x: i < 2, body, [0, tf.zeros_like(features)])[1]


def noise_in_a_branch(features):
    return tf.cond(step() < 1, lambda: noise(features), lambda: -noise(features))


def dropout(features):
    return tf.nn.dropout(tf.ones_like(features), rate=0.5)


def dropout_in_a_recurrent_network(features):
    cell = tf.nn.rnn_cell.GRUCell(5, kernel_initializer=tf.ones_initializer())
    cell = tf.nn.rnn_cell.DropoutWrapper(cell, output_keep_prob=0.5)
    ones = tf.ones_like(features)[:, :, None]
    outputs, _ = tf.nn.dynamic_rnn(cell, ones, dtype=tf.float32, parallel_iterations=1)
    return outputs[:, -1]


RANDOM = [
    noise,
    noise_in_a_loop,
    noise_in_a_branch,
    dropout,
    dropout_in_a_recurrent_network,
]


@pytest.mark.parametrize('forward', RANDOM, ids=lambda f: f.__name__)
def test_towers_draw_their_own_numbers(forward, behavior):
    """No two rows have the same; and the graph has a seed, so that runs do."""

    def draw():
        predict = tf.estimator.ModeKeys.PREDICT
        batches = [(x, None) for x, _ in away_from_0()[:2]]
        found = evaluate(of_all_modes(forward), batches, 3, mode=predict).predictions
        return np.array([step['output'] for step in found])

    first, again = draw(), draw()
    np.testing.assert_array_equal(first, again)
    shards = [shard.tobytes() for step in first for shard in np.split(step, 3)]
    assert len(set(shards)) == len(shards)
