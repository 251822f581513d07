"""`tf.gradients` after the model_fn has returned: the gradients of one device."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.tf_internals import graphs
from models import floats, sgd, spec_of, weights
from towers import MODES, TRAIN, assert_close, session

X, Y = floats(7, 4), floats(7, 1)


@tf.RegisterGradient('LaterTwice')
def twice(op, gradient):
    return [2 * gradient, None][: len(op.inputs)]


def overriding(op_type):
    return tf.get_default_graph().gradient_override_map({op_type: 'LaterTwice'})


# Each part of the model goes on from a tensor in the middle, which is sin(x w).


def dense(middle, x, w):
    return tf.nn.softmax(middle @ tf.transpose(middle))


def batch_norm(middle, x, w):
    scale, offset = np.ones([2, 4], np.float32)
    normalized, *_ = tf.nn.fused_batch_norm(middle[:, None, None], scale, offset)
    return normalized[:, 0, 0] * tf.square(middle)


def custom_gradient(middle, x, w):
    @tf.custom_gradient
    def square(h):
        return tf.square(h), lambda gradient: 3 * gradient * h

    return square(middle)


def override_of_identity(middle, x, w):
    with overriding('Identity'), tf.control_dependencies([tf.no_op()]):
        return tf.identity(middle)


def override_of_reshape(middle, x, w):
    with overriding('Reshape'):
        return tf.reshape(middle, tf.shape(x))


def loop(middle, x, w):
    def body(i, state):
        return i + 1, tf.tanh(state @ w) + x

    return tf.while_loop(lambda i, _: i < 3, body, (0, middle))[1]


def joint_loop(middle, x, w):
    """All examples decide how many steps it takes."""

    def body(state):
        return [tf.abs(state * 1.5) + tf.tanh(state @ w)]

    return tf.while_loop(lambda state: tf.reduce_max(state) < 4, body, [middle])


def branch(middle, x, w):
    return tf.cond(tf.reduce_sum(middle) < 99, lambda: tf.square(middle) * x, lambda: middle - w[0])


def lookup(middle, x, w):
    return tf.gather(w, tf.cast(x[:, 0] > 0, tf.int32)) * middle


def dropout(middle, x, w):
    return tf.nn.dropout(middle, rate=0.5, seed=3) * middle


def call(middle, x, w):
    """The swish has a gradient of its own."""
    return tf.function(lambda a, b: tf.nn.swish(a @ b) * a)(middle, w)


def loop_in_call(middle, x, w):
    """The loop waits for something once its call is inlined."""
    add = lambda state: [state + state @ w * 0.1]  # noqa: E731

    def repeated(state):
        return tf.while_loop(lambda _: True, add, [state], maximum_iterations=2)

    return tf.function(repeated)(middle)


PARTS = [
    *(dense, batch_norm, custom_gradient, override_of_identity, override_of_reshape),
    *(loop, joint_loop, branch, lookup, dropout, call, loop_in_call),
]


def of_all_parts(features, labels, mode):
    losses = []
    for part in PARTS:
        with tf.name_scope(part.__name__):
            w = weights(part.__name__, 4, 4)
            last = part(tf.sin(features @ w, 'middle'), features, w)
            losses.append(tf.reduce_mean(tf.square(tf.reduce_sum(last, 1, keepdims=True) - labels)))
    loss = tf.add_n(losses)
    return spec_of(mode, loss, sgd(loss, 0.01))


def gradients_of(graph, loss):
    """Of the loss, by what they are with respect to, and of one of them, which has two."""
    xs = {'x': graph.get_tensor_by_name('x:0')}
    for variable, part in zip(tf.trainable_variables(), PARTS):
        xs[f'variable of {part.__name__}'] = variable
        xs[f'middle of {part.__name__}'] = graph.get_tensor_by_name(f'{part.__name__}/middle:0')
    gradients = dict(zip(xs, tf.gradients(loss, list(xs.values()))))

    slopes = [gradients[f'middle of {name}'] for name in ('batch_norm', 'override_of_identity')]
    gradients['second'] = tf.gradients(tf.square(slopes), xs['x'])[0]
    return {name: tf.convert_to_tensor(gradient) for name, gradient in gradients.items()}


def run(devices, microbatches=1, **options):
    """All gradients; 0 devices run the model_fn as it is."""
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(7)
        tf.train.get_or_create_global_step()
        features = tf.placeholder_with_default(X, [None, 4], 'x')
        labels = tf.placeholder_with_default(Y, [None, 1])
        model_fn = of_all_parts
        if devices:
            options.update(devices=devices, microbatches=microbatches)
            model_fn = estimator_mgpu.replicate(model_fn, **options)
        spec = model_fn(features=features, labels=labels, mode=TRAIN)
        gradients = gradients_of(graph, spec.loss)
        with session(devices, microbatches=microbatches) as sess:
            sess.run(tf.global_variables_initializer())
            return sess.run(gradients)


@pytest.mark.core
def test_gradients_of_the_loss(behavior):
    options = dict(devices=3)
    if behavior == 'v1':
        options = dict(devices=2, microbatches=2, recompute=True)
    found = run(**options)
    for name, expected in run(0).items():
        assert_close(found[name], expected, 1e-4, name)


def linear(middle_of=tf.identity):
    """A model_fn of the mean of a weight times the features, and of what is in the middle."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [1, 4], initializer=tf.ones_initializer())
        middle = middle_of(features * w)
        loss = tf.reduce_mean(middle)
        predictions = {'middle': middle, 'loss': loss}
        with overriding('IdentityN'):
            [loss] = tf.identity_n([loss])
        train_op = sgd(loss) if mode == TRAIN else None
        return tf.estimator.EstimatorSpec(mode, predictions, loss, train_op)

    return model_fn


