"""Predictions: every row once, in input order, whatever the towers and the last batch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import floats
from towers import evaluate

PREDICT = tf.estimator.ModeKeys.PREDICT


def ids(*rows):
    """Batches of features that number the rows from 0 through all batches."""
    starts = np.cumsum([0, *rows])
    return [
        (np.arange(start, start + n, dtype=np.int64)[:, None], None)
        for start, n in zip(starts, rows)
    ]


def model_of(predict):
    def model_fn(features, labels, mode):
        return tf.estimator.EstimatorSpec(
            mode, predictions=predict(features), loss=tf.reduce_mean(tf.cast(features, tf.float32))
        )

    return model_fn


SIZES = {'even': (8, 8), 'short last': (8, 8, 3), 'fewer than towers': (5, 1, 2), 'odd': (7, 9)}


@pytest.mark.parametrize('mode', [PREDICT, 'eval'])
@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize('towers', [2, 4, 8], ids='towers={}'.format)
def test_every_row_once_and_in_order(towers, sizes, mode):
    def predict(x):
        return {
            'id': x[:, 0],
            'string': tf.strings.as_string(x[:, 0]),
            'matrix': tf.cast(tf.tile(x[:, :, None], [1, 2, 3]), tf.float64),
            'flag': x[:, 0] % 2 > 0,
        }

    model_fn = model_of(predict)
    ours = evaluate(model_fn, ids(*sizes), towers, static=len(set(sizes)) == 1, mode=mode)
    for batch, (features, _) in zip(ours.predictions, ids(*sizes)):
        numbers = features[:, 0]
        np.testing.assert_array_equal(batch['id'], numbers)
        np.testing.assert_array_equal(batch['string'], [str(n).encode() for n in numbers])
        np.testing.assert_array_equal(batch['matrix'], np.tile(features[:, :, None], [1, 2, 3]))
        np.testing.assert_array_equal(batch['flag'], numbers % 2 > 0)


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
def test_a_bare_tensor(sizes):
    ours = evaluate(model_of(lambda x: x * 2), ids(*sizes), 4, static=False, mode=PREDICT)
    for batch, (features, _) in zip(ours.predictions, ids(*sizes)):
        np.testing.assert_array_equal(batch, features * 2)


@pytest.mark.parametrize('towers', [1, 2], ids='towers={}'.format)
def test_estimator_takes_no_sparse_predictions(towers):
    """Nor ragged ones: EstimatorSpec says so itself, on one device as on several."""
    predict = lambda x: {'sparse': tf.sparse.from_dense(x)}  # noqa: E731
    with pytest.raises(TypeError, match='must be Tensor, given: SparseTensor'):
        evaluate(model_of(predict), ids(8), towers, mode=PREDICT)


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_a_scalar_prediction(static):
    with pytest.raises(ValueError, match=r"predictions\['mean'\] is a scalar.*devices=1"):
        predict = lambda x: {'mean': tf.reduce_mean(tf.cast(x, tf.float32))}  # noqa: E731
        evaluate(model_of(predict), ids(8), 2, mode=PREDICT, static=static)


def test_a_scalar_in_evaluation_is_that_of_the_batch():
    predict = lambda x: {'mean': tf.reduce_mean(tf.cast(x, tf.float32)), 'id': x}  # noqa: E731
    for towers in (1, 2, 3):
        ours = evaluate(model_of(predict), ids(8), towers, static=False, mode='eval')
        assert ours.predictions[0]['mean'] == 3.5


def test_rows_as_wide_as_the_longest_of_their_shard():
    """By a float that something is made of before it's rounded."""

    def predict(x):
        longest = tf.cast(tf.square(tf.reduce_max(tf.cast(x, tf.float32))), tf.int32)
        return {'mask': tf.sequence_mask(x[:, 0], longest)}

    with pytest.raises(tf.errors.InvalidArgumentError, match='Pad them to one size'):
        evaluate(model_of(predict), ids(8), 2, mode=PREDICT, static=False)


PAIRS = {
    'product': lambda x: tf.matmul(x, x, transpose_b=True),
    'einsum': lambda x: tf.einsum('bi,ci->bc', x, tf.tanh(x)),
    'differences': lambda x: tf.norm(x[:, None] - x[None], axis=-1),
    'softmax': lambda x: tf.nn.softmax(tf.matmul(x, tf.transpose(x)) + 1),
}


@pytest.mark.parametrize('static', [True, False])
@pytest.mark.parametrize('pairs', PAIRS.values(), ids=PAIRS)
def test_pairs_of_rows(pairs, static):
    """Each device would have those of its shard with its shard."""

    def model_fn(features, labels, mode):
        return tf.estimator.EstimatorSpec(mode, predictions={'pairs': pairs(features)})

    with pytest.raises(
        ValueError, match=r"predictions\['pairs'\] has rows along .* \[0, 1\]: it is of pairs"
    ):
        evaluate(model_fn, [(floats(6, 6), None)], 2, mode=PREDICT, static=static)


def test_pairs_of_rows_in_evaluation():
    predict = lambda x: {'pairs': tf.matmul(x, x, transpose_b=True), 'id': x}  # noqa: E731
    with pytest.raises(tf.errors.InvalidArgumentError, match='it is of pairs of rows'):
        evaluate(model_of(predict), [(floats(6, 6), None)], 2, mode='eval')


