"""Which ops run in v1 loops, and which may be dead."""

import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals.liveness import Liveness
from towers import behavior_of

pytestmark = pytest.mark.core


@pytest.fixture(params=['built', 'imported'])
def liveness(request):
    """Called once a graph is built: its liveness, also where no op knows its context."""

    def look_at(graph):
        if request.param == 'imported':
            imported = tf.Graph()
            with imported.as_default():
                tf.import_graph_def(graph.as_graph_def(), name='')
            graph = imported
        return graph, Liveness(graph.get_operations())

    with behavior_of('v1'), tf.Graph().as_default():
        yield look_at


def names(graph, condition):
    """The names of the ops of a graph for which something holds."""
    return {op.name for op in graph.get_operations() if condition(op)}


def test_a_branch(liveness):
    """Its ops may be dead, and what waits for them; what joins them is not."""
    x = tf.placeholder(tf.float32, [], 'x')
    y = tf.cond(x > 0, lambda: tf.sin(x, 'sin'), lambda: tf.constant(2.0, name='two'))
    tf.exp(y, 'exp')
    graph = tf.get_default_graph()
    with tf.control_dependencies([graph.get_operation_by_name('cond/sin')]):
        tf.no_op('after_sin')
    graph, found = liveness(graph)

    dead = names(graph, found.may_be_dead)
    assert {'cond/sin', 'cond/two', 'after_sin', 'cond/switch_t'} <= dead
    assert not dead & {'x', 'Greater', 'cond/Switch', 'cond/sin/Switch', 'cond/Merge', 'exp'}
    switch = graph.get_operation_by_name('cond/sin/Switch')
    assert all(found.output_may_be_dead(output) for output in switch.outputs)
    assert not found.output_may_be_dead(graph.get_tensor_by_name('cond/Merge:0'))
    assert not names(graph, found.is_in_loop)


def test_branches_within_a_branch(liveness):
    """Each join is as alive as the branch around it."""
    x = tf.placeholder(tf.float32, [], 'x')
    inner = lambda: tf.cond(x > 1, lambda: tf.sin(x), lambda: tf.cos(x), name='inner')  # noqa: E731
    y = tf.cond(x > 0, inner, lambda: x, name='outer')
    tf.gradients(y, x)
    graph, found = liveness(tf.get_default_graph())

    assert found.may_be_dead(graph.get_operation_by_name('outer/inner/Merge'))
    assert not found.may_be_dead(graph.get_operation_by_name('outer/Merge'))
    # The gradient by x is there whatever branch is taken.
    [gradient] = [
        op for op in graph.get_operations() if op.type == 'AddN' and 'gradients' in op.name
    ][-1:]
    assert not found.may_be_dead(gradient)


def test_a_join_without_the_other_branch(liveness):
    """Of switches by hand: if neither input of a merge has a value, the merge is dead."""
    p, q = tf.placeholder(tf.bool, [], 'p'), tf.placeholder(tf.bool, [], 'q')
    x = tf.constant(1.0)
    by_p, by_q = (tf.raw_ops.Switch(data=x, pred=predicate) for predicate in (p, q))
    tf.raw_ops.Merge(inputs=[by_p.output_true, by_q.output_false], name='unrelated')
    tf.raw_ops.Merge(inputs=[by_p.output_true, x], name='with_a_value')
    tf.raw_ops.Merge(inputs=[by_p.output_true, by_p.output_false], name='either')
    graph, found = liveness(tf.get_default_graph())
    dead = names(graph, found.may_be_dead)
    assert dead & {'unrelated', 'with_a_value', 'either'} == {'unrelated'}


def test_a_loop(liveness):
    """Its ops are in its frame; what it gives is outside, and is never dead."""
    x = tf.placeholder(tf.float32, [], 'x')
    outside = tf.exp(x, 'exp')

    def body(i, y):
        return i + 1, tf.add(tf.sin(y, 'sin'), outside, 'sum')

    _, y = tf.while_loop(lambda i, _: i < 3, body, [0, x], name='loop')
    tf.identity(y, 'after')
    graph, found = liveness(tf.get_default_graph())

    of_name = graph.get_operation_by_name
    name = of_name('loop/Enter').get_attr('frame_name')
    assert found.frame(of_name('loop/sin')) == (name,)
    assert found.frame(of_name('loop/NextIteration_1')) == (name,)
    assert (found.frame(of_name('loop/Enter')), found.output_frame(of_name('loop/Enter'))) == (
        (),
        (name,),
    )
    assert (found.frame(of_name('loop/Exit')), found.output_frame(of_name('loop/Exit'))) == (
        (name,),
        (),
    )
    inside = names(graph, found.is_in_loop)
    assert {'loop/sin', 'loop/sum', 'loop/sum/Enter', 'loop/LoopCond', 'loop/add/y'} <= inside
    assert not inside & {'x', 'exp', 'after'}

    dead = names(graph, found.may_be_dead)
    assert 'loop/sin' in dead
    assert not dead & {'loop/Enter', 'loop/Merge_1', 'loop/Less', 'loop/Exit_1', 'after', 'exp'}


def test_a_loop_in_a_loop_in_a_branch_and_its_gradients(liveness):
    """A loop in a branch may not run at all; the gradient is there in any case."""
    x = tf.placeholder(tf.float32, [], 'x')

    def loop(name, step):
        return lambda y: tf.while_loop(
            lambda i, _: i < 2, lambda i, z: (i + 1, step(z)), [0, y], name=name
        )[1]

    nested = loop('outer', loop('inner', tf.sin))
    y = tf.cond(x > 0, lambda: nested(x), lambda: x)
    [gradient] = tf.gradients(y, x)
    tf.identity(gradient, 'gradient')
    graph, found = liveness(tf.get_default_graph())

    [inner] = [op for op in graph.get_operations() if op.name.endswith('inner/Sin')]
    assert len(found.frame(inner)) == 2
    [end] = [
        op
        for op in graph.get_operations()
        if op.name.endswith('outer/Exit_1') and 'grad' not in op.name
    ]
    assert found.may_be_dead(end)
    assert found.output_frame(end) == ()
    after = graph.get_operation_by_name('gradient')
    assert not found.may_be_dead(after)
    assert not found.is_in_loop(after)


def test_a_graph_without_either(liveness):
    tf.sin(tf.placeholder(tf.float32, [], 'x'), 'sin')
    graph, found = liveness(tf.get_default_graph())
    assert not names(graph, found.may_be_dead) | names(graph, found.is_in_loop)
