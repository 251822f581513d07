"""What waits for what: entries of tuples, writes for reads, and effects."""

import time

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.tf_internals import graphs
from models import floats, of_all_modes, sgd, spec_of
from towers import TRAIN, compare, session

pytestmark = pytest.mark.core
BATCHES = [(floats(7, 3), floats(7, 1))] * 3


def before(op):
    """The names of an op and all that it waits for."""
    return {other.name for other in graphs.ancestors([op])}


def variable(name, *shape, **options):
    return tf.get_variable(name, shape, use_resource=True, **options)


def replicated(model_fn):
    """The graph of a model_fn, on two devices."""
    features = tf.placeholder(tf.float32, [None, 3], 'features')
    tf.train.create_global_step()
    estimator_mgpu.replicate(model_fn, devices=2)(features=features, labels=None, mode=TRAIN)
    return tf.get_default_graph()


@pytest.mark.parametrize(
    'use_resource, effects', [(True, False), (True, True), (False, False)], ids=repr
)
def test_an_entry_waits_for_no_other(use_resource, effects):
    """Who fetches what follows from it runs the effects before the tuple, as on one device."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [3], use_resource=use_resource)
        count = variable('count', initializer=tf.zeros_initializer())
        update = [count.assign_add(1.0).op] if effects else []
        x, y = tf.identity(tf.tanh(features), 'x'), tf.identity(tf.square(features), 'y')
        with tf.control_dependencies(update):
            first, _ = tf.tuple([x, y], name='pair')
        loss = tf.reduce_sum(tf.identity(first, 'used') * w)
        return spec_of(mode, loss, tf.no_op())

    with tf.Graph().as_default(), session(2) as run:
        graph = replicated(model_fn)
        found = before(graph.get_operation_by_name('replicate/tower_1/used'))
        assert 'replicate/tower_1/x' in found
        assert 'replicate/tower_1/y' not in found
        run.run(tf.global_variables_initializer())
        run.run('used:0', {'features:0': floats(5, 3)})
        [count] = [v for v in tf.global_variables() if v.op.name == 'count']
        assert run.run(count) == effects


def test_a_variable_is_read_before_it_is_written():
    """Though the gradient of a linear loss doesn't follow from it."""

    def model_fn(features, labels, mode):
        w = variable('w', 3, 1)
        loss = tf.reduce_mean(tf.matmul(features, w))
        train_op = sgd(loss)
        with tf.control_dependencies([train_op]):
            after = tf.reduce_sum(features) * tf.reduce_sum(w.read_value(), name='after')
        return spec_of(mode, loss, train_op, after)

    with tf.Graph().as_default():
        graph = replicated(model_fn)
        [write] = [op for op in graph.get_operations() if op.type.startswith('ResourceApply')]
        assert 'MatMul/ReadVariableOp' in before(write)
        assert write.name in before(graph.get_operation_by_name('after'))
    ours = compare(model_fn, BATCHES, 3)[0]
    assert ours.losses[1] < ours.losses[0]


def ids_of(features):
    return tf.cast(tf.abs(features[:, 0]), tf.int32) % 7


def in_a_branch(table, features):
    return tf.cond(
        tf.reduce_sum(features) > -1e9,
        lambda: tf.matmul(features, table[:3]),
        lambda: tf.matmul(features, table[3:6]),
    )


READS = {
    'gather': lambda table, features: tf.gather(table, ids_of(features)),
    'branch': in_a_branch,
    'function': tf.function(in_a_branch),
    'gather in a function': lambda table, x: tf.function(tf.gather)(table, ids_of(x)),
}


@pytest.mark.parametrize('read', READS.values(), ids=READS)
def test_however_a_variable_is_read_it_is_written_later(read):
    """A gradient doesn't follow from what is read, which is slow."""

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', initializer=floats(7, 2), use_resource=True)
        late = tf.numpy_function(lambda x: time.sleep(0.05) or x, [features], tf.float32)
        late.set_shape(features.shape)
        with tf.control_dependencies([late]):
            rows = read(table, features)
        loss = tf.reduce_mean(rows * tf.matmul(features, variable('w', 3, 2)))
        return spec_of(mode, loss, sgd(loss, 1.0))

    compare(model_fn, BATCHES, 3)


def test_what_reads_a_variable_but_is_not_of_the_step_does_not_run():
    def never(x):
        raise AssertionError('It was asked for.')

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', initializer=floats(7, 2), use_resource=True)
        tf.gather(table, tf.numpy_function(never, [ids_of(features)], tf.int32))
        product = tf.matmul(features, variable('w', 3, 2))
        loss = tf.reduce_mean(tf.gather(table, ids_of(features)) * product)
        return spec_of(mode, loss, sgd(loss, 1.0))

    compare(model_fn, BATCHES, 3)


def test_effects_that_a_tuple_waits_for():
    calls = []

    def model_fn(features, labels, mode):
        seen = variable('seen', trainable=False)
        loss = tf.reduce_mean(tf.square(tf.matmul(features, variable('w', 3, 1))))
        count = tf.identity(seen.assign_add(tf.cast(tf.shape(features)[0], tf.float32)))
        called = tf.numpy_function(lambda x: calls.append(1) or x, [loss], tf.float32)
        loss, _, _ = tf.tuple([loss, count, called])
        return spec_of(mode, loss, sgd(loss))

    compare(model_fn, BATCHES, 3)
    assert len(calls) == 2 * 3  # on one device and on three


def test_a_group_that_an_entry_waits_for_does_its_work():
    """It looks like a tuple, and is what is to be run; the entry isn't."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(tf.layers.dense(features, 1) - labels))
        train_op = tf.group(sgd(loss), loss)
        with tf.control_dependencies([train_op]):
            tf.identity(loss, 'after')
        return spec_of(mode, loss, train_op)

    ours, _ = compare(model_fn, BATCHES, 3)
    assert ours.values['global_step'] == 3


def test_an_entry_that_is_fetched_is_the_batch_s():
    def forward(features):
        first, second = tf.tuple([tf.layers.dense(features, 2), tf.nn.tanh(features)])
        return tf.layers.dense(tf.concat([first, second], 1), 1)

    compare(of_all_modes(forward), BATCHES, 3)
