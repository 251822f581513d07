"""What waits for what: entries of tuples, writes for reads, and effects."""

import time

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.rewrites.inline_calls import inline_calls
from estimator_mgpu.tf_internals import graphs, op_types
from models import floats, of_all_modes, sgd, spec_of, step
from towers import NAMES, TRAIN, compare, session, tower_of

pytestmark = pytest.mark.core
BATCHES = [(floats(7, 3), floats(7, 1))] * 3


def before(op):
    """The names of an op and all that it waits for."""
    return {other.name for other in graphs.ancestors([op])}


def variable(name, *shape, **options):
    return tf.get_variable(name, shape, use_resource=True, **options)


def replicated(model_fn, labels=False):
    """The graph of a model_fn, on two devices."""
    features = tf.placeholder(tf.float32, [None, 3], 'features')
    labels = tf.placeholder(tf.float32, [None, 1], 'labels') if labels else None
    tf.train.create_global_step()
    estimator_mgpu.replicate(model_fn, devices=2)(features=features, labels=labels, mode=TRAIN)
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
        x, y = tf.tanh(features, 'x'), tf.square(features, 'y')
        with tf.control_dependencies(update):
            first, _ = tf.tuple([x, y], name='pair')
        loss = tf.reduce_sum(tf.tanh(first, name='used') * w)
        return spec_of(mode, loss, tf.no_op())

    with tf.Graph().as_default(), session(2) as run:
        graph = replicated(model_fn)
        found = before(graph.get_operation_by_name(NAMES.copy('used', 1)))
        assert NAMES.copy('x', 1) in found
        assert NAMES.copy('y', 1) not in found
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


def test_each_factor_is_read_before_the_other_one_is_written():
    """A reference variable's gradient reads the other variable when it's computed."""

    def model_fn(features, labels, mode):
        v, w = (tf.get_variable(name, [3], use_resource=False) for name in 'vw')
        loss = tf.reduce_sum(v * w) + tf.reduce_mean(features)
        return spec_of(mode, loss, sgd(loss))

    with tf.Graph().as_default():
        graph = replicated(model_fn)
        writes = [op for op in graph.get_operations() if op.type.startswith('ApplyGradient')]
        assert len(writes) == 2
        for write in writes:
            assert {'gradients/mul_grad/Mul', 'gradients/mul_grad/Mul_1'} <= before(write)


def convolution(features, labels, mode):
    net = tf.reshape(tf.layers.dense(features, 16), [-1, 4, 4, 1])
    net = tf.layers.conv2d(net, 4, 3, activation=tf.nn.relu)
    return trained_on_squares(mode, net)


def residual(features, labels, mode):
    """Convolutions with and without a bias have the same gradient."""
    net = tf.reshape(tf.layers.dense(features, 16), [-1, 4, 4, 1])
    first = tf.layers.conv2d(net, 4, 3, use_bias=False)
    second = tf.layers.conv2d(tf.nn.relu(net), 4, 3)
    return trained_on_squares(mode, tf.add_n([first, second]))


def trained_on_squares(mode, net):
    loss = tf.reduce_mean(tf.square(tf.layers.dense(tf.layers.flatten(net), 1)))
    return spec_of(mode, loss, sgd(loss))


@pytest.mark.parametrize('optimized', [False, True])
@pytest.mark.parametrize('model_fn', [convolution, residual])
def test_gradients_of_kernel_and_bias_are_computed_apart(model_fn, optimized):
    """By an op each, on each tower; also if TensorFlow optimizes the graph."""
    with tf.Graph().as_default() as graph, session(2, optimized=optimized) as run:
        replicated(model_fn)
        copies = [op for op in graph.get_operations() if tower_of(op.name) == 1]
        of_kernels = [op for op in copies if op.type == 'Conv2DBackpropFilter']
        assert len(of_kernels) == (2 if model_fn is residual else 1)
        for of_kernel in of_kernels:
            between = of_kernel.inputs[2].op
            assert between.type == 'Identity'
            [of_bias] = between.control_inputs
            assert of_bias.type == 'BiasAddGrad'
            assert tower_of(of_bias.name) == 1

        metadata = tf.RunMetadata()
        run.run(tf.global_variables_initializer())
        run.run(
            tf.get_collection(tf.GraphKeys.TRAIN_OP),
            {'features:0': floats(6, 3)},
            tf.RunOptions(output_partition_graphs=True),
            metadata,
        )
        types = [node.op for part in metadata.partition_graphs for node in part.node]
        of_kernels_in_use = [name for name in types if name.endswith('Conv2DBackpropFilter')]
        assert len(of_kernels_in_use) == 2 * len(of_kernels)
    compare(model_fn, BATCHES, 3)


