"""Loops of TensorFlow 2 are divided, in the forward pass and in the gradients."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import towers
from models import of_all_modes, ten_rows

pytestmark = pytest.mark.core

STEPS, UNITS = 3, 4
HEAVY = ('MatMul', 'Tanh', 'TanhGrad', 'Sigmoid', 'SigmoidGrad')


def _dynamic(make_cell):
    def forward(x):
        lengths = 1 + tf.cast(tf.abs(x[:, 0]) * 2, tf.int32)
        cell, sequence = make_cell(), tf.reshape(x, [-1, STEPS, 1])
        y, _ = tf.nn.dynamic_rnn(cell, sequence, lengths, dtype=tf.float32)
        return tf.layers.dense(y[:, -1], 1)

    return forward


def _layer(make_layer):
    return lambda x: tf.layers.dense(make_layer()(tf.reshape(x, [-1, STEPS, 1])), 1)


def _scan(x):
    w = tf.get_variable('w', [UNITS, UNITS])
    sequence = tf.transpose(tf.tile(x[:, :, None], [1, 1, UNITS]), [1, 0, 2])
    states = tf.scan(lambda h, r: tf.tanh(tf.matmul(h, w) + r), sequence)
    return tf.layers.dense(states[-1], 1)


def _while_loop(x):
    w = tf.get_variable('w', [UNITS, UNITS], use_resource=True)
    start = tf.zeros([tf.shape(x)[0], UNITS])

    def body(i, h):
        return i + 1, tf.tanh(tf.matmul(h, w) + x[:, i, None])

    return tf.layers.dense(tf.while_loop(lambda i, h: i < STEPS, body, (0, start))[1], 1)


def _large_zeros(x):
    """Zeros of so many entries that TensorFlow makes no constant of them."""
    wide = tf.tile(x, [1, 100])
    zeros = tf.zeros([x.shape[0] or tf.shape(x)[0], 300])
    body = lambda i, h: (i + 1, 0.5 * tf.where(wide > 0, h + wide, tf.zeros_like(h)))  # noqa: E731
    _, h = tf.while_loop(lambda i, h: i < STEPS, body, (0, zeros))
    return tf.layers.dense(h, 1)


def _branch(x):
    w = tf.get_variable('w', [STEPS, UNITS], use_resource=True)
    positive = tf.cond(
        tf.reduce_sum(x) > 0,
        lambda: tf.tanh(tf.matmul(x, w)),
        lambda: tf.tanh(tf.matmul(tf.tanh(x), w)),
    )
    return tf.layers.dense(positive, 1)


def _function(x):
    """One that calls another, with a loop."""
    w = tf.get_variable('w', [UNITS, UNITS], use_resource=True)

    @tf.function
    def inner(h):
        return tf.tanh(tf.matmul(h, w))

    @tf.function
    def outer(x):
        h = tf.tile(x[:, :1], [1, UNITS])
        return tf.while_loop(lambda i, h: i < STEPS, lambda i, h: (i + 1, inner(h)), (0, inner(h)))

    return tf.layers.dense(outer(x)[1], 1)


FORWARDS = {
    'lstm': _dynamic(lambda: tf.nn.rnn_cell.LSTMCell(UNITS)),
    'gru': _dynamic(lambda: tf.nn.rnn_cell.GRUCell(UNITS)),
    'keras lstm': _layer(lambda: tf.keras.layers.LSTM(UNITS)),
    'keras gru': _layer(lambda: tf.keras.layers.GRU(UNITS)),
    'bidirectional': _layer(lambda: tf.keras.layers.Bidirectional(tf.keras.layers.LSTM(UNITS))),
    'scan': _scan,
    'while_loop': _while_loop,
    'large zeros': _large_zeros,
    'branch': _branch,
    'function': _function,
}


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('name', FORWARDS)
def test_as_on_one_device(name, static):
    ours, _ = towers.compare(
        of_all_modes(FORWARDS[name], name=name), ten_rows()[:3], 3, static=static
    )
    types = ('While', 'StatelessWhile', 'If', 'StatelessIf')
    loops = [op for op in ours.graph.get_operations() if op.type in types]
    loops = [op for op in loops if 'AssertGuard' not in op.name]
    whole = {op.name for op in loops if 'tower_' not in op.name}
    assert whole
    for tower in range(3):
        scope = f'replicate/tower_{tower}/'
        assert {op.name[len(scope) :] for op in loops if op.name.startswith(scope)} == whole


@pytest.mark.parametrize('name, count', [('lstm', 60), ('branch', 20), ('function', 60)])
def test_kernels_run_on_all_devices(name, count):
    """By what ran, inside of the loops, too: TensorFlow takes them apart before it places nodes."""
    batch = np.random.RandomState(0).randn(12, STEPS).astype(np.float32)
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, STEPS])
        y = tf.placeholder(tf.float32, [None, 1])
        tf.train.get_or_create_global_step()
        model_fn = towers.estimator_mgpu.replicate(of_all_modes(FORWARDS[name]), devices=4)
        spec = model_fn(features=x, labels=y, mode=towers.TRAIN)
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        metadata = tf.RunMetadata()
        with towers.session(4) as session:
            session.run(tf.global_variables_initializer())
            feed = {x: batch, y: batch[:, :1]}
            session.run(spec.train_op, feed, options, metadata)
    kernels = collections.Counter()
    for stats in metadata.step_stats.dev_stats:
        for node in stats.node_stats:
            kind = node.timeline_label.partition(' = ')[2].partition('(')[0]
            kernels[stats.device] += kind in HEAVY or 'MatMul' in kind
    total = sum(kernels.values())
    assert total >= count  # An LSTM's step has five of these in the forward pass alone, a tower.
    assert max(kernels.values()) <= 0.35 * total


def test_a_loop_that_rows_end_runs_once():
    def forward(x):
        w = tf.get_variable('w', [3, 3])

        def body(i, h):
            return i + 1, tf.tanh(tf.matmul(h, w)) * 0.9

        ends = lambda i, h: (tf.reduce_max(tf.abs(h)) > 0.1) & (i < 20)  # noqa: E731
        return tf.layers.dense(tf.while_loop(ends, body, (0, x))[1], 1)

    ours, _ = towers.compare(of_all_modes(forward), ten_rows()[:3], 3)
    assert not [op for op in ours.graph.get_operations() if op.name == 'replicate/tower_0/while']


def test_a_loop_with_effects_runs_once():
    def forward(x):
        count = tf.get_variable('count', [], trainable=False, initializer=tf.zeros_initializer())

        def body(i, h):
            with tf.control_dependencies([count.assign_add(1.0)]):
                return i + 1, tf.tanh(h)

        return tf.layers.dense(tf.while_loop(lambda i, h: i < 3, body, (0, x))[1], 1)

    ours, one = towers.compare(of_all_modes(forward), ten_rows()[:3], 3)
    assert ours.values['count'] == one.values['count'] == 9
