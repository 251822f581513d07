"""Loops and branches of TensorFlow 1, which are made of ops: sharded, exact, also if imported."""

import functools
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
import towers
from estimator_mgpu import steps
from estimator_mgpu.tf_internals.liveness import Liveness
from estimator_mgpu.tf_internals.v1_loops import find_loops
from models import floats, sequences

pytestmark = pytest.mark.core
STEPS, WIDTH = 4, 3
MODELS = {}
RUN_ONCE = {}  # by model, what is said of a loop that runs once


def model(once=''):
    """Registers a function of [batch, STEPS, WIDTH], and of a matrix, that gives [batch, WIDTH]."""

    def register(function):
        MODELS[function.__name__] = function
        if once:
            RUN_ONCE[function.__name__] = once
        return function

    return register


def repeat(step, start, count=STEPS):
    """A loop of a fixed number of steps: `step(i, value)` gives the next value."""
    body = lambda i, value: (i + 1, step(i, value))  # noqa: E731
    return tf.while_loop(lambda i, _: i < count, body, (0, start))[1]


def lengths_of(x):
    """A length from 1 to STEPS for each example."""
    return tf.cast(tf.abs(x[:, 0, 0]) * 2, tf.int32) % STEPS + 1


@model()
def loop(x, w):
    return repeat(lambda i, h: tf.tanh(tf.matmul(h, w) + x[:, i]), x[:, 0])


@model()
def loop_in_loop(x, w):
    inner = lambda h: repeat(lambda _, h: tf.tanh(tf.matmul(h, w)), h, 3)  # noqa: E731
    return repeat(lambda i, h: inner(h) + x[:, i], x[:, 0])


@model()
def sum_in_loop(x, w):
    """A partial sum is carried along."""

    def body(i, h, total):
        h = tf.tanh(tf.matmul(h, w) + x[:, i])
        return i + 1, h, total + tf.reduce_sum(tf.square(h))

    _, h, total = tf.while_loop(lambda i, h, total: i < STEPS, body, (0, x[:, 0], 0.0))
    return h * tf.tanh(total * 0.01)


@model(once='needs all examples')  # but not if the batch has a static size
def mean_in_loop(x, w):
    def step(i, h):
        h = tf.tanh(tf.matmul(h, w) + x[:, i])
        return h - tf.reduce_mean(h, 0)

    return repeat(step, x[:, 0])


@model()
def examples_decide(x, w):
    """How many steps it takes depends on the longest example."""
    longest = lambda i, h: i < tf.reduce_max(lengths_of(x))  # noqa: E731
    body = lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w) + x[:, i]))  # noqa: E731
    return tf.while_loop(longest, body, (0, x[:, 0]))[1]


@model(once='draws random numbers')
def dropout_in_loop(x, w):
    """If the graph knows the mask's shape, nothing else lets one step draw after another."""

    def body(i, h):
        return i + 1, tf.nn.dropout(tf.tanh(tf.matmul(h, w) + x[:, i]), rate=0.5, seed=3)

    steps_at_once = 1 if x.shape.is_fully_defined() else 10
    start = 0, x[:, 0]
    loop = tf.while_loop(lambda i, _: i < STEPS, body, start, parallel_iterations=steps_at_once)
    return loop[1]


@model()
def array(x, w):
    """A TensorArray of shards, of which some elements are read and others gathered."""
    states = tf.TensorArray(tf.float32, STEPS, clear_after_read=False, element_shape=x.shape[::2])

    def body(i, h, states):
        h = tf.tanh(tf.matmul(h, w) + x[:, i])
        return i + 1, h, states.write(i, h)

    loop_vars = (0, x[:, 0], states)
    _, _, states = tf.while_loop(lambda i, h, states: i < STEPS, body, loop_vars)
    return states.read(0) + tf.reduce_sum(states.gather([1, 3]), 0)


