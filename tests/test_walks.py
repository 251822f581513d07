"""Walks through a graph find what is before what, also where later ops were put before."""

import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.walks import Order, before, inputs, walk


@pytest.fixture
def ops():
    """a -> b -> c by inputs, c -> d by control; e alone."""
    with tf.Graph().as_default():
        a = tf.constant(1.0)
        b = tf.negative(a)
        c = tf.negative(b)
        with tf.control_dependencies([c]):
            d = tf.constant(2.0)
        e = tf.constant(3.0)
        yield {name: t.op for name, t in zip('abcde', (a, b, c, d, e))}


def found(ops, *start, **options):
    names = {op.name: name for name, op in ops.items()}
    return ''.join(sorted(names[op.name] for op in walk([ops[s] for s in start], **options)))


def test_walks_back(ops):
    assert found(ops, 'd') == 'abcd'
    assert found(ops, 'd', 'e') == 'abcde'
    assert found(ops, 'd', onward=inputs) == 'd'
    assert found(ops, 'c', 'c', onward=inputs) == 'abc'
    assert found(ops, 'd', without={ops['b'].name}) == 'cd'
    assert found(ops, 'a', onward=private.followers) == 'abcd'


def order(ops, *ends):
    found = Order(ops['a'].graph, [ops[end] for end in ends])
    return {end: ''.join(n for n in ops if found.is_before(ops[n], ops[end])) for end in ends}


def test_order(ops):
    assert order(ops) == {}
    assert order(ops, 'd', 'b', 'e') == {'d': 'abcd', 'b': 'ab', 'e': 'e'}


def test_order_with_edges_from_later_ops(ops):
    private.add_control_inputs(ops['b'], [ops['e']])
    assert order(ops, 'c', 'a') == {'c': 'abce', 'a': 'a'}
    with ops['a'].graph.as_default():
        last = tf.constant(4.0).op
    private.add_control_inputs(ops['a'], [last])
    private.add_control_inputs(ops['e'], [ops['d']])
    late = Order(ops['a'].graph, [ops['b']])
    assert late.is_before(last, ops['b']) and late.is_before(ops['d'], ops['b'])


def test_order_in_a_v1_loop():
    with tf.Graph().as_default() as graph:
        tf.disable_control_flow_v2()
        try:
            end = tf.while_loop(lambda i: i < 3, lambda i: i * 2, [tf.constant(1)])
        finally:
            tf.enable_control_flow_v2()
        ops = list(graph.get_operations())
        back = {op.name for op in walk([end.op])}
        found = Order(graph, [end.op])
        assert {op.name for op in ops if found.is_before(op, end.op)} == back
        assert any(op.type == 'NextIteration' and op.name in back for op in ops)
        assert all(other.name in back for op in walk([end.op]) for other in before(op))
