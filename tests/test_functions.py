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


def nested_functions(features):
    w, v = square(), square('v')

    @tf.function
    def inner(x):
        return tf.matmul(x, w)

    @tf.function
    def outer(x):
        return inner(tf.nn.tanh(inner(x))) + tf.matmul(x, v)

    return dense(outer(features))


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


def function_with_a_gather(features):
    ids = tf.cast(tf.abs(features) * 10, tf.int32) % 7
    table = tf.get_variable('table', [7, 3], use_resource=True)

    @tf.function
    def call(ids):
        return tf.nn.tanh(tf.reduce_sum(tf.gather(table, ids), 1))

    return dense(call(ids))


def counting(features):
    """A function that writes to a variable."""
    w = square()
    zeros = tf.zeros_initializer()
    calls = tf.get_variable('calls', [], trainable=False, use_resource=True, initializer=zeros)

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


def py_func(features):
    w = square()
    x = tf.matmul(features, w)
    found = tf.py_func(lambda x: np.maximum(x, 0.5), [tf.stop_gradient(x)], tf.float32)
    found.set_shape(features.shape)
    return dense(x + found)


def numpy_function(features):
    w = square()
    x = tf.numpy_function(lambda x: np.sin(x), [features], tf.float32)
    x.set_shape([None, 3])
    return dense(tf.matmul(x, w))


def py_function(features):
    w = square()
    x = tf.py_function(lambda x: tf.nn.tanh(x), [tf.matmul(features, w)], tf.float32)
    x.set_shape([None, 3])
    return dense(x)


def py_function_two(features):
    w = square()
    x, y = tf.py_function(
        lambda x, w: (tf.nn.tanh(x), tf.matmul(x, w)), [tf.matmul(features, w), w], [tf.float32] * 2
    )
    x.set_shape([None, 3])
    y.set_shape([None, 3])
    return dense(x + y)


MODELS = [
    called_twice,
    nested_functions,
    autograph,
    cond_in_a_function,
    function_in_a_loop,
    input_signature,
    function_with_a_gather,
    counting,
    custom_gradient,
    py_func,
    numpy_function,
    py_function,
    py_function_two,
]


@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('model_fn', map(of_all_modes, MODELS), ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn, towers, behavior):
    compare_modes(model_fn, away_from_0, towers)


def test_a_python_function_is_called_once_a_tower(behavior):
    given = []

    def keep(x):
        given.append(x)
        return x * 2

    def model_fn(features, labels, mode):
        doubled = tf.numpy_function(keep, [features], tf.float32)
        return tf.estimator.EstimatorSpec(mode, predictions={'doubled': doubled})

    predict = tf.estimator.ModeKeys.PREDICT
    [(batch, _)] = away_from_0()[:1]
    [found] = evaluate(model_fn, [(batch, None)], 3, mode=predict).predictions
    np.testing.assert_array_equal(found['doubled'], batch * 2)
    shards = [batch[:4], batch[4:8], batch[8:]]
    assert sorted(x.tobytes() for x in given) == sorted(x.tobytes() for x in shards)


def noise(features):
    return tf.random.uniform(tf.shape(features))


def noise_in_a_loop(features):
    def body(i, x):
        return i + 1, x + noise(features)

    return tf.while_loop(lambda i, x: i < 2, body, [0, tf.zeros_like(features)])[1]


def noise_in_a_branch(features):
    return tf.cond(step() < 1, lambda: noise(features), lambda: -noise(features))


def noise_in_a_function(features):
    return tf.function(tf.function(lambda x: noise(x) + 1.0))(features)


def noise_in_a_map(features):
    return tf.map_fn(lambda row: tf.random.normal([3], seed=5), features, parallel_iterations=1)


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
    noise_in_a_function,
    noise_in_a_map,
    dropout,
    dropout_in_a_recurrent_network,
]


@pytest.mark.parametrize('forward', RANDOM, ids=lambda f: f.__name__)
def test_towers_draw_their_own_numbers(forward, behavior):
    """The same from run to run, as the graph has a seed."""

    def draw():
        predict = tf.estimator.ModeKeys.PREDICT
        batches = [(x, None) for x, _ in away_from_0()[:2]]
        found = evaluate(of_all_modes(forward), batches, 3, mode=predict).predictions
        return np.array([step['output'] for step in found])

    first, again = draw(), draw()
    np.testing.assert_array_equal(first, again)
    shards = [shard.tobytes() for step in first for shard in np.split(step, 3)]
    assert len(set(shards)) == len(shards)
