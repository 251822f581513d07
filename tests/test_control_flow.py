"""Loops and branches: which are sharded and which run once, with one device's results."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from estimator_mgpu import check_rule, replicate, steps
from estimator_mgpu.tf_internals import graphs
from towers import compare_outputs

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


def asserted_in_vain(x):
    """Nothing waits for the assertion, so it doesn't run; examples decide which branch does."""

    def body(net):
        small = tf.reduce_all(net < 0)

        def other():
            tf.raw_ops.Assert(condition=small, data=['large'])
            return net * 3

        return [tf.cond(small, lambda: net * 2, other)]

    return loop(body, x)


@pytest.mark.parametrize('program', [largest, replaced, doubled, counted, width])
def test_runs_once(program):
    sharded = check_rule(program, ROWS)
    assert not {op_type for op_type in sharded if op_type.endswith(('While', 'If'))}


def test_a_loop_whose_branches_all_examples_decide():
    assert 'If' in check_rule(asserted_in_vain, ROWS)


OUTPUTS = {}  # by program, a reason why ops run once if the size of the batch is static, and if not


def output(reason='', static=None):
    """Registers a function of [batch, 3] that one test computes beside all others.

    Args:
      reason: why ops run once; '' if all are sharded.
      static: the same if the size of the batch is static, where that counts.
    """

    def register(function):
        OUTPUTS[function] = {True: reason if static is None else static, False: reason}
        return function

    return register


def unknown(x):
    """The same rows, of which the graph doesn't know how many there are."""
    rows = tf.numpy_function(lambda x: x, [x], tf.float32)
    rows.set_shape([None, 3])
    return rows


@output('matmul needs all examples')
def products_of_examples(x):
    """Of each example with each other one."""
    return loop(lambda net: [tf.tanh(net @ tf.transpose(net)) @ net], x)


@output('MatMul needs all examples', static='this AddV2 needs all examples')
def sparse_matrix(x):
    """Its rows can't be told apart in a loop."""
    sparse = tf.sparse.from_dense(x)
    matrix = tf.constant(ROWS[:3])
    return loop(lambda net: [tf.tanh(net) + tf.sparse.sparse_dense_matmul(sparse, matrix)], x)


@output('this StatelessIf needs all examples')
def size_that_a_branch_gives(x):
    def body(net, is_even):
        count = tf.raw_ops.Shape(input=net)[0]
        count = tf.cond(is_even, lambda: count, lambda: 1 * count)
        return tf.reshape(tf.tanh(net), [count, 3]), ~is_even

    return loop(body, x, True)


@output('ConcatV2 needs a slice of Exp', static='no rule for PyFunc')
def rows_of_unknown_number(x):
    """They are as many as the batch has, or else the op fails."""
    rows = unknown(x)
    return loop(lambda net: [tf.concat([net, tf.exp(rows)], 1)[:, 1:4]], x)


@output('the size of')
def examples_in_place_of_others(x):
    """How many there are before the first step, nobody knows."""
    return loop(lambda net: [tf.tanh(x)], unknown(x))


@output('Less needs all examples', static='')
def a_step_for_each_example(x):
    count = tf.raw_ops.Shape(input=x)[0]
    return tf.while_loop(lambda i, _: i < count, lambda i, net: (i + 1, tf.tanh(net)), [0, x])[1]


@output('needs a slice of Const', static='')
def sums_that_begin_with_one(x):
    """In each step of a loop, an inner one sums examples; the one counts once."""
    add = lambda i, total: (i + 1, total + tf.reduce_sum(x))  # noqa: E731
    sums = lambda: tf.while_loop(lambda i, _: i < 2, add, [0, 1.0])[1]  # noqa: E731
    return loop(lambda total: [total + sums()], 0.0)


@output('Cast needs all examples', static='')
def size_of_the_batch(x):
    count = lambda net: tf.cast(tf.raw_ops.Shape(input=net)[0], tf.float32)  # noqa: E731
    return loop(lambda net: [tf.tanh(net) / count(net)], x)


@output('Shape are unknown')
def shape_of_a_sum(x):
    """Nobody knows which rank it has."""
    shape = tf.placeholder_with_default([3], None)

    def body(net):
        total = tf.reshape(tf.reduce_sum(net, 0), shape)
        return [tf.reshape(tf.tanh(net) + tf.ones(tf.shape(total)), tf.shape(net))]

    return loop(body, x)


