"""Functions that write to variables and read them: several devices do as one."""

import pytest
import tensorflow.compat.v1 as tf

from models import away_from_0, of_all_modes
from towers import compare_modes


def dense(x, units=1):
    """With a bias that stays away from 0, where rounding would be all there is of it."""
    return tf.layers.dense(x, units, bias_initializer=tf.ones_initializer())


def square(name='w'):
    return tf.get_variable(name, [3, 3], use_resource=True)


def zero(name, dtype=tf.float32):
    zeros = tf.zeros_initializer()
    return tf.get_variable(name, [], dtype, zeros, trainable=False, use_resource=True)


def counting_and_using(features):
    w = square()
    calls = zero('calls')

    @tf.function
    def call(x):
        calls.assign_add(1.0)
        return tf.nn.tanh(tf.matmul(x, w)) + calls

    return dense(call(features))


def counting_and_using_before(features):
    w = square()
    calls = zero('calls')

    @tf.function
    def call(x):
        before = calls.read_value()
        calls.assign_add(1.0)
        return tf.nn.tanh(tf.matmul(x, w)) + before

    return dense(call(features))


def power_iteration(features):
    """Spectral normalisation: a vector that's read and written, beside a counter that's written."""
    w = square()
    ones = tf.ones_initializer()
    u = tf.get_variable('u', [1, 3], trainable=False, use_resource=True, initializer=ones)
    calls = zero('calls', tf.int32)

    @tf.function
    def inner(x):
        found = tf.nn.l2_normalize(tf.matmul(u, tf.matmul(w, w, transpose_b=True)))
        u.assign(found)
        calls.assign_add(1)
        return tf.matmul(x, w) / (0.5 + tf.norm(tf.matmul(tf.stop_gradient(found), w)))

    @tf.function
    def outer(x):
        return inner(x)

    return dense(outer(outer(features)))


def writes_in_a_loop(features):
    w = square()
    seen = zero('seen')

    @tf.function
    def call(x):
        for _ in tf.range(3):
            if seen < 7.0:
                seen.assign_add(1.0)
            x = tf.nn.tanh(tf.matmul(x, w)) + 0.1 * seen
        return x

    return dense(call(features))


MODELS = [counting_and_using, counting_and_using_before, power_iteration, writes_in_a_loop]


@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('model_fn', map(of_all_modes, MODELS), ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn, towers, behavior):
    compare_modes(model_fn, away_from_0, towers)