@model()
def array_of_numbers(x, w):
    """Each tower makes its own TensorArray of the same elements."""
    step = lambda h, i: tf.tanh(tf.matmul(h, w) + x[:, i])  # noqa: E731
    return tf.foldl(step, tf.range(STEPS), tf.zeros_like(x[:, 0]))


@model()
def scan_in_loop(x, w):
    """Handles of TensorArrays are kept in a stack."""

    def step(_, x):
        states = tf.scan(
            lambda h, x: tf.tanh(tf.matmul(h, w) + x),
            tf.transpose(x, [1, 0, 2]),
            tf.zeros_like(x[:, 0]),
        )
        return tf.transpose(states, [1, 0, 2])

    return repeat(step, x, 2)[:, -1]


@model(once='gradients go through a loop over rows')
def map_over_examples(x, w):
    return tf.reduce_mean(tf.map_fn(lambda x: tf.tanh(tf.matmul(x, w)), x), 1)


@model()
def stacked_rnn(x, w):
    cells = [tf.nn.rnn_cell.LSTMCell(WIDTH), tf.nn.rnn_cell.GRUCell(WIDTH)]
    cell = tf.nn.rnn_cell.MultiRNNCell(cells)
    outputs, _ = tf.nn.dynamic_rnn(cell, tf.tensordot(x, w, 1), lengths_of(x), dtype=tf.float32)
    return tf.reduce_sum(outputs, 1)


@model()
def bidirectional_rnn(x, w):
    cells = [tf.nn.rnn_cell.GRUCell(WIDTH) for _ in range(2)]
    outputs, _ = tf.nn.bidirectional_dynamic_rnn(
        *cells, tf.tensordot(x, w, 1), lengths_of(x), dtype=tf.float32
    )
    return tf.reduce_sum(outputs[0] * outputs[1], 1)


@model()
def static_rnn(x, w):
    """With a branch for each step, as all examples may have ended."""
    inputs = tf.unstack(tf.tensordot(x, w, 1), axis=1)
    outputs, _ = tf.nn.static_rnn(
        tf.nn.rnn_cell.GRUCell(WIDTH), inputs, dtype=tf.float32, sequence_length=lengths_of(x)
    )
    return outputs[0] + outputs[-1]


@model()
def branch(x, w):
    x = x[:, 0]
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(tf.matmul(x, w)), lambda: x * 0.5)


@model()
def branch_with_sums(x, w):
    """Sums over all examples in the branch that is taken, and in the one that isn't."""
    h = tf.matmul(x[:, 0], w)
    normalized = lambda: h - tf.reduce_mean(h, 0)  # noqa: E731
    return tf.cond(tf.reduce_mean(h) < 9, normalized, lambda: h / tf.reduce_max(h))


@model()
def branch_in_loop(x, w):
    def step(i, h):
        return tf.cond(tf.equal(i % 2, 0), lambda: tf.tanh(tf.matmul(h, w)), lambda: h + x[:, i])

    return repeat(step, x[:, 0])


@model(once='is unknown, or not the same in all branches')
def branch_of_unknown_rank(x, w):
    """One branch gives a row for all examples, and the graph doesn't know it."""
    row = tf.placeholder_with_default(np.ones([1, WIDTH], 'f'), None)
    h = tf.matmul(x[:, 0], w)
    return h + tf.cond(tf.reduce_sum(x) < 99, lambda: row * 2.0, lambda: tf.tanh(h))


@model(once='needs all examples')  # but not if the batch has a static size
def loop_before_unknown_rank(x, w):
    """The loop's gradient is given no shards, and the list that both share by a `Switch`."""
    row = tf.placeholder_with_default(np.ones([1, WIDTH], 'f'), None)
    return x[:, 0] + tf.cond(tf.reduce_sum(x) < 99, lambda: loop(x, w), lambda: row)


@model()
def array_in_branch(x, w):
    """A TensorArray that one branch writes to, and the other one leaves empty."""
    states = tf.TensorArray(tf.float32, 1)
    states = tf.cond(
        tf.reduce_sum(x) < 99,
        lambda: states.write(0, tf.tanh(tf.matmul(x[:, 0], w))),
        lambda: states,
    )
    return states.read(0)


