"""Small variables and gradients share messages: which do, and how few those are."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.reports import traffic
from estimator_mgpu.tf_internals import graphs
from models import adam, batches, floats, sgd, spec_of, step, weights
from towers import TRAIN, behavior_of, compare, nodes_of_a_step, session, train

pytestmark = pytest.mark.core


def layers(features):
    """Matrices, vectors, a scalar, a float64 one, and one that's too large to be packed."""
    net = tf.matmul(features, weights('first', 3, 8))
    for i in range(10):
        net = tf.nn.tanh(tf.matmul(net, weights(f'w{i}', 8, 8) / 9) + weights(f'b{i}', 8) / 9)
    net *= tf.get_variable('scalar', [], initializer=tf.ones_initializer())
    wide = tf.matmul(net, weights('large', 8, 3000))
    double = tf.matmul(tf.cast(net, tf.float64), tf.cast(weights('v', 8, 1), tf.float64))
    scale = tf.get_variable('double', [2, 1], tf.float64, tf.ones_initializer())
    double = tf.reduce_sum(double * tf.reshape(scale, [2]), 1, keepdims=True)
    return tf.cast(double, tf.float32) + tf.reduce_mean(wide, 1, keepdims=True)


def error(labels, net):
    return tf.losses.mean_squared_error(labels, tf.reduce_sum(net, 1, keepdims=True))


def momentum(features, labels, mode):
    loss = tf.losses.mean_squared_error(labels, layers(features))
    return spec_of(mode, loss, tf.train.MomentumOptimizer(0.0002, 0.9).minimize(loss, step()))


def of_graph(run, kind):
    return [op for op in run.graph.get_operations() if op.type == kind and 'replicate/' in op.name]


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ('towers', 'variables', 'rows'),
    [(2, 'spread', 12), (4, 'spread', 11), (4, 'spread', 2), (3, 'first', 11), (3, 'first', 2)],
)
def test_packs(towers, variables, rows):
    """Also where some towers have no rows."""
    options = dict(static=rows == 12, variables=variables)
    ours, _ = compare(momentum, batches(rows, 4), towers, **options)
    packs = of_graph(ours, 'SplitV')
    assert len(packs) > towers
    assert {op.outputs[0].dtype for op in packs} <= {tf.float32, tf.float64}
    large = [op for op in packs for t in op.outputs if t.shape.num_elements() == 8 * 3000]
    assert not large


def replicated(model_fn, towers):
    tf.train.get_or_create_global_step()
    inputs = tf.constant(floats(16, 3)), tf.constant(floats(16, 1))
    return estimator_mgpu.replicate(model_fn, devices=towers)(*inputs, TRAIN)


@pytest.mark.parametrize('towers', [2, 4, 8])
def test_messages_of_a_step(towers):
    """Those that TensorFlow sends: few, and as `explain` counts them."""
    with tf.Graph().as_default(), session(towers) as run:
        spec = replicated(momentum, towers)
        ends = traffic.messages([spec.train_op], '/device:CPU:0')
        run.run(tf.global_variables_initializer())
        sent = sum(node.op == '_Send' for node in nodes_of_a_step(run, spec.train_op))
    others = towers - 1
    # Of the packs, each from each device to each other one and back; of the variables in none, as
    # one is large, one a scalar and two are float64; features, labels, two numbers of the optimizer
    # and the end of train_op.
    assert sent <= (2 * towers + 2 * 4 + 5) * others
    # But for a constant that is on no device, and the optimizer's two, which newer versions of
    # TensorFlow copy to where they're used.
    assert 10 * others < sent <= len(ends) <= sent + 1 + 2 * others


def test_a_variable_alone_is_in_no_pack():
    def model_fn(features, labels, mode):
        loss = error(labels, tf.matmul(features, weights('w', 3, 4)))
        return spec_of(mode, loss, sgd(loss))

    run = train(model_fn, batches(steps=1), 2)
    assert all('tower_' in op.name for op in of_graph(run, 'Reshape'))


