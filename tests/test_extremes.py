"""Sequences cut, masked or padded to the longest of the batch are as long on each device."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import floats, spec_of, step, weights
from towers import compare, evaluate, session, train

BOTH = pytest.mark.parametrize('static', [True, False], ids='static={}'.format)
LENGTHS = np.array([1, 2, 2, 1, 5, 4], np.int64)
TEXTS = np.array([' '.join('abcdef'[i % 6] for i in range(n)) for n in LENGTHS])
DATA = [
    ({'steps': floats(6, 5, 3, seed=i), 'lengths': LENGTHS, 'texts': TEXTS}, floats(6, seed=i))
    for i in (1, 2)
]


def scores(features):
    return tf.tensordot(features['steps'], weights('kernel', 3, 1), 1)[:, :, 0]


def cut(features):
    """Scores of the steps, and which of these there are, as long as the longest sequence."""
    longest = tf.reduce_max(features['lengths'])
    mask = tf.sequence_mask(features['lengths'], longest, tf.float32)
    return scores(features)[:, :longest], mask


def mean(features):
    values, mask = cut(features)
    return tf.reduce_mean(values * mask, 1)


def mean_of_all(features):
    values, mask = cut(features)
    return tf.reduce_mean(tf.square(values) * mask)


def of_floats(features):
    """Lengths that were added up from a mask."""
    mask = tf.sequence_mask(features['lengths'], 5, tf.float32)
    longest = tf.cast(tf.reduce_max(tf.reduce_sum(mask, 1)), tf.int32)
    return tf.reduce_mean((scores(features) * mask)[:, :longest], 1)


def of_rounded_floats(features):
    """A part of the longest one, of lengths that were halved, rounded up."""
    halves = tf.reduce_max(features['lengths'] / 2)
    longest = tf.cast(tf.ceil(halves * 1.5 - 0.5), tf.int32)
    least = tf.cast(tf.floor(1 + tf.reduce_min(features['lengths'] / 3)), tf.int32)
    return tf.reduce_mean(scores(features)[:, :longest], 1) + scores(features)[:, least]


def of_complex_numbers(features):
    """Which have no order: the cast of their maximum's real part has nothing to do with that."""
    parts = tf.cast(features['lengths'], tf.complex64) * 2
    halves = tf.reduce_max(tf.cast(tf.math.real(parts), tf.int32)) // 2
    turned = tf.cast(tf.cast(parts * 0.5, tf.int32), tf.float32)
    return tf.reduce_mean(scores(features)[:, :halves], 1) + 0.1 * turned


def of_bounds(features):
    """Of where rows begin and end, in another type."""
    rows = tf.RaggedTensor.from_row_lengths(
        tf.boolean_mask(scores(features), tf.sequence_mask(features['lengths'], 5)),
        features['lengths'],
    )
    splits = tf.identity(tf.cast(rows.row_splits, tf.int32))
    return tf.reduce_mean(scores(features)[:, : tf.reduce_max(splits[1:] - splits[:-1])], 1)


def masks_alone(features):
    mask = tf.sequence_mask(features['lengths'], dtype=tf.float32)
    return tf.reduce_mean(scores(features)[:, : tf.shape(mask)[1]] * mask, 1)


def by_the_size(features):
    values, mask = cut(features)
    size = tf.maximum(tf.cast(tf.shape(values)[1], tf.float32), 1.0)
    return tf.reduce_sum(values * mask, 1) / size


def by_the_longest(features):
    return scores(features)[:, 0] / tf.cast(tf.reduce_max(features['lengths']), tf.float32)


def less_the_shortest(features):
    return scores(features)[:, 0] * tf.cast(
        features['lengths'] - tf.reduce_min(features['lengths']), tf.float32
    )


def softmax(features):
    values, _ = cut(features)
    return tf.reduce_sum(tf.nn.softmax(values) * values, 1)


def largest(features):
    values, mask = cut(features)
    return tf.reduce_max(values * mask, 1)


def padded(features):
    missing = tf.reduce_max(features['lengths']) - 2
    return tf.reduce_mean(tf.pad(scores(features)[:, :2], [[0, 0], [0, missing]]), 1)


def convolution(features):
    values, mask = cut(features)
    filters = weights('filters', 3, 1, 2)
    return tf.reduce_sum(tf.nn.conv1d((values * mask)[:, :, None], filters, 1, 'SAME'), [1, 2])