@model()
def loop_in_branch(x, w):
    return tf.cond(tf.reduce_sum(x) < 99, lambda: loop(x, w), lambda: tf.matmul(x[:, 0], w))


@model()
def loop_in_branch_not_taken(x, w):
    return tf.cond(tf.reduce_sum(x) > 99, lambda: loop(x, w), lambda: tf.matmul(x[:, 0], w))


@model()
def likes_in_branches(x, w):
    """What is like something that the graph doesn't know the size of, if the branch is taken."""
    x = tf.matmul(x[:, 0], w)
    x += tf.cond(tf.reduce_sum(x) > 99, lambda: tf.zeros_like(x), lambda: tf.tanh(x))
    return x * tf.cond(tf.reduce_sum(x) < 99, lambda: 2 * tf.ones_like(x), lambda: tf.tanh(x))


@model()
def loop_tied_to_its_input(x, w):
    h = tf.tanh(x[:, 0])
    h, output = tf.tuple([h, repeat(lambda _, h: tf.tanh(tf.matmul(h, w)), h)])
    return h + output


@model()
def loop_waits_for_a_write(x, w):
    """The variable that it reads has to be written before."""
    v = tf.get_variable('v', initializer=tf.ones_initializer(), shape=[], trainable=False)
    x = tf.matmul(x[:, 0], w)
    with tf.control_dependencies([tf.assign_add(v, tf.reduce_mean(tf.abs(x)))]):
        return repeat(lambda _, h: tf.tanh(h * v), x)


@model()
def constant_in_loop_waits(x, w):
    total = tf.reduce_sum(x)

    def step(i, h):
        with tf.control_dependencies([tf.identity(total)]):
            two = tf.constant(2.0)
        return tf.tanh(tf.matmul(h, w)) * two

    return repeat(step, x[:, 0])


@model(once='gradients go through a loop over rows')
def branch_after_a_loop_that_runs_once(x, w):
    """Its branch isn't taken."""
    x = tf.map_fn(lambda row: tf.tanh(tf.reduce_sum(row * w, 1)), x[:, 0])
    return tf.cond(
        tf.reduce_mean(x) > 9, lambda: tf.matmul(x, w), lambda: 2 * tf.matmul(x, w)[::-1]
    )


@model()
def masked_in_branch_not_taken(x, w):
    """How many rows are left in the branch isn't known."""
    x = x[:, 0]
    masked = lambda: tf.reduce_sum(tf.matmul(tf.boolean_mask(x, x[:, 0] > 0), w), 0)  # noqa: E731
    return x * tf.cond(tf.reduce_sum(x) > 99, masked, lambda: tf.reduce_sum(x, 0))


@model(once='has side effects')
def variable_read_in_loop_that_runs_once(x, w):
    v = tf.get_variable('v', [WIDTH])
    count = tf.get_variable('count', [], initializer=tf.zeros_initializer(), trainable=False)

    def step(i, h):
        with tf.control_dependencies([tf.assign_add(count, 1.0)]):
            return tf.tanh(tf.matmul(h, w) + v.read_value() * x[:, i])

    return repeat(step, x[:, 0])


@model()
def case(x, w):
    x = x[:, 0]
    total = tf.reduce_sum(x)
    cases = [
        (total > 99, lambda: tf.matmul(x, w)),
        (total > -99, lambda: tf.tanh(tf.matmul(x, w))),
    ]
    return tf.case(cases, default=lambda: x)


@model()
def second_derivative(x, w):
    x = x[:, 0]
    h = tf.cond(tf.reduce_sum(x) < 99, lambda: tf.tanh(tf.matmul(x, w)), lambda: x)
    [slope] = tf.gradients(tf.reduce_sum(tf.square(h)), x)
    return h + 0.1 * slope


