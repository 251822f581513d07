"""Searches in a graph."""

import random
from graphlib import CycleError, TopologicalSorter

import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs
from towers import behavior_of

pytestmark = pytest.mark.core


def loop(start, increment):
    return tf.while_loop(lambda x: x < 9.0, lambda x: x + increment, [start])


def graph_with_loops(rng):
    """Returns the ops of a graph with sums, control edges, and loops of TensorFlow 1."""
    with behavior_of('v1'), tf.Graph().as_default() as graph:
        tensors = [tf.constant(float(i)) for i in range(3)]
        for _ in range(12):
            first, second, before = (rng.choice(tensors) for _ in range(3))
            with tf.control_dependencies([before]):
                is_loop = rng.random() < 0.3
                tensors.append(loop(first, second) if is_loop else first + second)
        return graph.get_operations()


@pytest.mark.parametrize('seed', range(20))
def test_paths_lead_along_consumers(seed):
    """There is a path from the ops that the target waits for, and from no others."""
    rng = random.Random(seed)
    ops = graph_with_loops(rng)
    target = rng.choice(ops)
    expected = graphs.ancestors([target])

    targets = {target}
    dead_ends = set()
    for op in rng.sample(ops, len(ops)):
        path = graphs.path_to(targets, op, dead_ends)
        assert bool(path) == (op in expected)
        if path:
            assert op in path and path & targets
            assert path <= expected
            targets |= path
    assert targets == expected
    assert dead_ends == set(ops) - expected


def test_no_op_is_searched_again():
    """Many ops without a path cost no more than one."""
    with tf.Graph().as_default():
        features = [tf.constant(1.0) for _ in range(5)]
        last = sum(features)
        for _ in range(5):
            last = tf.exp(last)

        dead_ends = set()
        for feature in features:
            before = len(dead_ends)
            assert not graphs.path_to((), feature.op, dead_ends)
            assert before == 0 or len(dead_ends) == before + 1


def test_ops_of_types_are_in_the_order_in_which_they_were_made():
    """Those that were made since the last question, too."""
    with tf.Graph().as_default() as graph:
        first = tf.constant(1.0)
        negative = tf.negative(first)
        assert graphs.ops_of_types(graph, ['Const', 'Neg']) == [first.op, negative.op]
        second = tf.constant(2.0)
        tf.exp(second)
        assert graphs.ops_of_types(graph, ['Neg', 'Const']) == [first.op, negative.op, second.op]
        assert graphs.ops_of_types(graph, ['Enter']) == []


@pytest.mark.parametrize('seed', range(20))
def test_nodes_are_sorted_as_graphlib_sorts_them(seed):
    """Nodes may wait for one twice, and for nodes that aren't among them."""
    rng = random.Random(seed)
    nodes = rng.sample(range(30), 30)
    inputs = {
        node: rng.choices(nodes[:place], k=rng.randrange(4))
        for place, node in enumerate(nodes)
        if place
    }
    expected = [node for node in TopologicalSorter(inputs).static_order() if node in inputs]
    assert graphs.sorted_by_inputs(inputs) == expected


def test_nodes_that_wait_for_each_other_are_named():
    with pytest.raises(CycleError) as raised:
        graphs.sorted_by_inputs({'a': ['c'], 'b': ['a'], 'c': ['b'], 'd': ['a']})
    assert set(raised.value.args[1]) == {'a', 'b', 'c'}
