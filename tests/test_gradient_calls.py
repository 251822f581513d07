"""Every way to ask for gradients, and losses of gradients, give the numbers of one device."""

import pytest
import tensorflow.compat.v1 as tf

from layers import hidden_layer, mean_square, of_losses, output_layer
from models import away_from_0, batches, spec_of, step
from towers import compare, compare_modes, train

# Losses: losses(features, labels) -> loss, output and a train_op of its own, if it has one.


def gradient_penalty(features, labels):
    """WGAN's: slopes where real and generated rows are mixed, each row in its own proportion."""
    del labels
    fake = tf.matmul(features[:, ::-1], tf.get_variable('generator', [3, 3]))

    def critic(x):
        with tf.variable_scope('critic', reuse=tf.AUTO_REUSE):
            return output_layer(hidden_layer(x) + 0.5)

    share = tf.sigmoid(10 * features[:, :1])
    [slope] = tf.gradients(critic(share * features + (1 - share) * fake), features)
    norms = tf.sqrt(tf.reduce_sum(tf.square(slope), 1) + 1e-6)
    penalty = tf.reduce_mean(tf.square(norms - 1))
    apart = tf.reduce_mean(critic(fake)) - tf.reduce_mean(critic(features))
    critic_loss = apart + 10 * penalty
    generator_loss = -tf.reduce_mean(critic(fake))
    optimizers = [tf.train.RMSPropOptimizer(0.01, epsilon=1e-2) for _ in range(2)]
    # The critic is read before it is written.
    with tf.control_dependencies([generator_loss]):
        of_critic = tf.trainable_variables('critic')
        first = optimizers[0].minimize(critic_loss, var_list=of_critic)
    with tf.control_dependencies([first]):
        of_generator = tf.trainable_variables('generator')
        second = optimizers[1].minimize(generator_loss, step(), of_generator)
    return critic_loss + 3 * generator_loss + 20, critic(features), second


def path_length(features, labels):
    """StyleGAN's: a product with fixed noise, differentiated, its norm held at a moving average."""
    hidden = hidden_layer(features)
    noise = tf.sin(7 * features)
    [slope] = tf.gradients(tf.reduce_sum(hidden * noise[:, :1]), features)
    lengths = tf.sqrt(tf.reduce_sum(tf.square(slope), 1))
    output = output_layer(hidden)
    loss = mean_square(labels, output) + tf.reduce_mean(tf.square(lengths - 0.3))
    return loss, output


def grad_ys(features, labels):
    """Gradients of two tensors, each from a given start."""
    hidden = hidden_layer(features)
    output = output_layer(hidden)
    [slope] = tf.gradients([hidden, output], features, [0.1 * hidden, tf.square(output)])
    return mean_square(labels, output) + tf.reduce_mean(tf.square(slope)), output


def grad_ys_of_variables(features, labels):
    """Policy gradients: of a score, from an advantage for each row."""
    output = output_layer(hidden_layer(features))
    variables = tf.trainable_variables()
    advantages = tf.stop_gradient(labels - output) / tf.cast(tf.shape(output)[0], tf.float32)
    grads = tf.gradients(output, variables, -advantages)
    train_op = tf.train.AdagradOptimizer(0.1).apply_gradients(zip(grads, variables), step())
    return mean_square(labels, output), output, train_op


def stop_gradients(features, labels):
    hidden = hidden_layer(features)
    output = output_layer(hidden) + output_layer(tf.nn.tanh(hidden), 'other')
    loss = mean_square(labels, output)
    variables = tf.trainable_variables()
    grads = tf.gradients(loss, variables, stop_gradients=[hidden])
    assert grads[0] is None
    stopped = zip(grads[1:], variables[1:])
    first = tf.train.MomentumOptimizer(0.05, 0.9).apply_gradients(stopped, step())
    with tf.control_dependencies([first]):
        rest = tf.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=variables[:1])
    return loss, output, rest


