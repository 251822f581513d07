"""Predictions: every row once, in input order, whatever the towers and the last batch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import floats
from towers import assert_close, evaluate

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
@pytest.mark.parametrize('towers', [2, 8], ids='towers={}'.format)
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


@pytest.mark.parametrize('towers', [1, 2], ids='towers={}'.format)
def test_estimator_takes_no_sparse_predictions(towers):
    """Nor ragged ones: EstimatorSpec says so itself, on one device as on several."""
    predict = lambda x: {'sparse': tf.sparse.from_dense(x)}  # noqa: E731
    with pytest.raises(TypeError, match='must be Tensor, given: SparseTensor'):
        evaluate(model_of(predict), ids(8), towers, mode=PREDICT)


def test_an_empty_batch():
    ours = evaluate(model_of(lambda x: x), ids(3, 0, 2), 2, mode=PREDICT, static=False)
    assert [len(batch) for batch in ours.predictions] == [3, 0, 2]


def of_the_batch(x):
    """What isn't a row a row: a scalar, pairs, time before rows, and names."""
    longest = tf.cast(tf.sqrt(tf.reduce_max(tf.cast(x, tf.float32))), tf.int32)
    return {
        'mean': tf.reduce_mean(tf.cast(x, tf.float32)),
        'pairs': tf.matmul(x, x, transpose_b=True),
        'by time': tf.transpose(tf.tile(x, [1, 3])),
        'names': tf.constant(['a', 'b', 'c']),
        'mask': tf.sequence_mask(x[:, 0], longest),
        'numbers': tf.range(tf.shape(x)[0]),
        'shares': tf.nn.softmax(tf.cast(x, tf.float32), 0),
        'flat': tf.reshape(tf.tile(x, [1, 3]), [-1]),
    }


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('mode', [PREDICT, 'eval'])
def test_predictions_of_the_batch(mode, static):
    sizes = (8, 8) if static else (7, 2)
    one, ours = (
        evaluate(model_of(of_the_batch), ids(*sizes), n, static=static, mode=mode) for n in (0, 3)
    )
    assert_close(ours, one, 1e-6)


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
