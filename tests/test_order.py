"""A step reads and writes state in one device's order; what that leaves open is decided once."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from estimator_mgpu import steps
from estimator_mgpu.tf_internals import graphs, private
from models import floats, sgd, spec_of, step
from towers import NAMES, TRAIN, assert_same, behavior_of, built, compare, graph_of, train

pytestmark = pytest.mark.core
BATCHES = [(floats(8, 3, seed=i), floats(8, 1, seed=10 + i)) for i in range(3)]


def late(x):
    """The value of a tensor, but for rounding, a good while later."""
    matrix = tf.eye(3) * 1.5
    for _ in range(60):
        x = tf.tanh(tf.matmul(x, matrix))
    return x


def one_late(x):
    """1, a good while later."""
    total = tf.reduce_sum(tf.square(late(x)))
    return total / total


def compare_on(model_fn, numbers=(1, 2, 3), **options):
    """Compares several numbers of devices with undecorated TensorFlow, in all modes of towers."""
    one = train(model_fn, BATCHES, 0, **options)
    ways = [{'towers': towers} for towers in numbers]
    for way in [*ways, {'towers': 2, 'microbatches': 2}, {'towers': 2, 'recompute': True}]:
        assert_same(train(model_fn, BATCHES, values=one.start, **way, **options), one)


@pytest.fixture(scope='module')
def module(tmp_path_factory):
    """A saved module whose function updates a mean in a branch, and then uses it."""

    class Module(tf2.Module):
        def __init__(self):
            self.mean = tf2.Variable(tf2.zeros([3]), trainable=False)

        @tf2.function(input_signature=[tf2.TensorSpec([None, 3]), tf2.TensorSpec([], tf2.bool)])
        def __call__(self, x, training):
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * tf2.reduce_mean(x, 0))
            return tf2.tanh(x - self.mean)

    path = str(tmp_path_factory.mktemp('module'))
    tf2.saved_model.save(Module(), path)
    return path


def test_a_loaded_module_updates_its_mean_in_a_branch(module, behavior):
    def model_fn(features, labels, mode):
        loaded = tf2.saved_model.load(module)
        tf.add_to_collection(tf.GraphKeys.GLOBAL_VARIABLES, loaded.mean)
        net = tf.layers.dense(loaded(features, tf.constant(True)), 1)
        loss = tf.reduce_mean(tf.square(net - labels))
        return spec_of(mode, loss, sgd(loss))

    ours, _ = compare(model_fn, BATCHES, 3)
    assert ours.values['Variable'].all()
    compare_on(model_fn)


def test_a_second_step_reads_what_the_first_one_wrote(behavior):
    """Small variables share messages, but not those of before the update."""

    def model_fn(features, labels, mode):
        layers = [
            tf.get_variable(name, initializer=floats(3, 3, seed=ord(name))) for name in 'abcd'
        ]

        def loss_of(x):
            for weights in layers:
                x = tf.matmul(x, weights)
            return tf.reduce_mean(tf.square(x - labels))

        first = tf.train.GradientDescentOptimizer(0.01).minimize(loss_of(features))
        with tf.control_dependencies([first]):
            loss = loss_of(features)
            second = tf.train.GradientDescentOptimizer(0.01).minimize(loss, step())
        return spec_of(mode, loss, second)

    compare_on(model_fn, (1, 2, 3, 4))
    compare(model_fn, BATCHES, 2, variables='first')


def test_an_average_of_what_was_written_is_sent_afterwards(behavior):
    """Variables and their averages may be on different devices."""

    def model_fn(features, labels, mode):
        net = tf.layers.dense(tf.layers.dense(features, 5), 1)
        loss = tf.reduce_mean(tf.square(net - labels))
        with tf.control_dependencies([sgd(loss)]):
            averages = tf.train.ExponentialMovingAverage(0.5).apply(tf.trainable_variables())
        return spec_of(mode, loss, averages)

    compare_on(model_fn)


VIEWS = {
    'identity': tf.identity,
    'reshape': lambda w: tf.reshape(w, [3]),
    'squeeze': lambda w: tf.squeeze(tf.stop_gradient(w)),
    'identity_n': lambda w: tf.identity_n([w, w])[1],
    'expand_dims': lambda w: tf.expand_dims(w, 0)[0],
    'branch': lambda w: tf.cond(step() >= 0, lambda: tf.identity(w), lambda: 2 * w),
    'given to a branch': lambda w: tf.cond(step() >= 0, lambda: w, lambda: 2 * w),
    'in branches': lambda w: tf.cond(
        step() >= 0, lambda: tf.cond(step() >= 0, lambda: tf.identity(w), lambda: w), lambda: w
    ),
}


@pytest.mark.parametrize('view', VIEWS.values(), ids=VIEWS)
def test_a_view_of_a_reference_variable_is_sent_after_the_write(view):
    """On one device, what lies in the variable's memory shows what was written.

    Devices of one process share that memory, so only the check sees what is sent too early.
    """

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [1, 3], initializer=tf.zeros_initializer())
        seen = view(w)
        with tf.control_dependencies([tf.assign_add(w, tf.ones([1, 3]))]):
            x = tf.identity(features)
        loss = tf.reduce_mean(tf.square(x * seen - labels))
        return spec_of(mode, loss, tf.assign_add(step(), 1), loss.op)

    with behavior_of('v1'):
        for towers in (1, 2, 3):
            compare(model_fn, BATCHES, towers)


def test_a_reference_variable_is_sent_again_after_a_second_write():
    """What reads after the second write is given what reads after the first one."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [1, 3], initializer=tf.zeros_initializer())
        seen = tf.identity(w)
        with tf.control_dependencies([tf.assign_add(w, tf.ones([1, 3]))]):
            again = tf.identity(seen)
        with tf.control_dependencies([again]):
            written = tf.assign_add(w, tf.ones([1, 3]))
        with tf.control_dependencies([written]):
            x = tf.identity(features)
        loss = tf.reduce_mean(tf.square(x * again - labels))
        return spec_of(mode, loss, tf.assign_add(step(), 1), loss.op)

    with behavior_of('v1'):
        for towers in (1, 2, 3):
            compare(model_fn, BATCHES, towers)