class GradientHook(tf.train.SessionRunHook):
    """Takes the gradient of the loss with respect to the weight."""

    def begin(self):
        [loss] = tf.get_collection(tf.GraphKeys.LOSSES)
        self.tensors = tf.gradients(loss, tf.trainable_variables())

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(self.tensors)

    def after_run(self, run_context, run_values):
        [self.gradient] = run_values.results


@pytest.mark.core
def test_a_hook():
    """The gradient is twice the mean of a feature, by 4 as the loss is a mean of all entries."""
    hook = GradientHook()
    estimator = estimator_mgpu.Estimator(linear(), devices=2)
    estimator.train(lambda: tf.data.Dataset.from_tensors((X, Y)), [hook])
    assert_close(hook.gradient, 2 * X.mean(0, keepdims=True) / 4, 1e-5)


@contextlib.contextmanager
def built(model_fn, mode=TRAIN, devices=2, **options):
    """A replicated model_fn's EstimatorSpec, and a function that returns what tensors are."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        replicated = estimator_mgpu.replicate(model_fn, devices=devices, **options)
        features = tf.placeholder_with_default(X, [None, 4])
        spec = replicated(features=features, labels=tf.constant(Y), mode=mode)

        def values_of(*tensors):
            with session(devices) as sess:
                sess.run(tf.global_variables_initializer())
                return sess.run(tensors)

        yield spec, values_of


def draw(x):
    return x * tf.random_uniform(tf.shape(x))


@pytest.mark.parametrize('draw', [draw, tf.function(draw)], ids=['op', 'function'])
def test_what_was_drawn(draw, behavior):
    """Each device draws numbers for its examples, and gradients are those for these numbers."""
    with built(linear(draw), MODES.EVAL) as (spec, values_of):
        gradients = tf.gradients(spec.loss, tf.trainable_variables())
        drawn, [gradient] = values_of(spec.predictions['middle'], gradients)
    assert_close(gradient, 2 * drawn.mean(0, keepdims=True) / 4, 1e-5)


def steps_of(x, w):
    return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x @ w), (0, x))[1]


def branch_of(x, w):
    return tf.cond(tf.reduce_sum(x) < 99, lambda: x @ w @ w, lambda: x)


@pytest.mark.parametrize('inner', [steps_of, branch_of])
def test_reads_before_writes(inner, behavior):
    """A loop that runs once more for gradients reads its variable before that is written."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', initializer=np.eye(4, dtype=np.float32), use_resource=True)
        loss = tf.reduce_mean(inner(features, w))
        return spec_of(mode, loss, sgd(loss))

    with built(model_fn) as (spec, values_of):
        gradients = tf.gradients(spec.loss, tf.trainable_variables())
        waits = [op for op in graphs.ancestors([spec.train_op]) if op.name.endswith('/again')]
        # Of a branch of TensorFlow 1, towers give what gradients need.
        assert waits or (behavior == 'v1' and inner is branch_of)
        [gradient], _ = values_of(gradients, spec.train_op)
    # Each w, of x w w, has the same gradient: the sums of features, by 28 as in the mean.
    assert_close(gradient, np.tile(2 * X.sum(0)[:, None] / 28, [1, 4]), 1e-5)