def recurrent(features):
    values, _ = cut(features)
    cell = tf.nn.rnn_cell.BasicRNNCell(2, name='cell')
    return tf.reduce_sum(tf.nn.dynamic_rnn(cell, values[:, :, None], dtype=tf.float32)[1], 1)


def in_a_function(features):
    function = tf.function(lambda values, mask: tf.reduce_mean(values * mask, 1))
    return function(*cut(features))


def in_a_loop(features):
    """Adds up as many steps as the longest has."""
    values, longest = scores(features), tf.cast(tf.reduce_max(features['lengths']), tf.int32)
    body = lambda i, total: (i + 1, total + values[:, i] / tf.cast(i + 1, tf.float32))  # noqa: E731
    return tf.while_loop(lambda i, total: i < longest, body, [0, tf.zeros_like(values[:, 0])])[1]


def longest_of_what_is_cut(features):
    values, mask = cut(features)
    sizes = tf.reduce_sum(tf.cast(mask * values > 0, tf.int32), 1)
    most = tf.reduce_max(sizes) + 1
    return tf.reduce_mean(tf.sequence_mask(sizes, most, tf.float32), 1) * values[:, 0]


def ragged(features):
    values = scores(features)
    rows = tf.RaggedTensor.from_row_lengths(
        tf.boolean_mask(values, tf.sequence_mask(features['lengths'], 5)), features['lengths']
    )
    return tf.reduce_mean(rows.to_tensor(), 1)


def words(features):
    """Embedded, and padded as text is."""
    numbers = tf.strings.to_hash_bucket_fast(tf.compat.v2.strings.split(features['texts']), 7)
    table = weights('table', 7, 2)
    return tf.reduce_mean(tf.gather(table, numbers.to_tensor()), [1, 2])


def words_of_some_size(features):
    """The shape that they're padded to is given for the last dimension only."""
    rows = tf.strings.unicode_decode(features['texts'], 'UTF-8')
    table = weights('table', 128, 2)
    rows = tf.ragged.map_flat_values(lambda values: tf.gather(table, values), rows)
    return tf.reduce_mean(rows.to_tensor(shape=[None, None, 2]), [1, 2])


def sparse_words(features):
    rows = tf.string_split(features['texts'])
    numbers = tf.strings.to_hash_bucket_fast(rows.values, 7)
    dense = tf.sparse.to_dense(tf.SparseTensor(rows.indices, numbers, rows.dense_shape))
    table = weights('table', 7, 2)
    return tf.reduce_mean(tf.gather(table, dense), [1, 2])


def sparse_rows(features):
    rows = tf.compat.v2.strings.split(features['texts']).to_sparse()
    lengths = tf.strings.length(tf.sparse.to_dense(rows, default_value='..'))
    return tf.reduce_mean(tf.cast(lengths, tf.float32), 1) * scores(features)[:, 0]


def parsed(features):
    """Lists of bytes in a proto by hand: each text is field 1 of a feature named 'a'."""
    examples = tf.numpy_function(
        lambda texts: np.array([example(text) for text in texts], object),
        [features['texts']],
        tf.string,
    )
    examples = tf.ensure_shape(examples, [None])
    rows = tf.io.parse_example(examples, {'a': tf.io.VarLenFeature(tf.string)})['a']
    lengths = tf.strings.length(tf.sparse.to_dense(rows, default_value='..'))
    return tf.reduce_mean(tf.cast(lengths, tf.float32), 1) * scores(features)[:, 0]


def example(text):
    values = tf.train.BytesList(value=text.split())
    feature = {'a': tf.train.Feature(bytes_list=values)}
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


OUTPUTS = [mean, mean_of_all, masks_alone, by_the_size, by_the_longest, less_the_shortest, softmax]
OUTPUTS += [largest, padded, convolution, recurrent, in_a_function, in_a_loop]
OUTPUTS += [longest_of_what_is_cut, ragged, words, words_of_some_size, sparse_words, sparse_rows]
OUTPUTS += [parsed, of_floats, of_rounded_floats, of_complex_numbers, of_bounds]


def cut_to_their_mean(features):
    lengths = tf.cast(features['lengths'], tf.float32)
    return scores(features)[:, : tf.cast(tf.ceil(tf.reduce_mean(lengths)), tf.int32)]


