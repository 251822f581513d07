"""Branches of TensorFlow 2 train on several devices as on one, sharded as TensorFlow 1's."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from estimator_mgpu import steps
from estimator_mgpu.reports.work import ops_run_once, works_of
from models import sequences

WIDTH, STEPS = 3, 5
MODELS = {}
ONCE = {}  # by model, which types of ops may run once


def model(*once):
    """Registers a function of [batch, steps, width] and a matrix that gives [batch, width].

    Args:
      *once: the types of ops that run once.
    """

    def register(function):
        MODELS[function.__name__] = function
        ONCE[function.__name__] = set(once)
        return function

    return register


def always(x):
    """It's true, but depends on the batch, so TensorFlow can't know before a step."""
    return tf.reduce_mean(x) > -100


def every_second():
    """Whether it's a step of an even number: both branches are taken in turns."""
    return tf.equal(tf.train.get_global_step() % 2, 0)


def variable(name, shape=(WIDTH,)):
    return tf.get_variable(
        name, shape, initializer=tf.zeros_initializer(), trainable=False, use_resource=True
    )


def drop(h, seed=3):
    return tf.nn.dropout(h, rate=0.3, seed=seed)


@model()
def seeded_numbers(x, w):
    """Steps without them draw none."""
    return tf.cond(every_second(), lambda: drop(x[:, 0] @ w), lambda: x[:, 1] @ w)


@model()
def numbers_without_seed(x, w):
    """Whatever they are, they change nothing."""
    drawn = lambda: x[:, 0] @ w + 0 * tf.random.uniform(tf.shape(x[:, 0]))  # noqa: E731
    return tf.cond(always(x), drawn, lambda: x[:, 1] @ w)


@model()
def mean_over_the_batch(x, w):
    def centered():
        h = tf.tanh(x[:, 0] @ w)
        return h - tf.reduce_mean(h, 0)

    return tf.cond(every_second(), centered, lambda: x[:, 1] @ w)


@model()
def mean_decides(x, w):
    """All devices take the same branch, in an inner one, too."""
    h = x[:, 0] @ w
    inner = lambda: tf.cond(tf.reduce_max(h) > 2, lambda: drop(h), lambda: h - tf.reduce_sum(h, 0))  # noqa: E731
    return tf.cond(tf.reduce_mean(h) > 0, inner, lambda: tf.tanh(h))


@model()
def ends_in_a_mean(x, w):
    """A branch that gives no examples."""
    mean = lambda: tf.reduce_mean(tf.tanh(x[:, 0] @ w) ** 2, 0)  # noqa: E731
    return x[:, 1] * tf.cond(every_second(), mean, lambda: tf.zeros([WIDTH]))


@model()
def outer_choice(x, w):
    """The inner branches use a choice from outside, in both branches."""
    is_large = tf.reduce_mean(x[:, 1] @ w) > 0

    def inner():
        h = tf.tanh(x[:, 0] @ w)
        return tf.cond(is_large, lambda: h @ w - tf.reduce_mean(h, 0), lambda: h)

    other = lambda: tf.cond(is_large, lambda: x[:, 1] @ w, lambda: x[:, 2])  # noqa: E731
    return tf.cond(every_second(), inner, other)


@model()
def one_of_four(x, w):
    """A number that no branch has takes the last one."""

    def centered():
        h = x[:, 0] @ w
        return h - tf.reduce_max(h, 0)

    last = lambda: tf.tanh(x[:, 2] @ w) - tf.reduce_mean(x)  # noqa: E731
    branches = [centered, lambda: x[:, 1] @ w, lambda: drop(x[:, 1]) @ w, last]
    number = tf.cast(tf.train.get_global_step() % 5, tf.int32)
    return tf.switch_case(number, branches)


@model()
def outer_number(x, w):
    """It's used in both branches, one of which has the gradient of a gradient."""
    number = tf.cast(tf.train.get_global_step() % 3, tf.int32)

    def one_of(k):
        h = tf.tanh(x[:, k] @ w)
        branches = [lambda: h @ w - tf.reduce_mean(h, 0), lambda: h, lambda: tf.sin(h @ w)]
        h = tf.switch_case(number, branches)
        return h + (tf.gradients(h, x)[0][:, 1] if k else 0)

    return tf.cond(every_second(), lambda: one_of(0), lambda: one_of(1))


@model()
def loop(x, w):
    step = lambda i, h: (i + 1, tf.tanh(h @ w) + x[:, i])  # noqa: E731
    steps = lambda: tf.while_loop(lambda i, _: i < STEPS, step, (0, x[:, 0]))[1]  # noqa: E731
    return tf.cond(every_second(), steps, lambda: x[:, 1] @ w)


@model()
def loop_until_the_largest(x, w):
    """All examples together decide when it ends, if it begins at all."""
    goes_on = lambda i, h: (i < STEPS) & (tf.reduce_max(h) < 50)  # noqa: E731
    step = lambda i, h: (i + 1, 1.5 * h + x[:, i])  # noqa: E731
    steps = lambda: tf.stop_gradient(tf.while_loop(goes_on, step, (0, x[:, 0]))[1]) @ w  # noqa: E731
    return tf.cond(every_second(), steps, lambda: x[:, 1] @ w)