@model()
def counted_in_branch(x, w):
    """A branch that writes, if it's taken, what depends on all examples."""
    seen = tf.get_variable('seen', [], initializer=tf.zeros_initializer(), trainable=False)
    x = x[:, 0]
    update = lambda: tf.assign_add(seen, tf.reduce_mean(tf.abs(x)))  # noqa: E731
    scale = tf.cond(tf.reduce_sum(x) < 99, update, lambda: tf.identity(seen))
    return tf.matmul(x, w) * scale


@model()
def variable_read_in_loop(x, w):
    v = tf.get_variable('v', [WIDTH])
    return repeat(lambda i, h: tf.tanh(tf.matmul(h, w) + v.read_value() * x[:, i]), x[:, 0])


def model_fn_of(function, updates_first=False):
    """Trains on the output of a function, of which there may be an average to update first."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [WIDTH, WIDTH])
        output = function(features, w)
        loss = tf.losses.mean_squared_error(labels, output)
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        # On one device, the gradients of loops never end if they wait for the updated variable.
        with tf.control_dependencies([tf.group(_update_average(output))] if updates_first else []):
            train_op = optimizer.minimize(loss, tf.train.get_or_create_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def _update_average(output):
    average = tf.get_variable('average', [], initializer=tf.zeros_initializer(), trainable=False)
    return tf.assign(average, 0.9 * average + 0.1 * tf.reduce_mean(tf.abs(output)))


batches = functools.partial(sequences, STEPS, WIDTH)


@pytest.mark.parametrize(
    'static, updates_first',
    [(True, False), (False, False), (False, True)],
    ids=['static', 'dynamic', 'after an update'],
)
@pytest.mark.parametrize('name', MODELS)
def test_as_on_one_device(name, static, updates_first):
    sizes = (7, 7) if static else (7, 4, 2, 1)
    model_fn = model_fn_of(MODELS[name], updates_first)
    with towers.behavior_of('v1'):
        ours, _ = towers.compare(model_fn, batches(*sizes), 3, static=static, rtol=2e-5)

    plan = steps.of_graph(ours.graph).plan
    reasons = ' '.join(why for why, _ in plan.once.values())
    is_sharded_if_static = name in ('mean_in_loop', 'loop_before_unknown_rank')
    if name in RUN_ONCE and not (is_sharded_if_static and static):
        assert RUN_ONCE[name] in reasons
    else:
        assert 'loop' not in reasons and 'TensorArray' not in reasons


OUTPUTS = {}  # by program, the reason why ops run once; '' if all are sharded


def output(once=''):
    """Registers a function of [batch, STEPS, WIDTH] that one test computes beside all others."""

    def register(function):
        OUTPUTS[function] = once
        return function

    return register


def products(x):
    """Of each example with each other one."""
    return tf.matmul(x[:, 0], x[:, 0], transpose_b=True)


@output()
def halved(x):
    """By a loop that has no other variable, such as a counter."""
    return tf.while_loop(lambda x: tf.reduce_max(x) > 1, lambda x: x / 2, [x])


@output()
def normalized(x):
    """By sums, of which one is divided by how many examples there are in all."""

    def total(x):
        return tf.reduce_sum(tf.abs(x))

    def is_large(x):
        return total(x) / tf.cast(tf.shape(x)[0], tf.float32) > 1

    return tf.while_loop(is_large, lambda x: x / total(x), [x])


@output()
def blocks_in_a_loop(x):
    """Two blocks of all examples, and then a third one."""

    def step(_, h):
        two = tf.concat([h, 2 * h], 0)
        return tf.tanh(tf.add_n(tf.split(tf.concat([two, h], 0), 3)))

    return repeat(step, x[:, 0])


@output(once='give it in several placements')
def transposed_in_a_branch(x):
    square = products(x)
    return tf.cond(tf.reduce_sum(x) < 99, lambda: tf.transpose(square), lambda: square)


@output()
def sums_or_examples(x):
    """One branch gives a partial sum, and the other one an entry for each example."""
    square = products(x)
    return tf.cond(
        tf.reduce_sum(x) < 99, lambda: tf.reduce_sum(tf.tanh(square), 0), lambda: x[:, 0, 0]
    )


@output()
def sums_in_some_steps(x):
    """A branch gives a sum over all examples, or a number that counts once."""

    def body(i, total):
        more = tf.cond(tf.equal(i % 2, 0), lambda: tf.reduce_sum(x[:, i]), lambda: total * 0 + 1)
        return i + 1, total + more

    return tf.while_loop(lambda i, _: i < STEPS, body, (0, 0.0))[1]


@output(once='is a size that depends on the tower')
def size_after_a_loop(x):
    body = lambda i, h, count: (i + 1, tf.tanh(h), count)  # noqa: E731
    count = tf.raw_ops.Shape(input=x)[0]
    _, h, count = tf.while_loop(lambda i, h, count: i < STEPS, body, (0, x[:, 0], count))
    return h / tf.cast(count, tf.float32)


@output()
def size_in_a_loop(x):
    """It's that of the global batch."""
    count = lambda h: tf.cast(tf.raw_ops.Shape(input=h)[0], tf.float32)  # noqa: E731
    return repeat(lambda i, h: tf.tanh(h) / count(h) + x[:, i], x[:, 0])


