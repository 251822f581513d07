"""Model functions as people write them, each with batches to train it on."""

import numpy as np
import tensorflow.compat.v1 as tf

ROWS = 12  # examples of a batch


def floats(rows, *shape, seed=0):
    """An array of random numbers, the same in each run."""
    return np.random.RandomState(seed + rows).randn(rows, *shape).astype(np.float32)


def weights(name, *shape):
    """The variable of this name, which the first call makes."""
    with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
        return tf.get_variable(name, initializer=floats(*shape))


def batches(rows=ROWS, steps=10, dtype=np.float32):
    """Batches of three features and one label for each example."""
    made = []
    for i in range(steps):
        features = floats(rows, 3, seed=i)
        labels = floats(rows, 1, seed=100 + i)
        made.append((features.astype(dtype), labels.astype(dtype)))
    return made


def sequences(steps, width, *sizes, seed=2):
    """Batches of these sizes, whose features have some steps, and whose labels have one."""
    random = np.random.default_rng(seed)
    shapes = [((size, steps, width), (size, width)) for size in sizes]
    return [tuple(random.normal(size=shape).astype('f') for shape in pair) for pair in shapes]


def away_from_0():
    """Batches with labels such that no gradient is a sum that all but cancels."""
    return [(features, labels + 2) for features, labels in batches()]


def spec_of(mode, loss, *train_ops):
    """An EstimatorSpec for training, by one op or several."""
    train_op = train_ops[0] if len(train_ops) == 1 else tf.group(*train_ops)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def step():
    return tf.train.get_global_step()


def adam(loss):
    """Returns a train_op.

    Adam divides a gradient by its size. The epsilon is above rounding errors, so that a gradient
    that is 0 but for rounding changes nothing.
    """
    return tf.train.AdamOptimizer(0.01, epsilon=1e-3).minimize(loss, step())


def clipped(loss):
    """The gradients' norm needs all gradients, of all examples."""
    optimizer = tf.train.MomentumOptimizer(0.1, 0.9)
    gradients, variables = zip(*optimizer.compute_gradients(loss))
    gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
    return optimizer.apply_gradients(zip(gradients, variables), step())


def sgd(loss, rate=0.1):
    """Returns a train_op."""
    return tf.train.GradientDescentOptimizer(rate).minimize(loss, step())


def predict(features):
    """A small network whose variables come from get_variable."""
    dtype = features.dtype
    with tf.variable_scope('net'):
        w = tf.get_variable('w', [3, 4], dtype)
        b = tf.get_variable('b', [4], dtype)
        v = tf.get_variable('v', [4, 1], dtype)
        hidden = tf.nn.tanh(tf.matmul(features, w) + b)
        return tf.matmul(hidden, v)


def regression(train):
    """Returns a model_fn of mean squared error, trained by the op that `train(loss)` returns."""

    def model_fn(features, labels, mode):
        loss = tf.losses.mean_squared_error(labels, predict(features))
        return spec_of(mode, loss, train(loss))

    return model_fn


def with_loss(loss_of):
    """Returns a model_fn whose loss is `loss_of(labels, predictions)`, trained by momentum."""

    def model_fn(features, labels, mode):
        loss = loss_of(labels, predict(features))
        optimizer = tf.train.MomentumOptimizer(0.05, 0.9)
        return spec_of(mode, loss, optimizer.minimize(loss, step()))

    return model_fn


def of_all_modes(forward, train=None, name=None):
    """Returns a model_fn for all modes.

    Args:
      forward: (features) -> predictions, of the labels' shape.
      train: (loss) -> train_op; Adam by default.
      name: the model_fn's name; by default that of `forward`.
    """

    def model_fn(features, labels, mode):
        output = forward(features)
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions={'output': output})

        tf.losses.mean_squared_error(labels, output)
        loss = tf.losses.get_total_loss()
        if mode == tf.estimator.ModeKeys.TRAIN:
            train_op = (train or adam)(loss)
            return spec_of(mode, loss, train_op)

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
    """As in contrib: for an embedding, a step updates only the moments of the rows it looks up."""

    def _apply_sparse_shared(self, grad, var, indices, scatter_add):
        m = self.get_slot(var, 'm')
        v = self.get_slot(var, 'v')
        mean = self._beta1 * tf.gather(m, indices) + (1 - self._beta1) * grad
        square = self._beta2 * tf.gather(v, indices) + (1 - self._beta2) * tf.square(grad)
        slots = [tf.scatter_update(m, indices, mean), tf.scatter_update(v, indices, square)]

        beta1_power, beta2_power = self._get_beta_accumulators()
        rate = self._lr * tf.sqrt(1 - beta2_power) / (1 - beta1_power)
        change = tf.cast(rate, grad.dtype) * mean / (tf.sqrt(square) + self._epsilon)
        return tf.group(scatter_add(var, indices, -change), *slots)
