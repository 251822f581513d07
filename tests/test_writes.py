"""What happens once a step is of the whole batch; where it can't be, a warning says so."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import batches, predict, spec_of, step
from towers import behavior_of, compare, compare_modes, train


def square(features, labels):
    return tf.square(predict(features) - labels)


def sgd(loss, rate=0.05):
    return tf.train.GradientDescentOptimizer(rate).minimize(loss, step())


def divided_by_the_batch_size(features, labels, mode):
    """A sum of rows, whose gradients are divided afterwards."""
    loss = tf.reduce_sum(square(features, labels))
    optimizer = tf.train.MomentumOptimizer(0.05, 0.9)
    rows = tf.cast(tf.shape(features)[0], tf.float32)
    grads = [(g / rows, v) for g, v in optimizer.compute_gradients(loss)]
    return spec_of(mode, loss, optimizer.apply_gradients(grads, step()))


def rate_from_the_loss(features, labels, mode):
    loss = tf.reduce_mean(square(features, labels))
    return spec_of(mode, loss, sgd(loss, 0.01 / (1.0 + tf.stop_gradient(loss))))


def rate_from_the_batch_size(features, labels, mode):
    loss = tf.reduce_mean(square(features, labels))
    rate = 0.01 * tf.cast(tf.shape(features)[0], tf.float32)
    return spec_of(mode, loss, sgd(loss, rate))


def counter_of_examples(features, labels, mode):
    loss = tf.reduce_mean(square(features, labels))
    seen = tf.get_variable('seen', [], tf.int64, tf.zeros_initializer(), trainable=False)
    add = seen.assign_add(tf.shape(features, out_type=tf.int64)[0])
    return spec_of(mode, loss, sgd(loss), add)


def average_of_the_loss(features, labels, mode):
    loss = tf.reduce_mean(square(features, labels))
    average = tf.train.ExponentialMovingAverage(0.9)
    return spec_of(mode, loss, sgd(loss), average.apply([loss]))


def skipped_unless_finite(features, labels, mode):
    loss = tf.reduce_mean(square(features, labels))
    optimizer = tf.train.GradientDescentOptimizer(0.05)
    finite = tf.cast(tf.is_finite(loss), tf.float32)
    grads = [(g * finite, v) for g, v in optimizer.compute_gradients(loss)]
    return spec_of(mode, loss, optimizer.apply_gradients(grads, step()))


MODELS = [
    divided_by_the_batch_size,
    rate_from_the_loss,
    rate_from_the_batch_size,
    counter_of_examples,
    average_of_the_loss,
    skipped_unless_finite,
]


@pytest.mark.parametrize('rows', [12, 7, 2], ids='rows={}'.format)
@pytest.mark.parametrize('model_fn', MODELS, ids=lambda f: f.__name__)
def test_scalars_are_of_the_whole_batch(model_fn, rows, caplog):
    compare(model_fn, batches(rows, steps=4), 3, static=rows != 12)
    assert 'of the first shard only' not in caplog.text


@pytest.mark.parametrize(
    'model_fn', [divided_by_the_batch_size, counter_of_examples], ids=lambda f: f.__name__
)
def test_static_sizes_are_of_the_whole_batch(model_fn, caplog):
    compare(model_fn, batches(12, steps=4), 3, static=True)
    assert 'happens once a step' not in caplog.text


def test_a_constant_like_the_rows_of_a_shard_is_warned_of(caplog):
    def model_fn(features, labels, mode):
        loss = tf.reduce_sum(square(features, labels))
        optimizer = tf.train.GradientDescentOptimizer(0.05)
        rows = features.shape.as_list()[0]
        grads = [(g / rows, v) for g, v in optimizer.compute_gradients(loss)]
        return spec_of(mode, loss, optimizer.apply_gradients(grads, step()))

    train(model_fn, batches(12, steps=1), 2)
    assert 'with the constant 6, which is also the number of rows of a shard' in caplog.text


def added(seen, rows):
    return seen.assign(seen.read_value() + rows)


def added_in_a_circle(seen, rows):
    return seen.assign((seen.read_value() + rows) % 48)


def subtracted(seen, rows):
    return seen.assign(tf.maximum(seen.read_value() - rows, -1000.0))


COUNTERS = [lambda seen, rows: seen.assign_add(rows), added, added_in_a_circle, subtracted]


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('write', COUNTERS)
def test_counters_that_add_the_static_rows_are_warned_of(write, static, behavior, caplog):
    def model_fn(features, labels, mode):
        seen = tf.get_variable('seen', [], initializer=tf.zeros_initializer(), trainable=False)
        loss = tf.reduce_mean(square(features, labels))
        rows = features.shape.as_list()[0]
        if rows is None:
            rows = tf.cast(tf.shape(features)[0], tf.float32)
        return spec_of(mode, loss, sgd(loss), write(seen, 1.0 * rows))

    text = 'with the constant 6, which is also the number of rows of a shard'
    if static:
        train(model_fn, batches(12, steps=1), 2)
        assert text in caplog.text
    else:
        compare(model_fn, batches(12, steps=2), 2, static=False)
        assert text not in caplog.text


def centre_loss(features, labels, mode):
    """The centres move towards the rows of their class."""
    centres = tf.get_variable('centres', [2, 3], trainable=False)
    classes = tf.cast(labels[:, 0] > 0, tf.int32)
    away = tf.gather(centres, classes) - features
    loss = tf.reduce_mean(square(features, labels)) + tf.reduce_mean(tf.square(away))
    with tf.control_dependencies([away]):
        train_op = sgd(loss)
    with tf.control_dependencies([train_op]):
        return spec_of(mode, loss, train_op, tf.scatter_sub(centres, classes, 0.1 * away))


def test_rows_that_go_by_others_are_warned_of_where_they_are_written(caplog):
    """Steps of centres that are divided by how many rows of the shard have their class."""

    def model_fn(features, labels, mode):
        centres = tf.get_variable('centres', [2, 3], trainable=False)
        classes = tf.cast(labels[:, 0] > 0, tf.int32)
        _, index, count = tf.unique_with_counts(classes)
        away = (tf.gather(centres, classes) - features) / (
            1.0 + tf.cast(tf.gather(count, index), tf.float32)[:, None]
        )
        loss = tf.reduce_mean(square(features, labels))
        return spec_of(mode, loss, sgd(loss), tf.scatter_sub(centres, classes, away))

    train(model_fn, batches(12, steps=1), 2, static=False)
    assert caplog.text.count('rows are combined with other rows of their shard') == 1


def codebook(features, labels, mode):
    """Moving averages of how many rows each class has, and of their sum (VQ-VAE)."""
    classes = tf.cast(labels[:, 0] > 0, tf.int32)
    one_hot = tf.one_hot(classes, 4)
    sums = tf.matmul(one_hot, features, transpose_a=True)
    same_sums = tf.einsum('bi,bj->ij', one_hot, features)
    segments = tf.math.unsorted_segment_sum(features, tf.argmax(one_hot, 1), 5)
    updates = []
    counts = [tf.reduce_sum(one_hot, 0), tf.einsum('ij->j', one_hot)]
    bins = tf.math.bincount(classes, minlength=7, maxlength=7)
    counts.append(tf.reshape(tf.cast(bins, tf.float32), [7]))
    counts.append(tf.math.confusion_matrix(classes, classes, 7, dtype=tf.float32))
    for i, value in enumerate([*counts, sums, same_sums, segments]):
        average = tf.get_variable(
            f'average_{i}', value.shape, initializer=tf.zeros_initializer(), trainable=False
        )
        updates.append(tf.assign_sub(average, (average - value) * 0.1))
    loss = tf.reduce_mean(square(features, labels))
    return spec_of(mode, loss, sgd(loss), *updates)


def first_values(features, labels, mode):
    """A variable that starts as a mean over the first batch."""
    start = tf.get_variable('start', initializer=tf.reduce_mean(features, 0), trainable=False)
    loss = tf.reduce_mean(square(features - start, labels))
    return spec_of(mode, loss, sgd(loss))


def test_initial_values_like_the_rows_of_a_shard_stay(caplog):
    def model_fn(features, labels, mode):
        start = tf.get_variable('start', initializer=lambda: tf.cast(4, tf.float32))
        tf.get_variable('other', [], initializer=tf.constant_initializer(4.0))
        loss = tf.reduce_mean(square(features * start, labels))
        return spec_of(mode, loss, sgd(loss))

    run = train(model_fn, batches(12, steps=1), 3, steps=0)
    assert run.values['start'] == run.values['other'] == 4.0
    assert 'with the constant' not in caplog.text


@pytest.mark.parametrize('rows', [12, 7, 2], ids='rows={}'.format)
@pytest.mark.parametrize('model_fn', [centre_loss, codebook], ids=lambda f: f.__name__)
def test_what_is_written_is_of_all_rows(model_fn, rows, behavior, caplog):
    compare(model_fn, batches(rows, steps=4), 3)
    assert 'happens once a step' not in caplog.text


def queue_of_rows(count, also=()):
    """Rows take the place of the oldest in a queue (MoCo); `count(features)` is how many."""

    def model_fn(features, labels, mode):
        queue = tf.get_variable('queue', [30, 3], trainable=False)
        place = tf.get_variable('place', [], tf.int32, tf.zeros_initializer(), trainable=False)
        keys = tf.matmul(features, tf.get_variable('keys', [3, 3]))
        loss = tf.reduce_mean(square(features, labels))
        loss += tf.reduce_mean(tf.square(tf.matmul(keys, queue, transpose_b=True)))
        with tf.control_dependencies([keys, sgd(loss)]):
            places = (place.read_value() + tf.range(count(features))) % 30
            enqueued = tf.scatter_update(queue, places, keys)
        with tf.control_dependencies([enqueued]):
            moved = place.assign((place.read_value() + tf.shape(features)[0]) % 30)
        return spec_of(mode, loss, enqueued, moved, *(update(features) for update in also))

    return model_fn


def rows_of(features):
    return tf.shape(features)[0]


def counts_of_ones(features):
    """How often each class was there: ones of the shard's static size are scattered."""
    counts = tf.get_variable('counts', [2], initializer=tf.zeros_initializer(), trainable=False)
    ones = tf.ones(features.shape[:1])
    return tf.scatter_add(counts, tf.cast(features[:, 0] > 0, tf.int32), ones)


