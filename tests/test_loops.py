"""Loops that run until all rows are finished run as often as those of one device."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import floats, spec_of, step, weights
from towers import behavior_of, compare, evaluate

BOTH = pytest.mark.parametrize('static', [True, False], ids='static={}'.format)
LENGTHS = np.array([1, 2, 2, 1, 5, 4], np.int64)
DATA = [({'steps': floats(6, 5, 3, seed=i), 'lengths': LENGTHS}, floats(6, seed=i)) for i in (1, 2)]


def start(features):
    state = tf.zeros_like(features['steps'][:, 0])
    return 0, state, tf.zeros_like(features['lengths'], tf.bool), array()


def array():
    return tf.TensorArray(tf.float32, 0, dynamic_size=True, element_shape=[None, 3])


def advance(features):
    """Returns a round of a recurrent network, which goes on with rows that are finished."""
    kernel = weights('kernel', 3, 3)

    def body(time, state, finished, outputs):
        state = tf.tanh(state @ kernel + features['steps'][:, time])
        finished |= tf.cast(time + 1, tf.int64) >= features['lengths']
        return time + 1, state, finished, outputs.write(time, state)

    return body


def steps_of(outputs):
    return tf.transpose(outputs.stack(), [1, 0, 2])


def unfinished(time, state, finished, outputs):
    return ~tf.reduce_all(finished)


def until(going):
    """Returns what a loop gives for each round."""

    def decode(features):
        return steps_of(tf.while_loop(going, advance(features), start(features))[3])

    decode.__name__ = going.__name__
    return decode


@until
def not_all(time, state, finished, outputs):
    return unfinished(time, state, finished, outputs)


@until
def some_not(time, state, finished, outputs):
    return tf.reduce_any(~finished)


@until
def at_most_four(time, state, finished, outputs):
    return (time < 4) & tf.logical_not(tf.reduce_all(finished))


@until
def not_either(time, state, finished, outputs):
    return ~(tf.reduce_all(finished) | (time >= 4))


def by_the_longest(features):
    """Which is looked for in every round."""
    going = lambda time, *_: tf.cast(time, tf.int64) < tf.reduce_max(features['lengths'])  # noqa: E731
    return until(going)(features)


def by_the_least_left(features):
    left = lambda time: features['lengths'] - tf.cast(time, tf.int64)  # noqa: E731
    return until(lambda time, *_: ~(tf.reduce_max(left(time)) <= 0))(features)


def by_maximum_iterations(features):
    rounds = tf.while_loop(unfinished, advance(features), start(features), maximum_iterations=4)
    return steps_of(rounds[3])


def as_decided_in_a_round(features):
    advanced = advance(features)

    def body(going, *carried):
        carried = advanced(*carried)
        return ~tf.reduce_all(carried[2]), *carried

    rounds = tf.while_loop(lambda going, *_: going, body, (tf.constant(True), *start(features)))
    return steps_of(rounds[4])


def with_a_branch(features):
    """As decoders do that save work once all are finished."""
    advanced = advance(features)

    def body(time, state, finished, outputs):
        time, state, finished, outputs = advanced(time, state, finished, outputs)
        state = tf.where(finished[:, None] & tf.ones_like(state, tf.bool), 0 * state, state)
        state = tf.cond(tf.reduce_all(finished), lambda: 0 * state, lambda: state * 1.5)
        return time, state, finished, outputs

    return steps_of(tf.while_loop(unfinished, body, start(features))[3])


def twice(features):
    """The second goes on from what the first has made."""
    first = tf.while_loop(unfinished, advance(features), start(features))
    zero, _, rest, outputs = start(features)
    second = tf.while_loop(unfinished, advance(features), (zero, first[1], rest, outputs))
    return steps_of(first[3]) + steps_of(second[3])


def final_state(features):
    return tf.while_loop(unfinished, advance(features), start(features))[1][:, None]


def halting(features):
    """As adaptive computation does: until each row has had enough."""
    state, kernel = features['steps'][:, 0], weights('kernel', 3, 3)

    def body(state, total, count):
        total += tf.sigmoid(tf.reduce_sum(state, 1))
        return tf.tanh(state @ kernel), total, count + tf.cast(total < 1.2, tf.float32)

    zeros = tf.zeros_like(state[:, 0])
    going = lambda state, total, count: tf.reduce_any(total < 1.2)  # noqa: E731
    state, _, count = tf.while_loop(going, body, (state, zeros, zeros), maximum_iterations=20)
    return (state + count[:, None])[:, None]


def attending(features):
    """To all steps, of which a gradient inside of the loop takes the shape."""
    advanced, zeros = advance(features), 0 * features['steps']

    def body(time, state, finished, outputs):
        scores = tf.nn.softmax(tf.reduce_sum(tf.tanh(features['steps'] + state[:, None]), 2))
        context = tf.reduce_sum(scores[:, :, None] * (features['steps'] + zeros), 1)
        return advanced(time, state + context, finished, outputs)

    return steps_of(tf.while_loop(unfinished, body, start(features))[3])


def nested(inner):
    """A loop, a branch or a function inside of the loop, with variables or without."""

    def decode(features):
        advanced = advance(features)
        step_of = inner(weights('other', 3, 3), weights('table', 7, 3))

        def body(time, state, finished, outputs):
            return advanced(time, step_of(time, state), finished, outputs)

        return steps_of(tf.while_loop(unfinished, body, start(features))[3])

    decode.__name__ = inner.__name__
    return decode


@nested
def an_inner_loop(kernel, table):
    body = lambda i, x: (i + 1, tf.tanh(x @ kernel) * 1.5)  # noqa: E731
    return lambda time, state: tf.while_loop(lambda i, _: i < 2, body, (0, state))[1]


@nested
def a_branch_with_a_variable(kernel, table):
    return lambda time, state: tf.cond(time > 1, lambda: state @ kernel, lambda: state * 2)


@nested
def a_branch_with_a_lookup(kernel, table):
    ids = lambda x: tf.cast(tf.abs(x[:, 0]) * 3, tf.int32) % 7  # noqa: E731
    look_up = lambda x: x + tf.nn.embedding_lookup(table, ids(x))  # noqa: E731
    return lambda time, state: tf.cond(time > 1, lambda: look_up(state), lambda: state * 2)


@nested
def a_map(kernel, table):
    return lambda time, state: tf.map_fn(lambda row: tf.tanh(row * kernel[0]), state)


@nested
def a_function(kernel, table):
    return lambda time, state: tf.function(lambda x: tf.tanh(x @ kernel))(state)


def up_to_the_size(features):
    """Which is asked for in every round."""
    most = lambda: tf.shape(features['steps'])[1] - 1  # noqa: E731
    return until(lambda time, state, finished, _: (time < most()) & ~tf.reduce_all(finished))(
        features
    )


DECODERS = [an_inner_loop, a_branch_with_a_variable, a_branch_with_a_lookup, a_map, a_function]
DECODERS += [
    up_to_the_size,
    not_all,
    some_not,
    at_most_four,
    not_either,
    by_the_longest,
    by_the_least_left,
]
DECODERS += [by_maximum_iterations, as_decided_in_a_round, with_a_branch, twice, final_state]
DECODERS += [halting, attending]


def mean_loss(decode):
    """Goes by how many steps there are, whether they are a row's own or not."""

    def loss_of(features, labels):
        return tf.reduce_mean(tf.square(tf.reduce_mean(decode(features), [1, 2]) - labels))

    return loss_of