def cut_to_their_sum(features):
    return scores(features)[:, : tf.maximum(tf.reduce_sum(features['lengths']) // 6, 1)]


def cut_in_a_function(features):
    longest = tf.function(lambda x: tf.reduce_max(x), autograph=False)(features['lengths'])
    return scores(features)[:, :longest]


def cut_in_a_branch(features):
    longest = tf.cond(step() >= 0, lambda: tf.reduce_max(features['lengths']), lambda: np.int64(3))
    return scores(features)[:, :longest]


def half(lengths):
    return tf.reduce_sum(lengths) // 12


def cut_in_nested_functions(features):
    inner = tf.function(half, autograph=False)
    size = tf.function(lambda lengths: inner(lengths) + 1, autograph=False)(features['lengths'])
    return scores(features)[:, :size]


def less_than_the_longest(features):
    """Not a part of it that grows with it."""
    longest = tf.cast(tf.ceil(6 - tf.reduce_max(features['lengths'] / 2)), tf.int32)
    return scores(features)[:, :longest]


def cut_to_what_is_above_the_mean(features):
    lengths = tf.cast(features['lengths'], tf.float32)
    more = tf.cast(2 * tf.nn.relu(lengths - tf.reduce_mean(lengths)), tf.int32)
    return scores(features)[:, : tf.reduce_max(more) + 1]


SHORTER = [
    cut_to_what_is_above_the_mean,
    cut_to_their_mean,
    cut_to_their_sum,
    cut_in_a_function,
    cut_in_nested_functions,
    cut_in_a_branch,
]
SHORTER += [less_than_the_longest]


def model_of(output):
    def model_fn(features, labels, mode):
        predicted = output(features)
        loss = tf.reduce_mean(tf.square(predicted - 1))
        loss += 0.1 * tf.nn.l2_loss(weights('kernel', 3, 1))
        if mode == tf.estimator.ModeKeys.TRAIN:
            train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, step())
            return spec_of(mode, loss, train_op)
        # Made after the predictions: what they come from is the whole batch's already.
        longest = tf.reduce_max(features['lengths'])
        metrics = {
            'mean': tf.metrics.mean(predicted),
            'longest': tf.metrics.mean(longest),
            'shares': tf.metrics.mean(features['lengths'] / longest),
        }
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, predictions=predicted, eval_metric_ops=metrics
        )

    return model_fn


def warnings(caplog):
    said = ['of their shard', 'of a shard', 'cannot be told', 'neither a sum']
    texts = [r.getMessage() for r in caplog.records if r.levelname == 'WARNING']
    return [text for text in texts if any(map(text.__contains__, said))]