def test_a_branch_is_sent_a_reference_variable_after_the_write():
    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [1, 3], initializer=tf.zeros_initializer())
        with tf.control_dependencies([tf.assign_add(w, tf.ones([1, 3]))]):
            net = tf.cond(step() >= 0, lambda: features * w, lambda: features)
        loss = tf.reduce_mean(tf.square(net - labels))
        return spec_of(mode, loss, tf.assign_add(step(), 1), loss.op)

    with behavior_of('v1'):
        for towers in (1, 2, 3):
            compare(model_fn, BATCHES, towers)


@pytest.mark.parametrize('update', ['assign', 'assign_sub'])
def test_what_waits_for_a_placeholder_that_is_fed(update, behavior):
    """TensorFlow drops what a placeholder waits for, so no wait may go by way of one."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', initializer=floats(3, 3))
        mean = tf.reduce_mean(tf.matmul(late(features), w))
        with tf.control_dependencies([mean]):
            after = tf.identity(labels)
        with tf.control_dependencies([after]):
            written = getattr(tf, update)(w, tf.ones([3, 3]))
        loss = mean + tf.reduce_mean(after)
        return spec_of(mode, loss, written, tf.assign_add(step(), 1))

    compare_on(model_fn)


@pytest.mark.parametrize('kind', ['compiled', 'called', 'loop', 'branch'])
def test_a_call_reads_when_its_arguments_are_there(kind):
    """These follow from a write to the variable that it reads."""

    def model_fn(features, labels, mode):
        scale = tf.get_variable('scale', [], initializer=tf.ones_initializer(), use_resource=True)
        added = tf.convert_to_tensor(tf.assign_add(scale, one_late(features)))
        step_of_loop = lambda i, x: (i + 1, tf.sin(x) * scale)  # noqa: E731

        def call(x):
            if kind == 'loop':
                return tf.while_loop(lambda i, _: i < 1, step_of_loop, [0, x])[1]
            if kind == 'branch':
                return tf.cond(tf.reduce_sum(x) > -1e9, lambda: tf.sin(x) * scale, lambda: x)
            function = tf2.function(lambda x: tf.sin(x) * scale, jit_compile=kind == 'compiled')
            return function(x)

        loss = tf.reduce_mean(call(features + 0.0 * added))
        with tf.control_dependencies([loss]):
            return spec_of(mode, loss, tf.assign_add(step(), 1))

    expected = [np.mean(np.sin(x)) * scale for (x, _), scale in zip(BATCHES, [2.0, 3.0, 4.0])]
    for towers in (1, 2, 3):
        losses = train(model_fn, BATCHES, towers).losses
        np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.parametrize('epochs', [None, 1], ids=['fed', 'read'])
def test_what_the_batch_depends_on_waits_for_nothing_of_the_model(epochs, behavior):
    """How many examples there are is asked of all features; so none may wait for another one's."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', initializer=floats(3, 3))
        loop = tf.while_loop(
            lambda i, _: i < 3, lambda i, h: (i + 1, tf.matmul(h, w)), [0, features]
        )
        mean = tf.reduce_mean(tf.square(loop[1]))
        with tf.control_dependencies([mean]):
            labels = tf.identity(labels)
        loss = mean + tf.reduce_mean(tf.square(labels * w[0]))
        return spec_of(mode, loss, sgd(loss))

    compare_on(model_fn, static=False, epochs=epochs)


