"""Batches of any size and any nest: several devices give the numbers of one."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import batches, floats, spec_of, step, weights, with_loss
from towers import assert_close, compare, evaluate, session, train

MODES = tf.estimator.ModeKeys


def mean_and_sum(labels, output):
    return tf.reduce_mean(tf.square(labels - output)) + tf.reduce_sum(tf.abs(output))


ROWS = {'1': 1, 'N-1': 4, 'N+1': 6}


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('rows', ROWS.values(), ids=ROWS.keys())
def test_any_batch_size(rows, static):
    compare(with_loss(mean_and_sum), batches(rows, steps=4), 5, static=static)


def test_batch_sizes_may_change_from_step_to_step(behavior):
    steps = [batches(rows, steps=1)[0] for rows in (6, 1, 5, 8)]
    compare(with_loss(mean_and_sum), steps, 4, static=False)


def images(features):
    return tf.tile(features[:, :, None, None], [1, 3, 9, 2])


def convolution(features):
    hidden = tf.nn.conv2d(images(features), weights('kernel', 3, 3, 2, 4), 1, 'SAME')
    return tf.reduce_sum(tf.nn.max_pool2d(hidden, 3, 3, 'VALID'), [1, 2])


def normalized(features):
    hidden = tf.layers.batch_normalization(images(features), training=True, name='norm')
    return convolution(tf.reduce_mean(tf.tanh(hidden), [2, 3]))


def maxima(features):
    """What no row changes is -inf, inf, 1, True or False."""
    x = features @ weights('w', 3, 4)
    over_all = [tf.reduce_max(x, 0), tf.reduce_min(x, 0), tf.reduce_prod(tf.tanh(x), 0)]
    positive = tf.cast(tf.reduce_any(x > 1, 0), tf.float32)
    small = tf.cast(tf.reduce_all(x < 1, 0), tf.float32)
    return x * (positive - small) + tf.add_n(over_all)


def divided(features):
    """Rows whose own norm divides, which would be 0 of a row that isn't there."""
    x = features @ weights('w', 3, 4)
    return x / tf.norm(x, axis=1, keepdims=True) + tf.log(tf.abs(x))


def looked_up(features):
    ids = tf.cast(tf.abs(features) * 10, tf.int32) % 7
    return tf.reduce_sum(tf.gather(weights('table', 7, 4), ids), 1)


def recurrent(features):
    sequence = tf.stack([features, 0.5 * features], 1)
    cell = tf.nn.rnn_cell.GRUCell(4)
    return tf.nn.dynamic_rnn(cell, sequence, dtype=tf.float32)[1]


FORWARD = [convolution, normalized, maxima, divided, looked_up, recurrent]


def model_of(forward):
    def model_fn(features, labels, mode):
        output = forward(features) @ weights('output', 4, 1)
        predictions = {'output': output, 'mean': tf.reduce_mean(output)}
        if mode == MODES.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions=predictions)
        loss = tf.reduce_mean(tf.square(tf.tanh(output) - labels))
        if mode == MODES.EVAL:
            metrics = {'error': tf.metrics.mean_absolute_error(labels, output)}
            return tf.estimator.EstimatorSpec(mode, predictions, loss, eval_metric_ops=metrics)
        return spec_of(mode, loss, tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss, step()))

    return model_fn


@pytest.mark.parametrize('sizes', [(1, 1), (2, 1, 3)], ids=['one row', 'few rows'])
@pytest.mark.parametrize('forward', FORWARD, ids=lambda f: f.__name__)
def test_fewer_rows_than_devices(forward, sizes, behavior):
    """Of an unknown number: devices without rows change nothing."""
    data = [batches(rows, steps=1)[0] for rows in sizes]
    _, one = compare(model_of(forward), data, 4, static=False)
    for mode in (MODES.EVAL, MODES.PREDICT):
        found = [
            evaluate(model_of(forward), data, n, mode=mode, values=one.values, static=False)
            for n in (4, 0)
        ]
        assert_close(*found, 1e-5)


