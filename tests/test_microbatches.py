"""Micro-batches: towers that run one after the other on a device, with one device's results."""

import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import steps
from estimator_mgpu.reports import traffic
from estimator_mgpu.tf_internals import graphs
from models import (
    adam,
    batches,
    clipped,
    floats,
    of_all_modes,
    predict,
    regression,
    sgd,
    spec_of,
    step,
)
from towers import MODES, NAMES, TRAIN, behavior_of, compare, compare_modes, tower_of, train


def short_last():
    """Two batches of 12 examples, and a last one of 5."""
    return [*batches(12, steps=2), *batches(5, steps=1)]


def dense(features):
    return predict(features)


def dropout(features):
    """Random numbers with a seed, which are drawn once for all examples."""
    hidden = tf.reshape(tf.layers.dense(features, 24, tf.nn.tanh), [-1, 4, 6])
    hidden = tf.nn.dropout(hidden, rate=0.3, seed=3)
    return tf.layers.dense(tf.reshape(hidden, [-1, 24]), 1)


def recurrent(features):
    """A loop, of which each tower has its own."""
    sequence = tf.tile(features[:, None, :], [1, 4, 1])
    lengths = 1 + tf.cast(features[:, 0] > 0, tf.int32)
    cell = tf.nn.rnn_cell.LSTMCell(3)
    _, state = tf.nn.dynamic_rnn(cell, sequence, lengths, dtype=tf.float32)
    return tf.layers.dense(state.h, 1)


def normalized(features):
    """Needs the mean of all examples in the midst of the network."""
    hidden = tf.layers.dense(features, 4, use_bias=False)
    mean, variance = tf.nn.moments(hidden, [0])
    hidden = tf.nn.batch_normalization(hidden, mean, variance, None, None, 1e-3)
    return tf.layers.dense(tf.layers.dense(hidden, 24, tf.tanh), 1)


def looked_up(features):
    """A table's gradient consists of rows, which are gathered."""
    table = tf.get_variable('table', initializer=floats(9, 2))
    ids = tf.cast(tf.abs(features) * 3, tf.int32) % 9
    return tf.layers.dense(tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1), 1)


def branch(features):
    """A branch that is taken in some batches, by what all examples say."""
    hidden = predict(features)
    return tf.cond(
        tf.reduce_mean(features) > 0, lambda: tf.square(hidden), lambda: tf.tanh(hidden) * 2
    )


def branch_of_all_examples(features):
    """In this branch, a sum over the towers may be dead."""
    hidden = tf.tanh(tf.layers.dense(features, 6))
    scaled = lambda: hidden * 3  # noqa: E731
    centered = lambda: hidden * tf.reduce_mean(hidden, 0)  # noqa: E731
    net = tf.cond(tf.reduce_mean(features) > 0, scaled, centered)
    net.set_shape([None, 6])
    return tf.layers.dense(tf.layers.dense(net, 24, tf.tanh), 1)


def sgd_train(loss):
    return sgd(loss)


def two_optimizers(loss):
    """An optimizer for each half of the variables; both compute their gradients first."""
    variables = tf.trainable_variables()
    half = len(variables) // 2
    first = tf.train.MomentumOptimizer(0.05, 0.9)
    second = tf.train.GradientDescentOptimizer(0.1)
    of_first = first.compute_gradients(loss, variables[:half])
    of_second = second.compute_gradients(loss, variables[half:])
    with tf.control_dependencies([gradient for gradient, _ in of_first + of_second]):
        return tf.group(first.apply_gradients(of_first), second.apply_gradients(of_second, step()))


FORWARD = [dense, dropout, recurrent, normalized, looked_up, branch]
MODEL_FNS = [
    *(of_all_modes(forward, sgd_train) for forward in FORWARD),
    of_all_modes(dense, clipped, 'clipped'),
    of_all_modes(dense, two_optimizers, 'two_optimizers'),
]


@pytest.mark.core
@pytest.mark.parametrize('devices, microbatches', [(1, 2), (2, 3)], ids=['1x2', '2x3'])
@pytest.mark.parametrize('model_fn', MODEL_FNS, ids=lambda model_fn: model_fn.__name__)
def test_results_of_one_device(model_fn, devices, microbatches, behavior):
    """In all modes, to the end of the data; the last batch has fewer examples than towers."""
    options = dict(static=False, epochs=1, microbatches=microbatches)
    compare_modes(model_fn, short_last, devices, **options)