def counts_by_hand(features, labels, mode):
    """As BERT does: the rate reads the step, and the step is counted beside the updates."""
    rate = tf.train.polynomial_decay(0.1, step(), 100, 0.0)
    net = tf.layers.dense(tf.layers.dense(features, 4, tf.nn.tanh), 1)
    loss = tf.reduce_mean(tf.square(net - labels))
    seen = tf.get_variable('seen', [], initializer=tf.zeros_initializer(), trainable=False)
    variables = tf.trainable_variables()
    gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 1.0)
    updates = [v.assign_sub(rate * gradient) for v, gradient in zip(variables, gradients)]
    counted = step().assign(step() + 1)
    return spec_of(mode, loss, *updates, seen.assign_add(rate), counted)


@pytest.mark.parametrize('microbatches', [1, 2])
@pytest.mark.parametrize('towers', [1, 2, 3, 4])
def test_a_rate_reads_the_step_before(towers, microbatches, behavior):
    """In each of 20 steps: the sum of 0.1 * (1 - step / 100) over these is 0.1 * (20 - 1.9)."""
    batches = [BATCHES[0]] * 20
    run = train(counts_by_hand, batches, towers, microbatches=microbatches, epochs=1)
    np.testing.assert_allclose(run.values['seen'], 1.81, rtol=1e-5)

    [pair] = steps.of_graph(run.graph).open_pairs
    assert pair.state == 'global_step'
    assert run.graph.get_operation_by_name(pair.second).type.startswith('Assign')


def pairs_of(model_fn):
    """What a model_fn leaves open."""
    return steps.of_graph(graph_of(model_fn, BATCHES, 1)).open_pairs


def test_two_writes_come_in_the_order_in_which_they_were_made(behavior):
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(tf.layers.dense(features, 1)))
        state = tf.get_variable('state', initializer=np.float32(1.0), trainable=False)
        slow = state.assign_add(one_late(features))
        fast = state.assign(tf.convert_to_tensor(np.float32(10.0)) * 2.0)
        return spec_of(mode, loss, sgd(loss), fast, slow)

    for towers in (1, 2):
        assert train(model_fn, BATCHES, towers).values['state'] == 20.0
    assert {pair.state for pair in pairs_of(model_fn)} == {'state'}


