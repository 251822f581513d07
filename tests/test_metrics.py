"""Metrics over towers are those of one device: for every metric, batch size and last batch."""

import inspect

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import batches as batches_of
from models import floats
from towers import assert_close, evaluate, session

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


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize('name', METRICS)
def test_metric(name, sizes):
    metric = getattr(tf.metrics, name)
    model_fn = model_of(metric=lambda x, y: METRICS[name](metric, x, y))
    static = len(set(sizes)) == 1
    one = evaluate(model_fn, labelled(*sizes), 0, static=static)
    ours = evaluate(model_fn, labelled(*sizes), 4, static=static)
    np.testing.assert_allclose(ours.metrics['metric'], one.metrics['metric'], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(ours.losses, one.losses, rtol=1e-6)
    assert np.isfinite(one.metrics['metric']).all()


@pytest.mark.parametrize('towers', [2, 3, 8], ids='towers={}'.format)
def test_all_metrics_at_once(towers, behavior):
    metrics = {
        name: lambda x, y, name=name: METRICS[name](getattr(tf.metrics, name), x, y)
        for name in METRICS
    }
    data = labelled(8, 5, 1)
    one = evaluate(model_of(**metrics), data, 0, static=False)
    ours = evaluate(model_of(**metrics), data, towers, static=False)
    for name in METRICS:
        np.testing.assert_allclose(
            ours.metrics[name], one.metrics[name], rtol=1e-6, atol=1e-7, err_msg=name
        )


def variable(name, shape, dtype=tf.float32, validate_shape=True):
    return tf.Variable(
        lambda: tf.zeros(shape, dtype),
        trainable=False,
        collections=[tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES],
        validate_shape=validate_shape,
        shape=tf.TensorShape(shape) if validate_shape else tf.TensorShape([None]),
        name=name,
    )


def streaming_covariance(x, y):
    """Not additive: each update needs the means so far (Chan, Golub and LeVeque's update)."""
    count, co = variable('count', []), variable('co', [])
    mean_x, mean_y = variable('mean_x', []), variable('mean_y', [])
    n = tf.cast(tf.size(x), tf.float32)
    new = count + n
    batch_x, batch_y = tf.reduce_mean(x), tf.reduce_mean(y)
    new_co = co + tf.reduce_sum((x - batch_x) * (y - batch_y))
    new_co += (batch_x - mean_x) * (batch_y - mean_y) * count * n / new
    new_x, new_y = mean_x + (batch_x - mean_x) * n / new, mean_y + (batch_y - mean_y) * n / new
    with tf.control_dependencies([new_co, new_x, new_y]):
        update = tf.group(
            count.assign(new), co.assign(new_co), mean_x.assign(new_x), mean_y.assign(new_y)
        )
    return co / (count - 1), update


def streaming_concat(values):
    """Keeps all values, in order, in an array that doubles in a branch when it's full."""
    array, size = variable('array', [0], validate_shape=False), variable('size', [], tf.int32)
    new_size = size + tf.shape(values)[0]

    def grow():
        with tf.control_dependencies(
            [
                tf.assign(
                    array, tf.concat([array, tf.zeros([2 * new_size])], 0), validate_shape=False
                )
            ]
        ):
            return tf.constant(True)

    full = new_size > tf.shape(array.read_value())[0]
    with tf.control_dependencies([tf.cond(full, grow, lambda: tf.constant(False))]):
        old = array.read_value()
        merged = tf.concat([old[:size], values, old[new_size:]], 0)
        with tf.control_dependencies([tf.assign(array, merged, validate_shape=False)]):
            update = size.assign(new_size)
    return array[:size], update


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize('towers', [2, 4], ids='towers={}'.format)
def test_metrics_that_are_not_additive(towers, sizes):
    model_fn = model_of(
        covariance=lambda x, y: streaming_covariance(x[:, 0], x[:, 1]),
        concat=lambda x, y: streaming_concat(x[:, 0]),
    )
    data = batches(*sizes)
    ours = evaluate(model_fn, data, towers, static=len(set(sizes)) == 1)
    everything = np.concatenate([x for x, _ in data])
    np.testing.assert_array_equal(ours.metrics['concat'], everything[:, 0])
    expected = np.cov(everything[:, 0], everything[:, 1])[0, 1]
    np.testing.assert_allclose(ours.metrics['covariance'], expected, rtol=1e-5)


@pytest.mark.parametrize('rows', [1000, 7, 64], ids='batch={}'.format)
@pytest.mark.parametrize('towers', [3, 8], ids='towers={}'.format)
def test_every_row_counts_once(towers, rows):
    sizes = [rows] * (1000 // rows) + [1000 % rows] * bool(1000 % rows)
    model_fn = model_of(
        rows=lambda x, y: tf.metrics.true_positives(tf.ones_like(y), tf.ones_like(y))
    )
    data = batches(*sizes)[-20:]
    ours = evaluate(model_fn, data, towers, static=False)
    assert ours.metrics['rows'] == sum(len(y) for _, y in data)


def test_mean_of_the_batch_loss_is_over_batches():
    """By hand: losses of two batches are 1 and 9, whatever their sizes; their mean is 5."""
    data = [(np.ones([5, 1], 'f'), np.zeros(5)), (np.full([2, 1], 3, 'f'), np.zeros(2))]
    model_fn = model_of(loss_again=lambda x, y: tf.metrics.mean(tf.reduce_mean(tf.square(x))))
    for towers in (1, 2, 4):
        ours = evaluate(model_fn, data, towers, static=False)
        np.testing.assert_allclose(ours.metrics['loss_again'], 5.0, rtol=1e-6)


def test_rows_added_up_by_position_are_an_error():
    with pytest.raises(ValueError, match="The metric 'rows' adds up batches row by row"):
        evaluate(model_of(rows=lambda x, y: tf.metrics.mean_tensor(x)), batches(8), 2)


def state(value):
    return variable(value, [])


def moving(value, decay=0.9):
    kept = state('moving')
    return kept, kept.assign(decay * kept + (1 - decay) * value)


def running_mean(value):
    total, count = state('total'), state('count')
    return total / count, tf.group(total.assign(total + value), count.assign(count + 1))


def loss_of(x):
    return tf.reduce_mean(tf.square(x))


BATCH_LEVEL = {
    'running mean': lambda x, y: running_mean(loss_of(x)),
    'moving average': lambda x, y: moving(loss_of(x)),
    'last': lambda x, y: moving(loss_of(x), 0.0),
    'sum': lambda x, y: (lambda s: (s, s.assign_add(loss_of(x))))(state('sum')),
    'root, weighted by rows': lambda x, y: tf.metrics.mean(
        tf.sqrt(loss_of(x)), weights=tf.cast(tf.shape(x)[0], tf.float32)
    ),
    'half weight': lambda x, y: tf.metrics.mean(loss_of(x), weights=0.5),
    'columns': lambda x, y: tf.metrics.mean(tf.reduce_mean(x, 0)),
    'python function': lambda x, y: (
        lambda s: (s, s.assign_add(tf.cast(tf.py_func(np.sum, [x], tf.float32), tf.float32)))
    )(state('python')),
}


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize('metric', BATCH_LEVEL.values(), ids=BATCH_LEVEL.keys())
def test_metrics_of_batches(metric, sizes):
    one = evaluate(model_of(metric=metric), batches(*sizes), 0, static=False)
    ours = evaluate(model_of(metric=metric), batches(*sizes), 4, static=False)
    np.testing.assert_allclose(ours.metrics['metric'], one.metrics['metric'], rtol=1e-5)


READS = {
    'variable': lambda v: v,
    'value': lambda v: v.value(),
    'read_value': lambda v: v.read_value(),
}


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize('read', READS.values(), ids=READS.keys())
def test_largest_so_far(read, sizes, behavior):
    def largest(x, y):
        kept = variable('largest', [])
        return tf.identity(kept), kept.assign(tf.maximum(read(kept), tf.reduce_max(x)))

    one = evaluate(model_of(metric=largest), batches(*sizes), 0, static=False)
    ours = evaluate(model_of(metric=largest), batches(*sizes), 4, static=False)
    assert ours.metrics['metric'] == one.metrics['metric'] > 0


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
def test_updates_that_metrics_share_run_once(sizes):
    def model_fn(features, labels, mode):
        positives, update_positives = tf.metrics.true_positives(labels, features[:, 0] > 0)
        loss, update_loss = tf.metrics.mean(loss_of(features))
        confusion = variable('confusion', [2, 2])
        add = tf.math.confusion_matrix(labels, features[:, 0] > 0, 2, dtype=tf.float32)
        batch = state('batches')
        ops = {
            'positives': (positives, update_positives),
            'loss': (loss, update_loss),
            'product': (positives * loss, tf.group(update_positives, update_loss)),
            'confusion': (confusion, tf.group(confusion.assign_add(add), batch.assign_add(1.0))),
            'batches': (batch, tf.no_op()),
        }
        return tf.estimator.EstimatorSpec(mode, loss=loss_of(features), eval_metric_ops=ops)

    static = len(set(sizes)) == 1
    one = evaluate(model_fn, batches(*sizes), 0, static=static)
    ours = evaluate(model_fn, batches(*sizes), 4, static=static)
    for name, expected in one.metrics.items():
        np.testing.assert_allclose(ours.metrics[name], expected, rtol=1e-5, err_msg=name)


def in_cond(predicate, update):
    def metric(x, y):
        kept = state('kept')
        return kept, tf.cond(predicate(x), lambda: update(kept, x), lambda: kept.assign_add(0.0))

    return metric


def kept_by(update):
    return lambda x, y: (lambda kept: (kept, update(kept, x)))(state('kept'))


def looped(kept, x):
    def body(i):
        with tf.control_dependencies([kept.assign_add(tf.reduce_sum(x) * tf.reduce_max(x))]):
            return i + 1

    return tf.while_loop(lambda i: i < 2, body, [0])


# With what they come to for rows 1, 2, 3, 4: of the batch, and of shards of 2.
UNLIKE = {
    'sum of maxima': (kept_by(lambda kept, x: kept.assign_add(tf.reduce_max(x))), 4, 6),
    'last maximum': (kept_by(lambda kept, x: kept.assign(tf.reduce_max(5 - x))), 4, 2),
    'at least 0': (
        kept_by(lambda kept, x: kept.assign(tf.maximum(0.0, tf.reduce_max(5 - x)))),
        4,
        2,
    ),
    'maximum of minima': (
        kept_by(lambda kept, x: kept.assign(tf.maximum(kept, tf.reduce_min(x)))),
        1,
        3,
    ),
    'different ones': (
        kept_by(
            lambda kept, x: kept.assign_add(tf.cast(tf.size(tf.unique(x[:, 0] * 0)[0]), 'float'))
        ),
        1,
        2,
    ),
    'batches that': (
        in_cond(lambda x: tf.reduce_max(x) > 1, lambda kept, x: kept.assign_add(1.0)),
        1,
        2,
    ),
    'sums where': (
        in_cond(lambda x: tf.reduce_mean(x) > 2, lambda kept, x: kept.assign_add(tf.reduce_sum(x))),
        10,
        7,
    ),
    'loop': (kept_by(looped), 80, 2 * (3 * 2 + 7 * 4)),
    'decaying maximum': (
        kept_by(lambda kept, x: kept.assign(tf.maximum(0.5 * kept, tf.reduce_max(5 - x)))),
        4,
        2,
    ),
    'beside a maximum': (
        lambda x, y: (
            lambda kept, most: (
                kept,
                tf.group(kept.assign_sub(1.0), most.assign(tf.maximum(most, tf.reduce_max(x)))),
            )
        )(state('kept'), state('most')),
        -1,
        -2,
    ),
    'columns beside a maximum': (
        lambda x, y: (
            lambda kept, most: (
                kept,
                tf.group(
                    kept.assign_add(tf.cast(tf.shape(x)[1] + 1, 'float')),
                    most.assign(tf.maximum(most, tf.reduce_max(x))),
                ),
            )
        )(state('kept'), state('most')),
        2,
        4,
    ),
    'half a batch': (
        kept_by(lambda kept, x: kept.assign_add(tf.reduce_max(x) * 0 + 0.5)),
        0.5,
        1,
    ),
}


def warned_of_shards(caplog):
    return [r.getMessage() for r in caplog.records if 'taken over shards' in r.getMessage()]


@pytest.mark.parametrize('name', UNLIKE)
def test_what_differs_when_shards_are_written_is_warned_of(name, behavior, caplog):
    metric, of_batch, of_shards = UNLIKE[name]
    data = [(np.arange(1, 5, dtype='f')[:, None], np.zeros(4))]
    one = evaluate(model_of(kept=metric), data, 0)
    assert one.metrics['kept'] == of_batch
    ours = evaluate(model_of(kept=metric), data, 2)
    assert ours.metrics['kept'] == of_shards
    [sentence] = warned_of_shards(caplog)
    assert sentence.startswith('The metrics kept are taken over shards, one after another')


@tf.function
def add_rows(kept, x):
    kept.assign_add(tf.reduce_sum(x))
    kept.assign_add(tf.cast(tf.shape(x)[0], 'float'))
    return kept.read_value()


def added_by_function(x, y):
    with tf.variable_scope('function', use_resource=True):
        kept = state('kept')  # A tf.function takes no other.
    return kept, add_rows(kept, x)


def maximum_and_sums(x, y):
    most, total, rows = state('most'), state('total'), state('rows')
    update = tf.group(
        most.assign(tf.maximum(most, tf.reduce_max(x))),
        total.assign(total + tf.reduce_sum(x)),
        rows.assign_add(tf.cast(tf.shape(x)[0], 'float')),
    )
    return most + total / rows, update


ALIKE = {
    'maximum': kept_by(lambda kept, x: kept.assign(tf.maximum(kept, tf.reduce_max(x)))),
    'minimum': kept_by(lambda kept, x: kept.assign(tf.minimum(tf.reduce_min(x), kept))),
    'maximum of two': kept_by(
        lambda kept, x: kept.assign(
            tf.maximum(kept, tf.maximum(tf.reduce_max(x), tf.reduce_max(-x)))
        )
    ),
    'function': added_by_function,
    'maximum and sums': maximum_and_sums,
}


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize('name', ALIKE)
def test_what_is_the_same_when_shards_are_written(name, sizes, behavior, caplog):
    one = evaluate(model_of(kept=ALIKE[name]), batches(*sizes), 0, static=False)
    ours = evaluate(model_of(kept=ALIKE[name]), batches(*sizes), 4, static=False)
    np.testing.assert_allclose(ours.metrics['kept'], one.metrics['kept'], rtol=1e-5)
    assert not warned_of_shards(caplog)


@pytest.mark.parametrize('how', ['tf.metrics.mean', 'own'])
def test_a_mean_of_what_only_shards_have_is_warned_of(how, caplog):
    """By hand: the shards of rows 0, 1, 2, 3 have maxima of 1 and 3, the batch one of 3."""

    def metric(x, y):
        largest = tf.reduce_max(x)
        if how == 'tf.metrics.mean':
            return tf.metrics.mean(largest)
        total, count = state('total'), state('count')
        return total / count, tf.group(total.assign_add(largest), count.assign_add(1.0))

    data = [(np.arange(4, dtype='f')[:, None], np.zeros(4))]
    ours = evaluate(model_of(largest=metric), data, 2)
    assert 'taken over shards instead' in caplog.text
    np.testing.assert_allclose(ours.metrics['largest'], (1 + 3) / 2)


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
def test_python_functions_see_each_row_once_and_in_order(sizes):
    seen = []

    def model_fn(features, labels, mode):
        update = tf.py_func(lambda x: seen.extend(x) or np.float32(0), [features[:, 0]], tf.float32)
        ops = {'seen': (tf.constant(0.0), update)}
        return tf.estimator.EstimatorSpec(mode, loss=loss_of(features), eval_metric_ops=ops)

    evaluate(model_fn, batches(*sizes), 4, static=len(set(sizes)) == 1)
    assert seen == [row for x, _ in batches(*sizes) for row in x[:, 0]]


def test_keras_metrics():
    def metric(features, labels):
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
        accuracy.update_state(labels, features)
        return accuracy

    one = evaluate(model_of(accuracy=metric), labelled(8, 5, 1), 0, static=False)
    ours = evaluate(model_of(accuracy=metric), labelled(8, 5, 1), 4, static=False)
    np.testing.assert_allclose(ours.metrics['accuracy'], one.metrics['accuracy'], rtol=1e-6)


def test_an_update_that_is_an_operation():
    def metric(features, labels):
        total, update = tf.metrics.mean(features)
        return total, tf.group(update)

    one = evaluate(model_of(mean=metric), batches(8, 3), 0, static=False)
    ours = evaluate(model_of(mean=metric), batches(8, 3), 4, static=False)
    np.testing.assert_allclose(ours.metrics['mean'], one.metrics['mean'], rtol=1e-6)


@pytest.mark.parametrize('sizes', SIZES.values(), ids=SIZES.keys())
def test_a_metric_that_loops_over_rows(sizes, behavior):
    """What it keeps goes through a loop, which has to end also where a tower has no rows."""

    def decaying(x, y):
        kept = variable('kept', [])
        body = lambda i, a: (i + 1, a * 0.9 + x[i, 0])  # noqa: E731
        last = tf.while_loop(lambda i, a: i < tf.shape(x)[0], body, [0, kept.read_value()])[1]
        return kept, tf.assign(kept, last)

    static = len(set(sizes)) == 1
    one = evaluate(model_of(kept=decaying), batches(*sizes), 0, static=static)
    ours = evaluate(model_of(kept=decaying), batches(*sizes), 4, static=static)
    np.testing.assert_allclose(ours.metrics['kept'], one.metrics['kept'], rtol=1e-5)


def test_rows_by_the_size_of_another_dimension():
    """Means over columns, each row's own, and their sum."""

    def model_fn(features, labels, mode):
        columns = tf.cast(tf.shape(features)[1], tf.float32)
        means = tf.reduce_sum(tf.square(features), 1) / columns
        metrics = {'rows': tf.metrics.mean(means), 'sums': tf.metrics.mean(tf.reduce_sum(means))}
        return tf.estimator.EstimatorSpec(mode, loss=tf.reduce_mean(means), eval_metric_ops=metrics)

    one, ours = (evaluate(model_fn, batches_of(steps=3), n, static=False) for n in (0, 3))
    assert_close(ours, one, 1e-5)


def test_weights_by_a_value_of_the_shard_are_warned_of(caplog):
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(features)
        weights = tf.exp(labels) / tf.reduce_sum(tf.exp(labels))
        metrics = {'weighted': tf.metrics.mean(features[:, :1], weights)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    evaluate(model_fn, batches_of(steps=1), 3)
    assert 'is a value of all rows of a shard' in caplog.text


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
def test_metrics_of_what_an_iterator_gives(towers, static, behavior):
    """Not one batch is taken but by the step that evaluates it."""

    def model_fn(features, labels, mode):
        metrics = {
            'labels': tf.metrics.mean(labels),
            'features': tf.metrics.mean(features),
            'error': tf.metrics.mean_absolute_error(labels, 2 * labels),
            'auc': tf.metrics.auc(labels > 0, labels, num_thresholds=9),
        }
        loss = tf.reduce_mean(tf.square(features))
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    rows = floats(24, 3), np.clip(floats(24), 0, 1)

    def evaluated(towers):
        with tf.Graph().as_default():
            dataset = tf.data.Dataset.from_tensor_slices(rows).batch(8, drop_remainder=static)
            batch = tf.data.make_one_shot_iterator(dataset).get_next()
            spec = estimator_mgpu.replicate(model_fn, devices=towers)(*batch, 'eval')
            updates = [update for _, update in spec.eval_metric_ops.values()]
            losses = []
            with session(towers) as sess:
                sess.run(tf.local_variables_initializer())
                with pytest.raises(tf.errors.OutOfRangeError):
                    while True:
                        losses.append(sess.run([spec.loss, updates])[0])
                return losses, sess.run({k: v for k, (v, _) in spec.eval_metric_ops.items()})

    ours, one = evaluated(towers), evaluated(1)
    assert len(one[0]) == 3
    np.testing.assert_allclose(one[1]['labels'], rows[1].mean(), rtol=1e-5)
    assert_close(ours, one, 1e-5)


@pytest.mark.parametrize('wide', [True, False], ids=['wide', 'flat'])
def test_curves_of_some_rows(wide, caplog):
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
    assert 'their shard' not in caplog.text