def net_of(features):
    return tf.layers.dense(tf.layers.dense(features, 4, tf.nn.tanh), 3, tf.nn.tanh)


def trained(mode, net, labels, **weights):
    """Trains on the mean squared error; with weights, all towers need their sum."""
    output = tf.layers.dense(net, 1)
    if weights:
        loss = tf.losses.mean_squared_error(labels, output, **weights)
    else:
        loss = tf.reduce_mean(tf.square(output - labels))
    return spec_of(mode, loss, tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss, step()))


def plain(features, labels, mode):
    return trained(mode, net_of(features), labels)


def linear(features, labels, mode):
    """The gradients of a linear loss follow from no read."""
    net = tf.layers.dense(tf.layers.dense(features, 4), 1)
    loss = tf.reduce_mean(net * labels)
    return spec_of(mode, loss, tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss, step()))


def dropout(features, labels, mode):
    net = tf.nn.dropout(net_of(features), rate=0.5)
    return trained(mode, tf.nn.dropout(tf.layers.dense(net, 4), rate=0.5), labels)


def seeded_dropout(features, labels, mode):
    net = tf.nn.dropout(net_of(features), rate=0.5, seed=3)
    return trained(mode, tf.nn.dropout(tf.layers.dense(net, 4), rate=0.5, seed=4), labels)


def assertion(features, labels, mode):
    net = net_of(features)
    with tf.control_dependencies([tf.Assert(tf.reduce_all(net < 2), [net])]):
        net = tf.identity(net)
    return trained(mode, tf.check_numerics(net, 'net'), labels)


def averages(features, labels, mode):
    """Updates around minimize."""
    net = net_of(features)
    update_average(net)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return trained(mode, net, labels)


def averages_before_the_loss(features, labels, mode):
    net = net_of(features)
    update_average(net)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        net = tf.identity(net)
    return trained(mode, net, labels)


def update_average(net):
    average = tf.get_variable('average', [3], trainable=False, initializer=tf.zeros_initializer())
    update = tf.assign(average, 0.9 * average + 0.1 * tf.reduce_mean(net, 0))
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)


def custom_gradient(features, labels, mode):
    """Of several inputs, which it joins, and again so in its backward pass."""

    @tf.custom_gradient
    def product(x, y):
        def gradients(d):
            return clipped(d * y, d * x)

        return x * y, gradients

    @tf.custom_gradient
    def clipped(x, y):
        return (tf.clip_by_value(x, -1.0, 1.0), tf.clip_by_value(y, -1.0, 1.0)), lambda *d: d

    net = net_of(features)
    scale = tf.get_variable('scale', [3], initializer=tf.ones_initializer())
    return trained(mode, product(net, tf.tanh(scale * net)), labels)


def recurrent(features, labels, mode):
    """A loop of variables, and a branch, beside layers."""
    _, w = tf.while_loop(
        lambda i, _: i < 2,
        lambda i, w: (i + 1, tf.nn.l2_normalize(w, 0)),
        [0, tf.get_variable('v', [3, 3])],
    )
    net = net_of(features)
    scale = tf.cond(tf.reduce_sum(w) > 0, lambda: w, lambda: -w)
    return trained(mode, tf.matmul(net, scale), labels)


def recurrent_after_updates(features, labels, mode):
    """A loop over the examples, whose gradients wait for an update."""
    net = net_of(features)
    _, net = tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, tf.sin(x)), [0, net])
    update_average(net)
    with tf.control_dependencies([tf.group(*tf.get_collection(tf.GraphKeys.UPDATE_OPS))]):
        return trained(mode, net, labels)


def weighted(features, labels, mode):
    net = net_of(features)
    return trained(mode, net, labels, weights=tf.cast(labels > 0, tf.float32))


def masked(features, labels, mode):
    net = net_of(features)
    mask = tf.cast(tf.abs(labels) < 10, tf.float32)
    loss = tf.reduce_sum(mask * tf.square(tf.layers.dense(net, 1) - labels)) / tf.reduce_sum(mask)
    return spec_of(mode, loss, sgd(loss))


def batch_normalization(features, labels, mode):
    """All towers need sums of all examples, in both passes."""
    net = tf.layers.batch_normalization(net_of(features), training=True)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return trained(mode, net, labels)


