"""Rows that meet others inside of functions, branches and loops, or before a layer."""

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import adam, batches, predict, spec_of, with_loss
from towers import compare, train

OTHERS = 'rows are combined with other rows of their shard'
VALUES = 'rows are combined with values of all rows of their shard'
BOTH = pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])


def with_forward(forward):
    """A model_fn that does something to its features before a network."""

    def model_fn(features, labels, mode):
        loss = tf.losses.mean_squared_error(labels, predict(forward(features)))
        return spec_of(mode, loss, adam(loss))

    return model_fn


def turn():
    return tf.equal(tf.train.get_global_step() % 2, 0)


def centred(x):
    return x - tf.reduce_mean(x, 0)


def in_a_branch(x):
    return tf.cond(turn(), lambda: centred(x), lambda: x)


def in_an_inner_branch(x):
    return tf.cond(turn(), lambda: tf.cond(turn(), lambda: centred(x), lambda: -x), lambda: x)


def captured_by_a_branch(x):
    mean = tf.reduce_mean(x, 0)
    return tf.cond(turn(), lambda: x - mean, lambda: x)


def returned_by_a_branch(x):
    return x - tf.cond(turn(), lambda: tf.reduce_mean(x, 0), lambda: tf.reduce_max(x, 0))


def in_a_loop(x):
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tf.tanh(centred(y))), [0, x])[1]


def handed_on_by_a_loop(x):
    """The rows meet what the round before has made of all of them."""

    def body(i, y, mean):
        return i + 1, tf.tanh(y - mean), tf.reduce_mean(y, 0)

    return tf.while_loop(lambda i, *_: i < 2, body, [0, x, tf.zeros_like(x[0])])[1]


def until_it_converges(x):
    """As many rounds as the whole batch needs."""

    def body(change, y):
        new = tf.tanh(0.7 * y)
        return tf.reduce_max(tf.abs(new - y)), new

    return tf.while_loop(lambda change, _: change > 0.1, body, [1.0, x])[1]


def captured_by_a_map(x):
    mean = tf.reduce_mean(x, 0)
    return tf.map_fn(lambda row: tf.tanh(row - mean), x)


def before_a_layer(x):
    return centred(x)


def scaled_before_a_layer(x):
    return x * tf.rsqrt(tf.reduce_mean(tf.square(x)) + 1e-3)


@pytest.mark.parametrize(
    'forward',
    [in_a_branch, in_an_inner_branch, captured_by_a_branch, returned_by_a_branch, in_a_loop]
    + [
        handed_on_by_a_loop,
        until_it_converges,
        captured_by_a_map,
        before_a_layer,
        scaled_before_a_layer,
    ],
    ids=lambda f: f.__name__,
)
@BOTH
def test_values_of_a_shard_are_warned_of(forward, static, behavior, caplog):
    train(with_forward(forward), batches(steps=1), 3, static=static)
    assert caplog.text.count(VALUES) == 1


def test_values_of_a_shard_in_a_function_are_warned_of(caplog):
    train(with_forward(tf.function(centred)), batches(steps=1), 3, static=False)
    assert VALUES in caplog.text
    assert "'sub' (Sub) in 'PartitionedCall'" in caplog.text


def scanned(x):
    return tf.scan(lambda state, row: 0.5 * state + row, x)


def recurrent(x):
    """As if rows were steps of one sequence."""
    cell = tf.nn.rnn_cell.GRUCell(3)
    return tf.nn.dynamic_rnn(cell, x[None], dtype=tf.float32)[0][0]


def convolved(x):
    return tf.layers.conv1d(x[None], 3, 3, padding='same')[0]


def quarters_of_two(x):
    one, two, three, four = tf.split(tf.concat([x, x**2], 0), 4)
    return tf.concat([one * two, three * four], 0)


def pooled(x):
    return tf.nn.max_pool(x[None, :, None], [1, 3, 1, 1], [1, 1, 1, 1], 'SAME')[0, :, 0]


def one_after_another(x):
    """A loop of the user's own, that reads row by row."""
    n = tf.shape(x)[0]
    array = tf.TensorArray(tf.float32, n, element_shape=[3])

    def body(i, state, array):
        state = 0.5 * state + x[i]
        return i + 1, state, array.write(i, state)

    out = tf.while_loop(lambda i, *_: i < n, body, [0, tf.zeros([3]), array])[2]
    return tf.reshape(out.stack(), [-1, 3])


