"""Small variables and gradients share messages: which do, and how few those are."""

from collections import Counter

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import explanation
from models import adam, batches, floats, spec_of, step, weights
from towers import compare, session, train

pytestmark = pytest.mark.core
TRAIN = tf.estimator.ModeKeys.TRAIN
LAYERS = 10
ENDS = 'send', 'recv'
PLAIN = {'graph_options': estimator_mgpu.session_config(2).graph_options}


def layers(features):
    """Matrices, vectors, a scalar, a float64 one, and one that's too large to be packed."""
    net = tf.matmul(features, weights('first', 3, 8))
    for i in range(LAYERS):
        net = tf.nn.tanh(tf.matmul(net, weights(f'w{i}', 8, 8) / 9) + weights(f'b{i}', 8) / 9)
    net *= tf.get_variable('scalar', [], initializer=tf.ones_initializer())
    wide = tf.matmul(net, weights('large', 8, 3000))
    double = tf.matmul(tf.cast(net, tf.float64), tf.cast(weights('v', 8, 1), tf.float64))
    scale = tf.get_variable('double', [2, 1], tf.float64, tf.ones_initializer())
    double = tf.reduce_sum(double * tf.reshape(scale, [2]), 1, keepdims=True)
    return tf.cast(double, tf.float32) + tf.reduce_mean(wide, 1, keepdims=True)


def momentum(features, labels, mode):
    loss = tf.losses.mean_squared_error(labels, layers(features))
    return spec_of(mode, loss, tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss, step()))


def of_graph(run, kind):
    return [op for op in run.graph.get_operations() if op.type == kind and 'replicate/' in op.name]


@pytest.mark.parametrize('rows, static', [(12, True), (11, False), (2, False)])
@pytest.mark.parametrize('towers', [2, 4])
def test_packs(rows, static, towers):
    """Also where some towers have no rows."""
    ours, _ = compare(momentum, batches(rows, steps=4), towers, static=static)
    packs = of_graph(ours, 'SplitV')
    assert len(packs) > towers
    assert {op.outputs[0].dtype for op in packs} <= {tf.float32, tf.float64}
    large = [op for op in packs for t in op.inputs if t.shape.num_elements() == 8 * 3000]
    assert not large


@pytest.mark.parametrize('variables', ['first', 'cpu'])
def test_packs_of_one_device(variables):
    compare(momentum, batches(steps=3), 3, variables=variables)


def sends_of(train_op, towers):
    """The sends of a step, as TensorFlow made them."""
    with session(towers, **PLAIN) as run:
        run.run(tf.global_variables_initializer())
        found = tf.RunMetadata()
        run.run(train_op, None, tf.RunOptions(output_partition_graphs=True), found)
    return [node for part in found.partition_graphs for node in part.node if node.op == '_Send']


@pytest.mark.parametrize('towers', [2, 4, 8])
def test_messages_of_a_step(towers):
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        inputs = tf.constant(floats(16, 3)), tf.constant(floats(16, 1))
        spec = estimator_mgpu.replicate(momentum, devices=towers)(*inputs, TRAIN)
        sends = sends_of(spec.train_op, towers)
    others = towers - 1
    # Of the packs, each from each device to each other one and back; of the variables in none, as
    # one is large, one a scalar and two are float64; features, labels, and the end of train_op.
    assert len(sends) <= (2 * towers + 2 * 4 + 3) * others


def rivals(features, labels, mode):
    """Two optimizers, of which a step runs one or both."""
    made = tf.matmul(tf.nn.tanh(tf.matmul(features, weights('g0', 3, 3))), weights('g1', 3, 3))
    judged = [
        tf.matmul(tf.nn.tanh(tf.matmul(x, weights('d0', 3, 4))), weights('d1', 4, 1))
        for x in (features, made)
    ]
    apart = tf.reduce_mean(judged[0] - judged[1]) + tf.reduce_mean(tf.square(labels - judged[1]))
    ours, theirs = tf.trainable_variables()[:2], tf.trainable_variables()[2:]
    optimizer = tf.train.GradientDescentOptimizer(0.05)
    gradients = tf.gradients(apart, ours), tf.gradients(-apart, theirs)
    with tf.control_dependencies([apart, *sum(gradients, [])]):
        first = optimizer.apply_gradients(zip(gradients[0], ours))
        second = optimizer.apply_gradients(zip(gradients[1], theirs), step())
    return spec_of(mode, apart, first, second)