INDEPENDENT = [plain, linear, dropout, seeded_dropout, assertion, averages]
INDEPENDENT += [averages_before_the_loss, custom_gradient, recurrent, recurrent_after_updates]


def waiting(graph, is_source):
    """The ops of the second tower that depend on some of the first one's."""
    found = []
    for op in graph.get_operations():
        if tower_of(op.name) == 1:
            copies = [NAMES.copy_of(name) for name in before(op) if tower_of(name) == 0]
            if any(is_source(copy.op_name) for copy in copies):
                found.append(op.name)
    return found


@pytest.mark.parametrize('model_fn', INDEPENDENT, ids=lambda f: f.__name__)
def test_no_tower_waits_for_another(model_fn, behavior):
    with tf.Graph().as_default():
        graph = replicated(model_fn, labels=True)
        found = waiting(graph, lambda name: True)
        # What an assertion of TensorFlow 1 shows if it fails, all examples decide.
        assert not [name for name in found if '/AssertGuard/' not in name]
    compare(model_fn, BATCHES, 3)


@pytest.mark.parametrize('model_fn', [weighted, masked], ids=lambda f: f.__name__)
def test_a_tower_waits_for_numbers_of_examples_only(model_fn, behavior):
    with tf.Graph().as_default():
        graph = replicated(model_fn, labels=True)
        assert not waiting(graph, lambda name: 'dense' in name or 'gradients' in name)
    compare(model_fn, BATCHES, 3)


def test_a_tower_waits_for_sums_that_the_model_asks_for(behavior):
    """But not for what the moving averages become."""
    with tf.Graph().as_default():
        graph = replicated(batch_normalization, labels=True)
        found = waiting(graph, lambda name: 'gradients/' in name)
        assert found
        assert all('gradients/' in name for name in found)
        for op in graph.get_operations():
            if tower_of(op.name) is not None:
                assert not [name for name in before(op) if 'AssignMovingAvg' in name]
        [*_, last] = tf.get_collection(tf.GraphKeys.TRAIN_OP)
        assert [name for name in before(last) if 'AssignMovingAvg' in name]
    compare(batch_normalization, [(floats(12, 3), floats(12, 1))] * 3, 3, rtol=1e-4)


@pytest.mark.parametrize('fetched', ['train_op', 'loss'])
def test_an_assertion_that_fails_fails_the_step(fetched, behavior):
    """Whether the gradients or only the loss are asked for; the variables aren't written."""

    def model_fn(features, labels, mode):
        with tf.control_dependencies([tf.Assert(tf.reduce_all(features < 1), ['too large'])]):
            features = tf.identity(features)
        return trained(mode, net_of(features), labels)

    with tf.Graph().as_default(), session(2) as run:
        features = tf.placeholder(tf.float32, [None, 3])
        labels = tf.placeholder(tf.float32, [None, 1])
        tf.train.create_global_step()
        replicate = estimator_mgpu.replicate(model_fn, devices=2)
        spec = replicate(features=features, labels=labels, mode=TRAIN)
        run.run(tf.global_variables_initializer())
        start = run.run(tf.trainable_variables())

        large = {features: [[0, 0, 0], [0, 5, 0]], labels: [[1], [1]]}
        with pytest.raises(tf.errors.InvalidArgumentError, match='too large'):
            run.run(getattr(spec, fetched), large)
        np.testing.assert_equal(run.run(tf.trainable_variables()), start)

        small = {features: [[0, 0, 0], [0, -5, 0]], labels: [[1], [1]]}
        run.run(getattr(spec, fetched), small)


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


def test_rows_of_a_reference_variable_are_looked_up_where_it_is():
    """So no tower is sent the table."""

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', initializer=floats(7, 2), use_resource=False)
        rows = tf.nn.embedding_lookup(table, ids_of(features))
        return spec_of(mode, *[tf.reduce_mean(tf.square(rows))] * 2)

    with tf.Graph().as_default():
        graph = replicated(model_fn)
        [table] = [v for v in tf.global_variables() if v.op.name == 'table']
        copies = [
            op
            for op in graph.get_operations()
            if tower_of(op.name) is not None and op.type == 'GatherV2'
        ]
        assert len(copies) == 2
        assert {op.device for op in copies} == {table.op.device}


