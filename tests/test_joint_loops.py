"""Loops whose steps all towers make together: examples decide how many, or are summed inside."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
import towers
from estimator_mgpu import steps
from models import sequences
from test_v1_control_flow import model_fn_of

STEPS, WIDTH = 5, 3
MODELS = {}


def model(function):
    """Registers a function of [batch, STEPS, WIDTH], and of a matrix, that gives [batch, WIDTH]."""
    MODELS[function.__name__] = function
    return function


def lengths_of(x):
    """A length from 1 to STEPS - 1 for each example: mostly, no example has all steps."""
    return tf.cast(tf.abs(x[:, 0, 0]) * 2, tf.int32) % (STEPS - 1) + 1


def until_finished(step, start, lengths):
    """A loop that ends as all examples are finished; an example keeps what it then has."""

    def body(i, finished, value):
        following = tf.where_v2(finished[:, None], value, step(i, value))
        return i + 1, finished | (i + 1 >= lengths), following

    goes_on = lambda i, finished, value: ~tf.reduce_all(finished)  # noqa: E731
    return tf.while_loop(goes_on, body, (0, tf.zeros_like(lengths, tf.bool), start))


@model
def decoder(x, w):
    """It writes what each step gives, and ends by itself or after a number of steps."""
    lengths = lengths_of(x)

    def body(i, finished, h, written):
        h = tf.tanh(tf.matmul(h, w) + x[:, i])
        shown = tf.where_v2(finished[:, None], tf.zeros_like(h), h)
        return i + 1, finished | (i + 1 >= lengths), h, written.write(i, shown)

    def goes_on(i, finished, h, written):
        return (i < STEPS) & tf.reduce_any(~finished)

    written = tf.TensorArray(tf.float32, 0, dynamic_size=True)
    start = 0, lengths < 0, x[:, 0], written
    *_, written = tf.while_loop(goes_on, body, start)
    return tf.reduce_sum(written.stack(), 0)


@model
def steps_are_counted(x, w):
    """What comes out depends on how many steps it took, and on one that only some examples make."""
    step = lambda i, h: tf.tanh(tf.matmul(h, w) + x[:, i])  # noqa: E731
    count, _, h = until_finished(step, x[:, 0], lengths_of(x))
    return h * tf.cast(count, tf.float32)


@model
def raw_rnn(x, w):
    """As `tf.nn.dynamic_rnn`, but its end is decided by a function."""
    lengths = lengths_of(x)
    cell = tf.nn.rnn_cell.GRUCell(WIDTH)
    inputs = tf.TensorArray(tf.float32, STEPS).unstack(tf.transpose(x, [1, 0, 2]))

    def loop_fn(time, output, state, loop_state):
        finished = time >= lengths
        if output is None:
            state = cell.zero_state(tf.shape(x)[0], tf.float32)
        following = tf.cond(
            tf.reduce_all(finished),
            lambda: tf.zeros([tf.shape(x)[0], WIDTH]),
            lambda: inputs.read(time),
        )
        return finished, tf.matmul(following, w), state, output, None

    outputs, state, _ = tf.nn.raw_rnn(cell, loop_fn)
    return tf.reduce_sum(outputs.stack(), 0) + state


@model
def loop_in_loop(x, w):
    """In each step of a loop, all examples wait for the longest one."""

    def step(i, h):
        inner = lambda _, h: tf.tanh(tf.matmul(h, w))  # noqa: E731
        return until_finished(inner, h + x[:, i], lengths_of(x))[2]

    return until_finished(step, x[:, 0], lengths_of(x))[2]


@model
def fixed_loop_inside(x, w):
    """Each tower makes the steps of the inner loop by itself."""

    def step(i, h):
        inner = lambda j, h: (j + 1, tf.tanh(tf.matmul(h, w)))  # noqa: E731
        return tf.while_loop(lambda j, h: j < 2, inner, (0, h + x[:, i]))[1]

    return until_finished(step, x[:, 0], lengths_of(x))[2]


@model
def until_small(x, w):
    """A mean, a maximum, and a sum over all examples decide."""

    def goes_on(i, h):
        size = tf.reduce_max(tf.abs(h)) + tf.reduce_mean(tf.square(h))
        return (i < 9) & (size + tf.reduce_sum(tf.abs(h)) * 0.001 > 0.5)

    return tf.while_loop(goes_on, lambda i, h: (i + 1, tf.matmul(h, w) * 0.5), (0, x[:, 0]))[1]


@model
def sum_decides(x, w):
    """A sum that is carried from step to step."""

    def body(i, h, total):
        h = tf.tanh(tf.matmul(h, w) + x[:, i])
        return i + 1, h, total + tf.reduce_sum(tf.square(h))

    goes_on = lambda i, h, total: (i < STEPS) & (total < 9)  # noqa: E731
    _, h, total = tf.while_loop(goes_on, body, (0, x[:, 0], 0.0))
    return h * tf.tanh(total * 0.1)


@model
def after_writes(x, w):
    """In functions, a loop waits for a write, and a constant of a loop for another one."""

    def last_value(name, index):
        count = tf.get_variable(
            name, [], initializer=tf.zeros_initializer(), trainable=False, use_resource=True
        )

        @tf.function
        def call(h, w):
            count.assign_add(1.0)
            goes_on = lambda i, h, w: (i < 9) & (tf.reduce_max(tf.abs(h)) > 0.5)  # noqa: E731
            body = lambda i, h, w: (i + 1, tf.matmul(h, w) * 0.5 / count, w)  # noqa: E731
            return tf.while_loop(goes_on, body, (0, h, w))[index]

        return call(x[:, 0], w)

    return tf.matmul(last_value('a', 1), last_value('b', 2))


batches = functools.partial(sequences, STEPS, WIDTH)


def check(name, sizes, static):
    ours, _ = towers.compare(
        model_fn_of(MODELS[name]), batches(*sizes), 3, static=static, rtol=2e-5
    )
    assert not steps.of_graph(ours.graph).plan.once


@pytest.mark.core
@pytest.mark.parametrize('name', MODELS)
def test_as_on_one_device(name, behavior):
    """Also with fewer examples than towers."""
    check(name, (7, 4, 2, 1), static=False)


@pytest.mark.parametrize('name', ['decoder', 'sum_decides'])
def test_batches_of_a_static_size(name, behavior):
    check(name, (7, 7), static=True)


def test_v1_loops_of_the_same_name():
    """The condition has one and the body has one, of an imported graph."""
    with towers.behavior_of('v1'), tf.Graph().as_default() as graph:
        start = tf.placeholder(tf.float32, [None, WIDTH], 'start')
        grow = lambda i, h: (i + 1, h * 1.5)  # noqa: E731
        tf.identity(tf.while_loop(lambda i, _: i < 2, grow, (0, start))[1], 'end')

    def grown(h):
        definition = graph.as_graph_def()
        [end] = tf.import_graph_def(definition, {'start': h}, ['end:0'], name='imported')
        return tf.ensure_shape(end, [None, WIDTH])

    def function(x, w):
        goes_on = lambda h: tf.reduce_sum(tf.abs(grown(h))) < 500  # noqa: E731
        h = tf.while_loop(goes_on, lambda h: grown(h) - x[:, 0], [x[:, 1] + 2])
        return tf.matmul(tf.stop_gradient(h), w)

    ours, _ = towers.compare(model_fn_of(function), batches(7, 2), 3, static=False, rtol=2e-5)
    assert not steps.of_graph(ours.graph).plan.once


def test_a_joint_loop_in_another_one(behavior):
    """How many steps the outer one makes, no example decides; in TensorFlow 2, it runs once."""

    def function(x, w):
        goes_on = lambda i, h: tf.reduce_any(i < lengths_of(x))  # noqa: E731
        step = lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w)))  # noqa: E731
        body = lambda i, h: (i + 1, tf.while_loop(goes_on, step, (0, h + x[:, i]))[1])  # noqa: E731
        return tf.while_loop(lambda i, _: i < 2, body, (0, x[:, 0]))[1]

    ours, _ = towers.compare(model_fn_of(function), batches(7, 2), 3, static=False, rtol=2e-5)
    reasons = {why for why, _ in steps.of_graph(ours.graph).plan.once.values()}
    if behavior == 'v2':
        assert 'in it, while: the examples decide how many steps it takes' in reasons
    else:
        assert not reasons


def condition_of_constants(x):
    """All that the second tower makes of it is a part of a maximum, the same in each step."""
    goes_on = lambda i, _: i < tf.cast(tf.reduce_max(x), tf.int32)  # noqa: E731
    return tf.while_loop(goes_on, lambda i, y: (i + 1, y * 1.5), (0, 1.0))[1]


def few_steps(body):
    """A number that a loop makes in up to four steps."""
    goes_on = lambda i, y: (i < 4) & (y < 100)  # noqa: E731
    return tf.while_loop(goes_on, lambda i, y: (i + 1, body(y)), (0, 1.0))[1]


def sum_with_constants(x):
    return few_steps(lambda y: y + tf.reduce_max(x))


def made_of_constants(x):
    """Unless it's dead once the loop has ended, the variable goes round for ever."""
    return few_steps(lambda _: tf.reduce_max(x))