@output('this TensorListStack needs all examples')
def list_of_shapes(x):
    def body(net):
        shapes = tf.raw_ops.EmptyTensorList(
            element_shape=[2], max_num_elements=1, element_dtype=tf.int32
        )
        shape = tf.raw_ops.Shape(input=net)
        shapes = tf.raw_ops.TensorListPushBack(input_handle=shapes, tensor=shape)
        stacked = tf.raw_ops.TensorListStack(
            input_handle=shapes, element_shape=[2], element_dtype=tf.int32
        )
        return [tf.reshape(tf.tanh(net), stacked[0])]

    return loop(body, x)


@output('changes from step to step')
def twice_the_rows(x):
    pairs = lambda net: tf.stack([net, tf.tanh(net)], 1)  # noqa: E731
    return loop(lambda net: [tf.reshape(pairs(net), [2 * tf.shape(net)[0], 3])], x)


@output()
def optional(x):
    """It's empty before the first step."""
    give = lambda i, _: (i + 1, tf.raw_ops.OptionalFromValue(components=[tf.tanh(x)]))  # noqa: E731
    _, last = tf.while_loop(lambda i, _: i < 3, give, [0, tf.raw_ops.OptionalNone()])
    [value] = tf.raw_ops.OptionalGetValue(
        optional=last, output_types=[tf.float32], output_shapes=[[None, 3]]
    )
    return value


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_outputs(static):
    """All in one graph."""
    batches = [ROWS, 2 * ROWS] if static else [ROWS, ROWS[:2]]
    reasons = compare_outputs(OUTPUTS, batches, 3, static=static)
    for program, expected in OUTPUTS.items():
        found = reasons[program.__name__]
        assert any(expected[static] in reason for reason in found or ['']), (program, found)
        assert bool(expected[static]) == bool(found), (program, found)


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


def test_a_loop_that_uses_a_variable_does_not_run_beside_its_copies():
    """The gradients of a loop ask for the shape of each variable that it has used."""

    def model_fn(features):
        weights = tf.get_variable('weights', [3, 3], use_resource=True)
        net = loop(lambda net: [tf.matmul(net, weights)], features)
        loss = tf.reduce_mean(net)
        train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        return tf.estimator.EstimatorSpec('train', loss=loss, train_op=train_op)

    with tf.Graph().as_default():
        tf.train.create_global_step()
        spec = replicate(model_fn, devices=2)(tf.constant(ROWS))
        needed = graphs.ancestors([spec.train_op])
    loops = {op.name for op in needed if op.type == 'While'}
    assert loops == {'while/replicate/tower_0', 'while/replicate/tower_1'}


@pytest.mark.parametrize('around', ['loop', 'loop in branch', 'loop in function'])
def test_functions_called_in_loops(around, behavior):
    """With two losses, each gives the calls that its gradients go through further outputs."""

    def model_fn(features, labels, mode):
        w, v = (tf.get_variable(name, [3, 3], use_resource=True) for name in 'wv')
        layer = tf.function(lambda h: tf.tanh(tf.matmul(h, w)))
        layers = lambda h: loop(lambda h: [layer(h)], h)  # noqa: E731
        program = {
            'loop': layers,
            'loop in branch': lambda h: tf.cond(w[0, 0] > -9, lambda: layers(h), lambda: h),
            'loop in function': tf.function(layers),
        }[around]
        h = program(tf.tanh(tf.matmul(features, v)))
        loss = tf.reduce_mean(h)
        gradients = tf.gradients(loss, w) + tf.gradients(tf.reduce_mean(tf.square(h)), v)
        optimizer = tf.train.GradientDescentOptimizer(0.5)
        step = tf.train.get_global_step()
        train_op = optimizer.apply_gradients(zip(gradients, [w, v]), step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    towers.compare(model_fn, [(ROWS, ROWS)] * 2, 3)


def test_a_gradient_that_fails():
    """By then, the graph of the loop's body has more arguments than the loop gives it.

    With TensorFlow 1's control flow, one device can't build a graph after that either.
    """

    @tf.custom_gradient
    def without_gradient(x):
        def gradient(_):
            raise LookupError

        return tf.identity(x), gradient

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [3, 3])
        net = tf.matmul(features, w)
        steps = loop(lambda net: [tf.tanh(without_gradient(tf.tanh(net)))], net)
        with pytest.raises(LookupError):
            tf.gradients(steps, w)
        loss = tf.reduce_mean(net * tf.stop_gradient(steps))
        train_op = tf.train.GradientDescentOptimizer(0.5).minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    towers.compare(model_fn, [(ROWS, ROWS)] * 2, 3)