def test_the_factors_of_a_product_are_written_after_both_are_read():
    """The gradient of each reads the other one, which is a reference variable."""

    def model_fn(features, labels, mode):
        factors = [
            tf.get_variable(name, initializer=floats(3, 1), use_resource=False) for name in 'vw'
        ]
        loss = tf.reduce_mean(tf.matmul(features, factors[0] * factors[1]))
        return spec_of(mode, loss, sgd(loss))

    compare(model_fn, BATCHES, 3)


def test_a_gradient_that_nobody_uses_is_not_computed():
    """Whoever fetches it gets what it was before the variable was written."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', initializer=floats(3, 1), use_resource=False)
        loss = tf.reduce_sum(tf.matmul(features, w))
        return spec_of(mode, loss, sgd(loss, 1.0))

    with tf.Graph().as_default(), session(2) as run:
        graph = replicated(model_fn)
        [write] = [op for op in graph.get_operations() if op.type.startswith('Apply')]
        unused = 'gradients/MatMul_grad/MatMul'  # with respect to the features
        for tower in range(2):
            assert NAMES.copy(unused, tower) not in before(write)
            assert NAMES.copy(f'{unused}_1', tower) in before(write)

        copies = [op for op in graph.get_operations() if op.type == 'DeepCopy']
        assert copies and set(copies) <= graphs.ancestors([write])
        run.run(tf.global_variables_initializer())
        fetched, _ = run.run([f'{unused}:0', write], {'features:0': floats(5, 3)})
        np.testing.assert_array_equal(fetched, np.tile(floats(3, 1).T, [5, 1]))


def test_a_call_writes_when_its_arguments_are_there():
    """Also what isn't computed from them."""

    def model_fn(features, labels, mode):
        w = variable('w', 3, 1)
        late = tf.numpy_function(lambda x: time.sleep(0.05) or x, [features], tf.float32)
        late.set_shape(features.shape)
        with tf.control_dependencies([late]):
            loss = tf.reduce_mean(tf.square(tf.matmul(features, w.read_value())))

        @tf.function
        def halve(loss):
            w.assign(w / 2)
            return loss

        return spec_of(mode, loss, tf.group(halve(loss), step().assign_add(1)))

    compare(model_fn, BATCHES, 3)


def test_calls_are_ordered_by_their_outputs():
    """Who waits for what a call gives waits for what the call writes."""

    def model_fn(features, labels, mode):
        total = variable('total', initializer=tf.zeros_initializer(), trainable=False)
        loss = tf.reduce_mean(tf.square(tf.matmul(features, variable('w', 3, 1))))

        @tf.function
        def add(x):
            total.assign(total * 2 + tf.reduce_sum(x))
            return x * 2

        first = add(features)
        with tf.control_dependencies([first]):
            second = add(features * 3)
        third = add(second)
        with tf.control_dependencies([third]):
            loss = tf.identity(loss)
        return spec_of(mode, loss, sgd(loss))

    compare(model_fn, BATCHES, 3)


def inlined_ops(op_type, call):
    """The ops of a type that the function of a call had."""
    scope = f'{call.op.name}/inlined/'
    ops = call.graph.get_operations()
    return [op for op in ops if op.type == op_type and op.name.startswith(scope)]


def test_a_call_reads_without_its_arguments():
    """Also if it waits for another call, which is inlined before it."""
    with tf.Graph().as_default() as graph:
        w = variable('w', 3)
        scale = tf.function(lambda x: w * x)
        late = tf.placeholder(tf.float32, [], 'late')
        first = scale(tf.placeholder(tf.float32, [], 'x'))
        with tf.control_dependencies([first]):
            second = scale(late)
        inline_calls(Division(graph))

        [read] = inlined_ops('ReadVariableOp', second)
        assert 'x' in before(read)
        assert 'late' not in before(read)


def test_a_branch_in_a_call_that_waits_begins_with_its_arguments():
    """Only what it waits for by control edges counts when TensorFlow takes it apart."""
    with tf.Graph().as_default() as graph:
        w = variable('w', 3)

        @tf.function
        def halve(x):
            return tf.cond(x > 0, lambda: w.assign(w / x), lambda: w.assign(w * 2)) + 0

        with tf.control_dependencies([tf.no_op('earlier')]):
            call = halve(tf.placeholder(tf.float32, [], 'x'))
        inline_calls(Division(graph))

        [branch] = inlined_ops('If', call)
        awaited = graphs.ancestors(branch.control_inputs)
        assert graph.get_operation_by_name('earlier') in awaited
        assert {operand.op for operand in branch.inputs} <= awaited | {w.handle.op}


