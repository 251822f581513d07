"""Maps, scans, folds and TensorArrays: several devices do as one."""

import pytest
import tensorflow.compat.v1 as tf

from models import away_from_0, of_all_modes, ten_rows
from towers import compare_modes


def dense(x, units=1):
    return tf.layers.dense(x, units)


def square(name='w'):
    return tf.get_variable(name, [3, 3])


def map_rows(features):
    w = tf.get_variable('w', [3, 4])
    return dense(tf.map_fn(lambda row: tf.nn.tanh(tf.matmul(row[None], w)[0]), features))


def map_columns(features):
    w = tf.get_variable('w', [1, 2])
    x = tf.map_fn(lambda column: tf.nn.tanh(column[:, None] @ w), tf.transpose(features))
    return dense(tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 6]))


def map_to_several(features):
    w = square()
    scale = tf.cast(tf.range(tf.shape(features)[0]), tf.float32) * 0.0 + 0.5

    def one(inputs):
        row, factor = inputs
        return {'a': tf.linalg.matvec(w, row) * factor, 'b': tf.reduce_sum(row)}

    found = tf.map_fn(
        one, (features, scale), dtype={'a': tf.float32, 'b': tf.float32}, parallel_iterations=2
    )
    return dense(found['a']) + found['b'][:, None]


def scan(features):
    w = square()

    def body(carried, column):
        state, count = carried
        return tf.nn.tanh(tf.matmul(state, w) + column[:, None]), count + 1.0

    states, counts = tf.scan(
        body, tf.transpose(features), (tf.zeros_like(features), tf.constant(0.0))
    )
    return dense(states[-1] + 0.1 * states[0]) + counts[-1]


def folds(features):
    w = square()

    def body(state, column):
        return tf.nn.tanh(tf.matmul(state, w)) + column[:, None]

    columns = tf.transpose(features)
    left = tf.foldl(body, columns, tf.zeros_like(features))
    return dense(left) + dense(tf.foldr(body, columns, tf.zeros_like(features)))


def tensor_arrays(features):
    """Written in a loop, read in another, stacked, unstacked and gathered."""
    w = square()
    columns = tf.TensorArray(tf.float32, 3).unstack(tf.transpose(features))

    def write(i, array):
        return i + 1, array.write(i, tf.nn.tanh(columns.read(i)[:, None] * w[:1]))

    empty = tf.TensorArray(tf.float32, 0, dynamic_size=True, clear_after_read=False)
    _, array = tf.while_loop(lambda i, _: i < 3, write, [0, empty])
    _, total = tf.while_loop(
        lambda i, _: i < 3, lambda i, x: (i + 1, x + array.read(i)), [0, tf.zeros_like(features)]
    )
    stacked = array.stack()
    return dense(total + stacked[0] * stacked[-1] + array.gather([1])[0])


MODELS = [
    map_rows,
    map_columns,
    map_to_several,
    scan,
    folds,
    tensor_arrays,
]


@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
@pytest.mark.parametrize('model_fn', map(of_all_modes, MODELS), ids=lambda f: f.__name__)
def test_as_on_one_device(model_fn, towers, behavior):
    compare_modes(model_fn, away_from_0, towers)


UNEVEN = [of_all_modes(f) for f in (map_to_several, tensor_arrays)]


@pytest.mark.parametrize('model_fn', UNEVEN, ids=lambda f: f.__name__)
def test_rows_that_do_not_divide(model_fn, behavior):
    compare_modes(model_fn, ten_rows, 4, static=False)
