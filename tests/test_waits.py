"""What waits for what: entries of tuples, writes for reads, and effects."""

import time

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import private
from models import floats, of_all_modes, spec_of, step
from towers import compare, session

pytestmark = pytest.mark.core
TRAIN = tf.estimator.ModeKeys.TRAIN


def before(op):
    """The names of an op and all that it waits for."""
    return {other.name for other in private.backward([op])}


def build(use_resource, effects=False):
    """Two entries of a tuple, x and y; returns x as whoever uses it gets it, and the count."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [3], use_resource=use_resource)
        count = tf.get_variable('count', [], use_resource=True, initializer=tf.zeros_initializer())
        update = [count.assign_add(1.0).op] if effects else []
        x, y = tf.identity(features * w, 'x'), tf.identity(tf.square(features), 'y')
        with tf.control_dependencies(update):
            first, _ = tf.tuple([x, y], name='pair')
        loss = tf.reduce_sum(tf.identity(first, 'used'))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.no_op())

    features = tf.placeholder(tf.float32, [None, 3], 'features')
    tf.train.create_global_step()
    estimator_mgpu.replicate(model_fn, devices=2)(features=features, labels=None, mode=TRAIN)
    return tf.get_default_graph()


def test_an_entry_waits_for_no_other():
    with tf.Graph().as_default():
        found = before(build(True).get_operation_by_name('replicate/tower_1/used'))
    assert 'replicate/tower_1/x' in found and 'replicate/tower_1/y' not in found


def test_reference_variables_keep_the_order():
    with tf.Graph().as_default():
        found = before(build(False).get_operation_by_name('replicate/tower_1/used'))
    assert {'replicate/tower_1/x', 'replicate/tower_1/y'} <= found


def test_what_else_comes_before_a_tuple_still_does():
    with tf.Graph().as_default() as graph, session(2) as run:
        build(True, effects=True)
        found = before(graph.get_operation_by_name('replicate/tower_1/used'))
        run.run(tf.global_variables_initializer())
        used = graph.get_tensor_by_name('replicate/tower_1/used:0')
        run.run(used, {'features:0': floats(5, 3)})
        [count] = [v for v in tf.global_variables() if v.op.name == 'count']
        assert run.run(count) == 1
    assert 'replicate/tower_1/x' in found and 'replicate/tower_1/y' not in found


def test_a_variable_is_read_before_it_is_written():
    """Though the gradient of a linear loss doesn't follow from it."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [3, 1], use_resource=True)
        loss = tf.reduce_mean(tf.matmul(features, w))
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        train_op = optimizer.minimize(loss, tf.train.get_global_step())
        with tf.control_dependencies([train_op]):
            after = tf.reduce_sum(features) * tf.reduce_sum(w.read_value(), name='after')
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=tf.group(train_op, after), eval_metric_ops={}
        )

    with tf.Graph().as_default() as graph:
        features = tf.placeholder(tf.float32, [None, 3])
        tf.train.create_global_step()
        replicated = estimator_mgpu.replicate(model_fn, devices=2)
        replicated(features=features, labels=None, mode=TRAIN)
        [write] = [op for op in graph.get_operations() if op.type.startswith('ResourceApply')]
        assert 'MatMul/ReadVariableOp' in before(write)
        assert write.name in before(graph.get_operation_by_name('after'))
    ours = compare(model_fn, [(floats(7, 3), floats(7, 1))] * 3, 3)[0]
    assert ours.losses[1] < ours.losses[0]


def read_late(read):
    """A gradient doesn't follow from what is read, which is slow."""

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', initializer=floats(7, 2), use_resource=True)
        w = tf.get_variable('w', [3, 2], use_resource=True)
        late = tf.numpy_function(lambda x: time.sleep(0.05) or x, [features], tf.float32)
        late.set_shape(features.shape)
        with tf.control_dependencies([late]):
            rows = read(table, features)
        loss = tf.reduce_mean(rows * tf.matmul(features, w))
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(1.0).minimize(loss, step()))

    return model_fn


def ids_of(features):
    return tf.cast(tf.abs(features[:, 0]), tf.int32) % 7


def in_a_branch(table, features):
    return tf.cond(
        tf.reduce_sum(features) > -1e9,
        lambda: tf.matmul(features, table[:3]),
        lambda: tf.matmul(features, table[3:6]),
    )


@pytest.mark.parametrize(
    'read',
    [
        lambda table, features: tf.gather(table, ids_of(features)),
        in_a_branch,
        tf.function(in_a_branch),
        lambda table, features: tf.function(tf.gather)(table, ids_of(features)),
    ],
    ids=['gather', 'branch', 'function', 'gather in a function'],
)
def test_however_a_variable_is_read_it_is_written_later(read):
    compare(read_late(read), [(floats(7, 3), floats(7, 1))] * 3, 3)


def test_what_reads_a_variable_but_is_not_of_the_step_does_not_run():
    def never(x):
        raise AssertionError('It was asked for.')

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', initializer=floats(7, 2), use_resource=True)
        tf.gather(table, tf.numpy_function(never, [ids_of(features)], tf.int32))
        w = tf.get_variable('w', [3, 2], use_resource=True)
        loss = tf.reduce_mean(tf.gather(table, ids_of(features)) * tf.matmul(features, w))
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(1.0).minimize(loss, step()))

    compare(model_fn, [(floats(7, 3), floats(7, 1))] * 2, 3)


def test_effects_that_a_tuple_waits_for():
    calls = []

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [3, 1], use_resource=True)
        seen = tf.get_variable('seen', [], use_resource=True, trainable=False)
        loss = tf.reduce_mean(tf.square(tf.matmul(features, w)))
        count = tf.identity(seen.assign_add(tf.cast(tf.shape(features)[0], tf.float32)))
        called = tf.numpy_function(lambda x: calls.append(1) or x, [loss], tf.float32)
        loss, _, _ = tf.tuple([loss, count, called])
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    compare(model_fn, [(floats(7, 3), floats(7, 1))] * 2, 3)
    assert len(calls) == 2 * 2  # on one device and on three


def test_a_group_that_an_entry_waits_for_does_its_work():
    """It looks like a tuple, and is what is to be run; the entry isn't."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(tf.layers.dense(features, 1) - labels))
        minimized = tf.train.GradientDescentOptimizer(0.1).minimize(loss, step())
        train_op = tf.group(minimized, loss)
        with tf.control_dependencies([train_op]):
            tf.identity(loss, 'after')
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    ours, _ = compare(model_fn, [(floats(7, 3), floats(7, 1))] * 2, 3)
    assert ours.values['global_step'] == 2


def test_an_entry_that_is_fetched_is_the_batch_s():
    def forward(features):
        first, second = tf.tuple([tf.layers.dense(features, 2), tf.nn.tanh(features)])
        return tf.layers.dense(tf.concat([first, second], 1), 1)

    compare(of_all_modes(forward), [(floats(7, 3), floats(7, 1))] * 2, 3)
