"""Ops that give what they are given: towers have no copies of them, and who fetches one has it."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import floats, sgd, spec_of, weights
from towers import NAMES, assert_close, session

X, Y = floats(7, 3), floats(7, 1)
INDICES = np.stack([np.arange(7), np.zeros(7, int)], 1)  # of a sparse tensor of an entry a row


def needless(features, labels, mode):
    """Gradients of `net` are summed over no dimension, as the size of the batch is dynamic.

    Those of `zeros` are zeros like these.
    """
    product = tf.matmul(features['x'], weights('w', 3, 3))
    net = tf.add(tf.add(product, weights('b', 3), 'biased'), features['x'], 'net')
    positive = tf.where(net < 0, tf.zeros_like(net, name='zeros'), net, 'positive')
    same = tf.reshape(positive, tf.shape(features['x']), 'same')
    folded = tf.reduce_sum(same, 1, keepdims=True, name='folded')
    loss = tf.reduce_mean(tf.square(folded - labels) * same)
    return spec_of(mode, loss, sgd(loss))


def needed(features, labels, mode):
    """More is asked of these ops than their value."""
    x = features['x']
    shape = tf.shape(x)
    net = tf.matmul(x, weights('w', 3, 3))
    with tf.device('/device:CPU:0'):
        net = tf.reshape(net, shape, 'placed')
    with tf.control_dependencies([tf.no_op()]):
        net = tf.reshape(net, shape, 'waits')
    net *= tf.stop_gradient(net, 'stopped')

    # A tower's rows of a sparse tensor are known by the name of its indices.
    indices = tf.reshape(features['indices'], tf.shape(features['indices']), 'indices')
    zeros = tf.zeros([shape[0]], tf.int32)
    sparse = tf.SparseTensor(indices, zeros, tf.cast([shape[0], 1], tf.int64))
    losses = tf.nn.ctc_loss(sparse, tf.stack([net, net]), zeros + 2)

    def body(i, values):
        return i + 1, tf.reshape(values, shape, 'looped') * 2

    _, looped = tf.while_loop(lambda i, _: i < 2, body, (0, x))
    branch = tf.cond(shape[0] > 2, lambda: tf.reshape(x, shape, 'branch'), lambda: -x)
    loss = tf.reduce_mean(tf.square(net + looped + branch - labels) + losses[:, None])
    return spec_of(mode, loss, sgd(loss))


def looked_up(features, labels, mode):
    """An optimizer adds up rows of the same id, but different ids were looked up."""
    ids = tf.sparse.from_dense(tf.cast(3 * tf.abs(features['x']), tf.int64))
    net = tf.nn.safe_embedding_lookup_sparse(weights('table', 20, 3), ids)
    loss = tf.reduce_mean(tf.square(tf.reduce_sum(net, 1, keepdims=True) - labels))
    optimizer = tf.train.AdagradOptimizer(0.1)
    return spec_of(mode, loss, optimizer.minimize(loss, tf.train.get_global_step()))


def run(model_fn, names, devices, microbatches=1):
    """Returns the graph, and numbers of the model.

    These are values of some ops, the loss, and the variables after a step.
    """
    with tf.Graph().as_default() as graph:
        tf.train.get_or_create_global_step()
        arrays = {'x': X, 'indices': INDICES}, Y
        batch = tf.nest.map_structure(
            lambda array: tf.placeholder_with_default(array, [None, array.shape[1]]), arrays
        )
        replicated = estimator_mgpu.replicate(
            model_fn, devices=devices, microbatches=microbatches, variables='first'
        )
        spec = replicated(*batch, mode='train')
        variables = tf.trainable_variables()
        with session(devices, microbatches=microbatches) as sess:
            sess.run(tf.global_variables_initializer())
            fetched = [f'{name}:0' for name in names]
            before = sess.run([*fetched, spec.loss])
            sess.run(spec.train_op)
            found = [*before, *sess.run(variables)]
    return graph, found


def compare(model_fn, names, devices, microbatches=1):
    """Compares several towers with one device, and returns the graph for these."""
    graph, ours = run(model_fn, names, devices, microbatches)
    _, of_one_device = run(model_fn, names, 1)
    assert_close(ours, of_one_device, 1e-5)
    return graph


def with_copies(names, graph):
    in_graph = {op.name for op in graph.get_operations()}
    return {name for name in names if NAMES.copy(name, 1) in in_graph}


@pytest.mark.core
@pytest.mark.parametrize('devices, microbatches', [(2, 1), (1, 2)], ids=['2x1', '1x2'])
def test_they_have_no_copies(devices, microbatches, behavior):
    """Also a gradient that goes to its variable in a pack, together with another one."""
    gradient = 'gradients/biased_grad/Reshape'
    sums = {'gradients/net_grad/Sum', 'gradients/net_grad/Reshape', gradient}
    bypassed = {'same', 'gradients/positive_grad/zeros_like', *sums}
    others = {'net', 'zeros', 'folded', 'gradients/MatMul_grad/MatMul_1'}
    names = [*bypassed, *others]
    graph = compare(needless, names, devices, microbatches)
    assert with_copies(names, graph) == others

    full_value = graph.get_operation_by_name(gradient).inputs[0]
    is_packed = full_value.op.name.startswith(NAMES.added('', ''))
    assert is_packed


@pytest.mark.core
def test_those_that_are_needed(behavior):
    names = {'placed', 'waits', 'stopped', 'indices'}
    graph = compare(needed, sorted(names), 2)
    if behavior == 'v1':  # Otherwise the loop and the branch are functions.
        names |= {'while/looped', 'cond/branch'}
    assert with_copies(names, graph) == names


@pytest.mark.core
@pytest.mark.parametrize('devices, microbatches', [(2, 1), (1, 2)], ids=['2x1', '1x2'])
def test_ids_that_are_different_already(devices, microbatches, behavior):
    update = 'Adagrad/update_table'
    names = [f'{update}/Unique', f'{update}/UnsortedSegmentSum']
    graph = compare(looked_up, names, devices, microbatches)
    assert not with_copies(names, graph)
    [apply] = [op for op in graph.get_operations() if 'SparseApplyAdagrad' in op.type]
    assert not {op.name for op in upstream_of(apply)} & set(names)


def upstream_of(op):
    found, stack = set(), [op]
    while stack:
        before = [tensor.op for tensor in stack.pop().inputs]
        stack += [one for one in before if one not in found]
        found.update(before)
    return found