def test_results_of_the_model_fn():
    """They are tensors of their own: a gradient may be taken with respect to one.

    The loss has the value of a prediction, and another gradient.
    """
    with built(linear()) as (spec, values_of):
        middle = spec.predictions['middle']
        of_loss = tf.gradients(spec.loss * 5, middle)
        of_prediction = tf.gradients(spec.predictions['loss'] * 5, middle)
        stopped = tf.gradients(
            spec.loss, [middle, tf.trainable_variables()[0]], stop_gradients=middle
        )
        found = values_of(of_loss[0], of_prediction[0], stopped[0])
    for gradient, each in zip(found, (10, 5, 2)):
        np.testing.assert_allclose(gradient, np.full([7, 4], each / 28), 1e-5)
    assert stopped[1] is None


def test_in_a_function(behavior):
    with built(linear()) as (spec, values_of):
        middle = spec.predictions['middle']
        loss = spec.loss
        gradient = tf.cond(loss < 9, lambda: tf.gradients(loss, middle)[0], lambda: middle)
        [found] = values_of(gradient)
    np.testing.assert_allclose(found, np.full([7, 4], 2 / 28), 1e-5)


def test_two_models():
    """The second one goes on from a result of the first one, and trains both."""

    def second(features, labels, mode):
        loss = tf.reduce_mean(tf.square(features))
        return spec_of(mode, loss, sgd(loss, 1.0))

    with built(linear()) as (spec, values_of):
        [w] = tf.trainable_variables()
        replicated = estimator_mgpu.replicate(second, devices=2)
        spec = replicated(features=spec.predictions['middle'], labels=None, mode=TRAIN)
        [later] = tf.gradients(spec.loss, w)
        with tf.control_dependencies([later, spec.train_op]):
            trained = tf.identity(w)
        gradient, found = values_of(later, trained)
    expected = 2 * np.square(X).mean(0, keepdims=True) / 4
    assert_close(gradient, expected, 1e-5)
    assert_close(found, 1 - expected, 1e-5)


def test_a_gradient_of_a_gradient_that_uses_copies():
    """Copies of forward ops begin at barriers, and those of unknown rank stop gradients."""

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', initializer=0.5)
        net = tf.placeholder_with_default(features * w, None)
        for _ in range(6):
            net = tf.tanh(net)
        loss = tf.reduce_mean(net)
        [slope] = tf.gradients(loss, w)
        train_op = tf.train.GradientDescentOptimizer(0.1).apply_gradients([(slope, w)])
        return tf.estimator.EstimatorSpec(mode, {'slope': slope}, loss, train_op)

    found = []
    for recompute in (False, True):
        with built(model_fn, devices=1, recompute=recompute) as (spec, values_of):
            [w] = tf.trainable_variables()
            found += values_of(tf.gradients(spec.predictions['slope'], w)[0])
            barriers = [
                op for op in w.graph.get_operations() if op.name.startswith('recompute/barrier')
            ]
            assert bool(barriers) == recompute
    assert_close(*found, 1e-5)


def test_batch_norm_of_each_device(behavior):
    """The loss follows from other statistics than the user's op has."""

    def model_fn(features, labels, mode):
        w = weights('w', 4, 4)
        v = weights('v', 4)
        loss = tf.reduce_mean(batch_norm(features @ w, features, w) + v)
        return spec_of(mode, loss, sgd(loss))

    with built(model_fn, batch_norm='device') as (spec, values_of):
        w, v = tf.trainable_variables()
        [gradient] = values_of(tf.gradients(spec.loss, v)[0])
        np.testing.assert_allclose(gradient, [0.25] * 4, 1e-5)
        with pytest.raises(ValueError, match="FusedBatchNormV3 normalizes .* batch_norm='device'"):
            tf.gradients(spec.loss, w)
