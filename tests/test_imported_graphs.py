"""Graphs that a model_fn imports: frozen ones, meta graphs and SavedModels, of both TensorFlows."""

import functools

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import towers
from estimator_mgpu import steps
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.rewrites.read_functions import read_functions
from estimator_mgpu.tf_internals import function_calls
from test_v1_control_flow import (
    STEPS,
    WIDTH,
    batches,
    branch,
    branch_in_loop,
    lengths_of,
    loop,
    loop_in_loop,
    model_fn_of,
    repeat,
)

pytestmark = pytest.mark.core


def array_of_steps(x, w):
    """The graph tells nothing of the elements' shape."""
    inputs = tf.TensorArray(tf.float32, STEPS).unstack(tf.transpose(x, [1, 0, 2]))
    step = lambda i, h: tf.tanh(tf.matmul(h, w) + inputs.read(i))  # noqa: E731
    return repeat(step, tf.zeros([tf.shape(x)[0], WIDTH]))


def recurrent(x, w):
    cell = tf.nn.rnn_cell.GRUCell(WIDTH)
    sequence = tf.tensordot(x, w, 1)
    return tf.nn.dynamic_rnn(cell, sequence, lengths_of(x), dtype=tf.float32)[1]


def branch_on_constant(x, w):
    is_training = tf.placeholder_with_default(False, [])
    return tf.cond(is_training, lambda: tf.matmul(x[:, 0], w), lambda: tf.tanh(x[:, 1]))


def loop_in_branch(x, w):
    return tf.cond(tf.reduce_sum(x) < 99, lambda: loop(x, w), lambda: tf.matmul(x[:, 0], w))


def call_in_loop(x, w):
    layer = tf2.function(lambda h: tf.tanh(tf.matmul(h, w)), autograph=False)
    return repeat(lambda i, h: layer(h) + x[:, i], x[:, 0])


WEIGHTS = np.random.default_rng(3).normal(0, 0.5, [WIDTH, WIDTH]).astype('f')


def graph_of(function, session):
    """Builds a function of `x` and of a variable, which gives `y`."""
    tf.set_random_seed(1)
    tf.get_variable_scope().set_use_resource(True)
    x = tf.placeholder(tf.float32, [None, STEPS, WIDTH], name='x')
    y = tf.identity(function(x, tf.get_variable('inner', initializer=WEIGHTS)), name='y')
    session.run(tf.global_variables_initializer())
    return x, y


@functools.cache
def frozen(function):
    """The definition of a graph in which variables have become constants."""
    with towers.behavior_of('v1'), tf.Graph().as_default() as graph, tf.Session() as session:
        graph_of(function, session)
        return tf.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), ['y'])


@functools.cache
def with_functions(function):
    """The definition of a graph whose loops and branches call functions."""
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [None, STEPS, WIDTH], name='x')
        tf.identity(function(x, tf.constant(WEIGHTS)), name='y')
        return graph.as_graph_def()


def imported(function, x, define=frozen):
    [y] = tf.import_graph_def(define(function), {'x:0': x}, ['y:0'], name='imported')
    return with_shape(y)


def with_shape(y):
    y.set_shape([None, WIDTH])
    return y


def check(function, *sizes):
    """Trains a function of features and of a matrix on one device and on three, to the data's end.

    Both start from the values that imported variables have.

    Returns:
      Names of the ops that run once.
    """
    model_fn = model_fn_of(function)
    options = {'static': False, 'epochs': 1}
    one = towers.train(model_fn, batches(*sizes), 0, **options)
    ours = towers.train(model_fn, batches(*sizes), 3, **options)
    towers.assert_same(ours, one, 2e-5)
    return set(steps.of_graph(ours.graph).plan.once)


FROZEN = [
    *(loop_in_loop, array_of_steps),
    *(branch, branch_in_loop, loop_in_branch, branch_on_constant),
]


@pytest.mark.parametrize('function', FROZEN)
def test_frozen_graphs(function, behavior):
    """What is behind the imported ops is trained."""
    once = check(lambda x, w: tf.matmul(imported(function, x), w), 7, 4)
    assert not [name for name in once if name.startswith('imported/')]


def test_a_loop_of_unknown_shapes(behavior):
    """An import doesn't tell them: it runs once."""
    once = check(lambda x, w: tf.matmul(imported(recurrent, x), w), 7, 4)
    assert [name for name in once if name.startswith('imported/rnn/while')]


def test_training_through_an_imported_branch(behavior):
    once = check(lambda x, w: imported(branch_on_constant, tf.tensordot(x, w, 1)), 7, 4)
    assert not [name for name in once if name.startswith('imported/')]


@pytest.mark.parametrize('function', [loop_in_branch, array_of_steps, call_in_loop])
def test_imported_functions(function):
    """TensorFlow keeps their definitions, but no graphs."""
    once = check(lambda x, w: tf.matmul(imported(function, x, with_functions), w), 7, 4)
    assert not [name for name in once if name.startswith('imported/')]


def saved(function, path):
    """Saves a function of TensorFlow 1; returns where it is."""
    with towers.behavior_of('v1'), tf.Graph().as_default(), tf.Session() as session:
        x, y = graph_of(function, session)
        tf.saved_model.simple_save(session, str(path), {'x': x}, {'y': y})
    return str(path)


def test_an_imported_meta_graph(tmp_path):
    """Its variable is trained, through its loop."""
    path = saved(recurrent, tmp_path / 'saved')

    def function(x, w):
        with tf.Session() as session:
            options = {'import_scope': 'imported', 'input_map': {'x:0': x}}
            tf.saved_model.loader.load(session, ['serve'], path, **options)
        return tf.matmul(tf.get_default_graph().get_tensor_by_name('imported/y:0'), w)

    with towers.behavior_of('v1'):
        once = check(function, 7, 4)
    assert not [name for name in once if name.startswith('imported/')]


