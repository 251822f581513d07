"""Keras layers and whole Keras models in a model_fn: several devices do as one."""

import pytest
import tensorflow.compat.v1 as tf

from models import adam, away_from_0, of_all_modes, spec_of
from towers import compare_modes

keras = tf.keras
L2 = keras.regularizers.l2


def ids_of(features):
    return tf.cast(tf.abs(features) * 10, tf.int32) % 7


def sequence_of(features):
    """Three steps of two numbers."""
    return tf.stack([features, tf.square(features)], 2)


def functional(features):
    inputs = keras.Input([3])
    hidden = keras.layers.Dense(4, activation='tanh')(inputs)
    hidden = keras.layers.Concatenate()([hidden, inputs])
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    return model(features)


def subclassed(features):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(3, activation='tanh')
            self.scale = self.add_weight('scale', [3], initializer='ones')
            self.out = keras.layers.Dense(1)

        def call(self, x):
            return self.out(self.layer(x) * self.scale)

    return Net()(features)


def embedding(features):
    rows = keras.layers.Embedding(7, 3)(ids_of(features))
    return keras.layers.Dense(1)(keras.layers.Flatten()(rows))


def masked_lstm(features):
    """Id 0 is padding."""
    rows = keras.layers.Embedding(7, 3, mask_zero=True)
    model = keras.Sequential([rows, keras.layers.LSTM(4, return_sequences=True)])
    return keras.layers.Dense(1)(model(ids_of(features))[:, -1])


def attention(features):
    sequence = keras.layers.Dense(4)(sequence_of(features))
    hidden = keras.layers.MultiHeadAttention(2, 3, use_bias=False)(sequence, sequence)
    return keras.layers.Dense(1)(keras.layers.Flatten()(hidden))


FORWARD = [
    functional,
    subclassed,
    embedding,
    masked_lstm,
    attention,
]


@pytest.mark.parametrize('model_fn', map(of_all_modes, FORWARD), ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn, behavior):
    compare_modes(model_fn, away_from_0, 3)


def with_losses(build, name):
    """A model_fn that adds a Keras model's own losses: of weights, and of these features."""

    def model_fn(features, labels, mode):
        model = build()
        output = model(features, training=mode == tf.estimator.ModeKeys.TRAIN)
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions={'output': output})
        loss = tf.reduce_mean(keras.losses.mean_squared_error(labels, output))
        added = model.get_losses_for(None) + model.get_losses_for(features)
        assert added
        loss += tf.add_n(added)
        if mode == tf.estimator.ModeKeys.TRAIN:
            return spec_of(mode, loss, adam(loss))
        metrics = {'error': tf.metrics.mean_squared_error(labels, output)}
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, predictions={'output': output}, eval_metric_ops=metrics
        )

    model_fn.__name__ = name
    return model_fn


def regularized():
    inputs = keras.Input([3])
    hidden = keras.layers.Dense(
        4, 'tanh', kernel_regularizer=L2(0.1), bias_regularizer=keras.regularizers.l1(0.1)
    )(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def activity_regularized():
    inputs = keras.Input([3])
    hidden = keras.layers.Dense(4, activity_regularizer=L2(0.1))(inputs)
    hidden = keras.layers.ActivityRegularization(l1=0.1)(keras.layers.Activation('tanh')(hidden))
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def loss_added():
    """A mean over the batch, added by the model itself."""
    inputs = keras.Input([3])
    hidden = keras.layers.Dense(4, activation='tanh')(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.add_loss(0.1 * tf.reduce_mean(tf.square(hidden)))
    return model


WITH_LOSSES = [
    with_losses(build, build.__name__) for build in [regularized, activity_regularized, loss_added]
]


@pytest.mark.parametrize('static', [True, False], ids='static={}'.format)
@pytest.mark.parametrize('model_fn', WITH_LOSSES, ids=lambda f: f.__name__)
def test_losses_of_models(model_fn, static):
    compare_modes(model_fn, away_from_0, 3, static=static)
