"""Steps of several losses, optimizers and updates: several devices take them as one."""

import pytest
import tensorflow.compat.v1 as tf

from layers import hidden_layer, mean_square, of_losses, output_layer
from models import away_from_0, of_all_modes, predict, step
from towers import compare_modes


def momentum(rate=0.05):
    return tf.train.MomentumOptimizer(rate, 0.9)


def sums_for(pairs):
    return [
        tf.get_variable(
            v.op.name + '/sum', v.shape, v.dtype, tf.zeros_initializer(), trainable=False
        )
        for _, v in pairs
    ]


def accumulated_in_cond(loss):
    """Gradients of three steps, their mean applied inside a tf.cond."""
    optimizer = momentum()
    pairs = [(g, v) for g, v in optimizer.compute_gradients(loss) if g is not None]
    sums = sums_for(pairs)
    count = tf.get_variable('count', [], tf.int32, tf.zeros_initializer(), trainable=False)
    added = [s.assign_add(g) for s, (g, _) in zip(sums, pairs)] + [count.assign_add(1)]

    def apply():
        means = [(s.read_value() / 3, v) for s, (_, v) in zip(sums, pairs)]
        with tf.control_dependencies([optimizer.apply_gradients(means)]):
            resets = [s.assign(tf.zeros_like(s)) for s in sums] + [count.assign(0)]
        with tf.control_dependencies(resets):
            return tf.constant(True)

    with tf.control_dependencies(added):
        applied = tf.cond(tf.equal(count.read_value(), 3), apply, lambda: tf.constant(False))
    return tf.group(applied, step().assign_add(1))


class Accumulating(tf.train.Optimizer):
    """Around another: apply_gradients adds up, and applies every other time."""

    def __init__(self, optimizer):
        super().__init__(False, 'Accumulating')
        self._optimizer = optimizer

    def compute_gradients(self, *args, **kwargs):
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = list(grads_and_vars)
        sums = sums_for(pairs)
        with tf.control_dependencies([s.assign_add(g) for s, (g, _) in zip(sums, pairs)]):
            now = tf.identity(global_step.read_value())

        def apply():
            halves = [(0.5 * s.read_value(), v) for s, (_, v) in zip(sums, pairs)]
            with tf.control_dependencies([self._optimizer.apply_gradients(halves)]):
                return tf.group(*[s.assign(tf.zeros_like(s)) for s in sums])

        applied = tf.cond(tf.equal(now % 2, 1), apply, tf.no_op)
        with tf.control_dependencies([applied]):
            return global_step.assign_add(1, name=name)


def accumulating_optimizer(loss):
    return Accumulating(tf.train.AdamOptimizer(0.01, epsilon=1e-3)).minimize(loss, step())


def applied_or_skipped(loss):
    """Apply_gradients inside a tf.cond, on the reduced gradients themselves."""
    optimizer = momentum()
    pairs = optimizer.compute_gradients(loss)
    norm = tf.global_norm([g for g, _ in pairs])
    apply = tf.cond(norm < 8, lambda: optimizer.apply_gradients(pairs), tf.no_op)
    return tf.group(apply, step().assign_add(1))


def reset_now_and_then(loss):
    """Accumulators of TensorFlow 1: conditional accumulators, which outlive a step."""
    optimizer = momentum()
    pairs = optimizer.compute_gradients(loss)
    sums = sums_for(pairs)
    due = tf.equal(step() % 2, 1)
    added = [s.assign(tf.where(due, s + g, g)) for s, (g, _) in zip(sums, pairs)]
    apply = tf.cond(
        due,
        lambda: optimizer.apply_gradients([(a, v) for a, (_, v) in zip(added, pairs)]),
        tf.no_op,
    )
    with tf.control_dependencies([apply, *added]):
        return step().assign_add(1)


TRAINS = [accumulated_in_cond, accumulating_optimizer, applied_or_skipped, reset_now_and_then]


def gan_losses(features):
    with tf.variable_scope('generator'):
        fake = output_layer(hidden_layer(features)) * tf.ones([1, 3]) + features[:, ::-1]
    with tf.variable_scope('critic', reuse=tf.AUTO_REUSE):
        real_score = output_layer(hidden_layer(features + 1.0))
        fake_score = output_layer(hidden_layer(fake))
    critic = tf.reduce_mean(tf.nn.softplus(-real_score)) + tf.reduce_mean(
        tf.nn.softplus(fake_score)
    )
    return critic, tf.reduce_mean(tf.nn.softplus(-fake_score)), real_score


def variables_of(scope):
    return tf.trainable_variables(scope + '/')


def gan_in_turn(features, labels):
    """Two optimizers, of which the step says which applies its gradients."""
    del labels
    critic, generator, output = gan_losses(features)
    optimizers = momentum(0.2), momentum(0.1)
    pairs = [
        optimizers[0].compute_gradients(critic, variables_of('critic')),
        optimizers[1].compute_gradients(generator, variables_of('generator')),
    ]
    apply = tf.cond(
        tf.equal(step() % 3, 0),
        lambda: optimizers[1].apply_gradients(pairs[1]),
        lambda: optimizers[0].apply_gradients(pairs[0]),
    )
    with tf.control_dependencies([apply]):
        return critic + generator, output, step().assign_add(1)