def test_two_optimizers():
    compare(rivals, batches(steps=4), 3)


def test_each_call_has_its_own_packs():
    """Who runs one optimizer alone gets no gradient, and no random number, of another's."""

    def model_fn(features, labels, mode):
        counts = [
            tf.get_variable(f'count{i}', [], initializer=tf.zeros_initializer()) for i in '01'
        ]
        train_ops = []
        for i, count in enumerate(counts):
            with tf.control_dependencies([count.assign_add(1.0).op]):
                x = tf.identity(features)
            w, b = weights(f'w{i}', 3, 1), weights(f'b{i}', 1)
            loss = tf.losses.mean_squared_error(labels, tf.matmul(x, w) + b)
            optimizer = tf.train.GradientDescentOptimizer(0.1)
            train_ops.append(optimizer.minimize(loss, var_list=[w, b]))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_ops[0])

    ours, _ = compare(model_fn, batches(steps=2), 2, variables='first')
    assert [ours.values[f'count{i}'] for i in '01'] == [2, 2]  # The loss is the second one's.
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        inputs = tf.constant(floats(6, 3)), tf.constant(floats(6, 1))
        spec = estimator_mgpu.replicate(model_fn, devices=2)(*inputs, TRAIN)
        counts = [v for v in tf.global_variables() if 'count' in v.name]
        with session(2) as run:
            run.run(tf.global_variables_initializer())
            run.run(spec.train_op)
            assert run.run(counts) == [1, 0]


def penalty(features, labels, mode):
    """Gradients of gradients: some sums of the first ones go back to the towers."""
    loss = tf.losses.mean_squared_error(labels, layers(features))
    variables = tf.trainable_variables()
    first = tf.gradients(loss, variables)
    loss += 1e-4 * tf.add_n([tf.cast(tf.reduce_sum(tf.square(g)), tf.float32) for g in first])
    return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.01).minimize(loss, step()))


def test_what_towers_wait_for_is_in_no_pack():
    compare(penalty, batches(steps=3), 3, rtol=1e-4)


def test_a_read_that_waits_is_in_no_pack():
    """A moving average that is read after it has been updated, beside variables that aren't."""

    def model_fn(features, labels, mode):
        average = tf.get_variable(
            'average', [3], trainable=False, initializer=tf.ones_initializer()
        )
        update = average.assign(0.9 * average + 0.1)
        other = average.assign_add([1.0, 2.0, 3.0])
        with tf.control_dependencies([other.op if hasattr(other, 'op') else other]):
            after = average.read_value()
        del update
        net = tf.matmul(features * after, weights('w', 3, 4)) + weights('b', 4)
        loss = tf.losses.mean_squared_error(labels, tf.reduce_sum(net, 1, keepdims=True))
        return spec_of(mode, loss, adam(loss))

    compare(model_fn, batches(steps=3), 2, variables='first')


def test_a_loss_alone_needs_no_gradient():
    """Not even of packs: who fetches it draws no numbers for them, and changes nothing."""
    run = train(momentum, batches(steps=1), 2)
    loss = run.spec.loss.op
    seen, stack = {loss}, [loss]
    while stack:
        before = {t.op for t in stack.pop().inputs} - seen
        seen |= before
        stack += before
    assert not [op.name for op in seen if 'gradients/' in op.name]
    assert np.isfinite(run.losses).all()


def test_messages_are_those_that_explain_counts():
    """From each device to each other one, of a model of all kinds of packs."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        inputs = tf.constant(floats(16, 3)), tf.constant(floats(16, 1))
        spec = estimator_mgpu.replicate(momentum, devices=4)(*inputs, TRAIN)
        ends = [e[:2] for e in explanation.messages([spec.train_op], '/device:CPU:0')]
        real = [
            tuple(node.attr[f'{end}_device'].s.decode()[-len('/device:CPU:0') :] for end in ENDS)
            for node in sends_of(spec.train_op, 4)
        ]
    # A constant that is on no device is put where it's used.
    assert len(real) > 40 and sum((Counter(ends) - Counter(real)).values()) <= 1
    assert not Counter(real) - Counter(ends)