@pytest.mark.parametrize('towers, static', [(2, True), (3, True), (5, False)])
def test_a_queue_of_rows(towers, static, behavior, caplog):
    also = [counts_of_ones] if static else []
    compare(queue_of_rows(rows_of, also), batches(steps=5), towers, static=static)
    assert 'happens once a step' not in caplog.text


def test_places_for_the_rows_of_a_shard_are_an_error():
    model_fn = queue_of_rows(lambda features: features.shape.as_list()[0])
    with pytest.raises(ValueError, match=r"Scatter.*'mod.*features\.shape\[0\] rows, take tf"):
        train(model_fn, batches(steps=1), 2)


def running_mean_used(features, labels, mode):
    """The write is part of the forward pass; the train_op doesn't name it."""
    mean = tf.get_variable('mean', [3], initializer=tf.zeros_initializer(), trainable=False)
    update = tf.assign_add(mean, 0.1 * (tf.reduce_mean(features, 0) - mean))
    with tf.control_dependencies([update]):
        centred = features - mean.read_value()
    output = predict(centred)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=output)
    loss = tf.reduce_mean(tf.square(output - labels))
    if mode == tf.estimator.ModeKeys.TRAIN:
        return spec_of(mode, loss, sgd(loss))
    seen = tf.get_local_variable('seen', [], initializer=tf.zeros_initializer())
    with tf.control_dependencies([tf.assign_add(seen, tf.cast(tf.shape(output)[0], tf.float32))]):
        loss = tf.identity(loss)
    metrics = {'mean': tf.metrics.mean(output), 'seen': (seen.read_value(), tf.no_op())}
    predictions = {'output': output, 'means': tf.reduce_mean(output, 0)}
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, eval_metric_ops=metrics, predictions=predictions
    )