@output(once='the size of')
def tokens(x):
    """The graph doesn't know how many an example has."""
    length = tf.placeholder_with_default(3, [])
    return repeat(lambda _, h: tf.tanh(h), tf.reshape(x[:, :length], [-1, WIDTH]))


@output()
def pairs(x):
    """Each example has an entry in each of two blocks, in which no constant can be sliced."""
    both = tf.concat([x[:, 0], x[:, 1]], 0)
    return repeat(lambda i, h: tf.tanh(h) + tf.ones(tf.shape(h)), both)


def written(*values):
    """A TensorArray with these values."""
    array = tf.TensorArray(tf.float32, len(values), clear_after_read=False, infer_shape=False)
    for i, value in enumerate(values):
        array = array.write(i, value)
    return array


@output(once='TensorArrayConcatV3')
def concatenated(x):
    return written(x[:, 0], x[:, 1]).concat()


@output(once='Cumsum')
def gathered_beside_shards(x):
    """A device writes its examples of what is computed once."""
    array = written(x[:, 0], tf.cumsum(x[:, 1]))
    return array.read(0) + array.read(1)


@output(once='TensorArrayWriteV3')
def constants_beside_shards(x):
    array = written(tf.ones([2, WIDTH]), x[:, 1])
    return [array.read(0), array.read(1)][1]


@output(once='TensorArrayWriteV3')
def what_a_mask_selects(x):
    """Rows of another number than the batch has."""
    return written(tf.tanh(tf.boolean_mask(x, x[:, :, 0] > 0))).read(0)


@output(once='Tanh')
def a_flow_as_a_number(x):
    return x + tf.tanh(written(x[:, 0], x[:, 1]).flow)


@output(once='TensorArrayWriteV3')
def a_flow_that_is_computed(x):
    handle, flow = tf.raw_ops.TensorArrayV3(size=1, dtype=tf.float32)
    write = dict(handle=handle, index=0, value=x[:, 0], flow_in=tf.cos(flow))
    flow = tf.raw_ops.TensorArrayWriteV3(**write)
    return tf.raw_ops.TensorArrayReadV3(handle=handle, index=0, flow_in=flow, dtype=tf.float32)


@output(once='StackPushV2')
def empty_arrays_in_a_stack(x):
    stack = tf.raw_ops.StackV2(max_size=-1, elem_type=tf.resource)

    def step(i, h):
        handle, _ = tf.raw_ops.TensorArrayV3(size=1, dtype=tf.float32)
        with tf.control_dependencies([tf.raw_ops.StackPushV2(handle=stack, elem=handle)]):
            return tf.tanh(h) + x[:, i]

    return repeat(step, x[:, 0])


