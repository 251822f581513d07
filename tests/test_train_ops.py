"""What users do between gradients and variables: several devices do it as one."""

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import away_from_0, of_all_modes, predict, step
from towers import compare_modes


def momentum():
    return tf.train.MomentumOptimizer(0.05, 0.9)


def adam():
    return tf.train.AdamOptimizer(0.01, epsilon=1e-3)


def changed(change):
    """Returns train(loss) that applies what `change(gradients)` makes of them."""

    def train(loss):
        optimizer = adam()
        grads, variables = zip(*optimizer.compute_gradients(loss))
        return optimizer.apply_gradients(zip(change(grads), variables), step())

    return train


def each(change):
    return changed(lambda grads: [change(g) for g in grads])


def by_average_norm(grad):
    return tf.clip_by_average_norm(grad, 0.001)


def noisy(grad):
    """With the same noise in every run, another in every step and for every gradient."""
    seed = tf.stack([tf.cast(step(), tf.int32), len(grad.shape) * 7 + int(grad.shape[0])])
    return grad + 0.1 * tf.random.stateless_normal(tf.shape(grad), seed)


def if_finite(grads):
    finite = tf.reduce_all([tf.reduce_all(tf.is_finite(g)) for g in grads])
    return [tf.where(finite, g, tf.zeros_like(g)) for g in grads]


def centralized(grad):
    return grad - tf.reduce_mean(grad, 0, keepdims=True) * 0.5


def by_norm_of_variable(loss):
    """Adaptive clipping: at a share of the variable's own norm."""
    optimizer = momentum()
    clipped = []
    for grad, variable in optimizer.compute_gradients(loss):
        most = 0.05 * tf.maximum(tf.norm(variable), 1e-3)
        clipped.append((grad * (most / tf.maximum(tf.norm(grad), most)), variable))
    return optimizer.apply_gradients(clipped, step())


def by_moving_norm(loss):
    """Clips at a moving average of the gradients' norm, which is a variable."""
    optimizer = momentum()
    grads, variables = zip(*optimizer.compute_gradients(loss))
    norm = tf.global_norm(grads)
    average = tf.get_variable('average_norm', [], initializer=tf.ones_initializer())
    update = average.assign(0.9 * average + 0.1 * norm)
    with tf.control_dependencies([update]):
        clipped, _ = tf.clip_by_global_norm(grads, 0.5 * update, norm)
    return optimizer.apply_gradients(zip(clipped, variables), step())


class Clipping(tf.train.Optimizer):
    """Around another, clipping in apply_gradients."""

    def __init__(self, optimizer, norm):
        super().__init__(False, 'Clipping')
        self._optimizer = optimizer
        self._norm = norm

    def compute_gradients(self, *args, **kwargs):
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        grads, variables = zip(*grads_and_vars)
        clipped, _ = tf.clip_by_global_norm(grads, self._norm)
        return self._optimizer.apply_gradients(zip(clipped, variables), global_step, name)


class ClippingComputed(tf.train.AdamOptimizer):
    """Clipping in compute_gradients."""

    def compute_gradients(self, *args, **kwargs):
        pairs = super().compute_gradients(*args, **kwargs)
        return [(None if g is None else tf.clip_by_norm(g, 0.01), v) for g, v in pairs]


def clipping(loss):
    return Clipping(adam(), 0.1).minimize(loss, step())


def clipping_computed(loss):
    tf.get_variable('unused', [2])
    return ClippingComputed(0.01, epsilon=1e-3).minimize(loss, step())


def clipping_in_tower_optimizer(loss):
    inner = Clipping(adam(), 0.1)
    return estimator_mgpu.TowerOptimizer(lambda: inner).minimize(loss, step())


def tower_optimizer_in_clipping(loss):
    return Clipping(estimator_mgpu.TowerOptimizer(adam()), 0.1).minimize(loss, step())


class Lars(tf.train.MomentumOptimizer):
    """Scales each gradient by the norms of it and its variable; decays but biases."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        scaled = []
        for grad, variable in grads_and_vars:
            if '/b' not in variable.op.name:
                grad += 1e-3 * variable
                norm = tf.norm(variable)
                ratio = tf.where(norm > 0, 0.1 * norm / (tf.norm(grad) + 1e-6), 1.0)
                grad = ratio * grad
            scaled.append((grad, variable))
        return super().apply_gradients(scaled, global_step, name)


class Lamb(tf.train.Optimizer):
    """Written from scratch: variables for moments, and assignments."""

    def __init__(self, rate, decay=0.0, trust=True, exclude=()):
        super().__init__(False, 'Lamb')
        self._options = rate, decay, trust, exclude

    def _moment(self, variable, name):
        name = f'{variable.op.name}/{name}'
        zeros = tf.zeros_initializer()
        return tf.get_variable(name, variable.shape, tf.float32, zeros, trainable=False)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        rate, decay, trust, exclude = self._options
        assignments = []
        for grad, variable in grads_and_vars:
            if grad is None:
                continue
            m, v = (self._moment(variable, name) for name in ('lamb_m', 'lamb_v'))
            next_m = 0.9 * m + 0.1 * grad
            next_v = 0.99 * v + 0.01 * tf.square(grad)
            update = next_m / (tf.sqrt(next_v) + 1e-2)
            if not any(part in variable.op.name for part in exclude):
                update += decay * variable
            if trust:
                norms = tf.norm(variable), tf.norm(update)
                usable = tf.logical_and(norms[0] > 0, norms[1] > 0)
                update *= tf.where(usable, norms[0] / norms[1], 1.0)
            assignments += [
                tf.assign(variable, variable - rate * update),
                m.assign(next_m),
                v.assign(next_v),
            ]
        if global_step is not None:
            assignments.append(tf.assign_add(global_step, 1))
        return tf.group(*assignments, name=name)


def lars(loss):
    return Lars(0.1, 0.9).minimize(loss, step())


def lamb(loss):
    return Lamb(0.01, 0.01).minimize(loss, step())


def adam_with_decay(loss):
    """As BERT's: tf.gradients, clipped, and the step counted outside."""
    optimizer = Lamb(0.01, 0.1, trust=False, exclude=['net/b'])
    variables = tf.trainable_variables()
    clipped, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 1.0)
    apply = optimizer.apply_gradients(zip(clipped, variables))
    return tf.group(apply, step().assign(step() + 1))