def stopped_at_a_variable(features, labels):
    """Partial derivatives: the other variable, computed from this one, is held."""
    w = tf.get_variable('w', [3, 1], use_resource=True)
    doubled = w * 2
    output = tf.matmul(features, w) + tf.matmul(tf.square(features), doubled)
    loss = mean_square(labels, output)
    grads = tf.gradients(loss, [w], stop_gradients=[doubled])
    apply = tf.train.GradientDescentOptimizer(0.1).apply_gradients(zip(grads, [w]), step())
    return loss, output, apply


def aggregated(features, labels):
    output = output_layer(hidden_layer(features)) + output_layer(
        hidden_layer(features * 2, 'two'), 'of_two'
    )
    loss = mean_square(labels, output) + tf.reduce_mean(tf.abs(output))
    methods = tf.AggregationMethod
    optimizer = tf.train.AdamOptimizer(0.01, epsilon=1e-3)
    halves = [
        optimizer.compute_gradients(0.5 * loss, aggregation_method=method)
        for method in (methods.EXPERIMENTAL_TREE, methods.EXPERIMENTAL_ACCUMULATE_N)
    ]
    sums = [(a + b, v) for (a, v), (b, _) in zip(*halves)]
    return loss, output, optimizer.apply_gradients(sums, step())


def unconnected(features, labels):
    tf.get_variable('unused', [3])
    output = output_layer(hidden_layer(features))
    loss = mean_square(labels, output)
    variables = tf.trainable_variables()
    zero = tf.UnconnectedGradients.ZERO
    grads = tf.gradients(loss, variables, unconnected_gradients=zero)
    assert all(g is not None for g in grads)
    apply = tf.train.MomentumOptimizer(0.05, 0.9).apply_gradients(zip(grads, variables), step())
    return loss, output, apply


def several_losses(features, labels):
    """Gradients of a list of losses, a mean and a sum, are those of their sum."""
    output = output_layer(hidden_layer(features))
    mean, total = mean_square(labels, output), 0.01 * tf.reduce_sum(tf.abs(output - labels))
    variables = tf.trainable_variables()
    grads = tf.gradients([mean, total, tf.nn.l2_loss(variables[0])], variables)
    apply = tf.train.AdagradOptimizer(0.1).apply_gradients(zip(grads, variables), step())
    return mean + total, output, apply


def of_rows(features, labels):
    """A loss with rows is minimized as their sum."""
    output = output_layer(hidden_layer(features))
    each = tf.square(output - labels)
    return tf.reduce_sum(each), output, tf.train.AdagradOptimizer(0.1).minimize(each, step())


def persistent_tape(features, labels):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(features)
        hidden = hidden_layer(features)
        output = output_layer(hidden)
        loss = mean_square(labels, output)
        slope = tape.gradient(output, features)
        loss += tf.reduce_mean(tf.square(slope))
        small = tf.nn.l2_loss(hidden) * 0.01
    variables = tf.trainable_variables()
    grads = tape.gradient(loss, variables)
    more = tape.gradient(small, variables)
    assert more[1] is None
    grads[0] += more[0]
    apply = tf.train.AdagradOptimizer(0.1).apply_gradients(zip(grads, variables), step())
    return loss, output, apply


def tape_of_nests(features, labels):
    """Sources in a dict, a target of several tensors, and a gradient to start from."""
    output = None
    with tf.GradientTape() as tape:
        output = output_layer(hidden_layer(features))
        loss = mean_square(labels, output)
        doubled = 2.0 * loss
    w, v = tf.trainable_variables()
    grads = tape.gradient([loss, doubled], {'w': w, 'v': v}, [tf.constant(0.5), tf.constant(0.25)])
    pairs = [(grads['w'], w), (grads['v'], v)]
    return loss, output, tf.train.AdagradOptimizer(0.1).apply_gradients(pairs, step())