@output(once='connected in an unusual way')
def variable_with_two_switches(x):
    """One is for the next step, and one for the way out."""
    with tf.Graph().as_default() as graph:
        repeat(lambda _, h: tf.tanh(h), tf.placeholder(tf.float32, [None, WIDTH], 'start'))
    definition = graph.as_graph_def()
    nodes = {node.name: node for node in definition.node}
    way_out = definition.node.add()
    way_out.CopyFrom(nodes['while/Switch_1'])
    way_out.name = 'way_out'
    nodes['while/Exit_1'].input[0] = 'way_out'
    [end] = tf.import_graph_def(definition, {'start:0': x[:, 0]}, ['while/Exit_1:0'])
    return end


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_outputs(static):
    """All in one graph."""
    sizes = (7, 7) if static else (7, 2)
    rows = [features for features, _ in batches(*sizes)]
    with towers.behavior_of('v1'):
        reasons = towers.compare_outputs(OUTPUTS, rows, 3, static=static)
    for program, once in OUTPUTS.items():
        expected = 'needs a slice' if static and program is pairs else once
        found = reasons[program.__name__]
        assert all(expected in reason for reason in found), (program, found)
        assert bool(expected) == bool(found), (program, found)


def test_a_branch_that_is_not_taken_draws_no_numbers():
    """Else the next draws of the same seed would be other ones."""

    def dropped_if_positive(x, w):
        x = x[:, 0]
        is_positive = tf.reduce_sum(x) > 0
        x = tf.cond(is_positive, lambda: tf.nn.dropout(x, rate=0.5, seed=1), lambda: x)
        return tf.matmul(x, w)

    [(rows, labels)] = batches(7)
    signs = [1, -1, 1, -1, -1, 1]
    signed = [(np.abs(rows) * sign, labels) for sign in signs]
    with towers.behavior_of('v1'):
        towers.compare(model_fn_of(dropped_if_positive), signed, 3, static=False)


def loops_of(graph):
    return find_loops(unused=(), liveness=Liveness(graph.get_operations()))


def test_what_a_loop_writes_comes_after_what_the_loop_waits_for():
    log = []

    def noted(value):
        time.sleep(0.05 if value == 'before' else 0)
        log.append(value)
        return np.float32(0)

    def model_fn(features, labels, mode):
        before = tf.numpy_function(lambda: noted('before'), [], tf.float32)

        def body(i, x):
            inside = tf.numpy_function(lambda: noted('inside'), [], tf.float32)
            return i + 1, tf.tanh(x) + tf.reshape(inside, [])

        with tf.control_dependencies([tf.group(before)]):
            _, output = tf.while_loop(lambda i, _: i < 2, body, [0, features])
        return tf.estimator.EstimatorSpec(mode, predictions=output)

    with towers.behavior_of('v1'), tf.Graph().as_default(), towers.session(2) as sess:
        model_fn = estimator_mgpu.replicate(model_fn, devices=2)
        spec = model_fn(tf.ones([4, 3]), None, towers.MODES.PREDICT)
        for _ in range(3):
            sess.run(spec.predictions)
    assert log == ['before', 'inside', 'inside'] * 3


def test_a_loop_that_waits_for_an_assignment():
    """The loop is given a reference to what is assigned, so all of it has to run on one device."""

    def model_fn(features, labels, mode):
        inside = tf.get_variable('inside', [WIDTH], initializer=tf.zeros_initializer())
        before = tf.get_variable('before', [WIDTH], initializer=tf.zeros_initializer())
        mean = tf.reduce_mean(features, axis=0)
        features = tf.tanh(features + mean)
        with tf.control_dependencies([features]):
            assigned = tf.assign_add(before, mean)

        def body(i, total):
            return i + 1, total + tf.assign_add(inside, 0.5 * mean)

        with tf.control_dependencies([assigned.op]):
            _, total = tf.while_loop(lambda i, _: i < 3, body, [0, mean], parallel_iterations=1)
        with tf.control_dependencies([total]):
            loss = tf.reduce_mean(features * total)
        with tf.control_dependencies([loss]):
            train_op = tf.assign_add(tf.train.get_global_step(), 1)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    batches = [(floats(7, WIDTH, seed=7), None), (floats(2, WIDTH, seed=8), None)]
    with towers.behavior_of('v1'):
        towers.compare(model_fn, batches, 3, static=False)