@pytest.mark.parametrize('output', OUTPUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize('towers', [2, 3, 4], ids='towers={}'.format)
@BOTH
def test_training(output, towers, static, behavior, caplog):
    compare(model_of(output), DATA, towers, static=static)
    if output not in (ragged, words_of_some_size):  # Of how they're put together.
        assert not warnings(caplog)


@pytest.mark.parametrize('output', [mean, by_the_longest, words], ids=lambda f: f.__name__)
@pytest.mark.parametrize('towers', [3, 8], ids='towers={}'.format)
@BOTH
def test_evaluation(output, towers, static, behavior, caplog):
    values = {'kernel': floats(3, 1), 'table': floats(7, 2)}
    ours, one = (evaluate(model_of(output), DATA, n, static=static) for n in (towers, 0))
    for name, expected in one.metrics.items():
        np.testing.assert_allclose(ours.metrics[name], expected, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(ours.losses, one.losses, rtol=1e-5)
    assert not warnings(caplog), values


@pytest.mark.parametrize('output', SHORTER, ids=lambda f: f.__name__)
@BOTH
def test_rows_cut_by_values_of_a_shard_are_warned_of(output, static, behavior, caplog):
    train(
        model_of(lambda features: tf.reduce_mean(output(features), 1)), DATA[:1], 3, static=static
    )
    assert 'rows are combined with values of all rows of their shard' in caplog.text


def test_lengths_of_the_features_own_padding(behavior):
    """Features are as long as the longest of the batch; so is the mask, on each device."""

    def model_fn(features, labels, mode):
        mask = tf.sequence_mask(features['lengths'], dtype=tf.float32)
        loss = tf.reduce_sum(scores(features) * mask) / tf.reduce_sum(mask)
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    compare(model_fn, DATA, 3)
    compare(model_fn, DATA, 4, static=False)


def test_predictions_as_wide_as_the_longest():
    def model_fn(features, labels, mode):
        values, mask = cut(features)
        return tf.estimator.EstimatorSpec(mode, predictions={'values': values * mask})

    mode = tf.estimator.ModeKeys.PREDICT
    ours, one = (evaluate(model_fn, DATA, n, mode=mode, static=False) for n in (3, 0))
    for a, b in zip(ours.predictions, one.predictions):
        np.testing.assert_allclose(a['values'], b['values'], rtol=1e-5)


def test_predictions_as_wide_as_lengths_of_what_was_combined(caplog):
    """They fit together as one device's would, and it's said that rows were combined for them."""

    def model_fn(features, labels, mode):
        lengths = tf.cast(features['lengths'], tf.float32)
        more = tf.cast(tf.nn.relu(lengths - tf.reduce_mean(lengths)), tf.int32)
        width = tf.reduce_max(more) + 1
        values = tf.pad(scores(features)[:, :1], [[0, 0], [0, width]])
        return tf.estimator.EstimatorSpec(mode, predictions={'values': values})

    [predicted] = evaluate(model_fn, DATA[:1], 3, mode='infer', static=False).predictions
    # Of 5, whose shard's mean is 4.5, but for the other shards' 1 and 2 and their means of 1.5.
    assert predicted['values'].shape == (6, 2)
    [warning] = warnings(caplog)
    assert warning.startswith("In what 'Max:0' comes from, rows are combined with values of all")


def test_sizes_that_a_function_computes_are_not_warned_of(caplog):
    """What is reduced there isn't rows."""

    @tf.function(autograph=False)
    def half_of(values):
        return tf.reduce_prod(tf.shape(values)[1:]) // 2

    def model_fn(features, labels, mode):
        values = scores(features)
        loss = tf.reduce_mean(tf.square(values[:, : half_of(values)]))
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    compare(model_fn, DATA, 3)
    assert not warnings(caplog)


def test_a_maximum_that_is_not_of_rows():
    """The longest word of each row is its own."""

    def model_fn(features, labels, mode):
        words = tf.reduce_max(tf.cast(features['steps'] * 9, tf.int32), [1, 2])
        predicted = scores(features)[:, 0] * tf.cast(words, tf.float32)
        loss = tf.reduce_mean(tf.square(predicted - labels))
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.01).minimize(loss, step()))

    compare(model_fn, DATA, 3)


def repeated(features):
    values = scores(features)
    ids = tf.repeat(tf.range(tf.shape(values)[0]), features['lengths'])
    return tf.math.segment_sum(tf.repeat(values[:, 0], features['lengths']), ids)


def stacked(features):
    """A step of all rows after the other, in an array as long as the longest."""
    values, longest = scores(features), tf.cast(tf.reduce_max(features['lengths']), tf.int32)
    body = lambda i, array: (i + 1, array.write(i, values[:, i]))  # noqa: E731
    array = tf.TensorArray(tf.float32, longest)
    array = tf.while_loop(lambda i, array: i < longest, body, [0, array])[1]
    return tf.reduce_mean(array.stack(), 0)


def of_segments(features):
    """As many as the largest number says; each has its mean."""
    values, size = scores(features)[:, 0], tf.reduce_max(features['lengths']) + 1
    sums = tf.math.unsorted_segment_sum(values, features['lengths'], size)
    counts = tf.math.unsorted_segment_sum(tf.ones_like(values), features['lengths'], size)
    return tf.reduce_sum(tf.square(tf.math.divide_no_nan(sums, counts)))


def confusion(features):
    values = scores(features)
    found = tf.math.confusion_matrix(features['lengths'], tf.argmax(values, 1))
    right = tf.linalg.trace(tf.cast(found, tf.float32))
    return tf.reduce_mean(values) + right / tf.cast(tf.shape(values)[0], tf.float32)


@pytest.mark.parametrize(
    'output', [repeated, stacked, of_segments, confusion], ids=lambda f: f.__name__
)
@BOTH
def test_other_uses_of_the_longest(output, static, behavior):
    compare(model_of(output), DATA, 3, static=static)


@pytest.mark.parametrize('output', [mean, ragged, words], ids=lambda f: f.__name__)
@BOTH
def test_a_tape(output, static):
    def model_fn(features, labels, mode):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(output(features) - labels))
        variables = tf.trainable_variables()
        pairs = [(g, v) for g, v in zip(tape.gradient(loss, variables), variables) if g is not None]
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        return spec_of(mode, loss, optimizer.apply_gradients(pairs, step()))

    compare(model_fn, DATA, 3, static=static)


