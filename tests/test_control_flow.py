"""Loops and branches: which are sharded and which run once, with one device's results."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu import check_rule, replicate, steps

ROWS = np.random.RandomState(0).randn(7, 3).astype(np.float32)


def loop(body, *start):
    """The last variable of a loop of three steps, whose shape may change from step to step."""
    start = [tf.convert_to_tensor(value) for value in (0, *start)]
    shapes = [tf.TensorShape([None] * value.shape.rank) for value in start]
    condition = lambda i, *_: i < 3  # noqa: E731
    return tf.while_loop(condition, lambda i, *x: (i + 1, *body(*x)), start, shapes)[-1]


def largest(x):
    """The variable has the same value on all devices before a step, and a part of it after it."""
    return loop(lambda _: [tf.reduce_max(x)], 0.0)


def replaced(x):
    """The variable has the examples before a step, and something else after it."""
    return loop(lambda _: [tf.ones([7, 3])], x)


def doubled(x):
    """There are twice as many rows after each step."""
    return loop(lambda net: [tf.reshape(tf.tile(net, [1, 2]), [-1, 3])], x)


def counted(x):
    """A variable is another number before the first step than the number of examples."""
    return loop(lambda net, count: [tf.tanh(net), tf.shape(net)[0]], x, 0)


def width(x):
    """No branch gives what depends on the examples."""
    given = tf.placeholder_with_default(True, [])
    return tf.cond(given, lambda: tf.shape(x)[1], lambda: 0)


@pytest.mark.parametrize('program', [largest, replaced, doubled, counted, width])
def test_runs_once(program):
    sharded = check_rule(program, ROWS)
    assert not {op_type for op_type in sharded if op_type.endswith(('While', 'If'))}


def test_each_loop_has_a_reason_of_its_own():
    """Also if both use a list that runs once for their sake."""

    def model_fn(features):
        columns = tf.TensorArray(tf.float32, 3).unstack(tf.transpose(features))
        noise = lambda i: columns.read(i) * tf.random.uniform([])  # noqa: E731
        ranks = lambda i: tf.cumsum(columns.read(i))  # noqa: E731
        sums = {}
        for name, step in {'noise': noise, 'ranks': ranks}.items():
            sums[name] = tf.while_loop(
                lambda i, _: i < 3,
                lambda i, net, step=step: (i + 1, net + step(i)),
                [0, tf.zeros_like(features[:, 0])],
                name=name,
            )[1]
        return tf.estimator.EstimatorSpec('infer', predictions=sums)

    with tf.Graph().as_default() as graph:
        replicate(model_fn, devices=2)(tf.placeholder(tf.float32, [None, 3]))
        once = steps.of_graph(graph).plan.once
    assert 'draws random numbers' in once['noise'][0]
    assert 'Cumsum' in once['ranks'][0]


def labeled(x):
    """The graph doesn't know that there is a label for each example, but the loop's op does."""
    labels = tf.where(x[:, 0] < 100)[:, 0] * 0
    cost = tf.nn.sparse_softmax_cross_entropy_with_logits
    return loop(lambda net: [net + cost(labels=labels, logits=net)[:, None]], x)


def checked(x):
    """All examples pass the checks."""

    def body(net):
        small = tf.debugging.assert_less(tf.abs(net), 1e9)
        with tf.control_dependencies([small, tf.debugging.assert_rank(net, 2)]):
            return [tf.check_numerics(net * 2, 'net')]

    return loop(body, x)


def scaled_by_steps(x):
    """The inner branch and the innermost loop are the same on all devices."""
    scales = tf.constant([2.0, 0.5])

    def power():
        steps = (lambda j, _: j < 2), lambda j, scale: (j + 1, scale * scales[0])
        return tf.while_loop(*steps, (0, scales[1]))[1]

    def body(i, net):
        return i + 1, net * tf.cond(i > 1, power, lambda: scales[1])

    return tf.while_loop(lambda i, _: i < 3, body, (0, x))[1]


@pytest.mark.parametrize('program', [labeled, checked, scaled_by_steps])
def test_runs_on_every_device(program, behavior):
    assert {'While', 'StatelessWhile', 'Enter'} & check_rule(program, ROWS)
