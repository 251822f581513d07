"""Recomputation: gradients use copies of forward ops; one device's results in less memory."""

import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import steps
from estimator_mgpu.partition.rewrites.recomputation.cuts import Activation, choose_cuts
from estimator_mgpu.reports import explain
from estimator_mgpu.tf_internals import graphs, op_types
from models import batches, clipped, floats, of_all_modes, sgd, spec_of, step, weights
from towers import TRAIN, behavior_of, compare, compare_modes, session, train

DEPTH = 6


def two_sizes():
    """A batch of 12 examples, and one of 5."""
    return [*batches(12, steps=1), *batches(5, steps=1)]


def deep(features, activation=tf.nn.tanh, use_bias=True):
    hidden = features
    for _ in range(DEPTH):
        hidden = activation(tf.layers.dense(hidden, 4, use_bias=use_bias))
    return tf.layers.dense(hidden, 1)


def residual(features):
    """Skips connect all segments; layer normalization has small activations beside large ones."""
    hidden = tf.layers.dense(features, 8)
    for _ in range(DEPTH):
        mean, variance = tf.nn.moments(hidden, [1], keepdims=True)
        normal = tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)
        hidden += 0.1 * tf.layers.dense(tf.layers.dense(normal, 8, tf.nn.tanh), 8)
    return tf.layers.dense(hidden, 1)


def dropout(features):
    """Random numbers with a seed, which are drawn once."""
    return deep(features, lambda x: tf.nn.dropout(tf.nn.softplus(x), rate=0.3, seed=3))


def batch_norm(features):
    """Moving averages are updated once."""
    return deep(features, lambda x: tf.tanh(tf.layers.batch_normalization(x, training=True)), False)


def fused_batch_norm(features):
    hidden = features[:, None, None, :]
    for _ in range(DEPTH):
        hidden = tf.layers.conv2d(hidden, 4, 1, use_bias=False)
        hidden = tf.tanh(tf.layers.batch_normalization(hidden, training=True))
    return tf.layers.dense(hidden[:, 0, 0], 1)


def gated_units(features):
    """Each layer begins with a tensor of which the graph knows nothing, and uses it twice."""
    hidden = features
    for _ in range(DEPTH):
        hidden = tf.placeholder_with_default(hidden, None)
        gated = tf.reshape(tf.tanh(hidden) * tf.sigmoid(hidden), [-1, features.shape[-1]])
        hidden = tf.layers.dense(gated, 3)
    return tf.layers.dense(hidden, 1)


def loop(features):
    """A recurrent network with layers before it."""
    sequence = tf.tile(deep(features)[:, None, :], [1, 3, 1])
    lengths = 1 + tf.cast(features[:, 0] > 0, tf.int32)
    cell = tf.nn.rnn_cell.BasicRNNCell(2)
    output, _ = tf.nn.dynamic_rnn(cell, sequence, lengths, dtype=tf.float32)
    return tf.reduce_sum(output, [1, 2])[:, None]


def branch(features):
    """A branch that is taken in some batches, between others."""
    hidden = tf.layers.dense(deep(features), 4)
    hidden = tf.cond(
        tf.reduce_mean(features) > 0, lambda: tf.square(hidden), lambda: tf.tanh(hidden) * 2
    )
    return deep(hidden)


@tf.custom_gradient
def doubled_gradient(x):
    y = tf.sin(x)
    return y, lambda dy: 2 * dy * tf.cos(x)


def custom_gradient(features):
    return deep(features, doubled_gradient)


def effects(features):
    """What writes to variables, between the layers, runs once."""
    calls = tf.get_variable('calls', [], initializer=tf.zeros_initializer(), trainable=False)

    def activation(x):
        with tf.control_dependencies([tf.assign_add(calls, 1)]):
            return tf.tanh(x)

    return deep(features, activation)


def updates_and_sgd(loss):
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return sgd(loss)


