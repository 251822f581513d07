"""Predictions: every row once, in input order, whatever the towers and the last batch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from towers import assert_close, evaluate


def ids(*rows):
    """Batches of features that number the rows from 0 through all batches."""
    starts = np.cumsum([0, *rows])
    return [(np.arange(at, at + n, dtype=np.int64)[:, None], None) for at, n in zip(starts, rows)]


def model_fn(features, labels, mode):
    """What is a row a row; and what isn't: a scalar, pairs, time before rows, and names."""
    x = tf.cast(features, tf.float32)
    longest = tf.cast(tf.sqrt(tf.reduce_max(tf.pad(x, [[0, 1], [0, 0]]))), tf.int32)
    predictions = {
        'id': features[:, 0],
        'string': tf.strings.as_string(features[:, 0]),
        'flag': features[:, 0] % 2 > 0,
        'matrix': tf.cast(tf.tile(features[:, :, None], [1, 2, 3]), tf.float64),
        'pairs': tf.matmul(features, features, transpose_b=True),
        'by time': tf.transpose(tf.tile(features, [1, 3])),
        'names': tf.constant(['a', 'b', 'c']),
        'mask': tf.sequence_mask(features[:, 0], longest),
        'numbers': tf.range(tf.shape(features)[0]),
        'shares': tf.nn.softmax(x, 0),
        'flat': tf.reshape(tf.tile(features, [1, 3]), [-1]),
    }
    return tf.estimator.EstimatorSpec(mode, predictions=predictions, loss=tf.reduce_sum(x))


SIZES = {'even': (8, 8), 'short last': (8, 8, 3), 'few': (5, 1, 2), 'odd': (7, 9), 'empty': (3, 0)}


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES)
@pytest.mark.parametrize('towers', [3, 8], ids='towers={}'.format)
@pytest.mark.parametrize('mode', ['infer', 'eval'])
def test_predictions(mode, towers, sizes):
    static = len(set(sizes)) == 1
    one, ours = (evaluate(model_fn, ids(*sizes), n, static=static, mode=mode) for n in (0, towers))
    assert_close(ours, one, 1e-6)
    numbers = np.concatenate([batch['id'] for batch in ours.predictions])
    np.testing.assert_array_equal(numbers, np.arange(sum(sizes)))


def test_predictions_of_a_checkpoint_that_is_not_the_last(tmp_path):
    def counting(features, labels, mode):
        step = tf.train.get_global_step()
        return tf.estimator.EstimatorSpec(
            mode,
            predictions=features * tf.cast(step, tf.float32),
            loss=tf.reduce_sum(features),
            train_op=tf.assign_add(step, 1),
        )

    input_fn = lambda: tf.data.Dataset.from_tensors([1.0, 2.0, 3.0])  # noqa: E731
    config = tf.estimator.RunConfig(save_checkpoints_steps=1)
    estimator = estimator_mgpu.Estimator(counting, str(tmp_path), config, devices=2)
    estimator.train(lambda: input_fn().repeat(2))
    for number in 1, 2:
        path = str(tmp_path / f'model.ckpt-{number}')
        found = [*estimator.predict(input_fn, checkpoint_path=path)]
        np.testing.assert_array_equal(found, [number, 2 * number, 3 * number])