def becomes_a_constant(x):
    """The same, of what is made outside of the loop."""
    largest = tf.reduce_max(x)
    goes_on = lambda i, _: (i < 4) & (tf.reduce_max(x) > -9)  # noqa: E731
    return tf.while_loop(goes_on, lambda i, _: (i + 1, largest), (0, 1.0))[1]


def nested(x):
    return few_steps(lambda y: y + condition_of_constants(x))


def reads_variables(x):
    """It runs once, with reads of variables that are on all devices."""
    start = tf.constant_initializer(0.5)
    weights = [tf.get_variable(f'w{i}', [3, 3], tf.float32, start) for i in range(4)]

    def body(i, h):
        for weight in weights:
            h = tf.tanh(tf.matmul(h, weight))
        return i + 1, tf.gather(h, tf.range(tf.shape(h)[0]) // 2)

    return tf.while_loop(lambda i, h: (i < 4) & tf.reduce_any(h < 9), body, (0, x))[1]


def test_constants_of_loops(behavior):
    """On each device, something is made in each step: TensorFlow has no steps there otherwise."""
    programs = [condition_of_constants, sum_with_constants, made_of_constants]
    programs += [becomes_a_constant, nested, reads_variables]
    x = np.abs(np.random.default_rng(0).normal(size=(7, 3))).astype('f') * 2
    reasons = towers.compare_outputs(programs, [x, x[:2]], 3, static=False)
    run_once = {name for name, why in reasons.items() if why}
    assert run_once == {'reads_variables', *(['nested'] if behavior == 'v2' else [])}


def graph_of(function, **options):
    with tf.Graph().as_default() as graph:
        features = tf.placeholder(tf.float32, [6, STEPS, WIDTH])
        labels = tf.placeholder(tf.float32, [6, WIDTH])
        model_fn = estimator_mgpu.replicate(model_fn_of(function), devices=2, **options)
        model_fn(features, labels, mode=towers.TRAIN)
    return graph


def test_towers_are_in_one_frame(behavior):
    """It has one condition, that of the first tower."""
    graph = graph_of(steps_are_counted)
    ops = [op for op in graph.get_operations() if towers.NAMES.is_added(op.name)]
    frame = 'while/while_context' if behavior == 'v1' else 'while/apart'
    frame = f'replicate/all_towers/{frame}'
    enters = [
        op for op in ops if op.type == 'Enter' and op.get_attr('frame_name').decode() == frame
    ]
    assert {op.device[-5:] for op in enters} == {'CPU:0', 'CPU:1'}

    conditions = [
        op.name for op in ops if op.type == 'LoopCond' and not op.name.startswith('gradients/')
    ]
    assert len(conditions) == 1 and towers.tower_of(conditions[0]) == 0


def test_loops_that_stay():
    """Of TensorFlow 2's loops, only those are taken apart whose end a reduction decides."""

    def function(x, w):
        multiply = lambda i, h: (i + 1, tf.matmul(h, w))  # noqa: E731
        fixed = tf.while_loop(lambda i, h: i < STEPS, multiply, (0, x[:, 0]), name='fixed')[1]
        draw = lambda h: (tf.matmul(h, w) + tf.random.uniform([]),)  # noqa: E731
        drawn = tf.while_loop(lambda h: tf.reduce_max(h) < 9.0, draw, (fixed,), name='drawn')[0]
        draw = lambda h: (tf.cond(w[0, 0] > 0, lambda: h + tf.random.uniform([]), lambda: h + 1),)  # noqa: E731
        drawn += tf.while_loop(lambda h: tf.reduce_max(h) < 9.0, draw, (fixed,), name='branch')[0]
        return tf.stop_gradient(drawn) + until_finished(lambda i, h: h + 1, fixed, lengths_of(x))[2]

    graph = graph_of(function)
    conditions = [op.name for op in graph.get_operations() if op.type == 'LoopCond']
    assert [name for name in conditions if 'replicate' not in name] == ['while/apart/goes_on']
    reasons = {why for why, _ in steps.of_graph(graph).plan.once.values()}
    assert 'in it, RandomUniform has side effects or draws random numbers' in reasons


def test_what_micro_batches_would_not_save(behavior):
    """The loop's tensors of [6, 500] are most activations, and all micro-batches keep them."""

    def function(x, w):
        widen = tf.get_variable('widen', [WIDTH, 500])

        def step(i, h):
            wide = tf.tanh(tf.matmul(h, widen))
            return tf.matmul(wide, widen, transpose_b=True)

        return tf.matmul(tf.stop_gradient(until_finished(step, x[:, 0], lengths_of(x))[2]), w)

    schedule = steps.of_graph(graph_of(function, microbatches=3)).schedule
    costliest = schedule.joins[0]
    assert costliest.op.endswith('(loop)') and costliest.share > 0.9
    assert not schedule.is_worth_it