def each_against_all(x):
    return tf.map_fn(lambda row: tf.reduce_mean(tf.tanh(x - row), 0), x)


def ids_of(x):
    return tf.cast(x[:, 0] > 0, tf.int32)


def by_how_often_their_id_is_there(x):
    _, index, count = tf.unique_with_counts(ids_of(x))
    return x / tf.cast(tf.gather(count, index), tf.float32)[:, None]


def from_the_mean_of_their_id(x):
    ids, index = tf.unique(ids_of(x))
    means = tf.math.unsorted_segment_mean(x, index, tf.size(ids))
    return x - tf.gather(0.5 * means, index)


def sorted_in_a_branch(x):
    return tf.cond(turn(), lambda: tf.sort(x, 0), lambda: x)


def shifted_in_a_loop(x):
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y + tf.roll(y, 1, 0)), [0, x])[1]


@pytest.mark.parametrize(
    'forward',
    [scanned, recurrent, convolved, pooled, one_after_another, each_against_all, quarters_of_two]
    + [sorted_in_a_branch, shifted_in_a_loop]
    + [by_how_often_their_id_is_there, from_the_mean_of_their_id],
    ids=lambda f: f.__name__,
)
@BOTH
def test_rows_that_meet_others_are_warned_of(forward, static, behavior, caplog):
    train(with_forward(forward), batches(steps=1), 3, static=static)
    assert caplog.text.count(OTHERS) == 1


def test_rows_that_are_chosen_by_a_feature_are_warned_of(caplog):
    def loss(partners, output):
        return tf.reduce_mean(tf.square(output - tf.gather(output, partners[:, 0])))

    data = [(features, (0 * labels).astype('int32')) for features, labels in batches(steps=1)]
    train(with_loss(loss), data, 3, static=False)
    assert OTHERS in caplog.text


def test_rows_of_what_a_sparse_feature_has_are_not_warned_of(caplog):
    """Its indices say which rows they are, in each shard."""

    def model_fn(features, labels, mode):
        rows = tf.gather(features['x'], features['words'].indices[:, 0])
        ids = features['words'].values
        output = predict(rows * tf.gather(tf.get_variable('table', [9, 3]), ids))
        loss = tf.reduce_mean(tf.square(output))
        return spec_of(mode, loss, adam(loss))

    def with_words(features, labels):
        words = tf.sparse.from_dense(tf.cast(tf.abs(features) * 4, tf.int32) % 9)
        return {'x': features, 'words': words}, labels

    compare(model_fn, batches(), 3, static=False, preprocess=with_words)
    assert OTHERS not in caplog.text


def test_what_differs_in_a_function_is_named_by_verify(capsys):
    def input_fn():
        return tf.data.Dataset.from_tensors(batches()[0])

    result = estimator_mgpu.verify(with_forward(tf.function(centred)), input_fn, devices=3)
    assert not result.exact
    assert "'sub' (Sub) in 'PartitionedCall'" in result.causes[0]


def test_a_python_function_is_told_of(caplog):
    def forward(x):
        return tf.ensure_shape(tf.py_function(lambda rows: 2 * rows, [x], tf.float32), [None, 3])

    train(with_forward(forward), batches(steps=1), 3, static=False)
    assert (
        "Python functions are called with the rows of one shard each: 'EagerPyFunc'" in caplog.text
    )


def test_a_python_function_is_named_by_verify(capsys):
    def forward(x):
        return tf.ensure_shape(tf.py_function(centred, [x], tf.float32), [None, 3])

    def input_fn():
        return tf.data.Dataset.from_tensors(batches()[0])

    result = estimator_mgpu.verify(with_forward(forward), input_fn, devices=3)
    assert not result.exact
    assert "called with the rows of one shard each: 'EagerPyFunc'" in result.causes[0]


def test_rows_of_unknown_rank_that_are_put_together_and_split():
    def forward(x):
        rows = tf.py_function(lambda rows: 2 * rows, [x], tf.float32)
        both = tf.ensure_shape(tf.concat([rows, rows], 0), [None, 3])
        one, two = tf.split(both, 2)
        return one - 0.5 * two

    compare(with_forward(forward), batches(), 3, static=False)


def each_in_a_map(x):
    return tf.map_fn(lambda row: row - tf.reduce_mean(row), x)