def penalized(loss):
    """The gradients of the loss are a part of what is minimized."""
    [gradient] = tf.gradients(loss, tf.trainable_variables()[:1])
    return sgd(loss + 0.1 * tf.reduce_sum(tf.square(gradient)))


def one_after_another(loss):
    """The second optimizer's gradients are computed after the first one's writes."""
    variables = tf.trainable_variables()
    first = tf.train.GradientDescentOptimizer(0.05).minimize(loss, var_list=variables[:4])
    with tf.control_dependencies([first]):
        second = tf.train.GradientDescentOptimizer(0.1)
        of_second = second.compute_gradients(tf.identity(loss), variables[4:])
        return second.apply_gradients(of_second, step())


RESIDUAL = of_all_modes(residual, clipped)
DROPOUT = of_all_modes(dropout, updates_and_sgd)
LOOP = of_all_modes(loop, updates_and_sgd)
NORMALIZED = of_all_modes(fused_batch_norm, updates_and_sgd)
OTHERS = [
    *(
        of_all_modes(f, updates_and_sgd)
        for f in [batch_norm, branch, custom_gradient, effects, gated_units]
    ),
    of_all_modes(deep, penalized, 'penalized'),
    of_all_modes(deep, one_after_another, 'one_after_another'),
]


@pytest.fixture
def as_written(monkeypatch):
    """Sessions without graph optimizers, which would round in other ways with copies and without.

    For example, oneDNN fuses a product with an addition if nothing else uses the product.
    """
    session_config = estimator_mgpu.session_config

    def without_optimizers(*args):
        config = session_config(*args)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        return config

    monkeypatch.setattr(estimator_mgpu, 'session_config', without_optimizers)


def recomputation(run):
    return steps.of_graph(run.graph).recomputation


@pytest.mark.core
@pytest.mark.parametrize(
    'model_fn', [RESIDUAL, DROPOUT, LOOP, NORMALIZED, *OTHERS], ids=lambda fn: fn.__name__
)
def test_same_bits_on_one_device(model_fn, behavior, as_written):
    one = train(model_fn, two_sizes(), 0, static=False)
    ours = train(model_fn, two_sizes(), 1, values=one.start, static=False, recompute=True)
    assert recomputation(ours).ops
    assert ours.losses == one.losses
    for name, value in one.values.items():
        np.testing.assert_array_equal(ours.values[name], value, name)


@pytest.mark.core
@pytest.mark.parametrize('devices, microbatches', [(2, 1), (1, 3)], ids=['2x1', '1x3'])
@pytest.mark.parametrize('model_fn', [RESIDUAL, DROPOUT, LOOP], ids=lambda fn: fn.__name__)
def test_results_of_one_device(model_fn, devices, microbatches, behavior):
    options = dict(static=False, microbatches=microbatches, recompute=True)
    ours, _ = compare(model_fn, two_sizes(), devices, **options)
    assert recomputation(ours).ops


def a_branch_and_a_penalty(features, labels, mode):
    """A condition of the batch, which is computed twice; the penalty's gradient comes before it."""
    net = tf.matmul(features, weights('v', 3, 7))
    hidden = tf.tanh(tf.matmul(net, weights('w', 7, 64)))
    [slope] = tf.gradients(tf.reduce_sum(hidden), net)
    net = tf.cond(
        tf.reduce_sum(features) > 0,
        lambda: tf.tanh(tf.matmul(hidden, weights('above', 64, 100))),
        lambda: tf.matmul(hidden, weights('below', 64, 100)),
    )
    loss = tf.reduce_mean(tf.square(net)) + tf.reduce_mean(tf.square(slope))
    return spec_of(mode, loss, sgd(loss))


@pytest.mark.parametrize('devices', [1, 3])
def test_a_condition_that_is_computed_twice(devices, behavior):
    compare(a_branch_and_a_penalty, batches(17, steps=2), devices, recompute=True)


