"""Gradients that models change, mix and use: several devices give those of one."""

import pytest
import tensorflow.compat.v1 as tf

from layers import hidden_layer, output_layer
from models import away_from_0, of_all_modes
from towers import compare_modes

# Models: forward(features) -> output.


def stopped(features):
    """One branch is stopped, and one path of the same tensor isn't."""
    hidden = hidden_layer(features)
    return output_layer(tf.stop_gradient(hidden)) + output_layer(hidden * 0.5, 'other')


def custom_gradient(features):
    @tf.custom_gradient
    def clipped(x):
        return tf.square(x), lambda dy: tf.clip_by_value(dy, -0.01, 0.01) * (x + 1)

    return output_layer(clipped(hidden_layer(features)))


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


@tf.RegisterGradient('EstimatorMgpuHalved')
def _halved(op, grad):
    return grad * 0.5 * (1 + tf.square(op.outputs[0]))


def overridden(features):
    with tf.get_default_graph().gradient_override_map({'Tanh': 'EstimatorMgpuHalved'}):
        hidden = hidden_layer(features)
    return output_layer(hidden)


def reversed_gradient(features):
    """Domain adaptation's reversal, by a map for Identity."""
    hidden = hidden_layer(features)
    with tf.get_default_graph().gradient_override_map({'Identity': 'EstimatorMgpuHalved'}):
        turned = tf.identity(hidden)
    return output_layer(hidden) + output_layer(turned, 'turned')


def straight_through(features):
    hidden = hidden_layer(features)
    hard = hidden + tf.stop_gradient(tf.round(hidden * 2) / 2 - hidden)
    return output_layer(hard)


def fake_quantized(features):
    w = tf.get_variable('w', [3, 4])
    w = tf.quantization.fake_quant_with_min_max_args(w, -2, 2)
    return output_layer(tf.nn.tanh(tf.matmul(features, w)))


def recomputed_twice(features):
    first = tf.get_variable('first', [3, 4], use_resource=True)
    second = tf.get_variable('second', [4, 4], use_resource=True)
    hidden = tf.recompute_grad(lambda x: tf.nn.tanh(tf.matmul(x, first)))(features)
    hidden = tf.recompute_grad(lambda x: tf.nn.tanh(tf.matmul(x, second)))(hidden)
    return output_layer(hidden)


def tied(features):
    """A table both looked up in and multiplied by, so that its gradient is of two kinds."""
    table = tf.get_variable('table', [5, 4])
    ids = tf.cast(tf.abs(features) * 10, tf.int32) % 5
    rows = tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1)
    return tf.reduce_mean(tf.matmul(tf.nn.tanh(rows), table, transpose_b=True), 1, keepdims=True)


def tied_with_rows_of_its_own(features):
    """The same table gathered in two ways, one of which takes an id once."""
    table = tf.get_variable('table', [5, 4])
    ids = tf.cast(tf.abs(features) * 10, tf.int32) % 5
    unique, places = tf.unique(tf.reshape(ids, [-1]))
    rows = tf.gather(tf.nn.embedding_lookup(table, unique), places)
    rows = tf.reduce_sum(tf.reshape(rows, [-1, 3, 4]), 1)
    return output_layer(tf.nn.tanh(rows + tf.gather(table, ids[:, 0])))


def partitioned(features):
    tables = tf.get_variable('table', [6, 4], partitioner=tf.fixed_size_partitioner(3))
    ids = tf.cast(tf.abs(features) * 10, tf.int32) % 6
    rows = tf.nn.embedding_lookup(tables, ids, partition_strategy='div')
    return output_layer(tf.nn.tanh(tf.reduce_sum(rows, 1)))


def frozen(features):
    w = tf.get_variable('w', [3, 4], trainable=False)
    return output_layer(tf.nn.tanh(tf.matmul(features, w)))


def not_used(features):
    tf.get_variable('unused', [3])
    tf.identity(hidden_layer(features, 'leads_nowhere'))
    return output_layer(hidden_layer(features))


def gradient_as_feature(features):
    """The slope of one net with respect to its input is what the next one gets."""
    slope = tf.gradients(output_layer(hidden_layer(features)), features)[0]
    return output_layer(tf.nn.tanh(slope), 'of_slope') + output_layer(features, 'direct')


def hessian_of_activations(features):
    """Two gradients of gradients with respect to the input: a curvature."""
    output = output_layer(hidden_layer(features))
    [slope] = tf.gradients(output, features)
    [curvature] = tf.gradients(slope[:, 0], features)
    return output + output_layer(tf.nn.tanh(curvature), 'of_curvature')


def taped_activations(features):
    with tf.GradientTape() as tape:
        tape.watch(features)
        output = output_layer(hidden_layer(features))
    slope = tape.gradient(output, features)
    return output + output_layer(tf.nn.tanh(slope), 'of_slope')


def nested_tapes(features):
    with tf.GradientTape() as outer:
        outer.watch(features)
        with tf.GradientTape() as inner:
            inner.watch(features)
            output = output_layer(hidden_layer(features))
        slope = inner.gradient(output, features)
    return output + output_layer(outer.gradient(slope, features), 'of_curvature')


def jacobian(features):
    with tf.GradientTape() as tape:
        tape.watch(features)
        hidden = hidden_layer(features, size=2)
    slopes = tape.batch_jacobian(hidden, features)
    return output_layer(tf.reshape(tf.nn.tanh(slopes), [-1, 6]))


MODELS = [
    stopped,
    custom_gradient,
    custom_gradient_of_variables,
    overridden,
    reversed_gradient,
    straight_through,
    fake_quantized,
    recomputed_twice,
    tied,
    tied_with_rows_of_its_own,
    partitioned,
    frozen,
    not_used,
    gradient_as_feature,
    hessian_of_activations,
    taped_activations,
    nested_tapes,
    jacobian,
]


@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('model_fn', map(of_all_modes, MODELS), ids=lambda f: f.__name__)
def test_model(model_fn, towers, behavior):
    compare_modes(model_fn, away_from_0, towers)