def test_a_branch_that_is_not_taken_ends_no_turn(behavior):
    """A turn whose gate waited for it wouldn't run. The size of the batch is static."""
    model_fn = of_all_modes(branch_of_all_examples, sgd_train)
    ours, _ = compare(model_fn, batches(12), 1, microbatches=2)
    ours.graph.get_operation_by_name('replicate/gate_1')


def test_a_slice_in_a_loop_waits_for_no_turn():
    """What is in a loop can't wait for what isn't. It's the loop that waits."""

    def model_fn(features, labels, mode):
        def body(i, net):
            noise = tf.random.stateless_uniform(tf.shape(features), [i, 1])  # for all examples
            return i + 1, tf.tanh(net) * noise

        _, net = tf.while_loop(lambda i, _: i < 3, body, (0, features))
        loss = tf.reduce_sum(net)
        return spec_of(mode, loss, tf.group(loss))

    with behavior_of('v1'):
        ours, _ = compare(model_fn, batches(12, steps=1), 1, microbatches=2)
    assert 'while/while_context (loop)' in steps.of_graph(ours.graph).schedule.chained


def test_a_turn_waits_for_no_call_in_a_loop():
    """What each device is given for a call in a loop, or for its gradient, is in the loop, too."""

    def model_fn(features, labels, mode):
        scale = tf.get_variable('scale', initializer=floats(3), use_resource=True)
        called = tf.function(lambda net: tf.tanh(net) * 0.9, autograph=False)
        body = lambda i, net: (i + 1, called(net))  # noqa: E731
        _, net = tf.while_loop(lambda i, _: i < 2, body, (0, tf.tanh(features * scale)))
        loss = tf.reduce_mean(tf.square(net * scale - labels))
        [gradient] = tf.gradients(loss, scale)
        return spec_of(mode, loss, scale.assign_sub(0.1 * gradient))

    with behavior_of('v1'):
        ours, _ = compare(model_fn, batches(12), 1, microbatches=2)
    ours.graph.get_operation_by_name('replicate/gate_1')


def ancestors_of(graph, name):
    """The names of what an op waits for."""
    return {op.name for op in graphs.ancestors([graph.get_operation_by_name(name)])}


def test_turns_wait_for_each_other():
    """The forward pass of a turn begins when the gradients of the turn before are there."""
    run = train(of_all_modes(dropout, sgd_train), batches(12), 2, steps=1, microbatches=3)
    gradient = 'gradients/dense/MatMul_grad/MatMul_1'
    before = ancestors_of(run.graph, NAMES.copy('dense/MatMul', 1))
    assert NAMES.copy(gradient, 0) in before
    assert NAMES.copy(gradient, 2) not in before
    # The other device's first turn waits for nothing.
    before = ancestors_of(run.graph, NAMES.copy('dense/MatMul', 3))
    assert not any(tower_of(name) == 0 for name in before)


def test_masks_wait_as_bits():
    """A device keeps a bit for each entry, and a turn unpacks its own."""
    run = train(of_all_modes(dropout, sgd_train), batches(12), 2, steps=1, microbatches=3)
    packed = set()
    for tower in range(6):
        copy = run.graph.get_operation_by_name(NAMES.copy('dropout/SelectV2', tower))
        mask = copy.inputs[0]
        assert mask.shape.as_list() == [2, 4, 6]

        unpacked = mask.op.inputs[0]
        before = graphs.ancestors([unpacked.op])
        earlier_turns = set(range(tower - tower % 3, tower))
        assert {tower_of(op.name) for op in before} == {None, *earlier_turns}
        packed |= {op.outputs[0] for op in before if op.type == 'RightShift'}

    [mask] = packed  # drawn once
    assert mask.shape.as_list() == [12, 3]


def test_one_sum_of_a_device_is_sent():
    """As many bytes, and tensors, as without micro-batches."""
    sent = []
    for microbatches in (1, 4):
        with tf.Graph().as_default():
            tf.train.get_or_create_global_step()
            features = tf.placeholder(tf.float32, [16, 3])
            labels = tf.placeholder(tf.float32, [16, 1])
            model_fn = regression(adam)
            replicated = estimator_mgpu.replicate(model_fn, devices=2, microbatches=microbatches)
            spec = replicated(features=features, labels=labels, mode=TRAIN)
            moved = traffic.messages([spec.train_op, spec.loss.op], '/device:CPU:0')
            # What a device is given of the batch comes in parts, but is as much.
            own = [
                message.size
                for message in moved
                if message.size and message[:2] == ('/device:CPU:1', '/device:CPU:0')
            ]
            sent.append((sorted(own), sum(message.size for message in moved)))
    assert sent[0] == sent[1]