@model()
def in_a_loop(x, w):
    """Each branch keeps something else for its gradient, one of them examples."""
    branch = lambda i, h: tf.cond(i > 2, lambda: tf.tanh(h @ w), lambda: h * 0.5 + x[:, i])  # noqa: E731
    step = lambda i, h: (i + 1, branch(i, h))  # noqa: E731
    return tf.while_loop(lambda i, _: i < STEPS, step, (0, x[:, 0]))[1]


@model()
def one_of_three_in_a_loop(x, w):
    def step(i, h):
        branches = [lambda: tf.tanh(h @ w), lambda: h * w[0], lambda: tf.sin(h) * x[:, i]]
        return i + 1, tf.switch_case(i % 3, branches)

    return tf.while_loop(lambda i, _: i < STEPS, step, (0, x[:, 0]))[1]


@model()
def chosen_outside_of_a_loop(x, w):
    """A choice that stays, and one of the step before."""
    is_even = every_second()

    def step(i, h, is_small):
        h = tf.cond(is_even, lambda: tf.tanh(h @ w), lambda: tf.sin(h * w[0]))
        h = tf.cond(is_small, lambda: tf.sin(h @ w), lambda: tf.tanh(h) * tf.tanh(x[:, i]))
        return i + 1, h, i < 2

    return tf.while_loop(lambda i, *_: i < STEPS, step, (0, x[:, 0], is_even))[1]


@model('While', 'StatelessWhile', 'Identity', 'Shape')
def branches_in_branches_in_a_loop(x, w):
    """It may run once."""

    def step(i, h):
        inner = lambda: tf.cond(i > 3, lambda: tf.tanh(h @ w), lambda: h * w[0])  # noqa: E731
        return i + 1, tf.cond(i > 1, inner, lambda: tf.sin(h @ w))

    return tf.while_loop(lambda i, _: i < STEPS, step, (0, x[:, 0]))[1]


@model()
def calls(x, w):
    layer = tf.function(lambda h: tf.tanh(h @ w))
    return tf.cond(
        always(x), lambda: layer(x[:, 0]) - tf.reduce_mean(layer(x[:, 1]), 0), lambda: x[:, 1]
    )


@model()
def writes(x, w):
    """A branch writes once a step, and reads what it has written."""
    total = variable('total')

    def counted():
        h = x[:, 0] @ w
        with tf.control_dependencies([total.assign_add(tf.reduce_mean(h, 0))]):
            return h - total.read_value()

    return tf.cond(every_second(), counted, lambda: x[:, 1] @ w)


@model()
def writes_in_a_function(x, w):
    """Nothing in the branch waits for the write, but the function does."""
    total = variable('total')

    @tf.function(autograph=False)
    def called(x):
        def counted():
            h = x[:, 0] @ w
            total.assign_add(tf.reduce_mean(h, 0))
            return h

        return tf.cond(every_second(), counted, lambda: x[:, 1] @ w) + total

    return called(x)


@model()
def after_a_write(x, w):
    """The branch waits for a write to what it reads."""
    total = variable('total')
    with tf.control_dependencies([total.assign_add(tf.reduce_mean(x[:, 0], 0))]):
        centered = lambda: x[:, 0] @ w - total.read_value()  # noqa: E731
        return tf.cond(every_second(), centered, lambda: x[:, 1] @ w + total.read_value())


@model()
def batch_norm(x, w):
    normal = lambda: tf.layers.batch_normalization(x[:, 0] @ w, training=True)  # noqa: E731
    return tf.cond(every_second(), normal, lambda: x[:, 1] @ w)


@model()
def second_derivative(x, w):
    def squared():
        h = tf.tanh(x[:, 0] @ w)
        return h * h - tf.reduce_mean(h, 0)

    h = tf.cond(every_second(), squared, lambda: x[:, 1] @ w)
    [gradient] = tf.gradients(tf.reduce_sum(h * h), x)
    return h + 0.1 * gradient[:, 0]


@model()
def two_gradients(x, w):
    """Both use what the branches keep for gradients."""
    h = tf.cond(every_second(), lambda: drop(tf.tanh(x[:, 0] @ w)), lambda: x[:, 1] @ w)
    [first], [second] = tf.gradients(tf.reduce_mean(h), w), tf.gradients(tf.reduce_mean(h * h), w)
    return h + tf.stop_gradient(tf.reduce_sum(first * second))


@model()
def sizes(x, w):
    count = tf.shape(x)[0]

    def reshaped():
        h = tf.reshape(tf.reshape(x, [count * STEPS, WIDTH]) @ w, [count, STEPS, WIDTH])
        return h[:, 0] / tf.cast(count, tf.float32)

    return tf.cond(every_second(), reshaped, lambda: tf.zeros_like(x[:, 0]) + 1)


