"""What several devices add to a graph and to a step."""

import gc
import json
import pathlib
import subprocess
import sys
import weakref
from collections import Counter

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import floats, spec_of, step
from towers import behavior_of, session

ROWS = 24


def network(features, labels, mode):
    """Three layers, with batch normalization whose updates come before the gradients."""
    net = features
    for size in (5, 7):
        net = tf.layers.dense(net, size, use_bias=False)
        net = tf.nn.relu(tf.layers.batch_normalization(net, training=True))
    loss = tf.reduce_mean(tf.square(tf.layers.dense(net, 1) - labels))
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return spec_of(mode, loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step()))


def perceptron(features, labels, mode):
    net = tf.layers.dense(tf.layers.dense(features, 5, tf.nn.tanh), 7, tf.nn.tanh)
    loss = tf.reduce_mean(tf.square(tf.layers.dense(net, 1) - labels))
    return spec_of(mode, loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step()))


def ops_of_a_step(model_fn, towers, rows=ROWS):
    """Returns the ops that a step runs, constants aside."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        batch = tf.placeholder(tf.float32, [rows, 3]), tf.placeholder(tf.float32, [rows, 1])
        if towers:
            model_fn = estimator_mgpu.replicate(model_fn, devices=towers)
        spec = model_fn(*batch, tf.estimator.ModeKeys.TRAIN)
        found, waiting = set(), [spec.train_op, spec.loss.op]
        while waiting:
            op = waiting.pop()
            if op not in found:
                found.add(op)
                waiting += [t.op for t in op.inputs] + list(op.control_inputs)
        return [op for op in found if op.type != 'Const']


def added(ops):
    return [op for op in ops if op.name.startswith(('replicate', 'reduced'))]


def types(ops):
    return Counter(op.type for op in ops)


def of_tower(ops, i):
    return types(op for op in ops if op.name.startswith(f'tower_{i}/'))


@pytest.mark.parametrize('towers', [2, 4, 8])
def test_a_step_splits_and_sums(towers):
    """Beyond the towers' own: a split a leaf, a sum a variable, and the loss, in scalars."""
    ops = added(ops_of_a_step(perceptron, towers))
    sums = [op for op in ops if op.name.startswith('replicate/gradient') and op.type == 'AddN']
    assert len(sums) == 6  # three layers' kernels and biases
    assert all(len(op.inputs) == towers for op in sums)
    rest = [op for op in ops if op not in sums]
    assert all(t.shape.rank == 0 for op in rest if op.type != 'Split' for t in op.outputs)
    # The loss's sum and mean, and what the gradient of the mean starts from.
    one = types(added(ops_of_a_step(perceptron, 2)))
    assert types(rest)['Split'] == 2
    assert types(rest)['AddN'] == 1
    assert types(rest) + types(sums) == one
    assert len(rest) < 12


@pytest.mark.parametrize('model_fn', [perceptron, network])
def test_towers_run_what_one_device_runs(model_fn):
    """All towers the same; and no more of any kind than one device, which has gates besides."""
    ops = ops_of_a_step(model_fn, 4)
    one = types(ops_of_a_step(model_fn, 0))
    own = of_tower(ops, 1)
    assert own == of_tower(ops, 2) == of_tower(ops, 3)
    assert own['MatMul'] == 3 + 2 * 3 - 1  # But for the gradient with respect to the features.
    assert own['NoOp'] == 0
    assert own['Identity'] == 1  # What the gradients start from.
    assert own - one == Counter()


def test_one_edge_for_all_updates():
    """Gradients wait for four moving averages: on tower 0 by four edges, on others by one."""
    ops = ops_of_a_step(network, 3)

    def waits(scope):
        """How many ops elsewhere those of a scope wait for, at most."""
        own = [op.control_inputs for op in ops if op.name.startswith(scope)]
        return max(sum(not op.name.startswith(scope) for op in waited) for waited in own)

    assert waits('gradients/') == 4
    assert waits('tower_1/') == waits('tower_2/') == 1


def test_gates_of_v1_variables_stay():
    """A gradient may use a variable that another, which came first, has changed already."""
    with behavior_of('v1'):
        found = of_tower(ops_of_a_step(perceptron, 2), 1)
    assert found['NoOp'] and found['Identity']


def test_tuples_that_wait_for_writes_stay():
    """A group of the user's may stand for a write; what it gates is after that."""

    def model_fn(features, labels, mode):
        counter = tf.get_variable('counter', [], trainable=False)
        counted = tf.group(counter.assign_add(1.0))
        w = tf.get_variable('w', [3, 1])
        output = features @ w
        output, _ = tf.tuple([output, tf.abs(output)], control_inputs=[counted])
        loss = tf.reduce_mean(tf.square(output - labels))
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    ops = ops_of_a_step(model_fn, 2)
    assert of_tower(ops, 1)['Identity'] == 2  # Of the tuple, and what the gradients start from.
    assert any(op.type == 'AssignAddVariableOp' and 'counter' in op.inputs[0].name for op in ops)


@pytest.mark.parametrize('rows', [ROWS, None], ids=['static', 'dynamic'])
def test_nodes_grow_by_the_same_for_each_tower(rows):
    counts = {towers: len(ops_of_a_step(network, towers, rows)) for towers in (2, 3, 4, 8)}
    further = counts[3] - counts[2]
    assert counts[4] - counts[3] == further
    assert counts[8] - counts[4] == 4 * further
    assert further < 0.7 * len(ops_of_a_step(network, 0, rows))


@pytest.mark.skipif(
    not pathlib.Path('/proc/self/statm').exists(), reason='memory is read from /proc'
)
def test_memory_is_flat():
    """Over 2,000 steps, and over 20 rounds of training and evaluating, once all is warm.

    Ten rounds build twenty graphs of some MB; if they stayed, it would show.
    """
    script = pathlib.Path(__file__).with_name('long_run.py')
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    steps, rounds = found['steps'], found['rounds']
    assert len(steps) == 2000 and len(rounds) == 20
    assert max(steps[-500:]) < max(steps[200:700]) + 8
    assert max(rounds[-5:]) < max(rounds[3:8]) + 16


def test_no_graph_is_left():
    """All that was made for a model goes with its graph."""
    graphs = []
    for _ in range(3):
        with tf.Graph().as_default() as graph, session(3) as sess:
            tf.train.get_or_create_global_step()
            batch = tf.constant(floats(ROWS, 3)), tf.constant(floats(ROWS, 1))
            spec = estimator_mgpu.replicate(network, devices=3)(*batch, 'train')
            sess.run(tf.global_variables_initializer())
            sess.run(spec.train_op)
            graphs.append(weakref.ref(graph))
        del graph, sess, batch, spec
    gc.collect()
    assert [graph() for graph in graphs] == [None] * 3