@pytest.mark.parametrize('steps', [3, 5])
def test_time_major_predictions_are_an_error(steps):
    """Also where a sequence is as long as a shard has rows, 3."""

    def model_fn(features, labels, mode):
        by_time = tf.transpose(tf.reduce_sum(features, 2))
        return tf.estimator.EstimatorSpec(mode, predictions={'by time': by_time})

    data = [(floats(6, steps, 2), None)]
    with pytest.raises(
        ValueError, match=r"predictions\['by time'\] has its rows along dimension 1"
    ):
        evaluate(model_fn, data, 2, mode=PREDICT)


def test_numbers_within_a_shard_are_warned_of(caplog):
    def model_fn(features, labels, mode):
        numbers = tf.range(tf.shape(features)[0])[:, None] + 1
        return tf.estimator.EstimatorSpec(mode, predictions={'numbers': numbers})

    evaluate(model_fn, [(floats(6, 2), None)], 2, mode=PREDICT, static=False)
    assert 'or taken by their place in it' in caplog.text


def test_shares_of_the_sum_of_a_shard_are_warned_of(caplog):
    def model_fn(features, labels, mode):
        shares = features / tf.reduce_sum(features, 0)
        top = tf.nn.softmax(features) - tf.reduce_max(features, 1, keepdims=True)
        return tf.estimator.EstimatorSpec(mode, predictions={'own': top, 'shares': shares})

    evaluate(model_fn, [(floats(6, 2), None)], 2, mode=PREDICT)
    found = [r.getMessage() for r in caplog.records if 'of all rows of a shard' in r.getMessage()]
    assert len(found) == 1 and "The rows of 'truediv:0'" in found[0]


def test_ranks_within_a_shard_are_warned_of(caplog):
    def model_fn(features, labels, mode):
        shares = tf.nn.softmax(features, axis=0)
        return tf.estimator.EstimatorSpec(mode, predictions={'shares': shares})

    evaluate(model_fn, [(floats(6, 2), None)], 2, mode=PREDICT)
    assert 'rows are combined with other rows of their shard' in caplog.text


# One to a graph: run side by side, even on one device without this package, TensorFlow's oneDNN
# kernels for them corrupt memory at times.
PRODUCTS = {
    'einsum': lambda x: tf.einsum('bi,bj->bij', x, x),
    'matmul': lambda x: tf.matmul(x[:, :, None], x[:, None, :]),
}


@pytest.mark.parametrize('product', PRODUCTS.values(), ids=PRODUCTS)
def test_products_of_one_row_are_not_of_pairs(product):
    model_fn = lambda features, labels, mode: tf.estimator.EstimatorSpec(  # noqa: E731
        mode, predictions=product(features)
    )
    batches = [(floats(6, 6), None)]
    [one] = evaluate(model_fn, batches, 0, mode=PREDICT).predictions
    [ours] = evaluate(model_fn, batches, 2, mode=PREDICT).predictions
    np.testing.assert_allclose(ours, one, rtol=1e-6)


def test_an_empty_batch():
    ours = evaluate(model_of(lambda x: x), ids(3, 0, 2), 2, mode=PREDICT, static=False)
    assert [len(batch) for batch in ours.predictions] == [3, 0, 2]


def test_rows_that_do_not_match_in_evaluation():
    """Estimator does not fetch them, so they are no error until somebody does."""
    predict = lambda x: {'flat': tf.reshape(tf.tile(x, [1, 3]), [-1]), 'id': x}  # noqa: E731
    evaluate(model_of(predict), ids(8), 2, mode='eval')


def test_rows_that_do_not_match():
    predict = lambda x: {'names': tf.constant(['a', 'b', 'c'])}  # noqa: E731
    with pytest.raises(ValueError, match=r"predictions\['names'\] has 3 rows where"):
        evaluate(model_of(predict), ids(8), 2, mode=PREDICT)
    with pytest.raises(tf.errors.InvalidArgumentError, match='another number of rows'):
        evaluate(model_of(predict), ids(8), 2, mode=PREDICT, static=False)


@pytest.mark.parametrize('single', [True, False], ids=['examples', 'batches'])
def test_under_estimator(single, tmp_path):
    seen = []

    class Hook(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            seen.append(1)

    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [3, 2])
        spec = tf.estimator.EstimatorSpec(
            mode,
            predictions={'out': tf.matmul(features, w)},
            loss=tf.reduce_mean(tf.matmul(features, w)),
            train_op=tf.train.get_global_step().assign_add(1),
            prediction_hooks=[Hook()],
        )
        return spec

    data = floats(11, 3)

    def input_fn():
        return tf.data.Dataset.from_tensor_slices(data).batch(4)

    one = tf.estimator.Estimator(model_fn, str(tmp_path))
    one.train(input_fn, steps=1)
    ours = estimator_mgpu.Estimator(model_fn, str(tmp_path), devices=3)
    results = [list(e.predict(input_fn, yield_single_examples=single)) for e in (one, ours)]
    assert len(seen) == 6
    assert len(results[1]) == len(results[0]) == (11 if single else 3)
    for expected, got in zip(*results):
        np.testing.assert_allclose(got['out'], expected['out'], rtol=1e-6)
