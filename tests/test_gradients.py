"""Gradients that models change, mix and use, and ways to ask for them: as on one device."""

import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from layers import hidden_layer, mean_square, of_losses, output_layer
from models import away_from_0, of_all_modes, spec_of, step
from towers import compare, compare_modes

# Models: forward(features) -> output.


def custom_gradient_of_variables(features):
    """A gradient function with `variables`, as reversible layers have."""
    with tf.variable_scope('scope', use_resource=True):

        @tf.custom_gradient
        def layer(x):
            w = tf.get_variable('w', [3, 4])
            y = tf.nn.tanh(tf.matmul(x, w))

            def grad(dy, variables=None):
                dz = dy * (1 - tf.square(y))
                assert len(variables) == 1
                return tf.matmul(dz, w, transpose_b=True), [2 * tf.matmul(x, dz, transpose_a=True)]

            return y, grad

        return output_layer(layer(features))


def recomputed_twice(features):
    first = tf.get_variable('first', [3, 4], use_resource=True)
    second = tf.get_variable('second', [4, 4], use_resource=True)
    hidden = tf.recompute_grad(lambda x: tf.nn.tanh(tf.matmul(x, first)))(features)
    hidden = tf.recompute_grad(lambda x: tf.nn.tanh(tf.matmul(x, second)))(hidden)
    return output_layer(hidden)


def jacobian(features):
    with tf.GradientTape() as tape:
        tape.watch(features)
        hidden = hidden_layer(features, size=2)
    slopes = tape.batch_jacobian(hidden, features)
    return output_layer(tf.reshape(tf.nn.tanh(slopes), [-1, 6]))


MODELS = [
    custom_gradient_of_variables,
    recomputed_twice,
    jacobian,
]


@pytest.mark.parametrize('model_fn', map(of_all_modes, MODELS), ids=lambda f: f.__name__)
def test_model(model_fn, behavior):
    compare_modes(model_fn, away_from_0, 3)


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


def grad_ys_of_variables(features, labels):
    """Policy gradients: of a score, from an advantage for each row."""
    output = output_layer(hidden_layer(features))
    variables = tf.trainable_variables()
    advantages = tf.stop_gradient(labels - output) / tf.cast(tf.shape(output)[0], tf.float32)
    grads = tf.gradients(output, variables, -advantages)
    train_op = tf.train.AdagradOptimizer(0.1).apply_gradients(zip(grads, variables), step())
    return mean_square(labels, output), output, train_op


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


LOSSES = [
    gradient_penalty,
    grad_ys_of_variables,
    persistent_tape,
]


@pytest.mark.parametrize('model_fn', map(of_losses, LOSSES), ids=lambda f: f.__name__)
def test_losses(model_fn, behavior):
    compare_modes(model_fn, away_from_0, 3)


def square(features, labels, own):
    return tf.square(tf.matmul(tf.nn.tanh(tf.matmul(features, own[0])), own[1]) - labels)


def two_variables():
    w = tf.get_variable('w', [3, 4], use_resource=True)
    return [w, tf.get_variable('v', [4, 1], use_resource=True)]


def clipped_by_row(features, labels, mode, **options):
    """The gradient of each row is clipped, over all variables, as for differential privacy."""
    own = two_variables()
    with tf.GradientTape() as tape:
        losses = square(features, labels, own)[:, 0]
    grads = tape.jacobian(losses, own, **options)
    norms = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g), [1, 2]) for g in grads]))
    factors = 1.0 / tf.maximum(norms, 1.0)
    clipped = [tf.reduce_mean(g * factors[:, None, None], 0) for g in grads]
    optimizer = tf.train.MomentumOptimizer(0.05, 0.9)
    train_op = optimizer.apply_gradients(zip(clipped, own), step())
    return spec_of(mode, tf.reduce_mean(losses), train_op)


def clipped_by_row_in_a_loop(features, labels, mode):
    return clipped_by_row(features, labels, mode, experimental_use_pfor=False)


def newton(features, labels, mode):
    """Steps by the second derivatives of the loss."""
    w = tf.get_variable('w', [3])
    loss = tf.reduce_mean(tf.log(tf.cosh(tf.linalg.matvec(features, w) - labels[:, 0])))
    [grad], [hessian] = tf.gradients(loss, w), tf.hessians(loss, w)
    move = tf.linalg.solve(hessian + 0.1 * tf.eye(3), grad[:, None])[:, 0]
    return spec_of(mode, loss, tf.group(w.assign_sub(0.1 * move), step().assign_add(1)))


def forwards(features, labels, mode):
    """A derivative in a direction is a term of the loss."""
    own = two_variables()
    with tf2.autodiff.ForwardAccumulator(own[0], 0.1 * tf.ones_like(own[0])) as accumulator:
        loss = tf.reduce_mean(square(features, labels, own))
    loss += accumulator.jvp(loss)
    return spec_of(mode, loss, tf.train.AdamOptimizer(0.01).minimize(loss, step()))


@pytest.mark.parametrize('rows, static', [(12, True), (7, False), (2, False)])
@pytest.mark.parametrize(
    'model_fn',
    [clipped_by_row, clipped_by_row_in_a_loop, newton, forwards],
    ids=lambda f: f.__name__,
)
def test_derivatives_of_rows(model_fn, rows, static):
    compare(model_fn, [(x[:rows], y[:rows]) for x, y in away_from_0()[:4]], 3, static=static)
