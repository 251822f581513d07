"""Recurrent networks and decoders: several devices do as one."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import away_from_0, floats, of_all_modes, ten_rows
from towers import assert_close, compare_modes, evaluate

TIMES = 4
BEAMS, WORDS, LONGEST = 3, 5, 6


def dense(x, units=1):
    return tf.layers.dense(x, units)


def sequences(features):
    """Four steps of two numbers for each row."""
    return tf.stack([tf.sin(features[:, :2] * (1.0 + 0.3 * i)) for i in range(TIMES)], 1)


def lengths(features):
    """Between 1 and 4, other maxima in other shards."""
    return 1 + tf.cast(tf.abs(features[:, 2]) * 10, tf.int32) % TIMES


def lstm():
    return tf.nn.rnn_cell.LSTMCell(3)


def gru():
    return tf.nn.rnn_cell.GRUCell(3)


def dynamic_lstm(features):
    outputs, state = tf.nn.dynamic_rnn(lstm(), sequences(features), dtype=tf.float32)
    return dense(outputs[:, -1] + state.c)


def dynamic_gru_of_lengths(features):
    outputs, state = tf.nn.dynamic_rnn(
        gru(), sequences(features), lengths(features), dtype=tf.float32, swap_memory=True
    )
    return dense(tf.reduce_sum(outputs, 1) + state)


def cut_to_the_longest(features):
    """Shards have sequences of different lengths in memory, and the same numbers."""
    size = lengths(features)
    outputs, _ = tf.nn.dynamic_rnn(
        lstm(), sequences(features)[:, : tf.reduce_max(size)], size, dtype=tf.float32
    )
    return dense(tf.reduce_sum(outputs, 1))


def stacked_time_major(features):
    cell = tf.nn.rnn_cell.MultiRNNCell([gru(), tf.nn.rnn_cell.ResidualWrapper(gru())])
    initial = cell.zero_state(tf.shape(features)[0], tf.float32)
    outputs, states = tf.nn.dynamic_rnn(
        cell,
        tf.transpose(sequences(features), [1, 0, 2]),
        initial_state=initial,
        time_major=True,
        parallel_iterations=1,
    )
    return dense(tf.concat([outputs[-1], states[0]], 1))


def bidirectional(features):
    outputs, states = tf.nn.bidirectional_dynamic_rnn(
        lstm(), gru(), sequences(features), lengths(features), dtype=tf.float32
    )
    return dense(tf.reduce_sum(tf.concat(outputs, 2), 1)) + dense(states[1])


def raw_rnn(features):
    """A decoder that is fed what it put out, for as many steps as the row has."""
    cell, rows = gru(), tf.shape(features)[0]
    kernel = tf.get_variable('kernel', [3, 2])
    size = lengths(features)

    def loop(time, output, state, _):
        if output is None:
            return time >= size, features[:, :2], cell.zero_state(rows, tf.float32), None, None
        return time >= size, tf.nn.tanh(tf.matmul(output, kernel)), state, output, None

    array, state, _ = tf.nn.raw_rnn(cell, loop)
    return dense(tf.reduce_sum(array.stack(), 0) + state)


def attention_decoder(features):
    """Dot-product attention over an encoder's outputs in each step of a loop."""
    memory, state = tf.nn.dynamic_rnn(gru(), sequences(features), dtype=tf.float32)
    mask = tf.sequence_mask(lengths(features), TIMES, tf.float32)
    w = tf.get_variable('w', [6, 3])

    def body(time, state, array):
        scores = tf.einsum('btd,bd->bt', memory, state) - 1e3 * (1 - mask)
        context = tf.einsum('bt,btd->bd', tf.nn.softmax(scores), memory)
        state = tf.nn.tanh(tf.matmul(tf.concat([state, context], 1), w))
        return time + 1, state, array.write(time, state)

    array = tf.TensorArray(tf.float32, 3, element_shape=[None, 3])
    _, _, array = tf.while_loop(lambda time, *_: time < 3, body, (0, state, array))
    return dense(tf.reshape(tf.transpose(array.stack(), [1, 0, 2]), [-1, 9]))


MODELS = [
    dynamic_lstm,
    dynamic_gru_of_lengths,
    cut_to_the_longest,
    stacked_time_major,
    bidirectional,
    raw_rnn,
    attention_decoder,
]


@pytest.mark.parametrize('model_fn', map(of_all_modes, MODELS), ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn, behavior):
    compare_modes(model_fn, away_from_0, 3)


@pytest.mark.parametrize('model_fn', [of_all_modes(raw_rnn)], ids=lambda f: f.__name__)
def test_rows_that_do_not_divide(model_fn, behavior):
    compare_modes(model_fn, ten_rows, 4, static=False)


def beam_search(features, labels, mode):
    """A step for as long as any beam has not ended; rows are padded to the same length."""
    del labels
    rows = tf.shape(features)[0]
    w = tf.get_variable('w', [WORDS, 3, WORDS])

    def extend(time, words, scores, ended):
        last = words[:, :, -1]
        logits = tf.einsum('bf,bkfv->bkv', features, tf.gather(w, last))
        # More and more, the end is likely; and no two ways to a sentence are equally so.
        now = tf.cast(time + 1, tf.float32)
        logits += now * tf.exp(features[:, None, :1]) * tf.one_hot(0, WORDS) + tf.sqrt(now) * logits
        stays = tf.one_hot(tf.zeros_like(last), WORDS, 0.0, -1e9)
        steps = tf.where(
            tf.tile(ended[:, :, None], [1, 1, WORDS]), stays, tf.nn.log_softmax(logits)
        )
        every = tf.reshape(scores[:, :, None] + steps, [rows, BEAMS * WORDS])
        scores, best = tf.nn.top_k(every, BEAMS)
        words = tf.gather(words, best // WORDS, batch_dims=1)
        words = tf.concat([words, (best % WORDS)[:, :, None]], 2)
        ended = tf.equal(words[:, :, -1], 0)
        return time + 1, words, scores, ended

    start = tf.tile(tf.constant([[0.0] + [-1e9] * (BEAMS - 1)]), [rows, 1])
    steps, words, scores, _ = tf.while_loop(
        lambda time, words, scores, ended: (time < LONGEST) & ~tf.reduce_all(ended),
        extend,
        (0, tf.ones([rows, BEAMS, 1], tf.int32), start, tf.zeros([rows, BEAMS], tf.bool)),
        shape_invariants=(
            tf.TensorShape([]),
            tf.TensorShape([None, BEAMS, None]),
            tf.TensorShape([None, BEAMS]),
            tf.TensorShape([None, BEAMS]),
        ),
    )
    words = tf.pad(words, [[0, 0], [0, 0], [0, LONGEST - steps]])
    predictions = {'words': words, 'scores': scores, 'steps': tf.fill([rows], steps)}
    return tf.estimator.EstimatorSpec(mode, predictions=predictions)


def test_beam_search(behavior):
    batches = [(x, None) for x, _ in away_from_0()]
    predict = tf.estimator.ModeKeys.PREDICT
    values = {'w': floats(5, 3, 5), 'global_step': np.array(0)}
    one = evaluate(beam_search, batches, 0, mode=predict, values=values).predictions
    ours = evaluate(beam_search, batches, 3, mode=predict, values=values).predictions
    assert_close(ours, one, 1e-5)
