"""Every optimizer, of TensorFlow, Keras and one's own, and what goes between it and gradients."""

import pytest
import tensorflow.compat.v1 as tf

from layers import hidden_layer, mean_square, of_losses, output_layer
from models import away_from_0, of_all_modes, predict, step
from towers import compare, compare_modes

KERAS = tf.keras.optimizers.legacy


TRAIN = {
    'sgd': lambda: tf.train.GradientDescentOptimizer(0.05),
    'nesterov': lambda: tf.train.MomentumOptimizer(0.05, 0.9, use_nesterov=True),
    'adadelta': lambda: tf.train.AdadeltaOptimizer(0.5, epsilon=1e-3),
    'adagrad': lambda: tf.train.AdagradOptimizer(0.1),
    'adagrad_da': lambda: tf.train.AdagradDAOptimizer(0.1, step()),
    'ftrl': lambda: tf.train.FtrlOptimizer(0.1, l1_regularization_strength=1e-3),
    'proximal_adagrad': lambda: tf.train.ProximalAdagradOptimizer(0.1),
    'proximal_sgd': lambda: tf.train.ProximalGradientDescentOptimizer(0.1),
    'rmsprop': lambda: tf.train.RMSPropOptimizer(0.01, momentum=0.5, centered=True, epsilon=1e-2),
}
KERAS_TRAIN = {
    'keras_sgd': lambda: KERAS.SGD(learning_rate=0.05, momentum=0.9, nesterov=True),
    'keras_adam': lambda: KERAS.Adam(learning_rate=0.01, epsilon=1e-3, amsgrad=True),
    'keras_rmsprop': lambda: KERAS.RMSprop(0.01, epsilon=1e-2, momentum=0.5, centered=True),
    'keras_ftrl': lambda: KERAS.Ftrl(learning_rate=0.1, l1_regularization_strength=1e-3),
}


def counted(optimizer):
    """A Keras optimizer that counts in the global step."""
    optimizer.iterations = step()
    return optimizer


def minimize(make):
    return lambda loss: make().minimize(loss, step(), colocate_gradients_with_ops=True)


def update(make):
    return lambda loss: tf.group(*counted(make()).get_updates(loss, tf.trainable_variables()))


def accumulated_in_cond(loss):
    """Gradients of three steps, their mean applied inside a tf.cond."""
    optimizer = tf.train.MomentumOptimizer(0.05, 0.9)
    zeros = {'initializer': tf.zeros_initializer(), 'trainable': False}
    pairs = optimizer.compute_gradients(loss)
    sums = [tf.get_variable(v.op.name + '/sum', v.shape, **zeros) for _, v in pairs]
    count = tf.get_variable('count', [], tf.int32, **zeros)
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


def keras_with_gradients_of_tensorflow(loss):
    variables = tf.trainable_variables()
    optimizer = counted(KERAS.Adam(0.01, epsilon=1e-3, clipnorm=0.05))
    return optimizer.apply_gradients(zip(tf.gradients(loss, variables), variables))


def keras_of_a_function(features, labels):
    """A loss that is a function, as minimize takes it in a graph too."""
    output = output_layer(hidden_layer(features))

    def loss():
        return mean_square(labels, output_layer(hidden_layer(features)))

    before = mean_square(labels, output)
    same = tf.variable_scope(tf.get_variable_scope(), reuse=True)
    with same, tf.control_dependencies([before]):  # Which is of the values before the step.
        optimizer = counted(KERAS.Adam(0.01, epsilon=1e-3))
        return before, output, optimizer.minimize(loss, tf.trainable_variables())


def keras_new_in_a_function(features, labels):
    """Keras' new optimizers update variables in functions only, not in a graph of TensorFlow 1."""
    output = output_layer(hidden_layer(features))
    loss = mean_square(labels, output)
    variables = tf.trainable_variables()
    optimizer = tf.compat.v2.keras.optimizers.SGD(
        0.05, momentum=0.9, weight_decay=0.01, global_clipnorm=1.0, jit_compile=False
    )
    optimizer.build(variables)

    @tf.function
    def apply(grads):
        optimizer.apply_gradients(zip(grads, variables))
        return tf.constant(0)

    with tf.control_dependencies([apply(tf.gradients(loss, variables))]):
        return loss, output, step().assign_add(1)


SIMPLE = [
    *(of_all_modes(predict, minimize(make), name) for name, make in TRAIN.items()),
    *(of_all_modes(predict, update(make), name) for name, make in KERAS_TRAIN.items()),
    of_all_modes(predict, keras_with_gradients_of_tensorflow, 'keras_with_gradients'),
    *map(of_losses, [keras_of_a_function, keras_new_in_a_function]),
]
ACCUMULATED = of_all_modes(predict, accumulated_in_cond, 'accumulated_in_cond')


@pytest.mark.parametrize('model_fn', SIMPLE, ids=lambda f: f.__name__)
def test_optimizer(model_fn):
    """Only training has one."""
    compare(model_fn, away_from_0(), 3)


def test_accumulated_gradients(behavior):
    compare_modes(ACCUMULATED, away_from_0, 3)