@pytest.mark.parametrize('waits_for', ['value', 'reference'])
def test_gradients_that_wait_for_their_loop(waits_for):
    """Nobody uses the loop's gradients: one device doesn't count the loop's steps for them."""

    def model_fn(features, labels, mode):
        inside = tf.get_variable('inside', [WIDTH], initializer=tf.zeros_initializer())
        mean = tf.reduce_mean(features, axis=0)

        def body(i, total):
            return i + 1, tf.tanh(total + tf.assign_add(inside, 0.5 * mean))

        _, total = tf.while_loop(lambda i, _: i < 3, body, [0, mean], parallel_iterations=1)
        loss = tf.reduce_mean(tf.square(features * (total + inside)))
        if waits_for == 'reference':
            before = tf.get_variable('before', [WIDTH], initializer=tf.zeros_initializer())
            total = tf.assign(before, total)
        with tf.control_dependencies([total]):
            [gradient] = tf.gradients(loss, [inside])
        with tf.control_dependencies([loss]):
            train_op = tf.assign_sub(inside, 0.1 * gradient)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    batches = [(floats(8, WIDTH), None)] * 2
    with towers.behavior_of('v1'):
        towers.compare(model_fn, batches, 2)


def test_the_parts_of_a_loop():
    """`i` and `h` go around, `limit` doesn't, and of `i` nothing comes out but in the condition."""
    with towers.behavior_of('v1'), tf.Graph().as_default() as graph:
        start = tf.placeholder(tf.float32, [2], name='start')
        limit = tf.placeholder(tf.int32, [], name='limit')
        tf.while_loop(lambda i, h: i < limit, lambda i, h: (i + 1, h * 2), (0, start))
        [found] = loops_of(graph)

    assert [tensor.name for tensor in found.inputs] == ['while/Const:0', 'start:0', 'limit:0']
    assert [tensor.op.type for tensor in found.outputs] == ['Exit', 'Exit']
    assert found.body.condition.op.type == 'Less'
    assert [tensor.op.type for tensor in found.body.outputs] == ['AddV2', 'Mul', 'Enter']
    assert found.body.unchanged == {2}
    assert {'Add', 'AddV2', 'Mul', 'Less', 'Switch'} >= {
        op.type for op in found.body.ops if op.type not in ('Const', 'Identity')
    }


def test_a_loop_of_unusual_ops_runs_once():
    """Two loops of one frame: TensorFlow itself can't run them, and nothing is made of them."""
    with towers.behavior_of('v1'), tf.Graph().as_default() as graph:
        for name in 'ab':
            tf.while_loop(lambda i: i < 3, lambda i: i + 1, [0], name=name)
        definition = graph.as_graph_def()
        for node in definition.node:
            if node.op == 'Enter':
                node.attr['frame_name'].s = b'one'
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition)
        [found] = loops_of(graph)
    assert found.body is None


def test_towers_have_frames_of_their_own():
    with towers.behavior_of('v1'), tf.Graph().as_default() as graph:
        features = tf.placeholder(tf.float32, [6, STEPS, WIDTH])
        labels = tf.placeholder(tf.float32, [6, WIDTH])
        model_fn = estimator_mgpu.replicate(model_fn_of(loop), devices=2)
        model_fn(features, labels, mode=towers.TRAIN)

    frames = {}
    for op in graph.get_operations():
        if op.type == 'Enter' and towers.NAMES.is_added(op.name):
            frames.setdefault(op.get_attr('frame_name'), set()).add(op.device)
    assert sorted(frames) == [
        b'gradients/replicate/tower_0/while/while_context',
        b'gradients/replicate/tower_1/while/while_context',
        b'while/replicate/tower_0/while_context',
        b'while/replicate/tower_1/while_context',
    ]
    assert all(len(devices) == 1 for devices in frames.values())