@pytest.mark.parametrize('read', ['loop', 'branch', 'call'])
def test_a_read_within_something_comes_before_a_write(read, behavior):
    """The write waits for where the loop, branch or call ends."""

    def model_fn(features, labels, mode):
        state = tf.get_variable('state', initializer=np.float32(2.0), trainable=False)
        x = one_late(features)
        found = {
            'loop': lambda: tf.while_loop(
                lambda i, _: i < 3, lambda i, y: (i + 1, y * state), [0, x]
            )[1],
            'branch': lambda: tf.cond(x > 0, lambda: x * state, lambda: x),
            'call': lambda: tf2.function(lambda x: x * state)(x),
        }[read]()
        loss = tf.reduce_mean(tf.layers.dense(features, 1)) * found
        return spec_of(mode, found, sgd(loss), state.assign_add(1.0))

    expected = np.arange(2.0, 5.0) ** (3 if read == 'loop' else 1)
    for towers in (1, 2):
        run = train(model_fn, BATCHES, towers)
        np.testing.assert_allclose(run.losses, expected, rtol=1e-5)
        assert run.values['state'] == 5.0
    assert pairs_of(model_fn)


def test_an_edge_that_would_close_a_cycle_is_left_out(behavior):
    """Each variable is read after a write of the other one: one of the reads has to come second."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(tf.layers.dense(features, 1)))
        a, b = (
            tf.get_variable(name, initializer=np.float32(value), use_resource=True)
            for name, value in (('a', 1.0), ('b', 2.0))
        )
        with tf.control_dependencies([a.assign(3.0)]):
            of_b = b.read_value()
        with tf.control_dependencies([b.assign(4.0)]):
            of_a = a.read_value()
        return spec_of(mode, loss, of_a.op, of_b.op, step().assign_add(1))

    assert len(pairs_of(model_fn)) == 1
    for towers in (1, 2):
        assert train(model_fn, BATCHES, towers).values['global_step'] == 3


def usual(features, labels, mode):
    net = tf.layers.batch_normalization(tf.layers.dense(features, 4), training=True)
    loss = tf.losses.mean_squared_error(labels, tf.layers.dense(tf.nn.dropout(net, rate=0.5), 1))
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return spec_of(mode, loss, tf.train.AdamOptimizer().minimize(loss, step()))


def test_a_usual_model_leaves_nothing_open(behavior):
    assert not pairs_of(usual)


def test_no_initializer_waits_for_reads(behavior):
    """Nor what only a hook runs: a step doesn't run it, so it has no place in the step's order."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(tf.layers.dense(features, 1)))
        state = tf.get_variable('state', initializer=np.float32(2.0), trainable=False)
        state.assign(0.0, name='by_a_hook')
        return spec_of(mode, loss * state, sgd(loss))

    assert not pairs_of(model_fn)


def test_what_waits_for_an_identity_of_a_variable_runs_its_effects(behavior):
    """Also if the value is read again after an update."""
    calls = []

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', initializer=floats(3, 1))
        loss = tf.reduce_mean(tf.square(tf.matmul(features, w) - labels))
        called = tf.numpy_function(lambda x: calls.append(1) or x, [loss], tf.float32)
        with tf.control_dependencies([called]):
            value = tf.identity(w)
        with tf.control_dependencies([sgd(loss), value]):
            after = tf.reduce_mean(tf.matmul(features, value))
        return spec_of(mode, after, after.op)

    for towers in (0, 1, 2):
        calls.clear()
        train(model_fn, BATCHES, towers)
        assert len(calls) == 3