def each_in_a_loop(x):
    n = tf.shape(x)[0]
    array = tf.TensorArray(tf.float32, n, element_shape=[3])

    def body(i, array):
        return i + 1, array.write(i, tf.tanh(tf.gather(x, i)))

    out = tf.while_loop(lambda i, _: i < n, body, [0, array])[1]
    return tf.reshape(out.stack(), [-1, 3])


def over_steps(x):
    steps = tf.stack([x, 2 * x, x**2], 1)
    cell = tf.nn.rnn_cell.GRUCell(3)
    lengths = tf.cast(tf.abs(x[:, 0]) * 2, tf.int32)
    return tf.nn.dynamic_rnn(cell, steps, lengths, dtype=tf.float32)[1]


def over_steps_first(x):
    steps = tf.stack([x, 2 * x, x**2])
    cell = tf.nn.rnn_cell.BasicRNNCell(3)
    return tf.nn.dynamic_rnn(cell, steps, dtype=tf.float32, time_major=True)[1]


def scanned_over_steps(x):
    return tf.scan(lambda state, step: 0.5 * state + step, tf.stack([x, 2 * x]))[-1]


def convolved_within(x):
    return tf.layers.flatten(tf.layers.conv1d(x[:, :, None], 1, 2, padding='same'))


def normalised_within(x):
    def norm():
        return (x - tf.reduce_mean(x, 1, keepdims=True)) / (1 + tf.norm(x, axis=1, keepdims=True))

    return tf.cond(turn(), norm, lambda: x)


def scaled_by_how_many_they_are(x):
    """What each gives to a mean over a branch's rows, and that mean times their number."""
    n = tf.cast(tf.shape(x)[0], tf.float32)
    return tf.cond(turn(), lambda: x * n / n, lambda: x)


def until_all_are_done(x):
    """Rows that are done stay as they are, as those of a decoder do."""

    def body(i, y, done):
        done |= tf.reduce_max(tf.abs(y), 1) < 0.5
        return i + 1.0, tf.where(done, y, 0.7 * y), done

    done = tf.zeros_like(x[:, 0], tf.bool)

    def going(i, y, done):
        return (i < 9.0) & ~tf.reduce_all(done)

    return tf.while_loop(going, body, [0.0, x, done])[1]


def both_at_once(x):
    """As discriminators see what is real and what isn't."""
    w = tf.get_variable('both', [3, 3])
    one, two = tf.split(tf.nn.tanh(tf.concat([x, x**2], 0) @ w), 2)
    return one - two


def looked_up_once_an_id(x):
    ids, index, _ = tf.unique_with_counts(ids_of(x))
    return x * tf.gather(tf.gather(tf.get_variable('table', [2, 3]), ids), index)


def softmax_of_ragged_rows(x):
    ragged = tf.RaggedTensor.from_tensor(x)
    ids = ragged.value_rowids()
    most = tf.math.segment_max(ragged.flat_values, ids)
    weights = tf.exp(ragged.flat_values - tf.gather(most, ids))
    return ragged.with_flat_values(weights).to_tensor(shape=[None, 3])


def by_the_step(x):
    rate = 1 / (1 + tf.cast(tf.train.get_global_step(), tf.float32))
    return tf.cond(turn(), lambda: x * rate, lambda: x)


@pytest.mark.parametrize(
    'forward',
    [each_in_a_map, each_in_a_loop, over_steps, over_steps_first, scanned_over_steps]
    + [convolved_within, normalised_within, scaled_by_how_many_they_are, by_the_step]
    + [until_all_are_done, both_at_once, looked_up_once_an_id, softmax_of_ragged_rows],
    ids=lambda f: f.__name__,
)
@BOTH
def test_rows_that_keep_to_themselves_are_not_warned_of(forward, static, behavior, caplog):
    compare(with_forward(forward), batches(), 3, static=static)
    assert OTHERS not in caplog.text
    assert VALUES not in caplog.text


@pytest.mark.parametrize('fused', [True, False], ids=['fused', 'plain'])
def test_batch_normalization_is_told_of(fused, behavior, caplog):
    def forward(x):
        x = tf.reshape(x, [-1, 1, 1, 3])
        return tf.layers.batch_normalization(x, training=True, fused=fused)[:, 0, 0]

    train(with_forward(forward), batches(steps=1), 3, static=False)
    assert VALUES not in caplog.text
    assert caplog.text.count("batch normalization takes each device's own statistics") == 1
