"""Batches of any size and any nest: several devices give the numbers of one."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from layers import mean_square
from models import batches, floats, spec_of, step, weights, with_loss
from towers import compare, compare_outputs, session, train, types_run_once

MODES = tf.estimator.ModeKeys


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('rows', [1, 4, 5, 6])
def test_any_batch_size(rows, static):
    """Of 5 devices."""

    def loss_of(labels, output):
        return tf.reduce_mean(tf.square(labels - output)) + tf.reduce_sum(tf.abs(output))

    compare(with_loss(loss_of), batches(rows, steps=2), 5, static=static)


def adagrad(mode, loss):
    return spec_of(mode, loss, tf.train.AdagradOptimizer(0.1).minimize(loss, step()))


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('kind', ['sparse', 'ragged', 'nested'])
def test_trains_on_nests(kind, static):
    """Sparse and ragged ids, and weights in a nested dict, each row's own."""

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', [5, 2])
        if kind == 'sparse':
            rows = tf.nn.embedding_lookup_sparse(table, features['ids'], None, combiner='sum')
            rows *= tf.reduce_sum(tf.ones(tf.shape(tf.sparse.to_dense(features['ids']))), 1, True)
        else:
            rows = tf.reduce_sum(tf.gather(table, features['ids']), 1)
        if kind == 'ragged':
            # A column for each number of the row splits: one more than there are examples.
            sizes = [tf.shape(rows)[0], tf.shape(features['ids'].row_splits)[0]]
            rows *= tf.reduce_sum(tf.ones(sizes), 1, True)
        output = tf.reduce_sum(rows, 1, keepdims=True) * features['scale']
        return adagrad(mode, tf.reduce_mean(tf.square(output - labels['y'][0])))

    def preprocess(features, labels):
        ids = tf.cast(tf.abs(features['deep']['x']) * 10, tf.int32) % 5
        ragged = tf.RaggedTensor.from_tensor(ids, 1 + tf.range(tf.shape(ids)[0]) % 3)
        made = {'sparse': ragged.to_sparse(), 'ragged': ragged, 'nested': ids}
        return {**features, 'ids': made[kind]}, labels

    data = [
        ({'deep': {'x': floats(7, 3, seed=i)}, 'scale': np.float32(2)}, {'y': (floats(7, 1),)})
        for i in range(4)
    ]
    compare(model_fn, data, 3, preprocess=preprocess, static=static)


def test_recurrent_network_on_ragged_sequences():
    """Padded before or after they are looked up, and as long as each is."""

    def model_fn(features, labels, mode):
        ids = features['ids']
        table = tf.get_variable('table', [5, 2])
        looked_up = tf.nn.embedding_lookup(table, ids).to_tensor()
        padded = tf.nn.embedding_lookup(table, ids.to_tensor())
        length = tf.cast(ids.row_lengths(), tf.int32)
        cell = tf.nn.rnn_cell.GRUCell(3)
        both = tf.concat([looked_up, padded], -1)
        _, state = tf.nn.dynamic_rnn(cell, both, length, dtype=tf.float32)
        return adagrad(mode, tf.reduce_mean(tf.square(state - labels)))

    def preprocess(features, labels):
        ids = tf.cast(tf.abs(features) * 10, tf.int32) % 5
        ragged = tf.RaggedTensor.from_tensor(ids, 1 + tf.range(tf.shape(ids)[0]) % 3)
        return {'ids': ragged}, labels

    ours, _ = compare(model_fn, batches(7, steps=2), 3, preprocess=preprocess, static=False)
    assert not types_run_once(ours.graph) & {'While', 'StatelessWhile', 'Exit'}


def test_broadcast():
    """A vocabulary of as many rows as the batch, and one of others."""

    def model_fn(features, labels, mode):
        ids = tf.cast(tf.abs(features['x'][:, 0]) * 10, tf.int32)
        same, other = features['same'], features['deep']['other']
        rows = tf.gather(same, ids % 6) + tf.gather(other, ids % 4) + tf.reduce_mean(same, 0)
        return adagrad(mode, tf.reduce_mean(tf.square(rows @ weights('w', 3, 1) - labels)))

    more = {'same': floats(6, 3, seed=50), 'deep': {'other': floats(4, 3)}}
    data = [({'x': x, **more}, y) for x, y in batches(6, steps=3)]
    compare(model_fn, data, 3, broadcast=['same', 'deep/other'])


@pytest.mark.parametrize('devices', [1, 3])
def test_every_feature_goes_whole(devices, behavior):
    """Labels alone are divided, and where there are none, nothing is."""

    def model_fn(features, labels, mode):
        x = features.pop('x')  # What it does to the dict changes nothing.
        made = tf.tanh(x @ weights('w', 3, 1))
        if mode == MODES.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions=made)
        spec = adagrad(mode, tf.reduce_mean(tf.square(made - labels)))
        return spec._replace(eval_metric_ops={'mean': tf.metrics.mean(labels)})

    def input_fn():
        data = tf.data.Dataset.from_tensor_slices((floats(23, 3), floats(23, 1))).batch(9)
        return data.map(lambda x, y: ({'x': x}, y))

    several = estimator_mgpu.Estimator(model_fn, devices=devices, broadcast=['x'])
    for estimator in (one := tf.estimator.Estimator(model_fn), several):
        estimator.train(input_fn)
    values = [estimator.get_variable_value('w') for estimator in (one, several)]
    np.testing.assert_allclose(*values, rtol=1e-5)
    metrics = [estimator.evaluate(input_fn)['mean'] for estimator in (one, several)]
    np.testing.assert_allclose(*metrics, rtol=1e-5)
    predictions = [np.stack(list(estimator.predict(input_fn))) for estimator in (one, several)]
    np.testing.assert_allclose(*predictions, rtol=1e-5)


