"""Ragged and sparse tensors that a model_fn makes of rows: texts, sequences and what's decoded."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import floats, spec_of, step, weights
from towers import compare, evaluate

TEXTS = ['a cat', 'the cat sat on a mat', 'on', 'a', 'a dog on the mat', 'the dog', 'dog mat cat']
IDS = np.array([[1, 2, 0, 0], [3, 1, 2, 4], [5, 0, 0, 0], [2, 2, 1, 0], [1, 0, 0, 0], [4, 3, 0, 0]])
LENGTHS = np.array([2, 4, 1, 3, 1, 2])


def data(rows):
    """Two batches, in another order each."""
    orders = [np.random.RandomState(seed).permutation(6)[:rows] for seed in (0, 1)]
    return [
        (
            {
                'text': np.array(TEXTS)[order],
                'ids': IDS[order],
                'lengths': LENGTHS[order],
                'x': floats(rows, 4, 3, seed=len(order)),
            },
            floats(rows),
        )
        for order in orders
    ]


def table(name):
    return weights(name, 11, 3)


def words(features):
    ragged = tf.strings.split(features['text'], ' ', result_type='RaggedTensor')
    return tf.ragged.map_flat_values(tf.strings.to_hash_bucket_fast, ragged, num_buckets=11)


def looked_up(ragged):
    return tf.ragged.map_flat_values(lambda ids: tf.gather(table('words'), ids), ragged)


def padded_and_masked(features):
    ragged = words(features)
    mask = tf.sequence_mask(ragged.row_lengths(), dtype=tf.float32)
    vectors = tf.gather(table('words'), ragged.to_tensor())
    return ragged, tf.reduce_sum(vectors * mask[:, :, None], 1)


def reduced(features):
    vectors = looked_up(words(features))
    return vectors, tf.reduce_mean(vectors, 1) + tf.reduce_max(vectors, 1)


def pairs_of_words(features):
    ragged = tf.strings.split(features['text'], ' ', result_type='RaggedTensor')
    pairs = tf.ragged.map_flat_values(
        tf.strings.to_hash_bucket_fast, tf.strings.ngrams(ragged, 2), num_buckets=11
    )
    found = tf.nn.safe_embedding_lookup_sparse(table('pairs'), pairs.to_sparse(), combiner='sqrtn')
    return pairs, found


def without_padding(features):
    ragged = tf.RaggedTensor.from_tensor(features['ids'], lengths=features['lengths'])
    mask = tf.sequence_mask(ragged.row_lengths(), dtype=tf.float32)
    scores = tf.reduce_sum(looked_up(ragged).to_tensor(), 2) - 9.0 * (1 - mask)
    return ragged, tf.nn.softmax(scores)[:, :1] + tf.reduce_mean(looked_up(ragged), 1)


def decoded(features):
    steps = tf.tensordot(features['x'], weights('letters', 3, 5), 1)
    lengths = tf.cast(features['lengths'], tf.int32)
    [found], _ = tf.nn.ctc_beam_search_decoder(tf.transpose(steps, [1, 0, 2]), lengths, 4)
    ragged = tf.RaggedTensor.from_sparse(found)
    return ragged, tf.reduce_sum(steps, 1)[:, :3] + tf.cast(ragged.row_lengths(), tf.float32)[
        :, None
    ]


MODELS = [padded_and_masked, reduced, pairs_of_words, without_padding, decoded]


def model_of(rows_of, static):
    def model_fn(features, labels, mode):
        ragged, vectors = rows_of(features)
        output = tf.tensordot(vectors, weights('output', 3, 1), 1)
        predictions = {'output': output, 'lengths': ragged.row_lengths()}
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions)
        losses = tf.square(output - labels[:, None])
        rows = tf.shape(losses)[0] if static else ragged.nrows()
        loss = tf.reduce_sum(losses) / tf.cast(rows, tf.float32)
        loss += tf.reduce_sum(losses) / tf.cast(tf.size(ragged.values), tf.float32)
        if mode == tf.estimator.ModeKeys.EVAL:
            metrics = {'length': tf.metrics.mean(ragged.row_lengths())}
            return tf.estimator.EstimatorSpec(mode, predictions, loss, eval_metric_ops=metrics)
        optimizer = tf.train.GradientDescentOptimizer(0.1)
        return spec_of(mode, loss, optimizer.minimize(loss, step()))

    return model_fn


@pytest.mark.parametrize(
    'rows, static', [(6, True), (4, False)], ids=['6 rows, static', '4 rows, dynamic']
)
@pytest.mark.parametrize('rows_of', MODELS, ids=lambda f: f.__name__)
def test_training(rows_of, rows, static, behavior):
    compare(model_of(rows_of, static), data(rows), 3, static=static)


@pytest.mark.parametrize('mode', ['eval', 'infer'])
@pytest.mark.parametrize('rows_of', MODELS, ids=lambda f: f.__name__)
def test_metrics_and_predictions(rows_of, mode):
    one, ours = (
        evaluate(model_of(rows_of, False), data(5), towers, mode=mode, static=False)
        for towers in (0, 3)
    )
    tf.nest.map_structure(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), ours, one
    )