def call_of_halving(x, y, w):
    """Calls a function that halves a variable, and is given two values that it doesn't use.

    The ops of a function that comes with a GraphDef aren't known: so it stays a call.
    """

    @tf2.function
    def halve(x, y, w):
        value = tf.raw_ops.ReadVariableOp(resource=w, dtype=tf.float32)
        tf.raw_ops.AssignVariableOp(resource=w, value=value / 2)

    with tf.Graph().as_default() as graph:
        values = [tf.placeholder(tf.float32, [], name) for name in 'xy']
        halve(*values, tf.placeholder(tf.resource, [], 'w'))
        [call] = [op for op in graph.get_operations() if op.type in op_types.PARTITIONED_CALLS]
    arguments = {'x:0': x, 'y:0': y, 'w:0': w.handle}
    [imported] = tf.import_graph_def(graph.as_graph_def(), arguments, [call.name], name='imported')
    return imported


def test_a_call_that_has_to_wait_begins_with_all_arguments():
    """The second one waits for a write, and the call itself for what the first one waited for."""

    def model_fn(features, labels, mode):
        w = variable('w', 3, 1)
        count = variable('count', initializer=tf.zeros_initializer(), trainable=False)
        with tf.control_dependencies([tf.numpy_function(lambda x: x, [features], tf.float32)]):
            loss = tf.reduce_mean(tf.square(tf.matmul(features, w.read_value())))
        with tf.control_dependencies([count.assign_add(1.0)]):
            after_write = tf.identity(loss)
        call = call_of_halving(loss, after_write, w)
        return spec_of(mode, loss, tf.group(call, step().assign_add(1)))

    compare(model_fn, BATCHES, 3, optimized=True)


@pytest.mark.parametrize('predicate', ['features', 'variable'])
@pytest.mark.parametrize('branches', ['cond', 'switch_case'])
def test_who_waits_for_a_branch_waits_for_what_it_writes(predicate, branches, behavior):
    def model_fn(features, labels, mode):
        count = variable('count', initializer=tf.zeros_initializer(), trainable=False)
        is_taken = tf.reduce_mean(features) < 99
        if predicate == 'variable':
            always = {'initializer': tf.ones_initializer(), 'trainable': False}
            is_taken = variable('is_taken', dtype=tf.bool, **always)

        def counted():
            with tf.control_dependencies([count.assign_add(1.0)]):
                return tf.identity(features)

        if branches == 'cond':
            result = tf.cond(is_taken, counted, lambda: features)
        else:
            index = tf.cast(is_taken, tf.int32)
            result = tf2.switch_case(index, [lambda: features, counted])
        with tf.control_dependencies([result]):
            loss = tf.reduce_mean(tf.square(tf.matmul(features, variable('w', 3, 1)))) * count
        return spec_of(mode, loss, sgd(loss))

    compare(model_fn, BATCHES, 3)


def test_who_waits_for_a_loop_waits_for_a_branch_before_it():
    """But not for the loop's ops: nothing outside of a loop can wait for one of them."""

    def model_fn(features, labels, mode):
        count = variable('count', initializer=tf.zeros_initializer(), trainable=False)

        def counted():
            with tf.control_dependencies([count.assign_add(1.0)]):
                return tf.identity(features)

        start = tf.cond(tf.reduce_mean(features) < 99, counted, lambda: features)
        is_large = lambda x: tf.reduce_max(tf.abs(x)) > 0.5  # noqa: E731
        end = tf.while_loop(is_large, lambda x: x / 2, [start])
        with tf.control_dependencies([end]):
            loss = tf.reduce_mean(tf.matmul(features, variable('w', 3, 1))) * count
        return spec_of(mode, loss, sgd(loss))

    compare(model_fn, BATCHES[:1], 2)


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


def test_effects_that_a_loop_waits_for():
    """The towers' loop needn't wait for them, so what follows from the loop does."""

    def model_fn(features, labels, mode):
        count = variable('count', initializer=tf.zeros_initializer(), trainable=False)
        with tf.control_dependencies([count.assign_add(1.0)]):
            start = tf.tanh(features)
        is_large = lambda x: tf.reduce_max(tf.abs(x)) > 0.5  # noqa: E731
        loss = tf.reduce_sum(tf.while_loop(is_large, lambda x: x / 2, [start]))
        return spec_of(mode, loss, tf.group(loss))

    ours, _ = compare(model_fn, BATCHES[:1], 2)
    assert ours.values['count'] == 1


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
