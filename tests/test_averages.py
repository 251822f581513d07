"""Averages, counters and normalisations that are written as a model trains: as on one device."""

import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import adam, away_from_0, batches, of_all_modes, predict, spec_of, step
from towers import compare, compare_modes

TOWERS = pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)


def linear(x):
    return tf.layers.dense(x, 1, name='output', reuse=tf.AUTO_REUSE)


def hidden(features):
    return linear(tf.layers.dense(features, 4, tf.nn.tanh))


def averaged(loss):
    """Averages of all variables, after they have changed."""
    average = tf.train.ExponentialMovingAverage(0.9, step())
    with tf.control_dependencies([adam(loss)]):
        return average.apply(tf.trainable_variables())


def averaged_loss(loss):
    """A learning rate that goes by the average of the loss."""
    average = tf.train.ExponentialMovingAverage(0.5, zero_debias=True)
    with tf.control_dependencies([average.apply([loss])]):
        rate = 0.01 / (1.0 + average.average(loss))
        return tf.train.MomentumOptimizer(rate, 0.9).minimize(loss, step())


class AveragingOptimizer(tf.train.Optimizer):
    """Another optimizer, and averages of what it has changed."""

    def __init__(self, optimizer):
        super().__init__(False, 'Averaging')
        self.optimizer = optimizer
        self.average = tf.train.ExponentialMovingAverage(0.8)

    def compute_gradients(self, *args, **kwargs):
        return self.optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads, global_step=None, name=None):
        train_op = self.optimizer.apply_gradients(grads, global_step, name)
        with tf.control_dependencies([train_op]):
            return tf.group(self.average.apply([v for _, v in grads]))


def averaging_optimizer(loss):
    optimizer = tf.train.AdamOptimizer(0.01, epsilon=1e-3)
    return AveragingOptimizer(optimizer).minimize(loss, step())


def counted_steps(loss):
    """Counters that the train_op waits for, and one that goes by them."""
    count = tf.get_variable('count', [], tf.int64, tf.zeros_initializer(), trainable=False)
    total = tf.get_variable('total', [], tf.float64, tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([tf.assign_add(count, 1)]):
        rate = 0.1 / tf.cast(1 + count.read_value(), tf.float32)
        with tf.control_dependencies([tf.assign_add(total, tf.cast(loss, tf.float64))]):
            return tf.train.GradientDescentOptimizer(rate).minimize(loss, step())


def best_loss(loss):
    """The best loss so far, and the last that was worse."""
    best = tf.get_variable('best', [], tf.float32, tf.constant_initializer(1e9), trainable=False)
    worse = tf.get_variable('worse', [], tf.float32, tf.zeros_initializer(), trainable=False)
    before = best.read_value()
    with tf.control_dependencies([before]):
        update = [
            tf.assign(best, tf.minimum(before, loss)),
            tf.assign(worse, tf.where(loss > before, loss, worse.read_value())),
        ]
    return tf.group(adam(loss), *update)


def slow_weights(loss):
    """Lookahead: every third step, slow weights follow and the fast ones go back to them."""
    train_op = adam(loss)
    pairs = [(v, tf.Variable(tf.zeros(v.shape), trainable=False)) for v in tf.trainable_variables()]
    with tf.control_dependencies([train_op]):
        now = tf.cast(tf.equal(step().read_value() % 3, 0), tf.float32)
        slow = [tf.assign_add(s, now * 0.5 * (v.read_value() - s)) for v, s in pairs]
        with tf.control_dependencies(slow):
            synced = [tf.assign_add(v, now * (s.read_value() - v)) for v, s in pairs]
    return tf.group(*synced)


TRAIN = [averaged, averaged_loss, averaging_optimizer, counted_steps, best_loss, slow_weights]


@TOWERS
@pytest.mark.parametrize('train', TRAIN, ids=lambda f: f.__name__)
def test_written_after_gradients(train, towers, behavior, caplog):
    compare_modes(of_all_modes(hidden, train, train.__name__), away_from_0, towers)
    assert 'of the first shard only' not in caplog.text


def normalized(features, write):
    """Divides a matrix by its largest singular value, of which a vector is kept."""
    w = tf.get_variable('w', [3, 4])
    u = tf.get_variable('u', [1, 4], initializer=tf.ones_initializer(), trainable=False)
    v = tf.nn.l2_normalize(tf.matmul(u, w, transpose_b=True))
    new = tf.stop_gradient(tf.nn.l2_normalize(tf.matmul(v, w)))
    new, w = write(u, new, w)
    sigma = tf.matmul(tf.matmul(tf.stop_gradient(v), w), new, transpose_b=True)
    return linear(tf.nn.tanh(tf.matmul(features, w / sigma[0, 0])))


def spectral_norm_by_output(features):
    return normalized(features, lambda u, new, w: (tf.assign(u, new), w))


def spectral_norm_by_dependency(features):
    def write(u, new, w):
        with tf.control_dependencies([tf.assign(u, new)]):
            return new, tf.identity(w)

    return normalized(features, write)


def spectral_norm_by_collection(features):
    def write(u, new, w):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(u, new).op)
        return new, w

    return normalized(features, write)


