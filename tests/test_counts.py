"""Numbers that come from shapes: those of other dimensions change nothing, those of rows do."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu import counts
from estimator_mgpu.reshapes import Place
from estimator_mgpu.rows import Rows
from models import batches, floats, spec_of, step, with_loss
from towers import compare, train

BOTH = pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])


def squares(labels, output):
    return tf.square(output - labels) + 0.1


def rows_of(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


def columns_of(x):
    return tf.cast(tf.shape(x)[-1], tf.float32)


def by_columns(labels, output):
    """As in a sum of scaled products."""
    return tf.reduce_sum(tf.concat([squares(labels, output)] * 3, 1) / columns_of(output))


def by_root_of_columns(labels, output):
    wide = tf.concat([labels, output], 1)
    return tf.reduce_sum(tf.reduce_sum(tf.square(wide), 1) / tf.sqrt(columns_of(wide)))


def by_entries(labels, output):
    wide = tf.square(tf.concat([labels, output], 1))
    return tf.reduce_sum(wide / tf.cast(tf.reduce_prod(tf.shape(wide)), tf.float32))


def by_two_sizes(labels, output):
    """A mean of rows, and one of columns, each row's own."""
    wide = tf.square(tf.concat([labels, output], 1))
    return tf.reduce_sum(wide / rows_of(wide) / columns_of(wide))


def by_unstacked_sizes(labels, output):
    """As in matrices of style."""
    wide = tf.square(tf.concat([labels, output], 1))
    rows, columns = tf.unstack(tf.cast(tf.shape(wide), tf.float32))
    return tf.reduce_sum(wide / columns) / rows


@BOTH
@pytest.mark.parametrize('towers', [3, 5])
@pytest.mark.parametrize(
    'loss', [by_columns, by_root_of_columns, by_entries, by_two_sizes] + [by_unstacked_sizes]
)
def test_sizes_of_other_dimensions(loss, towers, static, caplog):
    compare(with_loss(lambda y, p: 0.1 * loss(y, p)), batches(), towers, static=static)
    assert 'cannot be told' not in caplog.text
    assert 'is a value of all rows of a shard' not in caplog.text


WARNED = {
    'times rows': lambda y, p: tf.reduce_mean(squares(y, p) * rows_of(p)),
    'mean by rows': lambda y, p: tf.reduce_mean(squares(y, p) / rows_of(p)),
    'times unstacked rows': lambda y, p: tf.reduce_mean(
        squares(y, p) * tf.cast(tf.unstack(tf.shape(p))[0], tf.float32)
    ),
    'logarithm': lambda y, p: tf.reduce_mean(tf.square(p - tf.log(rows_of(p)))),
    'root': lambda y, p: tf.reduce_sum(squares(y, p) / tf.sqrt(rows_of(p))),
    'twice': lambda y, p: tf.reduce_sum(squares(y, p) / rows_of(p) / rows_of(y)),
    'one less': lambda y, p: tf.reduce_sum(squares(y, p) / (rows_of(p) - 1)),
}


@pytest.mark.parametrize('loss', WARNED.values(), ids=WARNED.keys())
def test_rows_that_go_by_how_many_they_are_are_warned_of(loss, caplog):
    train(with_loss(loss), batches(steps=1), 3, static=False)
    assert 'is a value of all rows of a shard' in caplog.text


@BOTH
def test_different_ids_are_not_as_many_as_rows(static, caplog):
    def loss(labels, output):
        ids, _ = tf.unique(tf.cast(labels[:, 0] > 0, tf.int32))
        return tf.reduce_sum(squares(labels, output)) / tf.cast(tf.size(ids), tf.float32)

    train(with_loss(loss), batches(steps=1), 3, static=static)
    assert 'it counts what differs among the rows of a shard' in caplog.text


def of_ragged(features, labels, mode):
    """Means over lists, over what is in them, and over the lists that aren't empty."""
    w = tf.get_variable('w', [], initializer=tf.ones_initializer())
    terms = tf.square(w * features.flat_values - 0.3)
    loss = tf.reduce_sum(terms) / tf.cast(features.nrows(), tf.float32)
    loss += tf.reduce_sum(terms) / tf.cast(tf.size(features.flat_values), tf.float32)
    loss += 0.1 * tf.reduce_mean(tf.cast(features.row_lengths(), tf.float32)) * w
    return spec_of(mode, loss, tf.train.MomentumOptimizer(0.01, 0.9).minimize(loss, step()))


@pytest.mark.parametrize('towers', [2, 5, 7])
@pytest.mark.parametrize('rows', [12, 6], ids='rows={}'.format)
def test_ragged_rows_are_counted(rows, towers, caplog):
    """With 7 towers and 6 rows, one tower has none."""
    lengths = [np.random.RandomState(i).randint(1, 5, rows) for i in range(4)]
    data = [((floats(rows, 4, seed=i), n), floats(rows, 1)) for i, n in enumerate(lengths)]

    def to_ragged(features, labels):
        return tf.RaggedTensor.from_tensor(*features), labels

    for static in (True, False):
        compare(of_ragged, data, towers, static=static, preprocess=to_ragged)
    assert 'rows are combined' not in caplog.text


def test_growth_by_hand():
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [None, 3])
        shape = tf.shape(x)
        n, m = tf.cast(shape[0], tf.float32), tf.cast(shape[-1], tf.float32)
        expected = [
            (n, 1),
            (m, 0),
            (n * m, 1),
            (tf.sqrt(n), 0.5),
            (n / m, 1),
            (1 / n, -1),
            (n * n, 2),
            (tf.maximum(n, 1), 1),
            (n + 1e-8, 1),
            (n + n, 1),
            (n - 1, None),
            (n + n * n, None),
            (tf.log(n), None),
            (tf.exp(m), 0),
            (tf.size(x), 1),
            (tf.reduce_prod(shape[:-1]), 1),
            (tf.reduce_prod(shape[1:]), 0),
            (tf.reduce_prod(tf.stack([shape[0], shape[0], 2])), 2),
            (tf.gather(shape, 0), 1),
            (tf.gather(shape, 1), 0),
        ]
        unknown = tf.placeholder_with_default(x, None)
        sizes = tf.cast(tf.shape(unknown), tf.float32)
        expected += [(sizes[i], None) for i in (0, 1)]
        names = {op.name for op in x.graph.get_operations() if op.type != 'Const'} - {x.op.name}
        rows = Rows([(x, Place(0))], names, None)
        for i, (tensor, power) in enumerate(expected):
            assert counts.growth(tensor, rows) == power, (i, tensor)
