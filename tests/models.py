"""Model functions as people write them, each with batches to train it on."""

import numpy as np
import tensorflow.compat.v1 as tf

ROWS = 12


def floats(rows, *shape, seed=0):
    return np.random.RandomState(seed + rows).randn(rows, *shape).astype(np.float32)


def weights(name, *shape):
    """A variable of its own for each name, however often it's asked for."""
    with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
        return tf.get_variable(name, initializer=floats(*shape))


def batches(rows=ROWS, steps=10, dtype=np.float32):
    """Three features and one label a row."""
    return [
        (floats(rows, 3, seed=i).astype(dtype), floats(rows, 1, seed=100 + i).astype(dtype))
        for i in range(steps)
    ]


def away_from_0():
    """Batches with labels such that no gradient is a sum that all but cancels."""
    return [(x, y + 2) for x, y in batches()]


def spec_of(mode, loss, *train_ops):
    train_op = train_ops[0] if len(train_ops) == 1 else tf.group(*train_ops)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def step():
    return tf.train.get_global_step()


def adam(loss):
    """An epsilon above rounding errors, for gradients that are 0."""
    return tf.train.AdamOptimizer(0.01, epsilon=1e-3).minimize(loss, step())


def sgd(loss, rate=0.1):
    return tf.train.GradientDescentOptimizer(rate).minimize(loss, step())


def predict(features):
    """A small network whose variables come from get_variable."""
    dtype = features.dtype
    with tf.variable_scope('net'):
        w = tf.get_variable('w', [3, 4], dtype)
        b = tf.get_variable('b', [4], dtype)
        v = tf.get_variable('v', [4, 1], dtype)
        return tf.matmul(tf.nn.tanh(tf.matmul(features, w) + b), v)


def regression(train):
    """Returns a model_fn of mean squared error that `train(loss)` gives the train_op of."""

    def model_fn(features, labels, mode):
        loss = tf.losses.mean_squared_error(labels, predict(features))
        return spec_of(mode, loss, train(loss))

    return model_fn


def with_loss(loss_of):
    """Returns a model_fn of any loss (labels, predictions), trained by momentum."""

    def model_fn(features, labels, mode):
        loss = loss_of(labels, predict(features))
        return spec_of(mode, loss, tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss, step()))

    return model_fn


def of_all_modes(forward, train=None, name=None):
    """Returns a model_fn for all modes, trained by Adam, or by what `train(loss)` gives.

    `forward(features)` gives what is predicted, of the labels' shape.
    """

    def model_fn(features, labels, mode):
        output = forward(features)
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions={'output': output})
        tf.losses.mean_squared_error(labels, output)
        loss = tf.losses.get_total_loss()
        if mode == tf.estimator.ModeKeys.TRAIN:
            return spec_of(mode, loss, (train or adam)(loss))
        metrics = {
            'error': tf.metrics.mean_absolute_error(labels, output),
            'above': tf.metrics.mean(tf.cast(output > labels, tf.float32)),
        }
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, predictions={'output': output}, eval_metric_ops=metrics
        )

    model_fn.__name__ = name or forward.__name__
    return model_fn


class LazyAdam(tf.train.AdamOptimizer):
    """Moments of an embedding's rows are those of the steps that look these up, as in contrib."""

    def _apply_sparse_shared(self, grad, var, indices, scatter_add):
        m, v = (self.get_slot(var, name) for name in 'mv')
        beta1_power, beta2_power = self._get_beta_accumulators()
        rate = self._lr * tf.sqrt(1 - beta2_power) / (1 - beta1_power)
        mean = self._beta1 * tf.gather(m, indices) + (1 - self._beta1) * grad
        square = self._beta2 * tf.gather(v, indices) + (1 - self._beta2) * tf.square(grad)
        kept = [tf.scatter_update(m, indices, mean), tf.scatter_update(v, indices, square)]
        step = tf.cast(rate, grad.dtype) * mean / (tf.sqrt(square) + self._epsilon)
        return tf.group(scatter_add(var, indices, -step), *kept)
