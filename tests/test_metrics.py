"""Metrics over towers are those of one device: for every metric, batch size and last batch."""

import inspect

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models import floats
from towers import assert_close, evaluate

K = 4  # classes

# What each function of tf.metrics is given; columns of the features are scores of classes.
CLASSES = ['accuracy', 'false_negatives', 'false_positives', 'precision', 'recall']
CLASSES += ['true_negatives', 'true_positives']
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
    **{name: lambda m, x, y: m(y > 1, x[:, 0] > 0) for name in CLASSES if name != 'accuracy'},
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
    return [(floats(n, K, seed=i), floats(n, 1, seed=7 * i)[:, 0] > 0) for i, n in enumerate(rows)]


def labelled(*rows):
    return [(x, (np.abs(x).sum(1) * 10).astype(np.int64) % K) for x, _ in batches(*rows)]


def model_of(**metrics):
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(features))
        ops = {name: metric(features, labels) for name, metric in metrics.items()}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=ops)

    return model_fn


SIZES = {'even': (8, 8), 'short last': (8, 8, 3), 'fewer than towers': (5, 1, 2), 'odd': (7, 9)}


@pytest.mark.parametrize('name', ['even', 'fewer than towers'])
def test_all_metrics(name, behavior):
    metrics = {
        name: lambda x, y, name=name: METRICS[name](getattr(tf.metrics, name), x, y)
        for name in METRICS
    }
    sizes, static = SIZES[name], name == 'even'
    one, ours = (evaluate(model_of(**metrics), labelled(*sizes), n, static=static) for n in (0, 4))
    assert all(np.isfinite(value).all() for value in one.metrics.values())
    assert_close(ours, one, 1e-6)


def state(name):
    collections = [tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES]
    zero = lambda: tf.zeros([])  # noqa: E731
    return tf.Variable(zero, trainable=False, collections=collections, name=name)


def running_mean(value):
    total, count = state('total'), state('count')
    return total / count, tf.group(total.assign(total + value), count.assign(count + 1))


def loss_of(x):
    return tf.reduce_mean(tf.square(x))


def kept_by(update):
    return lambda x, y: (lambda kept: (kept, update(kept, x)))(state('kept'))


def in_cond(predicate, update):
    def metric(x, y):
        kept = state('kept')
        return kept, tf.cond(predicate(x), lambda: update(kept, x), lambda: kept.assign_add(0.0))

    return metric


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


OWN = {
    'sum of maxima': kept_by(lambda kept, x: kept.assign_add(tf.reduce_max(x))),
    'moving average': kept_by(lambda kept, x: kept.assign(0.9 * kept + 0.1 * loss_of(x))),
    'loop': kept_by(looped),
    'sums where': in_cond(
        lambda x: tf.reduce_mean(x) > 0, lambda kept, x: kept.assign_add(tf.reduce_sum(x))
    ),
    'function': added_by_function,
    'running mean': lambda x, y: running_mean(loss_of(x)),
}


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
def test_metrics_of_batches(sizes, behavior):
    static = len(set(sizes)) == 1
    one, ours = (evaluate(model_of(**OWN), batches(*sizes), n, static=static) for n in (0, 4))
    assert_close(ours, one, 1e-5)


def test_keras_metrics():
    def metric(features, labels):
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
        accuracy.update_state(labels, features)
        return accuracy

    one = evaluate(model_of(accuracy=metric), labelled(8, 5, 1), 0, static=False)
    ours = evaluate(model_of(accuracy=metric), labelled(8, 5, 1), 4, static=False)
    np.testing.assert_allclose(ours.metrics['accuracy'], one.metrics['accuracy'], rtol=1e-6)


@pytest.mark.parametrize('wide', [True, False], ids=['wide', 'flat'])
def test_curves_of_some_rows(wide):
    """Of conversions of those that were clicked on, say: no row is combined with another."""

    def model_fn(features, labels, mode):
        output = tf.sigmoid(features[:, :1] * tf.get_variable('one', initializer=1.0))
        some, output, labels = features[:, 1] > 0, output, labels[:, None] > 0
        given = [tf.boolean_mask(x if wide else x[:, 0], some) for x in (labels, output)]
        return tf.estimator.EstimatorSpec(
            mode, loss=tf.reduce_mean(output), eval_metric_ops={'auc': tf.metrics.auc(*given)}
        )

    data = [(floats(rows, 3, seed=rows), floats(rows)) for rows in (8, 8, 3)]
    one, ours = (evaluate(model_fn, data, towers, static=False) for towers in (0, 3))
    np.testing.assert_allclose(ours.metrics['auc'], one.metrics['auc'], rtol=1e-5)