def masked_loss(features, labels):
    """As sequence-to-sequence models have it: a mask as long as the longest of the batch."""
    longest = tf.reduce_max(features['lengths'])
    mask = tf.sequence_mask(features['lengths'], longest, tf.float32)
    wanted = tf.reduce_sum(features['steps'], 2)[:, :longest]
    errors = tf.square(tf.reduce_sum(not_all(features), 2) - wanted) * mask
    return tf.reduce_sum(errors) / tf.reduce_sum(mask)


def model_of(loss_of):
    def model_fn(features, labels, mode):
        loss = loss_of(features, labels)
        return spec_of(mode, loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step()))

    return model_fn


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if 'the rows of its shard end' in r.getMessage()]


@pytest.mark.parametrize('decode', DECODERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize('towers', [3, 4], ids='towers={}'.format)
@BOTH
def test_training(decode, towers, static, caplog):
    compare(model_of(mean_loss(decode)), DATA, towers, static=static)
    assert not warnings(caplog)


@pytest.mark.parametrize('towers', [3, 4], ids='towers={}'.format)
@BOTH
def test_a_mask_of_the_whole_batch(towers, static, caplog):
    compare(model_of(masked_loss), DATA, towers, static=static)
    assert not warnings(caplog)


@BOTH
def test_two_gradients(static):
    """Gradients add outputs to a loop, and a second one may do so after the first was copied."""

    def model_fn(features, labels, mode):
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        outputs = not_all(features)
        first = tf.reduce_mean(tf.square(tf.reduce_mean(outputs, [1, 2]) - labels))
        second = tf.reduce_mean(tf.reduce_max(outputs * outputs, [1, 2]))
        pairs = zip(optimizer.compute_gradients(first), optimizer.compute_gradients(second))
        train_op = optimizer.apply_gradients([(a + 2 * b, v) for (a, v), (b, _) in pairs], step())
        return spec_of(mode, first + second, train_op)

    compare(model_fn, DATA, 3, static=static)


@BOTH
def test_a_tape(static, caplog):
    def model_fn(features, labels, mode):
        with tf.GradientTape() as tape:
            loss = mean_loss(not_all)(features, labels)
        variables = tf.trainable_variables()
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        pairs = zip(tape.gradient(loss, variables), variables)
        return spec_of(mode, loss, optimizer.apply_gradients(pairs, step()))

    compare(model_fn, DATA, 3, static=static)
    assert 'outside of the tape counts, too' in caplog.text


@BOTH
def test_a_tape_of_something_else(static, caplog):
    """What isn't on the tape is left out, though there's such a loop."""

    def model_fn(features, labels, mode):
        sums = tf.reduce_sum(features['steps'], 1)
        base = tf.reduce_mean(sums @ weights('kernel', 3, 3), 1)
        tf.summary.scalar('mean', tf.reduce_mean(not_all(features)))
        with tf.GradientTape() as tape:
            outputs = tf.reduce_mean(tf.tanh(sums @ weights('kernel', 3, 3)), 1)
            loss = tf.reduce_mean(tf.square(outputs - labels - base))
        variables = tf.trainable_variables()
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        pairs = zip(tape.gradient(loss, variables), variables)
        return spec_of(mode, loss, optimizer.apply_gradients(pairs, step()))

    compare(model_fn, DATA, 3, static=static)
    assert 'outside of the tape counts, too' not in caplog.text


@pytest.mark.parametrize(
    'decode', [not_all, by_maximum_iterations, twice], ids=lambda f: f.__name__
)
def test_predictions(decode):
    """Also those that a loop gives itself."""

    def model_fn(features, labels, mode):
        _, state, *_ = tf.while_loop(unfinished, advance(features), start(features))
        predictions = {'steps': decode(features), 'state': state}
        return tf.estimator.EstimatorSpec(mode, predictions=predictions)

    mode = tf.estimator.ModeKeys.PREDICT
    ours, one = (evaluate(model_fn, DATA, n, mode=mode, static=False) for n in (3, 0))
    for a, b in zip(ours.predictions, one.predictions, strict=True):
        for key in ('steps', 'state'):
            assert a[key].shape == b[key].shape
            np.testing.assert_allclose(a[key], b[key], rtol=1e-5)


def as_many_as_rows(features):
    """Takes one row a round, so that it ends with the shard."""
    values = features['steps'][:, 0]
    body = lambda i, kept: (i + 1, kept.write(i, values[i] * 2))  # noqa: E731
    kept = tf.TensorArray(tf.float32, tf.shape(values)[0], element_shape=[3])
    return tf.while_loop(lambda i, _: i < tf.shape(values)[0], body, (0, kept))[1].stack()[:, None]


def test_loops_over_rows_end_with_their_shard(behavior):
    compare(model_of(mean_loss(lambda x: scaled(as_many_as_rows(x)))), DATA, 3)


def scaled(outputs):
    return outputs * weights('scale', 3)


def told(decode, caplog):
    evaluate(model_of(mean_loss(decode)), DATA, 3, static=False)
    [warning] = warnings(caplog)
    return warning


def test_what_ends_with_its_shard_is_told(caplog):
    """There's no going on with a loop inside of a function."""
    assert 'tf.enable_control_flow_v2()' in told(lambda x: scaled(tf.function(not_all)(x)), caplog)


def by_a_sum(features):
    going = lambda time, state, finished, _: tf.reduce_sum(tf.cast(~finished, tf.int32)) > 0  # noqa: E731
    return until(going)(features)


def until_one_is_finished(features):
    return until(lambda time, state, finished, _: ~tf.reduce_any(finished))(features)


@pytest.mark.parametrize('decode', [by_a_sum, until_one_is_finished], ids=lambda f: f.__name__)
def test_other_ends_are_told(decode, caplog):
    told(decode, caplog)


def by_a_bound(features):
    """As a beam search's: it's computed from scores that may fall again."""
    kernel = weights('kernel', 3, 3)

    def body(time, state):
        return time + 1, tf.sin(state @ kernel + tf.cast(time, tf.float32))

    going = lambda time, state: (time < 20) & ~tf.reduce_all(state[:, 0] > 0.9)  # noqa: E731
    return tf.while_loop(going, body, (0, features['steps'][:, 0]))[1][:, None]


def by_the_last_word(features):
    kernel = weights('kernel', 3, 3)

    def body(time, word, state):
        state = tf.sin(state @ kernel + tf.cast(word, tf.float32)[:, None])
        return time + 1, tf.argmax(state, 1), state

    going = lambda time, word, state: (time < 20) & tf.reduce_any(word > 0)  # noqa: E731
    start = (0, features['lengths'], features['steps'][:, 0])
    return tf.while_loop(going, body, start)[2][:, None]


def kept(features):
    """By what a round computes, but rows that are finished stay so."""
    kernel = weights('kernel', 3, 3)

    def body(time, finished, state):
        state = tf.sin(state @ kernel + tf.cast(time, tf.float32))
        return time + 1, finished | (state[:, 0] > 0.9), state

    going = lambda time, finished, state: (time < 20) & ~tf.reduce_all(finished)  # noqa: E731
    state = features['steps'][:, 0]
    return tf.while_loop(going, body, (0, state[:, 0] > 0.9, state))[2][:, None]


@pytest.mark.parametrize('decode', [by_a_bound, by_the_last_word], ids=lambda f: f.__name__)
def test_rows_that_may_go_on_later_are_told(decode, caplog):
    evaluate(model_of(mean_loss(decode)), DATA, 3, static=False)
    assert 'computes anew' in caplog.text


@pytest.mark.parametrize('decode', [kept, not_all, by_the_longest], ids=lambda f: f.__name__)
def test_rows_that_stay_finished(decode, caplog):
    compare(model_of(mean_loss(decode)), DATA, 3, static=False)
    assert 'computes anew' not in caplog.text


def test_a_loop_of_one_variable():
    """It doesn't count its rounds."""

    @tf.function
    def going(x):
        return tf.reduce_any(x > 0)

    @tf.function
    def body(x):
        return x - 1

    def loss_of(features, labels):
        given = features['steps'][:, 0] * 3
        spec = tf.TensorSpec(given.shape, given.dtype)
        functions = [f.get_concrete_function(spec) for f in (going, body)]
        [last] = tf.raw_ops.While(input=[given], cond=functions[0], body=functions[1])
        return tf.reduce_mean(scaled(last + given))

    evaluate(model_of(loss_of), DATA, 3, static=False)


def test_v1_loops_that_end_with_their_shard_are_told(caplog):
    with behavior_of('v1'):
        assert 'tf.enable_control_flow_v2()' in told(not_all, caplog)


def test_control_flow_v2_without_v2_behavior(caplog):
    """The remedy."""
    with behavior_of('v1'):
        tf.enable_control_flow_v2()
        compare(model_of(mean_loss(not_all)), DATA, 3)
    assert not warnings(caplog)
