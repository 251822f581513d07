"""Metrics over towers are those of one device: for every metric, batch size and last batch."""

import inspect

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import floats
from towers import assert_close, behavior_of, evaluate

K = 4  # classes

# What each function of tf.metrics is given; columns of the features are scores of classes.
AT_THRESHOLDS = ['false_negatives', 'false_positives', 'precision', 'recall']
AT_THRESHOLDS += ['true_negatives', 'true_positives']
AT_K = ['average_precision_at_k', 'precision_at_k', 'recall_at_k']
AT_K += ['sparse_average_precision_at_k', 'sparse_precision_at_k']
DIFFERENCES = ['mean_absolute_error', 'mean_squared_error', 'root_mean_squared_error']


def scores(features):
    return tf.nn.sigmoid(features[:, 0])


METRICS = {
    'mean': lambda m, x, y: m(x[:, 0]),
    'mean_tensor': lambda m, x, y: m(tf.reduce_mean(x, 0)),
    'percentage_below': lambda m, x, y: m(x[:, 0], 0.3),
    'auc': lambda m, x, y: m(y > 1, scores(x), num_thresholds=20),
    'mean_iou': lambda m, x, y: m(y, tf.argmax(x, 1), K),
    'mean_per_class_accuracy': lambda m, x, y: m(y, tf.argmax(x, 1), K),
    'mean_relative_error': lambda m, x, y: m(x[:, 1], x[:, 0], tf.abs(x[:, 1]) + 1),
    'mean_cosine_distance': lambda m, x, y: m(
        tf.nn.l2_normalize(x, 1), tf.nn.l2_normalize(x[:, ::-1], 1), 1
    ),
    'sensitivity_at_specificity': lambda m, x, y: m(y > 1, scores(x), 0.4, num_thresholds=20),
    'specificity_at_sensitivity': lambda m, x, y: m(y > 1, scores(x), 0.4, num_thresholds=20),
    'precision_at_top_k': lambda m, x, y: m(y[:, None], tf.math.top_k(x, 2)[1], 2),
    'recall_at_top_k': lambda m, x, y: m(y[:, None], tf.math.top_k(x, 2)[1], 2),
    **{name: lambda m, x, y: m(y > 1, x[:, 0] > 0) for name in AT_THRESHOLDS},
    'accuracy': lambda m, x, y: m(y, tf.argmax(x, 1)),
    **{
        f'{name}_at_thresholds': lambda m, x, y: m(y > 1, scores(x), [0.3, 0.5, 0.8])
        for name in AT_THRESHOLDS
    },
    **{name: lambda m, x, y: m(y[:, None], x, 2) for name in AT_K},
    **{name: lambda m, x, y: m(x[:, 1], x[:, 0]) for name in DIFFERENCES},
}


def test_every_metric_of_the_module_is_tested():
    functions = {name for name, f in vars(tf.metrics).items() if inspect.isroutine(f)}
    functions = functions or {n for n in dir(tf.metrics) if callable(getattr(tf.metrics, n))}
    assert {name for name in functions if not name.startswith('_')} == set(METRICS)


def batches(*rows):
    """Scores, and the class of each row."""
    scores = [floats(n, K, seed=i) for i, n in enumerate(rows)]
    return [(x, (np.abs(x).sum(1) * 10).astype(np.int64) % K) for x in scores]


def model_of(**metrics):
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(features))
        ops = {name: metric(features, labels) for name, metric in metrics.items()}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=ops)

    return model_fn


SIZES = {'even': (8, 8), 'short last': (8, 8, 3), 'fewer than towers': (5, 1, 2), 'odd': (7, 9)}


def assert_as_on_one_device(metrics, sizes, rtol):
    static = len(set(sizes)) == 1
    data, model_fn = batches(*sizes), model_of(**metrics)
    one, ours = (evaluate(model_fn, data, towers, static=static) for towers in (0, 4))
    assert all(np.isfinite(value).all() for value in one.metrics.values())
    assert_close(ours, one, rtol)


@pytest.mark.parametrize(('name', 'version'), [('even', 'v2'), ('fewer than towers', 'v1')])
def test_all_metrics(name, version):
    metrics = {
        name: lambda x, y, name=name: METRICS[name](getattr(tf.metrics, name), x, y)
        for name in METRICS
    }
    with behavior_of(version):
        assert_as_on_one_device(metrics, SIZES[name], 1e-6)


def state(name):
    collections = [tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES]
    zero = lambda: tf.zeros([])  # noqa: E731
    return tf.Variable(zero, trainable=False, collections=collections, name=name)


def running_mean(value):
    total, count = state('total'), state('count')
    return total / count, tf.group(total.assign(total + value), count.assign(count + 1))


def kept_by(update):
    return lambda x, y: (lambda kept: (kept, update(kept, x)))(state('kept'))


def sum_where(kept, x):
    add = lambda: kept.assign_add(tf.reduce_sum(x))  # noqa: E731
    return tf.cond(tf.reduce_mean(x) > 0, add, lambda: kept.assign_add(0.0))


@tf.function
def add_rows(kept, x):
    kept.assign_add(tf.reduce_sum(x))
    kept.assign_add(tf.cast(tf.shape(x)[0], 'float'))
    return kept.read_value()


def added_by_function(x, y):
    with tf.variable_scope('function', use_resource=True):
        kept = state('kept')  # A tf.function takes no other.
    return kept, add_rows(kept, x)


def looped(kept, x):
    """Goes by the rows, one after another."""
    body = lambda i, a: (i + 1, a * 0.9 + x[i, 0])  # noqa: E731
    rounds = tf.while_loop(lambda i, a: i < tf.shape(x)[0], body, [0, kept.read_value()])
    return kept.assign(rounds[1])


def by_keras(x, y):
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
    accuracy.update_state(y, x)
    return accuracy


def auc_of_some(some, *tensors):
    return tf.metrics.auc(*(tf.boolean_mask(t, some) for t in tensors), num_thresholds=20)


OWN = {
    'sum of maxima': kept_by(lambda kept, x: kept.assign_add(tf.reduce_max(x))),
    'moving average': kept_by(lambda kept, x: kept.assign(0.9 * kept + tf.reduce_mean(x * x))),
    'loop': kept_by(looped),
    'sums where': kept_by(sum_where),
    'function': added_by_function,
    # Of conversions of those that were clicked on, say: no row is combined with another.
    'curve of some': lambda x, y: auc_of_some(x[:, 1] > 0, y > 1, scores(x)),
    'wide curve of some': lambda x, y: auc_of_some(x[:, 1] > 0, y[:, None] > 1, scores(x)[:, None]),
    'running mean': lambda x, y: running_mean(tf.reduce_mean(x * x)),
}


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES)
def test_metrics_of_batches(sizes, behavior):
    assert_as_on_one_device(OWN, sizes, 1e-5)


def test_keras_metrics():
    assert_as_on_one_device({'accuracy': by_keras}, (8, 5, 1), 1e-6)