def convolutions(features):
    """The gradients of their biases are fused with those of their weights, on CPUs."""
    hidden = features[:, None, None, :]
    for _ in range(DEPTH):
        hidden = tf.layers.conv2d(hidden, 4, 1, activation=tf.nn.relu)
    return tf.layers.dense(hidden[:, 0, 0], 1)


@pytest.mark.core
@pytest.mark.parametrize('devices', [1, 2])
def test_fused_gradients(devices):
    """No fused gradient waits for copies that wait for it: then neither would run."""
    ours, _ = compare(
        of_all_modes(convolutions, sgd), batches(12, steps=2), devices, recompute=True
    )
    assert recomputation(ours).ops
    assert ours.values['global_step'] == 2


def test_evaluation_and_predictions():
    """There are no gradients, so there is nothing to do."""
    compare_modes(DROPOUT, two_sizes, 1, static=False, recompute=True)


def test_exact_batch_norm_on_two_devices():
    """It's two ops before copies are made: one gives the statistics, and one applies them."""
    ours, _ = compare(NORMALIZED, batches(12, steps=2), 2, rtol=1e-4, recompute=True)
    copied = [op.type for op in copies_in(ours.graph)]
    assert 'FusedBatchNormV3' in copied
    for op in copies_in(ours.graph):
        if 'Norm' in op.type and op.get_attr('is_training'):
            assert op.get_attr(op_types.GIVES_MOMENTS)


def several_losses(features, labels, mode):
    """A generator and a discriminator, each with an optimizer of its own."""
    with tf.variable_scope('generator'):
        made = deep(features)
    with tf.variable_scope('discriminator', reuse=tf.AUTO_REUSE):
        of_made = tf.sigmoid(tf.layers.dense(tf.tanh(tf.layers.dense(made, 4, name='a')), 1))
        of_real = tf.sigmoid(tf.layers.dense(tf.tanh(tf.layers.dense(labels, 4, name='a')), 1))
    loss = tf.reduce_mean(tf.square(of_made - 1))
    loss_of_discriminator = tf.reduce_mean(tf.square(of_made) + tf.square(of_real - 1))
    pairs = [(loss, 'generator'), (loss_of_discriminator, 'discriminator')]
    optimizers = [tf.train.MomentumOptimizer(0.1, 0.9) for _ in pairs]
    gradients = [
        optimizer.compute_gradients(minimized, tf.trainable_variables(scope))
        for optimizer, (minimized, scope) in zip(optimizers, pairs)
    ]
    with tf.control_dependencies([gradient for pairs in gradients for gradient, _ in pairs]):
        updates = [o.apply_gradients(pairs) for o, pairs in zip(optimizers, gradients)]
    return spec_of(mode, loss, *updates, tf.assign_add(step(), 1))


def test_several_losses(as_written):
    one = train(several_losses, batches(12, steps=3), 0)
    ours = train(several_losses, batches(12, steps=3), 1, values=one.start, recompute=True)
    assert recomputation(ours).ops
    for name, value in one.values.items():
        np.testing.assert_array_equal(ours.values[name], value, name)


def unseeded(features, labels, mode):
    """Computes gradients twice: the first ones are applied, and the second ones only fetched."""
    output = deep(features, lambda x: tf.nn.dropout(tf.nn.softplus(x), rate=0.5))
    loss = tf.losses.mean_squared_error(labels, output)
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(loss)
    fetched = tf.gradients(loss, [variable for _, variable in pairs])
    for name, (gradient, _), again in zip(itertools.count(), pairs, fetched):
        tf.identity(gradient, f'applied_{name}')
        tf.identity(again, f'fetched_{name}')
    return spec_of(mode, loss, optimizer.apply_gradients(pairs, step()))


def built(model_fn, devices=1, rows=12, shape=(3,), **options):
    """Builds a graph for training in the default graph, of features that it returns, too."""
    tf.train.get_or_create_global_step()
    features = tf.constant(floats(rows, *shape))
    labels = tf.constant(floats(rows, 1))
    replicated = estimator_mgpu.replicate(model_fn, devices=devices, **options)
    return replicated(features=features, labels=labels, mode=TRAIN)


