"""Functions that XLA compiles: several devices give the variables of one."""

import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import op_types
from models import away_from_0, floats, of_all_modes
from towers import assert_same, train


def compiled(function):
    return tf.function(function, jit_compile=True)


def weight(name, *shape):
    """A variable; devices have them in turns, as there are several of about one size."""
    return tf.get_variable(name, initializer=floats(*shape), use_resource=True)


def dense(features):
    """A function whose gradient is compiled, too."""
    w, b, v = weight('w', 3, 4), weight('b', 4), weight('v', 4, 1)
    hidden = compiled(lambda x: tf.nn.tanh(tf.matmul(x, w) + b))(features)
    return tf.matmul(tf.nn.dropout(hidden, rate=0.3, seed=3), v)


def centered(features):
    """A function that needs all examples, so that it runs once."""
    w, b, v = weight('w', 3, 4), weight('b', 4), weight('v', 4, 1)

    @compiled
    def call(x):
        hidden = tf.matmul(x, w)
        hidden = tf.nn.tanh(hidden - tf.reduce_mean(hidden, 0) + b)
        return tf.matmul(hidden, v)

    return call(features)


def moving_mean(features):
    """A function that writes to a variable."""
    w, v = weight('w', 3, 4), weight('v', 4, 1)
    mean = tf.get_variable('mean', initializer=floats(4), use_resource=True, trainable=False)

    @compiled
    def call(x):
        hidden = tf.matmul(x, w)
        mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(hidden, 0))
        return tf.matmul(tf.nn.tanh(hidden - mean), v)

    return call(features)


def in_branch(features):
    """A function that a branch calls."""
    w, b, v = weight('w', 3, 4), weight('b', 4), weight('v', 4, 1)
    call = compiled(lambda x: tf.matmul(tf.nn.tanh(tf.matmul(x, w) + b), v))
    return tf.cond(tf.reduce_sum(w) > 100.0, lambda: call(features), lambda: 2 * call(features))


def in_function(features):
    """A function that another one calls, with variables that are read in both."""
    w, b, v = weight('w', 3, 4), weight('b', 4), weight('v', 4, 1)
    inner = compiled(lambda x: tf.nn.tanh(tf.matmul(x, w) + b))
    return tf.function(lambda x: tf.matmul(inner(x) + b, v))(features)


def keras_layers(features):
    layers = tf.keras.layers
    hidden = layers.Dense(4, 'tanh')
    output = layers.Dense(1)
    for layer, size in ((hidden, 3), (output, 4)):
        layer.build([None, size])
    return compiled(lambda x: output(hidden(x)))(features)


def compare(forward, towers, **options):
    model_fn = of_all_modes(forward)
    one = train(model_fn, away_from_0(), 0)
    ours = train(model_fn, away_from_0(), towers, values=one.start, **options)
    assert_same(ours, one)
    return ours


def devices_of_compiled(graph):
    """The devices of the towers' copies of compiled calls."""
    return [
        op.device.removeprefix('/device:')
        for op in graph.get_operations()
        if op_types.MUST_COMPILE in op.node_def.attr and op.name.startswith('replicate/tower_')
    ]


def test_every_tower_calls_its_own(behavior):
    """Although its variables aren't on its device."""
    ours = compare(dense, 3)
    forward_and_gradient = ['CPU:0', 'CPU:1', 'CPU:2'] * 2
    assert devices_of_compiled(ours.graph) == forward_and_gradient


def test_micro_batches():
    compare(dense, 2, microbatches=2)


@pytest.mark.parametrize('forward', [centered, moving_mean, in_branch], ids=lambda f: f.__name__)
def test_variables_on_one_device(forward, behavior):
    """The only one whose variables a compiled function can use."""
    compare(forward, 2)


@pytest.mark.parametrize('forward', [in_function, keras_layers], ids=lambda f: f.__name__)
def test_sharded(forward):
    ours = compare(forward, 2)
    assert 'CPU:1' in devices_of_compiled(ours.graph)


def test_is_compiled():
    """Copies are compiled like the function, as they fail if that can't be."""

    def joined(features):
        texts = compiled(tf.as_string)(features)
        return tf.strings.to_number(texts)[:, :1] * weight('w', 1)

    with pytest.raises(tf.errors.InvalidArgumentError, match='XLA_CPU_JIT'):
        train(of_all_modes(joined), away_from_0(), 2)