def adam_after_updates(loss):
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return adam(loss)


SPECTRAL = [
    of_all_modes(spectral_norm_by_output),
    of_all_modes(spectral_norm_by_dependency),
    of_all_modes(spectral_norm_by_collection, adam_after_updates),
]


@TOWERS
@pytest.mark.parametrize('model_fn', SPECTRAL, ids=lambda f: f.__name__)
def test_spectral_normalization(model_fn, towers, behavior):
    compare_modes(model_fn, away_from_0, towers)


def examples_seen(features, labels, mode):
    """How many examples there were, counted in the forward pass, sets the learning rate."""
    seen = tf.get_variable('seen', [], tf.int32, tf.zeros_initializer(), trainable=False)
    with tf.control_dependencies([tf.assign_add(seen, tf.shape(features)[0])]):
        features = tf.identity(features)
    loss = tf.reduce_mean(tf.square(predict(features) - labels))
    with tf.control_dependencies([loss]):
        rate = 1.0 / (10.0 + tf.cast(seen.read_value(), tf.float32))
    return spec_of(mode, loss, tf.train.GradientDescentOptimizer(rate).minimize(loss, step()))


def positives_seen(features, labels, mode):
    """The share of positive labels so far."""
    names = ['positives', 'labels']
    counts = [
        tf.get_variable(n, [], initializer=tf.ones_initializer(), trainable=False) for n in names
    ]
    updates = [
        tf.assign_add(counts[0], tf.reduce_sum(tf.cast(labels > 2, tf.float32))),
        tf.assign_add(counts[1], tf.cast(tf.size(labels), tf.float32)),
    ]
    loss = tf.reduce_mean(tf.square(predict(features) - labels))
    with tf.control_dependencies(updates):
        share = counts[0].read_value() / counts[1].read_value()
        with tf.control_dependencies([adam(loss)]):
            return spec_of(mode, loss, tf.assign_add(step(), tf.cast(share * 100, tf.int64)))


@pytest.mark.parametrize('static', [True, False], ids='static={}'.format)
@pytest.mark.parametrize('rows', [12, 10], ids='rows={}'.format)
@TOWERS
@pytest.mark.parametrize('model_fn', [examples_seen, positives_seen], ids=lambda f: f.__name__)
def test_counts_of_examples(model_fn, towers, rows, static, behavior):
    compare(model_fn, [(x, y + 2) for x, y in batches(rows, 5)], towers, static=static)


def averages_for_evaluation(features, labels, mode):
    """Trains on variables and evaluates on their averages."""
    output = predict(features)
    average = tf.train.ExponentialMovingAverage(0.7)
    if mode == tf.estimator.ModeKeys.PREDICT:
        saver = tf.train.Saver(average.variables_to_restore())
        predictions = {'output': output}
        scaffold = tf.train.Scaffold(saver=saver)
        return tf.estimator.EstimatorSpec(mode, predictions=predictions, scaffold=scaffold)
    loss = tf.losses.mean_squared_error(labels, output)
    if mode == tf.estimator.ModeKeys.EVAL:
        scaffold = tf.train.Scaffold(saver=tf.train.Saver(average.variables_to_restore()))
        return tf.estimator.EstimatorSpec(mode, loss=loss, scaffold=scaffold)
    with tf.control_dependencies([adam(loss)]):
        return spec_of(mode, loss, average.apply(tf.trainable_variables()))


def test_evaluates_averages(tmp_path):
    def input_fn():
        x, y = map(np.stack, zip(*away_from_0()))
        return tf.data.Dataset.from_tensor_slices((x, y))

    def run(name, towers):
        estimator = estimator_mgpu.Estimator(
            averages_for_evaluation,
            str(tmp_path / name),
            tf.estimator.RunConfig(tf_random_seed=1),
            devices=towers,
        )
        estimator.train(input_fn)
        predicted = [p['output'] for p in estimator.predict(input_fn)]
        return estimator.evaluate(input_fn)['loss'], predicted

    run('one', 1)
    shutil.copytree(tmp_path / 'one', tmp_path / 'several')
    one, ours = run('one', 1), run('several', 3)
    assert ours[0] == pytest.approx(one[0], rel=1e-5)
    assert [float(p[0]) for p in ours[1]] == pytest.approx([float(p[0]) for p in one[1]], rel=1e-4)