def decayed_afterwards(loss):
    """Decoupled weight decay, once the gradients are applied."""
    with tf.control_dependencies([adam().minimize(loss, step())]):
        decay = [v.assign_sub(0.01 * v.read_value()) for v in tf.trainable_variables()]
    return tf.group(*decay)


def rates_for_variables(loss):
    """Scaled gradients, and a name that decides."""
    optimizer = momentum()
    rates = {'net/w': 0.1, 'net/b': 2.0}
    pairs = [(g * rates.get(v.op.name, 1.0), v) for g, v in optimizer.compute_gradients(loss)]
    return optimizer.apply_gradients(pairs, step())


def groups_of_variables(loss):
    """One gradients call, an optimizer and a rate for each group."""
    variables = tf.trainable_variables()
    # Without tf.tuple, TensorFlow 1's variables may change before all gradients are there.
    gradients = tf.tuple(tf.gradients(loss, variables))
    grads = dict(zip([v.op.name for v in variables], gradients))
    applied = [
        optimizer.apply_gradients([(grads[v.op.name], v) for v in variables if name in v.op.name])
        for name, optimizer in (('/w', adam()), ('/b', momentum()), ('/v', adam()))
    ]
    with tf.control_dependencies(applied):
        return step().assign_add(1)


def lookahead(loss):
    """Slow weights that the fast ones go back to every third step."""
    train = adam().minimize(loss, step())
    variables = tf.trainable_variables()
    slow = [
        tf.get_variable(v.op.name + '/slow', initializer=v.initial_value, trainable=False)
        for v in variables
    ]
    with tf.control_dependencies([train]):
        due = tf.cast(tf.equal(step().read_value() % 3, 0), tf.float32)
        updates = []
        for s, v in zip(slow, variables):
            fast = v.read_value()
            to = fast + due * (s + 0.5 * (fast - s) - fast)
            updates += [s.assign(due * to + (1 - due) * s), v.assign(to)]
        return tf.group(*updates)


def averaged(loss):
    train = momentum().minimize(loss, step())
    average = tf.train.ExponentialMovingAverage(0.9, num_updates=step(), zero_debias=True)
    with tf.control_dependencies([train]):
        return average.apply(tf.trainable_variables('net/[wv]'))


def scheduled(rate_of):
    def train(loss):
        rate = rate_of(step())
        return tf.train.MomentumOptimizer(rate, 0.9).minimize(loss, step())

    return train


def warmed_up(now):
    rate = tf.train.polynomial_decay(0.1, now, 8, 0.01, power=2.0)
    share = tf.cast(now, tf.float32) / 4
    return tf.cond(now < 4, lambda: share * 0.1, lambda: rate)


def of_the_loss(loss):
    """A rate that falls with the batch's loss."""
    rate = 0.1 / (1 + tf.stop_gradient(loss))
    return tf.train.GradientDescentOptimizer(rate).minimize(loss, step())


TRAINS = {
    'clip_by_value': each(lambda g: tf.clip_by_value(g, -0.01, 0.02)),
    'clip_by_norm': each(lambda g: tf.clip_by_norm(g, 0.02, axes=[0])),
    'clip_by_average_norm': each(by_average_norm),
    'noisy': each(noisy),
    'if_finite': changed(if_finite),
    'centralized': each(centralized),
    'signs': each(lambda g: tf.tanh(g * 100)),
    'polynomial_decay': scheduled(lambda now: tf.train.polynomial_decay(0.1, now, 6, cycle=True)),
    'cosine_decay': scheduled(lambda now: tf.train.cosine_decay_restarts(0.1, now, 4)),
    'piecewise': scheduled(lambda now: tf.train.piecewise_constant(now, [3, 6], [0.1, 0.05, 0.01])),
    'noisy_cosine': scheduled(lambda now: tf.train.linear_cosine_decay(0.1, now, 10)),
    'warmed_up': scheduled(warmed_up),
}
for _train in (
    [by_norm_of_variable, by_moving_norm, clipping, clipping_computed, lars, lamb]
    + [clipping_in_tower_optimizer, tower_optimizer_in_clipping, adam_with_decay]
    + [decayed_afterwards, rates_for_variables, groups_of_variables, lookahead, averaged]
    + [of_the_loss]
):
    TRAINS[_train.__name__] = _train
MODELS = [of_all_modes(predict, train, name) for name, train in TRAINS.items()]


@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('model_fn', MODELS, ids=lambda f: f.__name__)
def test_train_op(model_fn, towers, behavior):
    compare_modes(model_fn, away_from_0, towers)