def test_fewer_turns_for_a_small_batch():
    """Each tower has an example, if the batch is known to have few."""
    ours, _ = compare(regression(adam), batches(5, steps=2), 2, microbatches=8)
    schedule = steps.of_graph(ours.graph).schedule
    assert schedule.turns == 2


def test_evaluation_with_a_train_op():
    """No step of evaluation runs it, so it keeps nothing from running in turns."""

    def model_fn(features, labels, mode):
        output = tf.layers.dense(tf.layers.dense(features, 64, tf.nn.relu), 1)
        loss = tf.losses.mean_squared_error(labels, output)
        train_op = tf.train.AdamOptimizer().minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    with tf.Graph().as_default() as graph:
        tf.train.create_global_step()
        batch = tf.placeholder(tf.float32, [12, 3]), tf.placeholder(tf.float32, [12, 1])
        estimator_mgpu.replicate(model_fn, devices=2, microbatches=3)(*batch, MODES.EVAL)
        assert steps.of_graph(graph).schedule.chainable == 1


def test_exact_batch_norm_is_not_chained(caplog):
    """Most of the network needs the statistics of all examples, so turns would save little."""

    def model_fn(features, labels, mode):
        net = features
        for _ in range(3):
            net = tf.layers.conv2d(net, 4, 3, padding='same')
            net = tf.nn.relu(tf.layers.batch_normalization(net, training=True))
        loss = tf.losses.mean_squared_error(labels, tf.layers.dense(tf.reduce_mean(net, [1, 2]), 1))
        return spec_of(mode, loss, sgd(loss))

    data = [(floats(8, 4, 4, 2), floats(8, 1))]
    run = train(model_fn, data, 1, microbatches=4)
    assert not any(tower_of(op.name) == 1 for op in run.graph.get_operations())
    assert 'microbatches=4 is left out: it would save only' in caplog.text
    assert "batch_norm='device' would help" in caplog.text

    run = train(model_fn, data, 1, microbatches=4, batch_norm='device')
    assert any(tower_of(op.name) == 3 for op in run.graph.get_operations())
    assert 'keeps 100% of the activations for one of them at a time' in caplog.text


def dense_layers(net, count):
    for _ in range(count):
        net = tf.layers.dense(net, 64, tf.nn.relu)
    return net


def centered(net):
    return net - tf.reduce_mean(net, 0)


def whole_batch_in_the_loss(features):
    """The gradients of all layers need the mean."""
    return centered(tf.layers.dense(dense_layers(features, 8), 4))


def whole_batch_at_the_begin(features):
    return tf.layers.dense(dense_layers(centered(features), 8), 4)


def whole_batch_at_a_quarter(features):
    """What is kept is what the gradients of two layers of eight need."""
    net = centered(tf.layers.dense(dense_layers(features, 2), 4))
    return tf.layers.dense(dense_layers(net, 6), 4)


def whole_batch_without_gradients(features):
    """Nothing is kept for gradients of the layers before the mean."""
    net = tf.stop_gradient(tf.layers.dense(dense_layers(features, 8), 4))
    return tf.layers.dense(centered(net), 4)