@pytest.mark.parametrize('towers', [1, 3, 4], ids='towers={}'.format)
def test_writes_in_the_forward_pass(towers, behavior, caplog):
    compare_modes(running_mean_used, batches, towers)
    assert 'happens once a step' not in caplog.text


def kept_in_a_branch(features, labels, mode):
    """The loss goes by what the branch gives, which isn't what it writes."""
    mean = tf.get_variable('mean', [3], initializer=tf.zeros_initializer(), trainable=False)
    w = tf.get_variable('w', [3, 1])
    own = tf.reduce_mean(features, 0)

    def keep():
        with tf.control_dependencies([mean.assign(0.9 * mean + own)]):
            return tf.nn.tanh(w)

    used = tf.cond(step() < 3, keep, lambda: w * 1.0)
    loss = tf.reduce_mean(tf.square(tf.matmul(features, used) - labels))
    return spec_of(mode, loss, sgd(loss))


@pytest.mark.parametrize('rows', [12, 7, 2], ids='rows={}'.format)
def test_writes_in_a_branch_beside_what_it_gives(rows, behavior, caplog):
    compare(kept_in_a_branch, batches(rows, steps=5), 3)
    assert 'of the first shard only' not in caplog.text


def test_writes_in_a_branch_of_the_forward_pass_are_warned_of(caplog):
    def model_fn(features, labels, mode):
        mean = tf.get_variable('mean', [3], initializer=tf.zeros_initializer(), trainable=False)
        own = tf.reduce_mean(features, 0)
        used = tf.cond(tf.equal(step(), 0), lambda: tf.assign(mean, own), lambda: mean * 1.0)
        loss = tf.reduce_mean(square(features - used, labels))
        return spec_of(mode, loss, sgd(loss))

    train(model_fn, batches(steps=1), 2)
    assert 'of the first shard only' in caplog.text


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_rows_that_are_written_as_they_are_are_warned_of(static, caplog):
    def model_fn(features, labels, mode):
        last = tf.get_variable('last', [6, 3], trainable=False)
        loss = tf.reduce_mean(square(features, labels))
        return spec_of(mode, loss, sgd(loss), last.assign(features))

    train(model_fn, batches(steps=1), 2, static=static)
    how = 'averaged over the shards' if static else 'of the first shard only: the other shards'
    assert how in caplog.text