@pytest.mark.parametrize('function', [array_of_steps, branch])
def test_a_saved_model_of_v1(function, behavior, tmp_path):
    """Its function has a v1 loop, and is called twice."""
    path = saved(function, tmp_path / 'saved')

    def called_twice(x, w):
        signature = tf2.saved_model.load(path).signatures['serving_default']
        both = signature(x=x)['y'] + signature(x=2 * x)['y']
        return tf.matmul(tf.stop_gradient(with_shape(both)), w)

    once = check(called_twice, 7, 4)
    assert not [name for name in once if '/inlined/' in name]


@pytest.fixture(scope='module')
def saved_module(tmp_path_factory):
    """Where a module of TensorFlow 2 is saved."""

    class Module(tf2.Module):
        def __init__(self):
            self.w = tf2.Variable(tf2.eye(WIDTH) * 0.5)

        @tf2.function(input_signature=[tf2.TensorSpec([None, WIDTH])])
        def layer(self, x):
            return tf2.tanh(x @ self.w)

        @tf2.function(input_signature=[tf2.TensorSpec([None, STEPS, WIDTH])])
        def __call__(self, x):
            h = x[:, 0]
            for i in tf2.range(STEPS):
                h = self.layer(h) + x[:, i]
            if tf2.reduce_sum(h) > 99:
                h *= 2.0
            return h

    path = str(tmp_path_factory.mktemp('saved_module'))
    module = Module()
    tf2.saved_model.save(module, path, signatures=module.__call__.get_concrete_function())
    return path


def test_a_saved_module(saved_module, behavior):
    """Its variable is trained, by a function, by a signature, and in a loop."""

    def function(x, w):
        module = tf2.saved_model.load(saved_module)
        [of_signature] = module.signatures['serving_default'](x=x).values()
        in_loop = repeat(lambda i, h: module.layer(h) + x[:, i], x[:, 0])
        return tf.matmul(with_shape(module(x) + of_signature + in_loop), w)

    once = check(function, 7, 4)
    assert not [name for name in once if 'while' in name or 'cond' in name]


@pytest.mark.parametrize('function', [array_of_steps, branch])
def test_what_a_call_waits_for(function, behavior):
    """It runs, whether the function has side effects or not; in a loop, nothing waits for it."""

    def model(x, w):
        count = tf.get_variable('count', initializer=0.0, trainable=False)
        signature = [tf.TensorSpec([None, STEPS, WIDTH])]
        with towers.behavior_of('v1'):
            wrapped = tf.wrap_function(lambda x: function(x, tf.eye(WIDTH)), signature)
        with tf.control_dependencies([tf.assign_add(count, 1.0)]):
            return tf.matmul(with_shape(wrapped(x)), w)

    check(model, 7, 4)


def check_shapes(variables):
    """Checks the shapes of `test_the_shapes_in_imported_loops()`."""
    kept, wider, deeper = [tensor.shape for tensor in variables]
    assert kept.as_list() == [None, WIDTH]
    assert wider.as_list() == [None, None]
    assert deeper.rank is None


def test_the_shapes_in_imported_loops():
    """Of a variable that keeps its shape, and of two of which the width, or the rank, changes."""

    def loop_of_three(x, w):
        def body(i, kept, wider, deeper):
            return i + 1, tf.tanh(kept), tf.concat([wider, kept], 1), deeper[None]

        shapes = [tf.TensorShape(dims) for dims in ([], [None, WIDTH], [None, None], None)]
        start = (0, x[:, 0], x[:, 1], x[:, 2])
        _, *found = tf.while_loop(lambda i, *_: i < STEPS, body, start, tuple(shapes))
        return tf.concat([tf.reshape(each, [-1]) for each in found], 0)

    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [None, STEPS, WIDTH])
        tf.import_graph_def(with_functions(loop_of_three), {'x:0': x}, name='')
        read_functions(Division(graph))
        [loop] = [op for op in graph.get_operations() if op.type == 'StatelessWhile']
        _, body = function_calls.function_graphs(loop)
        check_shapes(body.inputs[3:6])


def read(definition, width=WIDTH):
    """Imports the definition of `call_in_loop`, and reads the functions of its loop.

    Returns:
      Types of the ops in the loop's body; none if it isn't read.
    """
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [7, STEPS, width])
        tf.import_graph_def(definition, {'x:0': x}, name='')
        read_functions(Division(graph))
        [loop] = [op for op in graph.get_operations() if op.type == 'StatelessWhile']
        bodies = function_calls.function_graphs(loop)[1:]
        return [op.type for body in bodies for op in body.get_operations()]


def definition_and_call():
    """The definition of `call_in_loop`, the function of its loop's body, and the call in it."""
    definition = tf.GraphDef()
    definition.CopyFrom(with_functions(call_in_loop))
    for function in definition.library.function:
        for node in function.node_def:
            if node.op.endswith('PartitionedCall'):
                return definition, function, node
    raise AssertionError('nothing is called')


def test_functions_that_are_not_read():
    definition, body, call = definition_and_call()
    assert 'AddV2' in read(definition)
    body.attr['_noinline'].b = True
    assert not read(definition)

    definition, body, call = definition_and_call()
    call.attr['f'].func.name = body.signature.name  # It calls itself.
    assert not read(definition)

    assert 'MatMul' in read(with_functions(loop))
    assert not read(with_functions(loop), WIDTH + 1)  # It isn't legal for these shapes.