def test_gradients_wait_for_no_read_that_follows_from_them(behavior):
    """The write has to wait for it itself."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', initializer=floats(3, 1))
        seen = tf.get_variable('seen', [], initializer=tf.zeros_initializer(), trainable=False)
        loss = tf.reduce_mean(tf.matmul(features, w) * labels)
        [gradient] = tf.gradients(loss, [w])
        with tf.control_dependencies([loss, seen.assign_add(tf.reduce_sum(gradient))]):
            again = tf.matmul(features, w)
        with tf.control_dependencies([again]):
            gradient = tf.identity(gradient)
        return spec_of(mode, loss, w.assign_sub(gradient), step().assign_add(1))

    compare_on(model_fn)


def test_a_loop_waits_for_an_update_by_what_enters_it(behavior):
    """An identity of an example's label waits for the update, and the loop's reads for that."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', initializer=floats(3, 3))
        first = tf.train.AdamOptimizer(0.01).minimize(tf.reduce_mean(tf.square(features @ w)))
        with tf.control_dependencies([first]):
            waited = tf.identity(labels)

        def turn(i, x):
            with tf.control_dependencies([tf.identity(waited)]):
                return i + 1, tf.tanh(tf.matmul(x, tf.convert_to_tensor(w)))

        loss = tf.reduce_mean(tf.while_loop(lambda i, _: i < 2, turn, [0, features])[1])
        with tf.control_dependencies([loss]):
            return spec_of(mode, loss, step().assign_add(1))

    for towers in (1, 2, 3):
        compare(model_fn, BATCHES, towers)


def test_a_write_between_a_loop_and_its_gradient(behavior):
    """Spectral normalization writes its vector, and the train_op alone runs that, too."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', initializer=floats(6, 6, seed=1))
        u = tf.get_variable('u', initializer=floats(6, 1, seed=2), trainable=False)
        hidden = tf.matmul(features, w)

        def iterate(i, u):
            v = tf.nn.l2_normalize(tf.matmul(hidden, u))
            return i + 1, tf.nn.l2_normalize(tf.matmul(hidden, v, transpose_a=True))

        new = tf.while_loop(lambda i, _: i < 2, iterate, (0, u + 0.0))[1]
        with tf.control_dependencies([u.assign(new)]):
            product = tf.matmul(hidden, new)
        train_op = sgd(tf.reduce_mean(tf.square(product)), 0.1)
        return spec_of(mode, tf.reduce_mean(features), train_op)

    batches = [(floats(10, 6, seed=i), None) for i in range(2)]
    compare(model_fn, batches, 2, static=True)


def test_a_branch_sets_the_flag_that_has_chosen_it(behavior):
    """All that the flag decides is decided before."""

    def model_fn(features, labels, mode):
        is_set = tf.get_variable('is_set', initializer=False, trainable=False)

        def times(factor, flag):
            with tf.control_dependencies([tf.assign(is_set, flag)]):
                return features * factor

        x = tf.cond(is_set, lambda: times(1.0, False), lambda: times(2.0, True))
        loss = tf.reduce_mean(x) + 0.0 * tf.reduce_mean(tf.layers.dense(features, 1))
        return spec_of(mode, loss, sgd(loss))

    means = np.array([features.mean() for features, _ in BATCHES])
    for towers in (1, 2, 3):
        losses = train(model_fn, BATCHES, towers).losses
        np.testing.assert_allclose(losses, means * [2, 1, 2], rtol=1e-4)


@pytest.mark.parametrize('place', ['branch', 'loop'])
def test_what_is_not_taken_waits_for_nothing(place, behavior):
    """A write after it waits for reads that only a branch, or a loop's body, would wait for."""

    def model_fn(features, labels, mode):
        state = tf.get_variable('state', initializer=floats(3), use_resource=True)
        never = tf.cast(labels[0, 0] > 99, tf.int32)
        with tf.control_dependencies([one_late(features)]):
            value = state.read_value()
        with tf.control_dependencies([value]):
            net = tf.identity(features)

        def changed(x):
            with tf.control_dependencies([state.assign_add([1.0, 1, 1])]):
                return tf.identity(x)

        if place == 'branch':
            net = tf.cond(never > 0, lambda: changed(net), lambda: tf.identity(net))
        else:
            body = lambda i, x: (i + 1, changed(x))  # noqa: E731
            _, net = tf.while_loop(lambda i, _: i < never, body, [0, net])
        with tf.control_dependencies([net]):
            update = state.assign(state * 0.5)
        loss = tf.reduce_mean(tf.square(tf.layers.dense(net * update, 1, use_bias=False) - labels))
        loss += tf.reduce_sum(value)
        return spec_of(mode, loss, sgd(loss))

    compare_on(model_fn)


