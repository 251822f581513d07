"""Gradients of a user's own: those that combine rows are warned of, the others are exact."""

import pytest
import tensorflow.compat.v1 as tf

from models import adam, batches, spec_of, step
from towers import compare, train

WARNING = 'what all rows of a shard have is combined, as a custom gradient that clips does'


def with_gradient(gradient):
    """Returns a function that hands a tensor on, and does something to its gradient."""

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda upstream: gradient(upstream)

    return identity


def overridden(x):
    """Another gradient than TensorFlow's for an op of TensorFlow's."""
    name = tf.get_default_graph().unique_name('Scaled')
    tf.RegisterGradient(name)(lambda op, upstream: upstream / (tf.norm(upstream) + 1e-6))
    with tf.get_default_graph().gradient_override_map({'Identity': name}):
        return tf.identity(x)


def kernel(name, *shape):
    return tf.get_variable(name, shape, initializer=tf.random_normal_initializer(0, 0.5, seed=1))


def network(of_rows=tf.identity, of_weights=tf.identity):
    def model_fn(features, labels, mode):
        hidden = of_rows(tf.nn.silu(tf.matmul(features, of_weights(kernel('w', 3, 4)))))
        loss = tf.sqrt(tf.reduce_mean(tf.square(tf.matmul(hidden, kernel('o', 4, 1)) - labels)))
        train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, step())
        return spec_of(mode, loss, train_op)

    return model_fn


COMBINING = {
    'norm of rows': lambda d: tf.clip_by_norm(d, 0.01),
    'global norm': lambda d: tf.clip_by_global_norm([d], 0.01)[0][0],
    'size': lambda d: d / (tf.reduce_max(tf.abs(tf.reduce_sum(d, 0))) + 1e-6),
    'mean': lambda d: d - tf.reduce_mean(d, 0),
}
OF_WEIGHTS = {
    'norm': lambda d: tf.clip_by_norm(d, 0.1),
    'value': lambda d: tf.clip_by_value(d, -0.1, 0.1),
    'sign': lambda d: 0.1 * tf.sign(d),
}
OWN = {
    'reversed': lambda d: -0.3 * d,
    'of each row': lambda d: tf.clip_by_norm(d, 0.01, axes=[1]),
    'of each number': lambda d: tf.clip_by_value(d, -0.01, 0.01),
}


@pytest.mark.parametrize('gradient', COMBINING.values(), ids=COMBINING.keys())
@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_gradients_of_rows_that_are_combined_are_warned_of(gradient, static, behavior, caplog):
    train(network(with_gradient(gradient)), batches(steps=1), 3, static=static)
    assert caplog.text.count(WARNING) == 1


@pytest.mark.parametrize('gradient', OF_WEIGHTS.values(), ids=OF_WEIGHTS.keys())
def test_gradients_of_weights_that_are_no_sums_are_warned_of(gradient, behavior, caplog):
    model_fn = network(of_weights=with_gradient(gradient))
    train(model_fn, batches(steps=1), 3, static=False)
    assert caplog.text.count(WARNING) == 1


def test_gradients_of_other_ops_are_warned_of(caplog):
    train(network(overridden), batches(steps=1), 3, static=False)
    assert caplog.text.count(WARNING) == 1


@pytest.mark.parametrize('gradient', OWN.values(), ids=OWN.keys())
@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_gradients_of_each_row_are_exact(gradient, static, behavior, caplog):
    compare(network(with_gradient(gradient)), batches(), 3, static=static)
    assert WARNING not in caplog.text


@pytest.mark.parametrize('towers', [1, 3, 4])
def test_custom_gradients_of_weights_that_are_linear_are_exact(towers, behavior, caplog):
    """A straight-through estimator, behind a weight normalization."""

    @tf.custom_gradient
    def rounded(x):
        inside = tf.cast(tf.abs(x) < 0.9, tf.float32)
        return tf.round(4 * x) / 4, lambda upstream: upstream * inside

    def of_weights(w):
        return rounded(tf.nn.l2_normalize(w, 0) * kernel('g', 4))

    compare(network(of_weights=of_weights), batches(), towers, static=False)
    assert WARNING not in caplog.text


def test_what_is_recomputed_is_not_warned_of(caplog):
    def model_fn(features, labels, mode):
        w = kernel('w', 3, 4)
        layer = tf.recompute_grad(lambda x: tf.tanh(tf.matmul(x, w)))
        output = tf.matmul(layer(features), kernel('o', 4, 1))
        loss = tf.losses.mean_squared_error(labels, output)
        return spec_of(mode, loss, adam(loss))

    compare(model_fn, batches(), 3, static=False)
    assert WARNING not in caplog.text


def test_batch_norm_is_told_of_once(caplog):
    """Its gradient combines rows, too: that follows from what it's for."""

    def forward(x):
        return tf.nn.silu(tf.layers.batch_normalization(x, training=True))

    train(network(forward), batches(steps=1), 3, static=False)
    assert WARNING not in caplog.text


def test_python_functions_on_rows_hide_no_gradients(caplog):
    """They are told of as well."""

    def of_rows(x):
        same = tf.numpy_function(lambda rows: rows, [tf.stop_gradient(x)], tf.float32)
        same.set_shape(x.shape)
        return with_gradient(lambda d: tf.clip_by_norm(d, 0.01))(x + 0 * same)

    train(network(of_rows), batches(steps=1), 3, static=False)
    assert caplog.text.count(WARNING) == 1