@pytest.mark.parametrize('devices', [1, 2])
def test_copies_use_the_numbers_that_were_drawn(devices):
    """Gradients by copies are those by the ops themselves, in the same step."""
    with tf.Graph().as_default() as graph, session(devices) as sess:
        spec = built(unseeded, devices, recompute=True)
        assert steps.of_graph(graph).recomputation.ops
        sess.run(tf.global_variables_initializer())
        count = len(tf.trainable_variables())
        names = [f'{kind}_{i}:0' for kind in ('applied', 'fetched') for i in range(count)]
        *gradients, _ = sess.run([*names, spec.train_op])
    for applied, fetched in zip(gradients[:count], gradients[count:]):
        np.testing.assert_allclose(applied, fetched, rtol=1e-4, atol=1e-6)
        assert np.abs(applied).max() > 0


def graph_of(model_fn, **options):
    with tf.Graph().as_default() as graph:
        built(model_fn, recompute=True, **options)
        return graph


def test_copies_wait_for_gradients():
    """A copy runs after the gradients of the layers behind it, and before those of its layer."""
    graph = graph_of(of_all_modes(residual, sgd))
    op = graph.get_operation_by_name
    products = [name for name in names_of(graph) if name.endswith('/dense_1/MatMul')]
    assert products == ['recompute/dense_1/MatMul']

    before_copy = graphs.ancestors([op('recompute/dense_1/MatMul')])
    assert op('gradients/dense_12/MatMul_grad/MatMul') in before_copy  # of what arrives
    assert op('gradients/dense_12/MatMul_grad/MatMul_1') in before_copy  # of weights
    assert op('gradients/dense_2/MatMul_grad/MatMul_1') not in before_copy
    of_weights = graphs.ancestors([op('gradients/dense_2/MatMul_grad/MatMul_1')])
    assert op('recompute/dense_1/MatMul') in of_weights
    # What the loss is computed from stays, and the last layers have no copies.
    of_loss = graphs.ancestors([op('mean_squared_error/value')])
    assert of_loss.isdisjoint(copies_in(graph))
    assert 'recompute/dense_12/MatMul' not in names_of(graph)


def names_of(graph):
    return [op.name for op in graph.get_operations()]


def copies_in(graph):
    return [op for op in graph.get_operations() if op.name.startswith('recompute/')]


@pytest.mark.parametrize('forward', [dropout, effects, batch_norm], ids=lambda f: f.__name__)
def test_what_is_not_copied(forward, behavior):
    graph = graph_of(of_all_modes(forward, updates_and_sgd))
    assert copies_in(graph)
    for op in copies_in(graph):
        assert not op.op_def.is_stateful, op.type
        assert all(output.dtype == tf.float32 for output in op.outputs), op.type


def test_a_reference_variable_is_written_after_it_is_read_again():
    """A copy reads it in its own memory; between linear layers, no gradient needs the copy."""

    def ungated(loss):
        """With nothing that lets the gradients of one op wait for each other."""
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        return optimizer.minimize(loss, step(), gate_gradients=optimizer.GATE_NONE)

    linear = of_all_modes(lambda features: deep(features, tf.identity), ungated)
    with behavior_of('v1'):
        graph = graph_of(linear)
    assert copies_in(graph)
    for op in graph.get_operations():
        if op.type == 'ApplyGradientDescent':
            product = f'recompute/{op.inputs[0].op.name.removesuffix("/kernel")}/MatMul'
            if product in names_of(graph):
                assert graph.get_operation_by_name(product) in graphs.ancestors([op])