@pytest.mark.parametrize('output', [mean, mean_of_all], ids=lambda f: f.__name__)
@pytest.mark.parametrize('towers', [3, 4], ids='towers={}'.format)
def test_constant_features(output, towers, behavior):
    """By which TensorFlow works sizes out, and would have a shard's."""

    def constants(features, labels):
        features, labels = tf.nest.map_structure(tf.constant, DATA[0])
        return features, labels

    compare(model_of(output), DATA, towers, preprocess=constants)


@BOTH
def test_ops_that_are_made_between_gradients(static, behavior):
    def model_fn(features, labels, mode):
        longest = tf.reduce_max(features['lengths'])
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        first = tf.reduce_mean(tf.square(tf.reduce_mean(scores(features)[:, :longest], 1)))
        gradients = optimizer.compute_gradients(first)
        second = tf.reduce_mean(tf.reduce_mean(scores(features)[:, 1:longest], 1) * labels)
        others = optimizer.compute_gradients(second)
        pairs = [(a + b, v) for (a, v), (b, _) in zip(gradients, others)]
        return spec_of(mode, first + second, optimizer.apply_gradients(pairs, step()))

    compare(model_fn, DATA, 3, static=static)


def numbered(features):
    """Each row begins a segment."""
    values = scores(features)[:, 0]
    ids = tf.cumsum(tf.ones_like(features['lengths'])) - 1
    return tf.math.unsorted_segment_sum(values, ids, tf.reduce_max(ids) + 1)


def by_row_ids(features):
    """Of a ragged tensor: as many as a shard has rows."""
    values = scores(features)
    rows = tf.RaggedTensor.from_row_lengths(
        tf.boolean_mask(values, tf.sequence_mask(features['lengths'], 5)), features['lengths']
    )
    ids = rows.value_rowids()
    sums = tf.math.unsorted_segment_sum(rows.values, ids, tf.reduce_max(ids) + 1)
    return sums + values[:, 0]


def up_to_the_last(features):
    """As many rows as there are, by their numbers."""
    values, rows = scores(features)[:, 0], tf.range(tf.shape(features['lengths'])[0])
    last = tf.reduce_max(tf.cast(features['lengths'] > 0, tf.int32) * rows) + 1
    return values[:last]


@pytest.mark.parametrize('output', [numbered, by_row_ids, up_to_the_last], ids=lambda f: f.__name__)
@pytest.mark.parametrize('towers', [3, 4], ids='towers={}'.format)
@BOTH
def test_where_the_rows_of_a_shard_are_is_its_own(output, towers, static, behavior):
    compare(model_of(output), DATA, towers, static=static)


class Holds(tf.train.SessionRunHook):
    def __init__(self, tensor):
        self.tensor = tensor


def test_what_predictions_and_hooks_have():
    def model_fn(features, labels, mode):
        longest = tf.reduce_max(features['lengths'])
        loss = tf.reduce_mean(tf.square(scores(features)[:, 0]))
        return tf.estimator.EstimatorSpec(
            mode,
            loss=loss,
            predictions={'longest': longest},
            evaluation_hooks=[Holds(longest)],
        )

    ours = evaluate(model_fn, DATA, 3)
    assert [batch['longest'] for batch in ours.predictions] == [5, 5]
    with tf.Graph().as_default():
        features = {name: tf.constant(value) for name, value in DATA[0][0].items()}
        spec = estimator_mgpu.replicate(model_fn, devices=3)(features, None, 'eval')
        with session(3) as sess:
            sess.run(tf.global_variables_initializer())
            assert sess.run(spec.evaluation_hooks[0].tensor) == 5


def test_an_adversarial_step_on_what_is_padded():
    """The gradient with respect to what to_tensor() gave is that of what is used."""

    def model_fn(features, labels, mode):
        rows = tf.strings.to_hash_bucket_fast(tf.compat.v2.strings.split(features['texts']), 7)
        table = weights('table', 7, 2)
        words = tf.ragged.map_flat_values(lambda ids: tf.gather(table, ids), rows).to_tensor()
        loss = tf.reduce_mean(tf.square(tf.reduce_mean(words, [1, 2]) - labels))
        [moved] = tf.gradients(loss, [words])
        words += 0.1 * tf.stop_gradient(tf.sign(moved))
        loss += tf.reduce_mean(tf.square(tf.reduce_mean(words, [1, 2]) - labels))
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    compare(model_fn, DATA, 3)