def test_a_read_comes_before_a_write_in_a_loop(behavior):
    def model_fn(features, labels, mode):
        state = tf.get_variable('state', initializer=np.float32(1.0), trainable=False)
        with tf.control_dependencies([one_late(features)]):
            value = tf.identity(state + 0.0)

        def counted(i):
            with tf.control_dependencies([state.assign_add(1.0)]):
                return i + 1

        count = tf.while_loop(lambda i: i < 3, counted, [0])
        loss = value + 0.0 * tf.reduce_mean(tf.layers.dense(features, 1))
        return spec_of(mode, loss, sgd(loss), count)

    for towers in (1, 2, 3):
        np.testing.assert_allclose(train(model_fn, BATCHES, towers).losses, [1, 4, 7], rtol=1e-5)
    assert {pair.state for pair in pairs_of(model_fn)} == {'state'}


def test_a_branch_writes_when_its_arguments_are_there(behavior):
    """One of these is a value of the variable that the branch writes."""

    def model_fn(features, labels, mode):
        state = tf.get_variable(
            'state', initializer=np.float32(1.0), trainable=False, use_resource=True
        )
        with tf.control_dependencies([one_late(features)]):
            value = state.read_value()

        def counted():
            with tf.control_dependencies([state.assign_add(1.0)]):
                return tf.identity(value)

        loss = tf.cond(step() >= 0, counted, lambda: value)
        loss += 0.0 * tf.reduce_mean(tf.layers.dense(features, 1))
        return spec_of(mode, loss, sgd(loss))

    for towers in (1, 2, 3):
        np.testing.assert_allclose(train(model_fn, BATCHES, towers).losses, [1, 2, 3], rtol=1e-5)


def test_a_write_in_a_branch_waits_for_all_reads_there():
    """Of all towers, though it only follows from their shapes."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', initializer=floats(3, 3))
        late_features = late(features)

        def changed():
            y = tf.matmul(late_features, w)
            count = tf.cast(tf.shape(y)[0], tf.float32)
            return y, w.assign_sub(0.01 * count * tf.ones([3, 3]))

        y, written = tf.cond(step() >= 0, changed, lambda: (features, w + 0.0))
        loss = tf.reduce_mean(tf.square(y - labels))
        return spec_of(mode, loss, written.op, tf.assign_add(step(), 1))

    with behavior_of('v1'):
        compare_on(model_fn, static=False)


def test_a_write_waits_for_reads_whether_a_placeholder_is_fed_or_not(behavior):
    """TensorFlow drops all that it waits for if it's fed."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', initializer=floats(3, 3))
        read = tf.matmul(features, w, name='read')
        with tf.control_dependencies([read]):
            rate = tf.placeholder_with_default(1.0, [], 'rate')
            same = tf.identity(labels)
        with tf.control_dependencies([same]):
            written = w.assign_sub(rate * np.ones([3, 3], np.float32))
        loss = tf.reduce_mean(read) + tf.reduce_mean(same)
        return spec_of(mode, loss, written.op, tf.assign_add(step(), 1))

    with built(model_fn, BATCHES, 2, TRAIN, epochs=1):
        operation = tf.get_default_graph().get_operation_by_name
        write = next(op for op in operation('w').graph.get_operations() if 'AssignSub' in op.type)
        private.remove_control_inputs(operation('rate'))
        before = graphs.ancestors([write])
        assert {operation(NAMES.copy('read', tower)) for tower in range(2)} <= before


def test_what_never_runs_together_leaves_nothing_open(behavior):
    def model_fn(features, labels, mode):
        state = tf.get_variable('state', initializer=np.float32(1.0), use_resource=True)
        value = tf.cond(step() > 0, lambda: state + 0.0, lambda: state.assign_add(1.0) + 0.0)
        loss = tf.reduce_mean(tf.layers.dense(features, 1)) + 0.0 * tf.stop_gradient(value)
        return spec_of(mode, loss, tf.assign_add(step(), 1))

    assert 'state' not in {pair.state for pair in pairs_of(model_fn)}