def tape_of_a_function(features, labels):
    w = tf.get_variable('w', [3, 1], use_resource=True)

    @tf.function
    def predict(x):
        return tf.nn.tanh(tf.matmul(x, w))

    with tf.GradientTape() as tape:
        output = predict(features)
        loss = mean_square(labels, output)
    grads = tape.gradient(loss, [w])
    return loss, output, tf.train.AdagradOptimizer(0.1).apply_gradients(zip(grads, [w]), step())


def normalized_losses(features, labels):
    """GradNorm's weights of two tasks, from norms of their gradients of a shared layer."""
    hidden = hidden_layer(features)
    one, two = output_layer(hidden, 'one'), output_layer(hidden, 'two')
    losses = [mean_square(labels, one), tf.reduce_mean(tf.abs(labels * 2 - two))]
    shared = tf.trainable_variables()[:1]
    norms = [tf.norm(tf.gradients(loss, shared)[0]) for loss in losses]
    weights = [tf.stop_gradient(tf.add_n(norms) / (2 * norm)) for norm in norms]
    loss = tf.add_n([weight * loss for weight, loss in zip(weights, losses)])
    return loss, one


LOSSES = [
    gradient_penalty,
    path_length,
    grad_ys,
    grad_ys_of_variables,
    stop_gradients,
    stopped_at_a_variable,
    aggregated,
    unconnected,
    several_losses,
    of_rows,
    persistent_tape,
    tape_of_nests,
    tape_of_a_function,
    normalized_losses,
]


UNEVEN = [grad_ys, grad_ys_of_variables, several_losses, of_rows, persistent_tape]


@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('model_fn', map(of_losses, LOSSES), ids=lambda f: f.__name__)
def test_losses(model_fn, towers, behavior):
    compare_modes(model_fn, away_from_0, towers)


def hessian_vector(features, labels):
    loss = mean_square(labels, output_layer(hidden_layer(features)))
    variables = tf.trainable_variables()
    grads = tf.gradients(loss, variables)
    return tf.gradients(grads, variables, grad_ys=[tf.ones_like(g) for g in grads])


def hessian_vector_on_tapes(features, labels):
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = mean_square(labels, output_layer(hidden_layer(features)))
        variables = tf.trainable_variables()
        grads = inner.gradient(loss, variables)
    return outer.gradient(grads, variables)


@pytest.mark.parametrize('second', [hessian_vector, hessian_vector_on_tapes])
def test_gradients_of_reduced_gradients(second):
    def model_fn(features, labels, mode):
        second(features, labels)

    with pytest.raises(ValueError, match='(?s)depends on a gradient.*replicate\\(devices=1\\)'):
        train(model_fn, away_from_0(), 3)


def ten_rows():
    return batches(10)


@pytest.mark.parametrize('model_fn', map(of_losses, UNEVEN), ids=lambda f: f.__name__)
def test_batch_that_does_not_divide(model_fn):
    compare_modes(model_fn, ten_rows, 4, static=False)


@pytest.mark.parametrize('towers', [3, 4])
@pytest.mark.parametrize('norm', ['l2', 'greatest'])
def test_normed_gradients_of_fewer_rows_than_towers(norm, towers, behavior):
    """A gradient of zeros, on a device without rows, would have no direction."""

    def model_fn(features, labels, mode):
        hidden = hidden_layer(features)
        loss = mean_square(labels, output_layer(hidden))
        slope = tf.stop_gradient(tf.gradients(loss, hidden)[0])
        by = tf.norm if norm == 'l2' else lambda x, **options: tf.reduce_max(tf.abs(x), **options)
        slope /= by(slope, axis=1, keepdims=True)
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
            loss += mean_square(labels, output_layer(hidden + 0.3 * slope))
        train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, step())
        return spec_of(mode, loss, train_op)

    compare(
        model_fn,
        [(x[:rows], y[:rows]) for (x, y), rows in zip(batches(), (5, 2, 1))],
        towers,
        static=False,
    )