def test_no_labels_and_features_in_a_tuple():
    def model_fn(features, labels, mode):
        assert labels is None
        x, (y, word) = features
        length = tf.cast(tf.strings.length(word), tf.float32)
        return adagrad(mode, tf.reduce_mean(tf.square(x @ weights('w', 3, 1) - y)[:, 0] * length))

    words = np.array([b'a', b'of', b'the', b'that', b'there'])
    compare(model_fn, [((x, (y, words)), None) for x, y in batches(5, steps=3)], 3)


def test_rows_that_differ_when_the_step_runs():
    data = [(floats(6, 3), floats(5, 1))]
    loss = with_loss(lambda labels, output: tf.reduce_mean(output) + tf.reduce_mean(labels))
    with pytest.raises(tf.errors.InvalidArgumentError, match='same number of examples'):
        train(loss, data, 2, static=False)


@pytest.mark.parametrize('rows', [3, 6])
@pytest.mark.parametrize('kind', ['sparse', 'ragged'])
def test_rows_of_entries_that_differ_when_the_step_runs(kind, rows, behavior):
    """Beside labels of which the graph knows how many there are."""

    def model_fn(features, labels, mode):
        if kind == 'sparse':
            made = tf.sparse.sparse_dense_matmul(features, weights('w', 3, 1))
        else:
            made = tf.reduce_sum(features, 1, keepdims=True) * weights('w', 1, 1)
        return adagrad(mode, tf.reduce_mean(tf.square(made)) + tf.reduce_sum(labels))

    def features_of(data):
        if kind == 'sparse':
            return tf.SparseTensor([[0, 0], [2, 1]], [1.0, 2.0], data['shape'])
        return tf.RaggedTensor.from_row_splits([1.0, 2.0], data['splits'], validate=False)

    def input_fn(rows):
        splits = np.array([0, 1, *[2] * (rows - 1)])
        data = {'shape': np.array([rows, 3]), 'splits': splits, 'labels': floats(4, 1)}
        tensors = {name: tf.placeholder_with_default(value, None) for name, value in data.items()}
        tensors['shape'].set_shape([2])
        tensors['splits'].set_shape([None])
        tensors['labels'].set_shape([4, 1])
        return features_of(tensors), tensors['labels']

    estimator = estimator_mgpu.Estimator(model_fn, devices=2)
    estimator.train(lambda: input_fn(4), steps=1)
    with pytest.raises(tf.errors.InvalidArgumentError, match='same number of examples'):
        estimator.train(lambda: input_fn(rows), steps=1)


MEETINGS = {
    'joined': lambda rows, x: tf.concat([rows, x], 1),
    'chosen': lambda rows, x: tf.where(x > 0, rows, x),
    'selected': lambda rows, x: tf.concat(
        tf.dynamic_partition(rows, tf.cast(x[:, 0] > 0, tf.int32), 2), 0
    ),
}


@pytest.mark.parametrize('towers', [2, 3])
@pytest.mark.parametrize('meeting', MEETINGS)
def test_rows_beside_those_of_the_batch(meeting, towers, behavior):
    """What was made once, and only the step tells of how many rows: as many, fewer, or more."""

    def model_fn(features, labels, mode):
        sums = tf.math.segment_sum(features, labels)
        made = MEETINGS[meeting](sums, features)
        return adagrad(mode, tf.reduce_mean(tf.square(made @ weights('w', made.shape[1], 1))))

    def batch(*segments):
        return floats(len(segments), 3), np.array(segments, np.int32)

    as_many = [batch(0, 1, 1, 3, 3, 5), batch(0, 1), batch(0)]
    compare(model_fn, as_many, towers, static=False)
    for other in (batch(0, 1, 1, 3, 3, 4), batch(0, 1, 1, 3, 3, 6), batch(0, 2), batch(0, 6)):
        for devices in (1, towers):
            with pytest.raises(tf.errors.InvalidArgumentError):
                train(model_fn, [other], devices, static=False)


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
        return adagrad(mode, tf.reduce_mean(tf.square(features @ weights('w', 3, 1) - labels)))

    found = []
    for devices in (1, 2):
        estimator = estimator_mgpu.Estimator(model_fn, devices=devices)
        estimator.train(lambda: (x, y), steps=3)
        found.append(estimator.get_variable_value('w'))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


def test_what_cannot_be_replicated():
    model_fn = estimator_mgpu.replicate(with_loss(mean_square), devices=2)
    with tf.init_scope(), pytest.raises(RuntimeError, match='builds a graph. Let an Estimator'):
        model_fn(features=floats(4, 3), labels=floats(4, 1), mode='train')
    with pytest.raises(TypeError, match='model_fn=None is of NoneType, not a function'):
        estimator_mgpu.Estimator(None)


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_a_cast_that_changes_numbers_of_rows(static, behavior):
    """A bool is 1 at most, so that most crops are of the second image."""

    def crops(images):
        count = tf.shape(images)[0]
        which = tf.cast(tf.cast(tf.range(count), tf.bool), tf.int32)
        boxes = tf.tile([[0.0, 0.0, 0.5, 0.5]], [count, 1])
        return tf.image.crop_and_resize(images, boxes, which, [2, 2])

    compare_outputs([crops], [floats(7, 4, 4, 1, seed=i) for i in range(2)], 3, static=static)
