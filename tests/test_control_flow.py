"""Loops of both TensorFlows: several devices do as one."""

import pytest
import tensorflow.compat.v1 as tf

from models import away_from_0, of_all_modes, step, ten_rows
from towers import compare_modes, evaluate


def dense(x, units=1):
    return tf.layers.dense(x, units)


def square(name='w'):
    return tf.get_variable(name, [3, 3])


def while_loop(features):
    w = square()

    def body(i, x):
        return i + 1, tf.nn.tanh(tf.matmul(x, w)) + x

    _, x = tf.while_loop(
        lambda i, x: i < 4, body, (0, features), parallel_iterations=1, maximum_iterations=3
    )
    return dense(x)


def until_all_are_done(features):
    """How many steps it takes differs between shards; rows that are done stay as they are."""
    w = square()

    def body(x, count):
        running = tf.reduce_max(tf.abs(x), 1, keepdims=True) > 0.5
        going = tf.nn.tanh(tf.matmul(0.5 * x, w)) * 0.7
        return tf.where(tf.tile(running, [1, 3]), going, x), count + tf.cast(running, tf.float32)

    x, count = tf.while_loop(
        lambda x, count: tf.reduce_max(tf.abs(x)) > 0.5,
        body,
        (features, tf.zeros_like(features[:, :1])),
        maximum_iterations=20,
    )
    return dense(tf.concat([x, 0.1 * count], 1))


def growing(features):
    """Shape invariants: a column more in each iteration."""
    w = tf.get_variable('w', [3, 1])

    def body(i, x):
        return i + 1, tf.concat([x, tf.nn.tanh(tf.matmul(x[:, -3:], w))], 1)

    _, x = tf.while_loop(
        lambda i, x: i < 4,
        body,
        [0, features],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, None])],
        back_prop=True,
        swap_memory=True,
    )
    return dense(tf.reshape(x, [-1, 7]))


def grows_by_rows(features):
    """Rows of rows are added in the loop, and reduced after it."""
    w = square()

    def body(i, x):
        return i + 1, tf.concat([x, tf.matmul(x[-tf.shape(features)[0] :], w)], 0)

    _, x = tf.while_loop(
        lambda i, x: i < 3,
        body,
        [0, features],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, 3])],
    )
    x = tf.reshape(x, tf.stack([4, tf.shape(features)[0], 3]))
    return dense(tf.reshape(tf.reduce_sum(tf.nn.tanh(x), 0), [-1, 3]))


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


def counts_from_a_variable(features):
    """The number of iterations comes from a variable, that of the inner loop from the outer."""
    steps = tf.get_variable('steps', [], tf.int32, tf.constant_initializer(2), trainable=False)
    w = square()

    def body(i, x):
        _, x = tf.while_loop(
            lambda j, y: j <= i, lambda j, y: (j + 1, tf.nn.tanh(tf.matmul(y, w) + y)), [0, x]
        )
        return i + 1, x

    return dense(tf.while_loop(lambda i, x: i < steps, body, [0, features])[1])


def no_back_prop(features):
    fixed = tf.while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, tf.sin(x)), [0, features], back_prop=False
    )[1]
    return dense(tf.stop_gradient(fixed) + features)


def layers_in_the_body(features):
    def body(i, x):
        with tf.variable_scope('body', reuse=tf.AUTO_REUSE):
            return i + 1, tf.layers.dense(x, 3, tf.nn.tanh, name='layer') + x

    return dense(tf.while_loop(lambda i, x: i < 3, body, [0, features])[1])


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


def write_in_a_loop(features):
    """Which only the write holds in the loop."""
    w = square()
    zeros = tf.zeros_initializer()
    rounds = tf.get_variable('rounds', [], initializer=zeros, trainable=False)

    def body(i, x):
        with tf.control_dependencies([tf.assign_add(rounds, 1.0)]):
            return i + 1, tf.nn.tanh(tf.matmul(x, w))

    return dense(tf.while_loop(lambda i, x: i < 3, body, [0, features])[1])


def read_in_a_loop_then_written(features):
    """The other towers' loops have to read before tower 0 writes."""
    w = tf.get_variable('w', [3, 3])
    shift = tf.get_variable('shift', [], initializer=tf.zeros_initializer(), trainable=False)

    def body(i, x):
        return i + 1, tf.nn.tanh(tf.matmul(x, w)) + shift

    _, x = tf.while_loop(lambda i, x: i < 3, body, [0, features])
    with tf.control_dependencies([x]):
        written = tf.assign_add(shift, 0.1)
    with tf.control_dependencies([written]):
        return tf.layers.dense(tf.identity(x), 1)


MODELS = [
    while_loop,
    until_all_are_done,
    growing,
    nested_loops,
    counts_from_a_variable,
    no_back_prop,
    layers_in_the_body,
    embedding_in_a_loop,
    write_in_a_loop,
    read_in_a_loop_then_written,
]


@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('model_fn', map(of_all_modes, MODELS), ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn, towers, behavior):
    compare_modes(model_fn, away_from_0, towers)


UNEVEN = [of_all_modes(f) for f in (grows_by_rows, until_all_are_done)]


@pytest.mark.parametrize('model_fn', UNEVEN, ids=lambda f: f.__name__)
def test_rows_that_do_not_divide(model_fn, behavior):
    compare_modes(model_fn, ten_rows, 4, static=False)


def use_of_a_write_in_a_loop(features):
    total = tf.get_variable('total', [], use_resource=False, trainable=False)
    return tf.while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, x + tf.assign_add(total, 1.0)), [0, features]
    )[1]


def use_of_a_write_in_a_branch(features):
    total = tf.get_variable('total', [], use_resource=False, trainable=False)
    large = tf.reduce_max(features) > 1
    return features + tf.cond(large, lambda: 2 * tf.assign_add(total, 1.0), lambda: 0.0)


@pytest.mark.parametrize('forward', [use_of_a_write_in_a_loop, use_of_a_write_in_a_branch])
@pytest.mark.parametrize('behavior', ['v1'], indirect=True)
def test_what_is_written_inside_cannot_be_used_by_others(forward, behavior):
    predict = tf.estimator.ModeKeys.PREDICT
    batches = [(x, None) for x, _ in away_from_0()[:1]]
    values = {'total': 0.0, 'global_step': 0}
    evaluate(of_all_modes(forward), batches, 0, mode=predict, values=values)
    with pytest.raises(ValueError, match=r"AssignAdd' \(AssignAdd\) writes to a variable inside a"):
        evaluate(of_all_modes(forward), batches, 3, mode=predict)