@model()
def several_outputs(x, w):
    """Examples, a mean, a sum and a number of examples."""
    one = lambda: (x[:, 0] @ w, tf.reduce_mean(x), tf.reduce_sum(x, [0, 1]), tf.shape(x)[0])  # noqa: E731
    other = lambda: (x[:, 1] @ w, tf.reduce_max(x), tf.zeros([WIDTH]), 7)  # noqa: E731
    h, factor, total, count = tf.cond(every_second(), one, other)
    return h * factor + total / tf.cast(count, tf.float32)


@model()
def masked(x, w):
    selected = lambda: tf.reduce_sum(tf.boolean_mask(x[:, 0], x[:, 0, 0] > 0) @ w, 0)  # noqa: E731
    return x[:, 1] @ w + tf.cond(every_second(), selected, lambda: tf.zeros([WIDTH]))


@model(*['Merge', 'Identity', 'Unique', 'UnsortedSegmentSum', 'ResourceSparseApplyMomentum'])
def looked_up(x, w):
    """One branch has a sparse gradient, and the other one none."""
    ids = tf.cast(tf.abs(x[:, 0, 0]), tf.int32) % WIDTH
    found = lambda: tf.nn.embedding_lookup(w, ids) - tf.reduce_mean(x[:, 1], 0)  # noqa: E731
    return tf.cond(every_second(), found, lambda: x[:, 1])


@model()
def handle_of_a_variable(x, w):
    """The branch that gives it stays a call; it depends on the batch only by what chooses."""
    chosen = tf.cond(always(x), lambda: w.handle, lambda: w.handle)
    read = tf.raw_ops.ReadVariableOp(resource=chosen, dtype=tf.float32)
    return x[:, 0] @ w + x[:, 1] @ tf.stop_gradient(tf.reshape(read, [WIDTH, WIDTH]))


@model()
def text(x, w):
    numbers = lambda k: lambda: tf.strings.as_string(x[:, k, 0])  # noqa: E731
    length = tf.strings.length(tf.cond(every_second(), numbers(0), numbers(1)))
    return x[:, 0] @ w + tf.cast(length, tf.float32)[:, None]


def model_fn_of(function):
    def model_fn(features, labels, mode):
        start = tf.random_normal_initializer(seed=4)
        w = tf.get_variable('w', [WIDTH, WIDTH], initializer=start, use_resource=True)
        loss = tf.losses.mean_squared_error(labels, function(features, w))
        optimizer = tf.train.MomentumOptimizer(0.05, 0.5)
        train_op = optimizer.minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


batches = functools.partial(sequences, STEPS, WIDTH, seed=1)


def check(name, sizes, **options):
    ours, _ = towers.compare(model_fn_of(MODELS[name]), batches(*sizes), 3, rtol=2e-5, **options)
    plan = steps.of_graph(ours.graph).plan
    types = {ours.graph.get_operation_by_name(op).type: why for op, (why, _) in plan.once.items()}
    assert types.keys() <= ONCE[name], types
    return ours.graph


@pytest.mark.core
@pytest.mark.parametrize('name', MODELS)
def test_as_on_one_device(name):
    """Also with fewer examples than towers."""
    check(name, (7, 4, 2, 1, 7), static=False)


@pytest.mark.no_cover
@pytest.mark.parametrize('name', MODELS)
def test_batches_of_a_static_size(name):
    check(name, (7, 7, 7, 7, 7), static=True)


@pytest.mark.no_cover
@pytest.mark.parametrize('name', MODELS)
def test_micro_batches_and_recomputation(name):
    """Of four examples a tower."""
    options = {'microbatches': 2, 'recompute': True}
    check(name, (12, 12, 7, 12), static=False, **options)


def network_in_a_branch(features, labels, mode, sliced=False):
    """All layers, and their mean, in a branch; if `sliced`, something in it needs all examples."""
    weights = [tf.get_variable(f'w{k}', [8, 8], use_resource=True) for k in range(4)]

    def network():
        h = features
        for w in weights:
            h = tf.tanh(h @ w)
        return tf.reduce_mean(h * h) + (features[0, 0] if sliced else 0.0)

    step = tf.train.get_global_step()
    loss = tf.cond(step >= 0, network, lambda: 0.0)
    train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, step)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


@pytest.mark.parametrize('sliced', [False, True], ids=['a mean', 'also the first example'])
def test_a_network_in_a_branch_is_sharded(sliced):
    model_fn = functools.partial(network_in_a_branch, sliced=sliced)
    rows = np.random.default_rng(2).normal(size=(12, 8)).astype('f')
    ours, _ = towers.compare(model_fn, [(rows, rows)] * 2, 3)
    plan = steps.of_graph(ours.graph).plan
    products = {op.name for op in plan.order if op.type == 'MatMul' and 'recompute' not in op.name}
    assert len(products) == 12 and products <= plan.ops.keys()
    share = sum(op.share for op in ops_run_once(plan, works_of(plan)))
    assert share == 0 if not sliced else 0 < share < 0.15