def gan_one_after_the_other(features, labels):
    """As TF-GAN's: both train ops in a row, each with gradients of its own moment."""
    del labels
    critic, generator, output = gan_losses(features)
    pairs = [
        momentum(0.2).compute_gradients(critic, variables_of('critic')),
        momentum(0.1).compute_gradients(generator, variables_of('generator')),
    ]
    with tf.control_dependencies([g for both in pairs for g, _ in both]):
        first = momentum(0.2).apply_gradients(pairs[0])
    with tf.control_dependencies([first]):
        second = momentum(0.1).apply_gradients(pairs[1], step())
    return critic + generator, output, second


def gan_of_one_optimizer(features, labels):
    """A joint loss, its sign turned for the critic's variables by hand."""
    del labels
    critic, generator, output = gan_losses(features)
    optimizer = tf.train.AdagradOptimizer(0.1)
    pairs = optimizer.compute_gradients(critic, variables_of('critic'))
    pairs += optimizer.compute_gradients(generator, variables_of('generator'))
    return critic + generator, output, optimizer.apply_gradients(pairs, step())


def loop(x, w, steps=3):
    def body(i, x):
        return i + 1, tf.nn.tanh(tf.tensordot(x, w, 1)) + 0.5 * x

    return tf.while_loop(lambda i, _: i < steps, body, [0, x])[1]


def two_losses_of_a_loop(features, labels):
    """Minimize twice, where both losses share a loop and its variables."""
    w = tf.get_variable('w', [3, 3], use_resource=True)
    hidden = loop(features, w)
    one, two = output_layer(hidden, 'one'), output_layer(hidden, 'two')
    losses = mean_square(labels, one), tf.reduce_mean(tf.abs(two - 3 * labels))
    optimizers = momentum(), momentum(0.01)
    pairs = [o.compute_gradients(loss) for o, loss in zip(optimizers, losses)]
    with tf.control_dependencies([g for both in pairs for g, _ in both if g is not None]):
        first = optimizers[0].apply_gradients(pairs[0], step())
    with tf.control_dependencies([first]):
        second = optimizers[1].apply_gradients(pairs[1])
    return losses[0] + losses[1], one, second


def two_minimizes_of_a_branch(features, labels):
    w = tf.get_variable('w', [3, 3], use_resource=True)
    turn = tf.equal(step() % 2, 0)
    hidden = tf.cond(turn, lambda: tf.matmul(features, w), lambda: tf.nn.tanh(features @ w))
    one, two = output_layer(hidden, 'one'), output_layer(hidden, 'two')
    losses = mean_square(labels, one), tf.reduce_mean(tf.abs(two - 3 * labels))
    first = momentum().minimize(losses[0], var_list=tf.trainable_variables('one'))
    rest = tf.trainable_variables('two') + [w]
    second = momentum().minimize(losses[0] + losses[1], step(), rest)
    return losses[0] + losses[1], one, tf.group(first, second)


def colocated(features, labels):
    """Gradients with the ops that they are of: a gather stays with its variable."""
    table = tf.get_variable('table', [5, 4], use_resource=True)
    ids = tf.cast(tf.abs(features) * 10, tf.int32) % 5
    hidden = tf.reduce_sum(loop(tf.gather(table, ids), table[:4]), 1)
    output = output_layer(hidden)
    loss = mean_square(labels, output)
    train = momentum(0.002).minimize(loss, step(), colocate_gradients_with_ops=True)
    return loss, output, train


def surgery(features, labels):
    """PCGrad: of two tasks' gradients, each loses what opposes the other."""
    hidden = hidden_layer(features)
    one, two = output_layer(hidden, 'one'), output_layer(hidden, 'two')
    losses = mean_square(labels, one), tf.reduce_mean(tf.square(two + labels))
    optimizer = tf.train.AdagradOptimizer(0.1)
    variables = tf.trainable_variables()
    grads = [tf.gradients(loss, variables) for loss in losses]
    grads = [
        [tf.zeros_like(v) if g is None else g for g, v in zip(own, variables)] for own in grads
    ]
    flat = [tf.concat([tf.reshape(g, [-1]) for g in own], 0) for own in grads]
    product = tf.minimum(tf.tensordot(flat[0], flat[1], 1), 0.0)
    shares = [product / tf.reduce_sum(tf.square(f)) for f in flat]
    merged = [a - shares[1] * b + b - shares[0] * a for a, b in zip(grads[0], grads[1])]
    apply = optimizer.apply_gradients(zip(merged, variables), step())
    return losses[0] + losses[1], one, apply


def frozen_then_tuned(features, labels):
    """The lower layer joins in from the fifth step on."""
    output = output_layer(hidden_layer(features))
    loss = mean_square(labels, output)
    optimizers = [tf.train.AdamOptimizer(0.01, epsilon=1e-3) for _ in range(2)]
    upper = optimizers[0].compute_gradients(loss, tf.trainable_variables('output'))
    lower = optimizers[1].compute_gradients(loss, tf.trainable_variables('hidden'))
    tune = tf.cond(step() < 5, tf.no_op, lambda: optimizers[1].apply_gradients(lower))
    with tf.control_dependencies([tune]):
        return loss, output, optimizers[0].apply_gradients(upper, step())


LOSSES = [
    gan_in_turn,
    gan_one_after_the_other,
    gan_of_one_optimizer,
    two_losses_of_a_loop,
    two_minimizes_of_a_branch,
    colocated,
    surgery,
    frozen_then_tuned,
]
MODELS = [of_all_modes(predict, train, train.__name__) for train in TRAINS]


@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('model_fn', [*MODELS, *map(of_losses, LOSSES)], ids=lambda f: f.__name__)
def test_step(model_fn, towers, behavior):
    compare_modes(model_fn, away_from_0, towers)