@pytest.mark.parametrize(
    ('statistic', 'shape'),
    [(tf.reduce_max, []), (lambda x: tf.math.reduce_std(x, 0), [3])],
    ids=['greatest', 'deviation'],
)
def test_a_statistic_that_is_no_mean_is_warned_of(statistic, shape, caplog):
    def model_fn(features, labels, mode):
        last = tf.get_variable('last', shape, trainable=False)
        loss = tf.reduce_mean(square(features, labels))
        return spec_of(mode, loss, sgd(loss), last.assign(statistic(features)))

    train(model_fn, batches(steps=1), 2)
    assert 'averaged over the shards: it cannot be told to be a sum or a mean' in caplog.text


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_gradients_times_how_many_rows_a_shard_has_are_warned_of(static, caplog):
    """Each row's own gradient, from that of the mean: which is the whole batch's."""

    def model_fn(features, labels, mode):
        hidden = tf.layers.dense(features, 3)
        loss = tf.reduce_mean(square(hidden, labels))
        [own] = tf.gradients(loss, [hidden])
        own *= tf.cast(tf.shape(features)[0], tf.float32)
        fisher = tf.get_variable('fisher', [3], trainable=False)
        return spec_of(mode, loss, sgd(loss), fisher.assign(tf.reduce_mean(own**2, 0)))

    train(model_fn, batches(steps=1), 2, static=static)
    assert 'averaged over the shards: it cannot be told to be a sum or a mean' in caplog.text


def test_batch_norm_is_not_warned_of(caplog):
    def model_fn(features, labels, mode):
        hidden = tf.layers.batch_normalization(features, training=True)
        loss = tf.reduce_mean(square(hidden, labels))
        return spec_of(mode, loss, sgd(loss), *tf.get_collection(tf.GraphKeys.UPDATE_OPS))

    train(model_fn, batches(steps=1), 2)
    assert 'of the first shard only' not in caplog.text


