"""Feature columns of all kinds, dense and sparse: several devices do as one."""

import tempfile

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import ROWS, floats, of_all_modes, sgd, spec_of
from towers import compare, compare_modes, types_run_once

fc = tf.feature_column
WORDS = ['red', 'green', 'blue']
FILE = tempfile.NamedTemporaryFile('w', suffix='.txt')  # noqa: SIM115, as long as the tests
FILE.write('\n'.join(WORDS))
FILE.flush()


def examples():
    """Features as an input_fn gives them, with a label a row; some ids and words are unknown."""
    return [(_features(i), floats(ROWS, 1, seed=i) + 2) for i in range(4)]


def _features(seed):
    random = np.random.RandomState(seed)
    return {
        **{name: random.choice([*WORDS, 'grey'], [ROWS, 2]) for name in 'abcde'},
        'age': random.uniform(0, 80, [ROWS, 1]).astype(np.float32),
        'size': random.randn(ROWS, 2).astype(np.float32),
        'day': random.randint(0, 7, [ROWS, 1]),
        'weight': random.uniform(0.5, 2, [ROWS, 2]).astype(np.float32),
    }


BUCKETS = fc.bucketized_column(fc.numeric_column('age'), [20, 40, 60])
CATEGORICAL = [
    fc.categorical_column_with_identity('day', 7),
    fc.categorical_column_with_vocabulary_list('a', WORDS, default_value=0),
    fc.categorical_column_with_vocabulary_list('b', WORDS, num_oov_buckets=2),
    fc.categorical_column_with_vocabulary_file('c', FILE.name, 3, num_oov_buckets=1),
    fc.categorical_column_with_hash_bucket('d', 5),
    fc.weighted_categorical_column(
        fc.categorical_column_with_vocabulary_list('e', WORDS, default_value=0), 'weight'
    ),
    fc.crossed_column([BUCKETS, 'a'], 11),
]
NUMERIC = [fc.numeric_column('age', normalizer_fn=lambda x: x / 80), fc.numeric_column('size', 2)]
COLUMNS = [
    [*NUMERIC, BUCKETS, *map(fc.indicator_column, CATEGORICAL)],
    [fc.embedding_column(column, 2, combiner='mean') for column in CATEGORICAL[::2]],
    [fc.embedding_column(column, 2, combiner='sqrtn') for column in CATEGORICAL[1::2]],
]


def network(x):
    hidden = tf.layers.dense(x, 4, tf.nn.tanh)
    return tf.layers.dense(hidden, 1)


def all_kinds(features):
    layers = [fc.input_layer(features, columns) for columns in COLUMNS]
    return network(tf.concat(layers, 1))


def two_words():
    return [fc.categorical_column_with_vocabulary_list(name, WORDS) for name in 'ab']


def shared_of_v1(features):
    return network(fc.input_layer(features, fc.shared_embedding_columns(two_words(), 2)))


def shared_of_v2(features):
    columns = tf.compat.v2.feature_column.shared_embeddings(two_words(), 2)
    return network(tf.keras.layers.DenseFeatures(columns)(features))


def wide_and_deep(features):
    deep = network(fc.input_layer(features, [*NUMERIC, fc.indicator_column(CATEGORICAL[1])]))
    return fc.linear_model(features, [NUMERIC[0], *CATEGORICAL[:2], *CATEGORICAL[5:]]) + deep


def sequences(features):
    """Sequences of words and of numbers, as long as the longest of the batch."""
    words = fc.sequence_categorical_column_with_vocabulary_list('a', WORDS, num_oov_buckets=1)
    columns = [fc.embedding_column(words, 3), fc.sequence_numeric_column('weight')]
    sparse = {name: tf.sparse.from_dense(features[name]) for name in ('a', 'weight')}
    inputs, length = tf.keras.experimental.SequenceFeatures(columns)(sparse)
    mask = tf.sequence_mask(length, tf.shape(inputs)[1], tf.float32)[:, :, None]
    return network(tf.reduce_sum(inputs * mask, 1))