@pytest.mark.parametrize('counted', [True, False])
def test_each_call_has_its_own_packs(counted):
    """Who runs one optimizer alone gets no gradient, and no random number, of another's."""

    def model_fn(features, labels, mode):
        train_ops = []
        for i in '01':
            count = tf.get_variable(f'count{i}', [], initializer=tf.zeros_initializer())
            with tf.control_dependencies([count.assign_add(1.0).op] if counted else []):
                x = tf.identity(features)
            w, b = weights(f'w{i}', 3, 1), weights(f'b{i}', 1)
            loss = tf.losses.mean_squared_error(labels, tf.matmul(x, w) + b)
            optimizer = tf.train.GradientDescentOptimizer(0.1)
            train_ops.append(optimizer.minimize(loss, var_list=[w, b]))
        return spec_of(mode, loss, train_ops[0])

    ours, _ = compare(model_fn, batches(steps=2), 2, variables='first')
    assert [ours.values[f'count{i}'] for i in '01'] == [2 * counted] * 2  # The loss is the last.
    with tf.Graph().as_default(), session(2) as run:
        spec = replicated(model_fn, 2)
        run.run(tf.global_variables_initializer())
        run.run(spec.train_op)
        assert run.run([v for v in tf.global_variables() if 'count' in v.name]) == [counted, 0]
    assert not [op.name for op in graphs.ancestors([spec.train_op]) if 'gradients_1/' in op.name]


@pytest.mark.no_cover
def test_what_towers_wait_for_is_in_no_pack():
    """Gradients of gradients: some sums of the first ones go back to the towers."""

    def model_fn(features, labels, mode):
        loss = tf.losses.mean_squared_error(labels, layers(features))
        first = tf.gradients(loss, tf.trainable_variables())
        loss += 1e-4 * tf.add_n([tf.cast(tf.nn.l2_loss(g), tf.float32) for g in first])
        return spec_of(mode, loss, sgd(loss, 0.001))

    compare(model_fn, batches(steps=3), 3, rtol=1e-4)


def test_a_read_that_waits_is_in_no_pack():
    """A moving average that is read after it has been updated, beside variables that aren't."""

    def model_fn(features, labels, mode):
        ones = tf.ones_initializer()
        average = tf.get_variable('average', [3], trainable=False, initializer=ones)
        with tf.control_dependencies([average.assign_add([1.0, 2.0, 3.0]).op]):
            after = average.read_value()
        loss = error(labels, tf.matmul(features * after, weights('w', 3, 4)) + weights('b', 4))
        return spec_of(mode, loss, adam(loss))

    compare(model_fn, batches(steps=3), 2, variables='first')


def test_a_loss_alone_needs_no_gradient():
    """Not even of packs: who fetches it draws no numbers for them, and changes nothing."""
    loss = train(momentum, batches(steps=1), 2).spec.loss.op
    assert not [op.name for op in graphs.ancestors([loss]) if 'gradients/' in op.name]


def after_a_step(model_fn, towers, fetch, feed=None, first=None):
    """Trains for a step, then runs what `fetch` makes of the spec three times: what both gave."""
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        tf.train.get_or_create_global_step()
        if towers:
            model_fn = estimator_mgpu.replicate(model_fn, devices=towers, variables='first')
        spec = model_fn(tf.constant(floats(6, 3)), tf.constant(floats(6, 1)), TRAIN)
        with session(towers) as run:
            run.run(tf.variables_initializer(tf.get_collection('first')))
            run.run(tf.global_variables_initializer() if first is None else first)
            run.run(spec.train_op, feed)
            found = [run.run(fetch(spec)) for _ in range(3)]
            return found, run.run({v.op.name: v for v in tf.global_variables()})


