"""What XLA compiles: several devices give the variables of one."""

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
import towers
from estimator_mgpu.tf_internals import op_types
from forks import output_of
from models import away_from_0, floats, of_all_modes, predict
from towers import TRAIN, behavior_of, nodes_of_a_step, session, train


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


def with_global_step(features):
    """A function that runs once, and uses a variable that was there before the model_fn."""
    largest, w, v = weight('largest', 3, 90), weight('w', 90, 2), weight('v', 2, 1)
    steps = tf.train.get_global_step()

    @compiled
    def call(x):
        hidden = tf.matmul(x - tf.reduce_mean(x, 0), w)
        return tf.nn.tanh(hidden / (1 + tf.cast(steps, tf.float32)))

    return tf.matmul(call(tf.matmul(features, largest)), v)


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


def compare(forward, count, **options):
    """Trains on one device and on so many, and compares; returns the latter run."""
    ours, _ = towers.compare(of_all_modes(forward), away_from_0(), count, **options)
    return ours


def devices_of_compiled(graph):
    """The devices of the towers' copies of compiled calls."""
    return [
        op.device.removeprefix('/device:')
        for op in graph.get_operations()
        if op_types.MUST_COMPILE in op.node_def.attr and towers.tower_of(op.name) is not None
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


def test_with_variable_that_is_placed():
    compare(with_global_step, 2)


def test_is_compiled():
    """Copies are compiled like the function, as they fail if that can't be."""

    def joined(features):
        texts = compiled(tf.as_string)(features)
        return tf.strings.to_number(texts)[:, :1] * weight('w', 1)

    with pytest.raises(tf.errors.InvalidArgumentError, match='XLA_CPU_JIT'):
        train(of_all_modes(joined), away_from_0(), 2)


def compare_with_auto_jit(level, count, **options):
    """The same, where XLA compiles all that it can; to be called in a process of its own.

    Args:
      level: of `global_jit_level` in the session's config.
      count: how many devices.
      options: of `train`.
    """
    make_config = estimator_mgpu.session_config

    def config_with_level(*args):
        config = make_config(*args)
        config.graph_options.optimizer_options.global_jit_level = level
        return config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimator_mgpu, 'session_config', config_with_level)
        # Without constant folding, TensorFlow itself fails on several CPU devices.
        compare(predict, count, optimized=True, **options)
        assert devices_of_clusters(count) == {f'CPU:{number}' for number in range(count)}


def devices_of_clusters(count):
    """The devices on which a step runs what XLA has compiled."""
    with tf.Graph().as_default(), session(count, optimized=True) as sess:
        tf.train.get_or_create_global_step()
        batch = map(tf.constant, away_from_0()[0])
        spec = estimator_mgpu.replicate(of_all_modes(predict), devices=count)(*batch, TRAIN)
        sess.run(tf.global_variables_initializer())
        nodes = nodes_of_a_step(sess, [spec.loss, spec.train_op])
    return {node.device.rpartition('device:')[2] for node in nodes if node.op == '_XlaRun'}


def test_auto_jit():
    """Both levels, and micro-batches. TensorFlow takes the flags in a new process only."""
    program = 'import test_xla; test_xla.compare_in_all_ways_with_auto_jit()'
    flags = '--tf_xla_cpu_global_jit --tf_xla_min_cluster_size=2'
    output_of(['-c', program], TF_XLA_FLAGS=flags)


def compare_in_all_ways_with_auto_jit():
    levels = tf.OptimizerOptions
    compare_with_auto_jit(levels.ON_1, 3)
    compare_with_auto_jit(levels.ON_2, 2, microbatches=2)
    with behavior_of('v1'):
        compare_with_auto_jit(levels.ON_2, 2)