@pytest.mark.parametrize('number', [4, 4.0], ids=['cast', 'as it is'])
def test_numbers_that_are_also_the_rows_of_a_shard_stay_as_they_are(number, caplog):
    """Gradients by 4, and a counter of 4 a step, where shards have 4 rows."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_sum(square(features, labels))
        optimizer = tf.train.MomentumOptimizer(0.001, 0.9)
        by = tf.cast(number, tf.float32)
        grads = [(g / by, v) for g, v in optimizer.compute_gradients(loss)]
        total = tf.get_variable('total', [], initializer=tf.zeros_initializer(), trainable=False)
        return spec_of(mode, loss, optimizer.apply_gradients(grads, step()), total.assign_add(by))

    compare(model_fn, batches(), 3)
    assert 'which is also the number of rows of a shard' in caplog.text


def test_texts_and_sizes_of_variables_are_written_as_they_are():
    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(square(features, labels))
        name = tf.get_variable('name', initializer='none', trainable=False, use_resource=True)
        kernel = tf.trainable_variables()[0]
        like = tf.get_variable('like', initializer=tf.ones_like(kernel), trainable=False)
        return spec_of(mode, loss, sgd(loss), name.assign('done'), like.assign_add(like))

    for behavior in ('v1', 'v2'):
        with behavior_of(behavior):
            run = train(model_fn, batches(steps=1), 3)
        assert run.values['name'] == b'done'
        np.testing.assert_array_equal(run.values['like'], np.full([3, 4], 2.0))


class Runs(tf.train.SessionRunHook):
    """Runs an op with each step."""

    def __init__(self, op):
        self.held = {'op': op}

    def before_run(self, run_context):
        return tf.train.SessionRunArgs(self.held)


def test_what_a_hook_writes(tmp_path):
    """A counter that is no part of the train_op, of what 12 rows by 3 add up to."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(square(features, labels))
        total = tf.get_variable('total', [], initializer=tf.zeros_initializer(), trainable=False)
        hook = Runs(total.assign_add(tf.reduce_sum(features)))
        train_op = sgd(loss)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[hook])

    data = batches(steps=4)
    rows = tuple(np.concatenate(part) for part in zip(*data))
    estimator = estimator_mgpu.Estimator(model_fn, str(tmp_path), devices=3)
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices(rows).batch(12))
    np.testing.assert_allclose(estimator.get_variable_value('total'), rows[0].sum(), rtol=1e-5)


def test_rows_that_meet_reduced_gradients_in_each_tower_are_not_warned_of(caplog):
    """An adversarial step for a table, by its own gradient: the second pass is each tower's."""

    def model_fn(features, labels, mode):
        table = tf.get_variable('table', [7, 3])
        kernel = tf.get_variable('kernel', [3, 1])
        ids = tf.cast(tf.abs(features) * 3, tf.int32) % 7

        def loss_of(table):
            rows = tf.reduce_mean(tf.gather(table, ids), 1)
            return tf.reduce_mean(tf.square(tf.matmul(rows, kernel) - labels))

        loss = loss_of(table)
        [gradient] = tf.gradients(loss, table)
        gradient = tf.stop_gradient(tf.convert_to_tensor(gradient))
        loss += loss_of(table + 0.5 * gradient / tf.norm(gradient))
        return spec_of(mode, loss, sgd(loss))

    compare(model_fn, batches(), 3)
    compare(model_fn, batches(), 5, static=False)
    assert 'happens once a step' not in caplog.text


def test_a_scope_of_the_name_of_this_packages(behavior):
    def model_fn(features, labels, mode):
        loss = tf.reduce_sum(square(features, labels))
        optimizer = tf.train.MomentumOptimizer(0.05, 0.9)
        grads = optimizer.compute_gradients(loss)
        with tf.name_scope('replicate'):
            rows = tf.cast(tf.shape(features)[0], tf.float32)
            grads = [(g / rows, v) for g, v in grads]
        return spec_of(mode, loss, optimizer.apply_gradients(grads, step()))

    compare(model_fn, batches(), 3)
    compare(model_fn, batches(), 5, static=False)
