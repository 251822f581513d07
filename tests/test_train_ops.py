"""What users do between gradients and variables, own optimizers included: as on one device."""

import pytest
import tensorflow.compat.v1 as tf

from layers import hidden_layer, of_losses, output_layer
from models import away_from_0, of_all_modes, predict, step
from towers import compare_modes


def momentum():
    return tf.train.MomentumOptimizer(0.05, 0.9)


class AdamWithDecay(tf.train.Optimizer):
    """Written from scratch: variables for moments, and assignments."""

    def __init__(self, rate, decay, exclude):
        super().__init__(False, 'AdamWithDecay')
        self._options = rate, decay, exclude

    def _moment(self, variable, name):
        name = f'{variable.op.name}/{name}'
        zeros = tf.zeros_initializer()
        return tf.get_variable(name, variable.shape, tf.float32, zeros, trainable=False)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        rate, decay, exclude = self._options
        assignments = []
        for grad, variable in grads_and_vars:
            m, v = (self._moment(variable, name) for name in ('adam_m', 'adam_v'))
            next_m = 0.9 * m + 0.1 * grad
            next_v = 0.99 * v + 0.01 * tf.square(grad)
            update = next_m / (tf.sqrt(next_v) + 1e-2)
            if not any(part in variable.op.name for part in exclude):
                update += decay * variable
            assignments += [
                tf.assign(variable, variable - rate * update),
                m.assign(next_m),
                v.assign(next_v),
            ]
        return tf.group(*assignments, name=name)


def adam_with_decay(loss):
    """As BERT's: tf.gradients, clipped, and the step counted outside."""
    optimizer = AdamWithDecay(0.01, 0.1, exclude=['net/b'])
    variables = tf.trainable_variables()
    clipped, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 1.0)
    apply = optimizer.apply_gradients(zip(clipped, variables))
    return tf.group(apply, step().assign(step() + 1))


def warmed_up(loss):
    now = step()
    rate = tf.train.polynomial_decay(0.1, now, 8, 0.01, power=2.0)
    share = tf.cast(now, tf.float32) / 4
    rate = tf.cond(now < 4, lambda: share * 0.1, lambda: rate)
    return tf.train.MomentumOptimizer(rate, 0.9).minimize(loss, now)


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


def gan_one_after_the_other(features, labels):
    """As TF-GAN's: both train ops in a row, each with gradients of its own moment."""
    del labels
    critic, generator, output = gan_losses(features)
    pairs = [
        momentum().compute_gradients(critic, variables_of('critic')),
        momentum().compute_gradients(generator, variables_of('generator')),
    ]
    with tf.control_dependencies([g for both in pairs for g, _ in both]):
        first = momentum().apply_gradients(pairs[0])
    with tf.control_dependencies([first]):
        second = momentum().apply_gradients(pairs[1], step())
    return critic + generator, output, second


TRAINS = {f.__name__: f for f in (adam_with_decay, warmed_up, accumulated_in_cond)}
MODELS = [of_all_modes(predict, train, name) for name, train in TRAINS.items()]
MODELS.append(of_losses(gan_one_after_the_other))


@pytest.mark.parametrize('model_fn', MODELS, ids=lambda f: f.__name__)
def test_train_op(model_fn, behavior):
    compare_modes(model_fn, away_from_0, 3)
