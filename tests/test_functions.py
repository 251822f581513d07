"""tf.function: several devices do as one."""

import pytest
import tensorflow.compat.v1 as tf

from models import away_from_0, of_all_modes, step
from towers import compare_modes


def dense(x, units=1):
    return tf.layers.dense(x, units)


def square(name='w'):
    return tf.get_variable(name, [3, 3], use_resource=True)


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
    kept_apart,
    nested_with_effects,
    autograph,
    cond_in_a_function,
    function_in_a_loop,
    counting,
    custom_gradient,
]


@pytest.mark.parametrize('model_fn', map(of_all_modes, MODELS), ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn, behavior):
    compare_modes(model_fn, away_from_0, 3)