# In units of an output of relu, [batch, 64]. Without micro-batches, a step keeps 8 of them, and has
# two tensors of their size while it computes a gradient. An output of [batch, 4] has 1/16 of that.
@pytest.mark.parametrize(
    'forward, kept, most',
    [
        (whole_batch_in_the_loss, 8 + 1 / 16, 10),
        (whole_batch_at_the_begin, 0, 10),
        (whole_batch_at_a_quarter, 2 + 1 / 16, 10 + 1 / 16),
        (whole_batch_without_gradients, 1 / 16, 2),
    ],
)
def test_what_is_kept_for_all_micro_batches(forward, kept, most):
    """So much of a step's memory isn't saved. That is measured, too, with eight of them."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(forward(features)))
        return spec_of(mode, loss, sgd(loss))

    peaks = []
    for microbatches in (1, 8):
        with tf.Graph().as_default() as graph:
            tf.train.get_or_create_global_step()
            features = tf.random.stateless_normal([4096, 8], [1, 2])
            replicated = estimator_mgpu.replicate(model_fn, devices=1, microbatches=microbatches)
            spec = replicated(features=features, labels=None, mode=TRAIN)
            peaks.append(peak_of(spec.train_op, microbatches))

    schedule = steps.of_graph(graph).schedule
    assert schedule.chainable == pytest.approx(1 - kept / most)
    assert schedule.is_worth_it == (kept / most < 0.5)
    if kept:
        assert [join.op for join in schedule.joins] == ['Mean']
        assert schedule.joins[0].share == pytest.approx(kept / most)
    turns = 8 if schedule.is_worth_it else 1
    expected = (kept + (most - kept) / turns) / most
    assert peaks[1] / peaks[0] == pytest.approx(expected, abs=0.15)


def peak_of(fetched, microbatches):
    """The bytes that a step has at most, without variables."""
    config = estimator_mgpu.session_config(1, microbatches=microbatches)
    metadata = tf.RunMetadata()
    trace = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        session.run(fetched)
        session.run(fetched, options=trace, run_metadata=metadata)
    changes = []
    for device in metadata.step_stats.dev_stats:
        for memory in [memory for node in device.node_stats for memory in node.memory]:
            changes += [(r.alloc_micros, r.alloc_bytes) for r in memory.allocation_records]
    return max(itertools.accumulate(size for _, size in sorted(changes)))


def test_initial_value_from_the_batch():
    """It's computed when the gradients, which need the variable, can't be waited for."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', initializer=lambda: tf.reduce_mean(tf.square(features), 0))
        loss = tf.losses.mean_squared_error(labels, predict(features * w))
        return spec_of(mode, loss, sgd(loss))

    def run(towers, **options):
        with tf.Graph().as_default():
            tf.set_random_seed(1)
            tf.train.get_or_create_global_step()
            features, labels = map(tf.constant, batches(12)[0])
            fn = estimator_mgpu.replicate(model_fn, devices=towers, **options)
            spec = fn(features=features, labels=labels, mode=TRAIN)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                return session.run([spec.loss, spec.train_op])[0], tf.get_default_graph()

    one, _ = run(1)
    ours, graph = run(1, microbatches=3)
    assert ours == pytest.approx(one, rel=1e-5)
    assert steps.of_graph(graph).schedule.is_worth_it


def test_verify_on_one_device():
    """Without micro-batches, there would be nothing to compare."""
    model_fn = estimator_mgpu.replicate(of_all_modes(dense), microbatches=3)
    dataset = lambda: tf.data.Dataset.from_tensors(batches(7)[0])  # noqa: E731
    assert estimator_mgpu.verify(model_fn, dataset, devices=1, steps=1).exact


@pytest.mark.parametrize('microbatches', [0, -1, 2.5, '2', None, True])
@pytest.mark.parametrize(
    'called', [estimator_mgpu.session_config, estimator_mgpu.replicate], ids=['config', 'replicate']
)
def test_what_is_no_number_of_micro_batches(called, microbatches):
    with pytest.raises(ValueError, match='is no number of micro-batches. Give 1 or more'):
        called(devices=2, microbatches=microbatches)


@pytest.mark.parametrize(
    'called', [estimator_mgpu.session_config, estimator_mgpu.replicate], ids=['config', 'replicate']
)
def test_too_many(called):
    with pytest.raises(ValueError, match='microbatches=1000000 is too many.*Give 1000 at most'):
        called(devices=2, microbatches=10**6)


def test_numbers_and_booleans_of_numpy():
    """They become Python's, as JSON knows no others."""
    options = dict(devices=2, microbatches=np.int64(3), recompute=np.bool_(True))
    replicated = estimator_mgpu.replicate(regression(adam), **options).replicate_options
    assert replicated['microbatches'] == 3 and type(replicated['microbatches']) is int
    assert replicated['recompute'] is True
    ours, _ = compare(regression(adam), batches(12, steps=2), 2, microbatches=np.int32(3))
    assert steps.of_graph(ours.graph).microbatches == 3


@pytest.mark.parametrize(
    ('rows', 'static', 'level', 'text'),
    [
        (12, True, 'WARNING', ' microbatches=7 is more than a device has examples: 6. Each device'),
        (12, False, 'INFO', 'at a time. With fewer than 14 examples, some of them are empty.'),
        (14, True, 'INFO', ' 7 micro-batches one after another'),
        (3, True, 'WARNING', ' microbatches=7 is more than a device has examples: 1.'),
    ],
    ids=['static', 'dynamic', 'as many', 'one each'],
)
def test_the_log_says_if_there_may_be_too_few_examples(rows, static, level, text, caplog):
    compare(regression(adam), batches(rows, steps=1), 2, static=static, microbatches=7)
    [record] = [r for r in caplog.records if 'The input_fn gives' in r.getMessage()]
    assert text in record.getMessage() and record.levelname == level
    mentioned = record.getMessage().count('more than a device has')
    assert mentioned == (level == 'WARNING')
    assert ('are empty' in record.getMessage()) == (not static)
