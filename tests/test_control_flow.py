"""Loops and branches of both TensorFlows: several devices do as one."""

import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu import check_rule
from models import away_from_0, floats, of_all_modes, step
from towers import compare_modes


def dense(x, units=1):
    return tf.layers.dense(x, units)


def square(name='w'):
    return tf.get_variable(name, [3, 3])


def nested_loops(features):
    w = square()

    def inner(x):
        return tf.while_loop(
            lambda j, y: j < 2, lambda j, y: (j + 1, tf.nn.tanh(tf.matmul(y, w))), [0, x]
        )[1]

    def body(i, x, total):
        x = inner(x) + features
        return i + 1, x, total + inner(x)

    _, x, total = tf.while_loop(lambda i, *_: i < 3, body, [0, features, tf.zeros_like(features)])
    return dense(x + total)


def embedding_in_a_loop(features):
    """Sparse gradients from inside a loop and a branch."""
    ids = tf.cast(tf.abs(features) * 10, tf.int32) % 7
    table = tf.get_variable('table', [7, 3])

    def body(i, x):
        return i + 1, x + tf.nn.tanh(tf.nn.embedding_lookup(table, ids[:, i]))

    _, x = tf.while_loop(lambda i, x: i < 3, body, [0, features])
    odd = tf.equal(step() % 2, 1)
    x += tf.cond(odd, lambda: tf.nn.embedding_lookup(table, ids[:, 0]), lambda: 2.0 * features)
    return dense(x)


def read_in_a_loop_then_written(features):
    """The loop has to read before the variable is written, in each tower."""
    w = tf.get_variable('w', [3, 3])
    shift = tf.get_variable('shift', [], initializer=tf.zeros_initializer(), trainable=False)

    def body(i, x):
        return i + 1, tf.nn.tanh(tf.matmul(x, w)) + shift

    _, x = tf.while_loop(lambda i, x: i < 3, body, [0, features])
    with tf.control_dependencies([x]):
        written = tf.assign_add(shift, 0.1)
    with tf.control_dependencies([written]):
        return tf.layers.dense(tf.identity(x), 1)


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


def cond_in_while_in_cond(features):
    w = square()

    def body(i, x):
        row_wise = tf.reduce_max(x) > 0.5
        x = tf.cond(row_wise, lambda: tf.minimum(x, 0.5), lambda: tf.identity(x))
        return i + 1, tf.matmul(x, w)

    def loop():
        return tf.while_loop(lambda i, x: i < 2, body, [0, features])[1]

    return dense(tf.cond(tf.equal(step() % 2, 0), loop, lambda: features))


MODELS = [
    cond_on_a_placeholder,
    cond_of_several,
    cond_in_while,
    cond_in_while_in_cond,
    nested_loops,
    embedding_in_a_loop,
    read_in_a_loop_then_written,
]


@pytest.mark.parametrize('model_fn', map(of_all_modes, MODELS), ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn, behavior):
    compare_modes(model_fn, away_from_0, 3)


@pytest.mark.parametrize(('made', 'divided'), [('ZerosLike', True), ('OnesLike', False)])
def test_what_a_branch_has_in_place_of_a_sum(made, divided):
    """Zeros are a part of any sum, and ones aren't."""

    def branches(x):
        like, no = (
            tf.placeholder_with_default(tf.ones([3]), [3]),
            tf.placeholder_with_default(0, []),
        )
        other = getattr(tf.raw_ops, made)
        return tf.cond(no > 0, lambda: tf.reduce_sum(x, 0), lambda: other(x=like))

    assert ('StatelessIf' in check_rule(branches, floats(7, 3))) == divided


def test_a_mean_in_a_branch():
    """It's of all rows, which towers have unevenly."""

    def branch(x):
        no = tf.placeholder_with_default(0, [])
        return tf.cond(no > 0, lambda: tf.reduce_mean(x, 0), lambda: tf.reduce_mean(2 * x, 0))

    assert 'StatelessIf' in check_rule(branch, floats(7, 3))