def peak_bytes(model_fn, devices, **options):
    """The most bytes that a step's activations, gradients and updates have on a device."""
    metadata = tf.RunMetadata()
    trace = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    with tf.Graph().as_default(), session(devices) as sess:
        spec = built(model_fn, devices, rows=2000, shape=(16,), **options)
        sess.run(tf.global_variables_initializer())
        sess.run(spec.train_op)
        sess.run(spec.train_op, options=trace, run_metadata=metadata)

    peaks = []
    for stats in metadata.step_stats.dev_stats:
        used = [memory for node in stats.node_stats for memory in node.memory]
        records = [(r.alloc_micros, r.alloc_bytes) for m in used for r in m.allocation_records]
        peaks.append(max(itertools.accumulate(size for _, size in sorted(records)), default=0))
    return max(peaks)


@pytest.mark.parametrize('devices', [1, 2])
def test_peak_memory(devices):
    def model_fn(features, labels, mode):
        hidden = features
        for _ in range(32):
            hidden = tf.layers.dense(hidden, 16, tf.nn.tanh)
        loss = tf.losses.mean_squared_error(labels, tf.layers.dense(hidden, 1))
        return spec_of(mode, loss, sgd(loss))

    without = peak_bytes(model_fn, devices)
    assert peak_bytes(model_fn, devices, recompute=True) < 0.5 * without


def test_shallow_model(caplog):
    """Nothing can be saved, so nothing changes, and the log says so."""

    def model_fn(features, labels, mode):
        loss = tf.losses.mean_squared_error(labels, tf.layers.dense(features, 1))
        return spec_of(mode, loss, sgd(loss))

    assert not copies_in(graph_of(model_fn))
    assert 'recompute=True is left out: it would save too little' in caplog.text


@pytest.mark.parametrize('devices', [1, 2])
def test_loss_that_ignores_the_batch(devices, caplog):
    """No forward op uses the batch, so there is nothing to compute again."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_sum(tf.square(tf.get_variable('w', [3]) - 1))
        return spec_of(mode, loss, sgd(loss))

    ours, _ = compare(model_fn, batches(12, steps=2), devices, recompute=True)
    assert recomputation(ours) == (0, 0.0)
    assert 'recompute=True is left out: it would save too little' in caplog.text


def test_fewer_examples_than_devices(caplog):
    """The model runs on one device, and that computes activations again."""
    ours, _ = compare(of_all_modes(deep, sgd), batches(2, steps=2), 3, recompute=True)
    assert recomputation(ours).ops
    assert 'Nothing is sharded' in caplog.text
    assert f' {recomputation(ours).ops} ops run a second time for the gradients' in caplog.text


def test_explanation(caplog, tmp_path):
    estimator = estimator_mgpu.Estimator(
        of_all_modes(deep), str(tmp_path), devices=2, recompute=True
    )
    found = explain.explain(
        estimator, lambda: tf.data.Dataset.from_tensors((floats(8, 3), floats(8, 1)))
    )
    ops = found.recomputation.ops
    assert f'computed twice\n  {ops} ops, with ' in str(found)
    assert f' {ops} ops run a second time for the gradients, so that ' in caplog.text
    assert found.as_dict()['recomputation']['ops'] == ops
    assert 0.3 < found.recomputation.share < 1


def test_cuts():
    """Layers of 10 bytes, with what only leads to the next op between them."""
    activations = []
    for layer in range(10):
        activations.append(Activation(2 * layer, 2 * layer + 1, bytes=10, is_needed=False))
        activations.append(Activation(2 * layer + 1, 2 * layer + 2, bytes=10, is_needed=True))
    # 1 + 2 + 3 + 4 layers: three are kept, and beside them one is computed again at most.
    assert choose_cuts(activations, 21, fixed=0) == [7, 13, 17]
    # The same, if what else is kept makes it worthless.
    assert choose_cuts(activations, 21, fixed=1000) == []


@pytest.mark.parametrize('make', [estimator_mgpu.replicate, estimator_mgpu.Estimator])
@pytest.mark.parametrize('recompute', [1, 0, None, 'yes'])
def test_what_is_no_bool(make, recompute):
    with pytest.raises(ValueError, match=f'recompute={recompute!r} is neither True nor False'):
        make(of_all_modes(deep), recompute=recompute)
