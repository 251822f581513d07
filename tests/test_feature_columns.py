"""Feature columns of all kinds, dense and sparse: several devices do as one."""

import functools
import tempfile

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import ROWS, floats, of_all_modes
from towers import compare, compare_modes

fc = tf.feature_column
WORDS = ['red', 'green', 'blue']
FILE = tempfile.NamedTemporaryFile('w', suffix='.txt')  # noqa: SIM115, as long as the tests
FILE.write('\n'.join(WORDS))
FILE.flush()


def examples(rows=ROWS):
    """Features as an input_fn gives them, with a label a row; some ids and words are unknown."""
    return [(_features(rows, i), floats(rows, 1, seed=i) + 2) for i in range(4)]


def _features(rows, seed):
    random = np.random.RandomState(seed)
    words = {name: random.choice([*WORDS, 'grey'], [rows, 2]) for name in 'abcde'}
    return {
        'age': random.uniform(0, 80, [rows, 1]).astype(np.float32),
        'size': random.randn(rows, 2).astype(np.float32),
        'day': random.randint(0, 7, [rows, 1]),
        'weight': random.uniform(0.5, 2, [rows, 2]).astype(np.float32),
        **words,
    }


def numeric():
    return [fc.numeric_column('age', normalizer_fn=lambda x: x / 80), fc.numeric_column('size', 2)]


def buckets():
    return fc.bucketized_column(fc.numeric_column('age'), [20, 40, 60])


def categorical():
    """All kinds but those made of others."""
    return [
        fc.categorical_column_with_identity('day', 7),
        fc.categorical_column_with_vocabulary_list('a', WORDS, default_value=0),
        fc.categorical_column_with_vocabulary_list('b', WORDS, num_oov_buckets=2),
        fc.categorical_column_with_vocabulary_file('c', FILE.name, 3, num_oov_buckets=1),
        fc.categorical_column_with_hash_bucket('d', 5),
    ]


def weighted():
    column = fc.categorical_column_with_vocabulary_list('e', WORDS, default_value=0)
    return fc.weighted_categorical_column(column, 'weight')


def crossed():
    return fc.crossed_column([buckets(), 'a'], 11)


def indicators():
    kinds = [*categorical(), weighted(), crossed()]
    return [buckets(), *map(fc.indicator_column, kinds)]  # Buckets are dense as they are.


def embeddings(combiner):
    kinds = [*categorical(), weighted(), crossed()]
    return [fc.embedding_column(kind, 2, combiner=combiner) for kind in kinds]


def embedded_means():
    return embeddings('mean')


def embedded_roots():
    return embeddings('sqrtn')


def linear_columns():
    return [numeric()[0], *categorical()[:2], weighted(), crossed()]


def network(x):
    hidden = tf.layers.dense(x, 4, tf.nn.tanh)
    return tf.layers.dense(hidden, 1)


def input_layer(columns, features):
    return network(fc.input_layer(features, columns()))


def dense_features(columns, features):
    return network(tf.keras.layers.DenseFeatures(columns())(features))


def two_words():
    return [fc.categorical_column_with_vocabulary_list(name, WORDS) for name in 'ab']


def shared_of_v1(features):
    return network(fc.input_layer(features, fc.shared_embedding_columns(two_words(), 2)))


def shared_of_v2(features):
    columns = tf.compat.v2.feature_column.shared_embeddings(two_words(), 2)
    return network(tf.keras.layers.DenseFeatures(columns)(features))


def wide_and_deep(features):
    deep = network(fc.input_layer(features, [*numeric(), *indicators()[2:3]]))
    return fc.linear_model(features, linear_columns()) + deep


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


def named(function, columns):
    forward = functools.partial(function, columns)
    forward.__name__ = f'{function.__name__}-{columns.__name__}'
    return forward


COLUMNS = [numeric, indicators, embedded_roots]
FORWARD = [
    *(named(input_layer, columns) for columns in COLUMNS),
    named(dense_features, embedded_means),
    shared_of_v1,
    shared_of_v2,
    lookups_of_one_table,
    wide_and_deep,
    sequences,
]


@pytest.mark.parametrize('model_fn', map(of_all_modes, FORWARD), ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn):
    compare_modes(model_fn, examples, 4)


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


SPARSE = [*(named(input_layer, c) for c in COLUMNS[1:]), wide_and_deep, shared_of_v1]


@pytest.mark.parametrize('forward', SPARSE, ids=lambda f: f.__name__)
def test_sparse_features(forward):
    compare(of_all_modes(forward), with_gaps(), 4, static=False, preprocess=to_sparse)