@pytest.mark.parametrize('forward', [divided, looked_up, recurrent], ids=lambda f: f.__name__)
def test_a_batch_without_rows(forward):
    """Between others. A mean of nothing is nan on one device, too, so it's a sum here."""

    def model_fn(features, labels, mode):
        output = forward(features) @ weights('output', 4, 1)
        predictions = {'output': output, 'sum': tf.reduce_sum(output)}
        if mode == MODES.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions=predictions)
        loss = 1.0 + tf.reduce_sum(tf.square(tf.tanh(output) - labels)) / 10
        return spec_of(mode, loss, tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss, step()))

    data = [(x[:rows], y[:rows]) for (x, y), rows in zip(batches(9, steps=3), (5, 0, 2))]
    _, one = compare(model_fn, data, 3, static=False)
    found = [
        evaluate(model_fn, data, n, mode=MODES.PREDICT, values=one.values, static=False)
        for n in (3, 0)
    ]
    assert [len(p['output']) for p in found[0].predictions] == [5, 0, 2]
    assert_close(*found, 1e-5)


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('kind', ['sparse', 'ragged', 'nested'])
def test_trains_on_nests(kind, static):
    """Sparse and ragged ids, and weights in a nested dict, each row's own."""

    def model_fn(features, labels, mode):
        ids = tf.cast(tf.abs(features['deep']['x']) * 10, tf.int32) % 5
        table = tf.get_variable('table', [5, 2])
        if kind == 'sparse':
            rows = tf.nn.embedding_lookup_sparse(table, features['ids'], None, combiner='sum')
        elif kind == 'ragged':
            rows = tf.reduce_sum(tf.ragged.map_flat_values(tf.gather, table, features['ids']), 1)
        else:
            rows = tf.reduce_sum(tf.gather(table, ids), 1)
        output = tf.reduce_sum(rows, 1, keepdims=True) * features['scale']
        loss = tf.reduce_mean(tf.square(output - labels['y'][0]))
        return spec_of(mode, loss, tf.train.AdagradOptimizer(0.1).minimize(loss, step()))

    def preprocess(features, labels):
        ids = tf.cast(tf.abs(features['deep']['x']) * 10, tf.int32) % 5
        ragged = tf.RaggedTensor.from_tensor(ids, 1 + tf.range(tf.shape(ids)[0]) % 3)
        return {**features, 'ids': ragged if kind == 'ragged' else ragged.to_sparse()}, labels

    data = [
        ({'deep': {'x': floats(7, 3, seed=i)}, 'scale': np.float32(2)}, {'y': (floats(7, 1),)})
        for i in range(4)
    ]
    compare(model_fn, data, 3, preprocess=preprocess, static=static)


def test_broadcast():
    """A vocabulary of as many rows as the batch, and one of others."""

    def model_fn(features, labels, mode):
        ids = tf.cast(tf.abs(features['x'][:, 0]) * 10, tf.int32)
        same, other = features['same'], features['deep']['other']
        rows = tf.gather(same, ids % 6) + tf.gather(other, ids % 4) + tf.reduce_mean(same, 0)
        loss = tf.reduce_mean(tf.square(rows @ weights('w', 3, 1) - labels))
        return spec_of(mode, loss, tf.train.AdagradOptimizer(0.1).minimize(loss, step()))

    data = [
        (
            {'x': x, 'same': floats(6, 3, seed=50), 'deep': {'other': floats(4, 3)}},
            y,
        )
        for x, y in batches(6, steps=3)
    ]
    compare(model_fn, data, 3, broadcast=['same', 'deep/other'])


def test_no_labels_and_features_in_a_tuple():
    def model_fn(features, labels, mode):
        assert labels is None
        x, (y, word) = features
        loss = tf.reduce_mean(tf.square(x @ weights('w', 3, 1) - y)) * tf.cast(
            tf.strings.length(word), tf.float32
        )
        loss = tf.reduce_mean(loss)
        return spec_of(mode, loss, tf.train.AdagradOptimizer(0.1).minimize(loss, step()))

    words = np.array([b'a', b'of', b'the', b'that', b'there'])
    compare(model_fn, [((x, (y, words)), None) for x, y in batches(5, steps=3)], 3)


def test_rows_that_differ_when_the_step_runs():
    data = [(floats(6, 3), floats(5, 1))]
    loss = with_loss(lambda labels, output: tf.reduce_mean(output) + tf.reduce_mean(labels))
    with pytest.raises(tf.errors.InvalidArgumentError, match='same number of rows'):
        train(loss, data, 2, static=False)


def test_one_batch_is_taken_a_step():
    """By whatever of it is divided."""
    rows = floats(24, 3)

    def model_fn(features, labels, mode):
        metrics = {'mean': tf.metrics.mean(features), 'rows': tf.metrics.mean(labels)}
        return tf.estimator.EstimatorSpec(
            mode, loss=tf.reduce_mean(features), eval_metric_ops=metrics
        )

    with tf.Graph().as_default(), session(3) as sess:
        dataset = tf.data.Dataset.from_tensor_slices((rows, rows[:, 0])).batch(10)
        batch = tf.data.make_one_shot_iterator(dataset).get_next()
        spec = estimator_mgpu.replicate(model_fn, devices=3)(*batch, MODES.EVAL)
        updates = [update for _, update in spec.eval_metric_ops.values()]
        sess.run(tf.local_variables_initializer())
        losses = []
        with pytest.raises(tf.errors.OutOfRangeError):
            while True:
                losses.append(sess.run([spec.loss, updates])[0])
        found = sess.run({name: value for name, (value, _) in spec.eval_metric_ops.items()})
    means = [rows[i : i + 10].mean() for i in (0, 10, 20)]
    np.testing.assert_allclose(losses, means, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found['mean'], rows.mean(), rtol=1e-4)
    np.testing.assert_allclose(found['rows'], rows[:, 0].mean(), rtol=1e-4)


def test_arrays_alone_are_not_divided():
    """They are constants of the model."""
    x, y = floats(6, 3), floats(6, 1)

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(features @ weights('w', 3, 1) - labels))
        return spec_of(mode, loss, tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss, step()))

    found = []
    for devices in (1, 2):
        estimator = estimator_mgpu.Estimator(model_fn, devices=devices)
        estimator.train(lambda: (x, y), steps=3)
        found.append(estimator.get_variable_value('w'))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
