"""Branches, also with loops in them or around them: several devices do as one."""

import pytest
import tensorflow.compat.v1 as tf

from models import away_from_0, of_all_modes, step
from towers import compare_modes


def dense(x, units=1):
    return tf.layers.dense(x, units)


def square(name='w'):
    return tf.get_variable(name, [3, 3])


def cond_on_the_batch(features):
    """Shards take different branches, of the same gradients where both apply."""
    w = square()
    x = tf.matmul(features, w)
    large = tf.reduce_max(tf.abs(x)) > 1
    return dense(tf.cond(large, lambda: tf.clip_by_value(x, -1.0, 1.0), lambda: tf.identity(x)))


def cond_on_variables(features):
    w, gate = square(), tf.get_variable('gate', [], initializer=tf.constant_initializer(0.2))
    x = tf.cond(
        gate > 0.15,
        lambda: tf.nn.tanh(tf.matmul(features, w)) * gate,
        lambda: tf.matmul(features, w) + gate,
    )
    return dense(x)


def cond_on_a_placeholder(features):
    training = tf.placeholder_with_default(True, [])
    w = square()
    x = tf.cond(training, lambda: tf.matmul(features, w), lambda: features)
    nested = tf.cond(
        tf.logical_not(training),
        lambda: x,
        lambda: tf.cond(step() < 5, lambda: tf.nn.tanh(x), lambda: tf.nn.tanh(2.0 * x)),
    )
    return dense(nested)


def cond_of_several(features):
    """Lists and dicts, an output that does not depend on the shard, and an unused one."""
    w, v = square(), square('v')

    def first():
        return {'a': tf.matmul(features, w), 'b': [w * 2.0, tf.shape(features)[0]]}

    def second():
        return {'a': features, 'b': [tf.nn.tanh(w + v), tf.constant(0)]}

    result = tf.cond(tf.equal(step() % 3, 0), first, second)
    return dense(tf.matmul(result['a'], result['b'][0]))


def cond_in_while(features):
    w, v = square(), square('v')

    def body(i, x):
        return i + 1, tf.cond(
            tf.equal(i % 2, 0), lambda: tf.nn.tanh(tf.matmul(x, w)), lambda: tf.matmul(x, v) + x
        )

    return dense(tf.while_loop(lambda i, x: i < 4, body, [0, features])[1])


def while_in_cond(features):
    w = square()

    def loop(times):
        return tf.while_loop(
            lambda i, x: i < times,
            lambda i, x: (i + 1, tf.nn.tanh(tf.matmul(x, w)) + features),
            [0, features],
        )[1]

    return dense(tf.cond(step() < 5, lambda: loop(2), lambda: loop(4)))


def cond_in_while_in_cond(features):
    w = square()

    def body(i, x):
        row_wise = tf.reduce_max(x) > 0.5
        x = tf.cond(row_wise, lambda: tf.minimum(x, 0.5), lambda: tf.identity(x))
        return i + 1, tf.matmul(x, w)

    def loop():
        return tf.while_loop(lambda i, x: i < 2, body, [0, features])[1]

    return dense(tf.cond(tf.equal(step() % 2, 0), loop, lambda: features))


def case(features):
    w = square()
    now = step()
    return dense(
        tf.case(
            [
                (now < 3, lambda: tf.matmul(features, w)),
                (now < 6, lambda: tf.nn.tanh(tf.matmul(features, w))),
            ],
            default=lambda: features - tf.matmul(features, w),
            exclusive=False,
        )
    )


def switch_case(features):
    w = square()
    branch = tf.cast(step() % 3, tf.int32)
    return dense(
        tf.switch_case(
            branch,
            [
                lambda: tf.matmul(features, w),
                lambda: tf.nn.sigmoid(tf.matmul(features, w)),
                lambda: features,
            ],
        )
    )


MODELS = [
    cond_on_the_batch,
    cond_on_variables,
    cond_on_a_placeholder,
    cond_of_several,
    cond_in_while,
    while_in_cond,
    cond_in_while_in_cond,
    case,
    switch_case,
]


@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('model_fn', map(of_all_modes, MODELS), ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn, towers, behavior):
    compare_modes(model_fn, away_from_0, towers)