def assert_as_one(model_fn, fetch, **options):
    ours, one = (after_a_step(model_fn, towers, fetch, **options) for towers in (2, 0))
    np.testing.assert_allclose(ours[0], one[0], rtol=1e-5)
    for name, value in one[1].items():
        np.testing.assert_allclose(ours[1][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    return one[1]


@pytest.mark.parametrize('fetched', ['gradient', 'scale'])
def test_who_fetches_one_runs_no_effects_of_others(fetched):
    """Of a gradient, or of a sum over rows that gradients are scaled by; backward passes count."""

    def model_fn(features, labels, mode):
        count = tf.get_variable('count', [], trainable=False, initializer=tf.zeros_initializer())

        @tf.custom_gradient
        def counted(x):
            def grad(dy):
                with tf.control_dependencies([count.assign_add(1.0).op]):
                    return tf.identity(dy)

            return tf.identity(x), grad

        w, b, u = weights('w', 3, 4), weights('b', 4), weights('u', 4)
        net = counted(tf.nn.tanh(tf.matmul(features, w) + b))
        loss = error(labels, net) + tf.reduce_mean(features[:, :1] * u)
        optimizer, scale = tf.train.GradientDescentOptimizer(0.1), tf.reduce_sum(features, 0)
        gradients = tf.gradients(loss, [w, b, u])
        pairs = [(g / (1 + tf.norm(scale)), v) for g, v in zip(gradients, [w, b, u])]
        return tf.estimator.EstimatorSpec(
            mode,
            loss=loss,
            train_op=optimizer.apply_gradients(pairs, step()),
            predictions={'gradient': gradients[2], 'scale': 2 * scale},
        )

    values = assert_as_one(model_fn, lambda spec: spec.predictions[fetched])
    assert values['count'] == 1


def test_who_fetches_one_needs_nothing_fed_for_others():
    def model_fn(features, labels, mode):
        mask = tf.placeholder(tf.float32, [4], 'mask')
        w, b, c = weights('w', 3, 4) + 0.0, weights('b', 4) + 0.0, weights('c', 4) * mask
        net = tf.nn.tanh(tf.matmul(features, w) + b)
        loss = error(labels, net)
        total = loss + tf.reduce_sum(tf.square(net) * c)
        return spec_of(mode, loss, sgd(total))

    assert_as_one(model_fn, lambda spec: spec.loss, feed={'mask:0': [1, 2, 3, 4]})


def test_a_learning_rate_that_is_fed():
    def model_fn(features, labels, mode):
        rate = tf.constant(0.1, name='rate')
        loss = tf.losses.mean_squared_error(labels, tf.matmul(features, weights('w', 3, 1)))
        return spec_of(mode, loss, tf.train.MomentumOptimizer(rate, 0.9).minimize(loss, step()))

    values = assert_as_one(model_fn, lambda spec: spec.loss, feed={'rate:0': 0.0})
    np.testing.assert_array_equal(values['w'], floats(3, 1))


def test_variables_whose_first_values_follow_from_the_batch():
    """Those that they're made of share no pack with them."""

    def model_fn(features, labels, mode):
        v = tf.get_variable('v', initializer=floats(3, 4), collections=['first', 'variables'])
        pre = tf.matmul(features, tf.nn.l2_normalize(v, 0))
        mean, variance = tf.nn.moments(pre, 0)
        scale = tf.get_variable('scale', initializer=1 / tf.sqrt(variance + 1e-3))
        offset = tf.get_variable('offset', initializer=-mean / tf.sqrt(variance + 1e-3))
        loss = error(labels, tf.nn.tanh(pre * scale + offset))
        tf.group(scale.initializer, offset.initializer, step().initializer, name='late')
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        return spec_of(mode, loss, optimizer.minimize(loss, step(), [v, scale, offset]))

    assert_as_one(model_fn, lambda spec: spec.loss, first='late')


def test_loops_of_tensorflow_1_are_no_cycles():
    """A spectral norm, by power iterations."""

    def model_fn(features, labels, mode):
        w, b = weights('w', 3, 4), weights('b', 4)

        def iterate(i, u):
            return i + 1, tf.nn.l2_normalize(tf.matmul(tf.matmul(u, w, transpose_b=True), w))

        _, u = tf.while_loop(lambda i, u: i < 3, iterate, (0, tf.ones([1, 4])))
        norm = tf.norm(tf.matmul(tf.stop_gradient(u), w, transpose_b=True))
        loss = error(labels, tf.tanh(tf.matmul(features, w / norm) + b))
        return spec_of(mode, loss, sgd(loss))

    with behavior_of('v1'):
        compare(model_fn, batches(8, steps=2), 2)


def test_many_groups_and_an_assignment_before_a_lookup():
    """What is added for groups has names of its own."""

    def model_fn(features, labels, mode):
        table = weights('table', 6, 3)
        with tf.control_dependencies([table.assign(table * 0.5).op]):
            looked = tf.nn.embedding_lookup(table, tf.cast(tf.abs(features[:, 0]), tf.int32))
        net = tf.tanh(features) + looked
        for i in range(16):
            net = tf.nn.tanh(tf.matmul(net, weights(f'w{i}', 3, 3)) + weights(f'b{i}', 3))
        loss = error(labels, net + 3 * looked)
        variables = [v for v in tf.trainable_variables() if v.op.name != 'table']
        pairs = list(zip(tf.gradients(loss, variables), variables))
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        updates = [optimizer.apply_gradients(pairs[i : i + 8]) for i in range(0, 32, 8)]
        return spec_of(mode, loss, *updates)

    ours, _ = compare(model_fn, batches(16, steps=3), 2)
    lookups = of_graph(ours, 'ResourceGather')
    waited = {op.type for lookup in lookups for op in graphs.ancestors([lookup])}
    assert len(lookups) == 2 and 'AssignVariableOp' in waited
