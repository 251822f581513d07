"""Keras optimizers in a model_fn, old and new: several devices give the variables of one."""

import pytest
import tensorflow.compat.v1 as tf

from layers import hidden_layer, mean_square, of_losses, output_layer
from models import away_from_0, of_all_modes, predict, step
from towers import compare_modes

OLD = tf.keras.optimizers.legacy
OPTIMIZERS = {
    'SGD': {'learning_rate': 0.05, 'momentum': 0.9, 'nesterov': True},
    'Adam': {'learning_rate': 0.01, 'epsilon': 1e-3, 'amsgrad': True},
    'RMSprop': {'learning_rate': 0.01, 'epsilon': 1e-2, 'momentum': 0.5, 'centered': True},
    'Ftrl': {'learning_rate': 0.1, 'l1_regularization_strength': 1e-3},
}


def counted(optimizer):
    """An optimizer that counts in the global step."""
    optimizer.iterations = step()
    return optimizer


def adam(**options):
    return counted(OLD.Adam(0.01, epsilon=1e-3, **options))


def updates_by(name, options):
    def train(loss):
        optimizer = counted(getattr(OLD, name)(**options))
        return tf.group(*optimizer.get_updates(loss, tf.trainable_variables()))

    return train


def gradients_of_tensorflow(loss):
    variables = tf.trainable_variables()
    return adam(clipnorm=0.05).apply_gradients(zip(tf.gradients(loss, variables), variables))


def sparse(features):
    table = tf.get_variable('table', [5, 4], use_resource=True)
    ids = tf.cast(tf.abs(features) * 10, tf.int32) % 5
    return output_layer(tf.nn.tanh(tf.reduce_sum(tf.gather(table, ids), 1)))


def by_updates(loss):
    return tf.group(*adam().get_updates(loss, tf.trainable_variables()))


TRAINS = {name: updates_by(name, options) for name, options in OPTIMIZERS.items()}
TRAINS['gradients_of_tensorflow'] = gradients_of_tensorflow
MODELS = [of_all_modes(predict, train, name) for name, train in TRAINS.items()]
MODELS.append(of_all_modes(sparse, by_updates))


def minimized(features, labels):
    """A loss that is a function, as minimize takes it in a graph too."""
    output = output_layer(hidden_layer(features))

    def loss():
        return mean_square(labels, output_layer(hidden_layer(features)))

    before = mean_square(labels, output)
    same = tf.variable_scope(tf.get_variable_scope(), reuse=True)
    with same, tf.control_dependencies([before]):  # Which is of the values before the step.
        train = adam().minimize(loss, tf.trainable_variables())
    return before, output, train


def new_in_a_function(features, labels):
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


LOSSES = [new_in_a_function, minimized]


@pytest.mark.parametrize('model_fn', [*MODELS, *map(of_losses, LOSSES)], ids=lambda f: f.__name__)
def test_keras_optimizer(model_fn):
    compare_modes(model_fn, away_from_0, 3)
