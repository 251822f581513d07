"""Rows are found along whichever dimension ops put them, whatever its size and that of others."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu.places import Places
from estimator_mgpu.reshapes import Place
from models import floats, spec_of, step
from towers import compare

TIMES, UNITS = 8, 8


def data(rows):
    return [
        (floats(rows, TIMES, UNITS, seed=i), np.random.RandomState(i).randint(0, 4, [rows, TIMES]))
        for i in range(2)
    ]


def dense(x, units, name):
    initializer = tf.random_normal_initializer(stddev=0.3)
    w = tf.get_variable(name, [x.shape.as_list()[-1], units], initializer=initializer)
    return tf.tensordot(x, w, 1)


def recurrent(x, time_major=False):
    cell = tf.nn.rnn_cell.GRUCell(UNITS)
    return tf.nn.dynamic_rnn(cell, x, dtype=tf.float32, time_major=time_major)[0]


def time_major(features, labels):
    """Of [time, rows], the mean over time."""
    outputs = recurrent(tf.transpose(features, [1, 0, 2]), time_major=True)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.transpose(labels), logits=dense(outputs, 4, 'o')
    )
    return tf.reduce_mean(tf.sqrt(tf.reduce_mean(losses, 0)))


def stacked_members(features, labels):
    members = tf.stack([dense(features[:, 0], UNITS, f'w{i}') for i in range(4)])
    return tf.reduce_mean(tf.sqrt(tf.reduce_mean(tf.square(members), 0) + 1e-6))


def samples(features, labels):
    """As many samples as a shard has rows, along dimension 0."""
    scale = tf.get_variable('scale', [4, 1, 1], initializer=tf.ones_initializer())
    scores = tf.reduce_sum(dense(features[:, 0], 4, 'w')[None] * (scale + 0.1), 2)
    return -tf.reduce_mean(tf.log(tf.reduce_mean(tf.exp(-tf.square(scores)), 0) + 0.01))


def units_first(features, labels):
    """As many units as a shard has rows."""
    units = tf.transpose(dense(features[:, 0], UNITS, 'w'))
    mean = tf.reduce_mean(tf.square(units[None]), [0, 1])
    return tf.reduce_mean(tf.sqrt(mean + 0.001))


def flattened(features, labels):
    """[time, rows, units] as [time * rows, units]."""
    flat = tf.reshape(tf.transpose(features, [1, 0, 2]), [-1, UNITS])
    return tf.reduce_mean(tf.sqrt(tf.reduce_mean(tf.square(dense(flat, UNITS, 'w')), 1)))


def flattened_and_back(features, labels):
    x = tf.transpose(features, [1, 0, 2])
    flat = dense(tf.reshape(x, [-1, UNITS]), UNITS, 'w')
    back = tf.reshape(flat, tf.shape(x))
    return tf.reduce_mean(tf.sqrt(tf.reduce_mean(tf.square(back), [0, 2])))


def scanned_time(features, labels):
    x = dense(tf.transpose(features, [1, 0, 2]), UNITS, 'w')
    states = tf.scan(lambda state, entry: 0.5 * state + tf.tanh(entry), x)
    return tf.reduce_mean(tf.sqrt(tf.reduce_mean(tf.square(states), [0, 2]) + 1e-6))


def rms_of_sequences(features, labels):
    return tf.reduce_mean(tf.sqrt(tf.reduce_mean(tf.square(recurrent(features)), [1, 2]) + 1e-6))


def attention(features, labels):
    outputs = recurrent(features)
    weights = tf.nn.softmax(tf.squeeze(dense(outputs, 1, 'att'), -1))
    pooled = tf.reduce_sum(outputs * weights[:, :, None], 1)
    return tf.reduce_mean(tf.maximum(0.0, 0.8 - tf.norm(pooled, axis=1)))


def model_of(loss_of, unknown=False):
    def model_fn(features, labels, mode):
        if unknown:  # As from padded_batch.
            features = tf.placeholder_with_default(features, [None, None, UNITS])
            labels = tf.placeholder_with_default(labels, [None, None])
        loss = loss_of(features, labels)
        train_op = tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss, step())
        return spec_of(mode, loss, train_op)

    return model_fn


LOSSES = [
    time_major,
    stacked_members,
    samples,
    units_first,
    flattened,
    flattened_and_back,
    scanned_time,
    rms_of_sequences,
    attention,
]


@pytest.mark.parametrize('towers', [2, 4], ids='towers={}'.format)
@pytest.mark.parametrize('loss_of', LOSSES, ids=lambda f: f.__name__)
def test_sizes_that_might_be_rows(loss_of, towers, behavior, caplog):
    """Shards of 4 or 2 rows, and 8 of all else."""
    compare(model_of(loss_of), data(8), towers)
    assert 'cannot be told' not in caplog.text


@pytest.mark.parametrize('towers', [2, 5], ids='towers={}'.format)
@pytest.mark.parametrize('loss_of', LOSSES, ids=lambda f: f.__name__)
def test_sequences_of_unknown_length(loss_of, towers, behavior, caplog):
    """Towers have 6 rows, or 3 and 2, so that what is taken for rows has other sizes."""
    compare(model_of(loss_of, unknown=True), data(12), towers, static=False)
    assert 'cannot be told' not in caplog.text


@pytest.mark.parametrize('last', ['steps', 'lengths'])
def test_what_an_op_that_is_not_known_gives_is_as_its_like_input(last):
    with tf.Graph().as_default():
        steps = tf.placeholder(tf.float32, [None, None, 5])
        lengths = tf.placeholder(tf.int32, [None])
        loss, gradient = tf.raw_ops.CTCLoss(
            inputs=steps,
            labels_indices=tf.placeholder(tf.int64, [None, 2]),
            labels_values=tf.placeholder(tf.int32, [None]),
            sequence_length=lengths,
        )
        given = [(steps, Place(1)), (lengths, Place(0))]
        places = Places(given if last == 'lengths' else given[::-1], None, None)
        assert (places.axis(loss), places.axis(gradient)) == (0, 1)