def lookups_of_one_table(features):
    """Two that take each id once, one that doesn't, and one that all rows share."""
    table = tf.get_variable('table', [8, 3])
    words = [tf.strings.to_hash_bucket_fast(features[name], 8) for name in 'abc']
    sparse = [tf.sparse.from_dense(ids) for ids in words[:2]]
    means = tf.nn.safe_embedding_lookup_sparse(table, sparse[0], combiner='mean')
    sums = tf.nn.safe_embedding_lookup_sparse(table, sparse[1], combiner='sum')
    rows = tf.reduce_sum(tf.nn.embedding_lookup(table, words[2]), 1)
    tf.add_to_collection(
        tf.GraphKeys.REGULARIZATION_LOSSES, tf.nn.l2_loss(tf.gather(table, [1, 2]))
    )
    return network(means * sums + tf.nn.tanh(rows))


FORWARD = [all_kinds, wide_and_deep, shared_of_v1, shared_of_v2, lookups_of_one_table, sequences]
MODELS = [*map(of_all_modes, FORWARD)]


@pytest.mark.no_cover
@pytest.mark.parametrize('model_fn', MODELS, ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn):
    compare_modes(model_fn, examples, 4)


def test_recurrent_network_on_sequences():
    """It runs on every device, and the longest sequence of the batch is on one of them."""

    def model_fn(features, labels, mode):
        words = fc.sequence_categorical_column_with_vocabulary_list('a', WORDS, num_oov_buckets=1)
        columns = [fc.embedding_column(words, 3), fc.sequence_numeric_column('weight')]
        inputs, length = tf.keras.experimental.SequenceFeatures(columns)(features)
        cell = tf.nn.rnn_cell.GRUCell(3)
        _, state = tf.nn.dynamic_rnn(cell, inputs, length, dtype=tf.float32)
        loss = tf.reduce_mean(tf.square(network(state) - labels))
        return spec_of(mode, loss, sgd(loss))

    def preprocess(features, labels):
        """The first half of the examples has one word, and the last example has none."""
        last = tf.shape(labels)[0] - 1
        is_long = tf.range(last + 1) > last // 2
        count = 1 + tf.cast(is_long, tf.int32) - 2 * tf.one_hot(last, last + 1, dtype=tf.int32)
        places = tf.where(tf.sequence_mask(count, 2))
        shape = tf.shape(features['a'], out_type=tf.int64)
        return {
            name: tf.SparseTensor(places, tf.gather_nd(features[name], places), shape)
            for name in ('a', 'weight')
        }, labels

    ours, _ = compare(model_fn, examples()[:2], 3, static=False, preprocess=preprocess)
    assert not types_run_once(ours.graph) & {'While', 'StatelessWhile', 'Exit'}


def to_sparse(features, labels):
    """As `parse_example` gives it: an example may have two words, one or none."""
    sparse = {name: tf.sparse.from_dense(features[name]) for name in 'abcd'}
    dense = {name: features[name] for name in ('age', 'size', 'day')}
    found = tf.where(tf.not_equal(features['e'], ''))
    for name in ('e', 'weight'):
        values = tf.gather_nd(features[name], found)
        size = tf.shape(features[name], out_type=tf.int64)
        sparse[name] = tf.SparseTensor(found, values, size)
    return {**sparse, **dense}, labels


def with_gaps():
    """Batches in which some words are missing."""
    batches = examples()
    for features, _ in batches:
        for name in 'abcde':
            features[name] = np.where(features[name] == 'green', '', features[name])
    return batches


@pytest.mark.no_cover
@pytest.mark.parametrize('model_fn', MODELS[:3], ids=lambda f: f.__name__)
def test_sparse_features(model_fn):
    compare(model_fn, with_gaps(), 4, static=False, preprocess=to_sparse)
