"""Batch normalization, by the statistics of the whole batch unless one asks for a device's."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from models import floats, spec_of, step
from towers import assert_close, compare, evaluate, train

MOMENTUM = 0.8


def images(*sizes, seed=0):
    return [
        (floats(rows, 4, 4, 3, seed=seed + i) + 1, floats(rows, 1, seed=100 + i) + 2)
        for i, rows in enumerate(sizes)
    ]


def tf_layer(x, **options):
    return tf.layers.batch_normalization(
        x, momentum=MOMENTUM, training=True, name='norm', **options
    )


def fused(x):
    return tf_layer(x, fused=True)


def unfused(x):
    return tf_layer(x, fused=False)


def of_vectors(x):
    return tf_layer(tf.reduce_mean(x, [1, 2]))


def by_placeholder(x):
    training = tf.placeholder_with_default(True, [])
    return tf.layers.batch_normalization(x, momentum=MOMENTUM, training=training, name='norm')


def keras_layer(x):
    layer = tf.keras.layers.BatchNormalization(momentum=MOMENTUM, name='norm')
    output = layer(x, training=True)
    for update in layer.updates or layer.get_updates_for(x):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return output


def by_hand(x):
    """Averages of tensors, as old code keeps them, in the branch of a `cond`."""
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    average = tf.get_variable('norm/moving_mean', [3], initializer=tf.zeros_initializer())
    other = tf.get_variable('norm/moving_variance', [3], initializer=tf.ones_initializer())
    for variable, value in ((average, mean), (other, variance)):
        update = variable.assign(variable * MOMENTUM + value * (1 - MOMENTUM))
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return tf.nn.batch_normalization(x, mean, variance, None, None, 1e-3)


NORMS = [
    fused,
    unfused,
    of_vectors,
    by_placeholder,
    keras_layer,
    by_hand,
]


def model_of(norm):
    def model_fn(features, labels, mode):
        output = tf.layers.dense(tf.layers.flatten(norm(features)), 1)
        loss = tf.losses.mean_squared_error(labels, output)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train_op = tf.train.GradientDescentOptimizer(0.02).minimize(loss, step())
        return spec_of(mode, loss, train_op)

    return model_fn


SIZES = {'static': (12, 12, 12), 'dynamic': (12, 10, 2)}


@pytest.mark.core
@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('norm', NORMS, ids=lambda f: f.__name__)
def test_as_on_one_device(norm, static, behavior):
    """The moving averages, too."""
    sizes = SIZES['static' if static else 'dynamic']
    ours, one = compare(model_of(norm), images(*sizes), 5, static=static)
    assert np.abs(one.values['norm/moving_mean']).min() > 0.1


@pytest.mark.parametrize('fused', [True, False], ids=['fused', 'unfused'])
def test_averages_by_hand(fused):
    def model_fn(features, labels, mode):
        x = tf.layers.batch_normalization(
            features, momentum=0.5, fused=fused, training=True, name='norm'
        )
        loss = tf.reduce_mean(tf.square(x - labels[:, None, None]))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss))

    features = np.reshape([0.0, 2.0, 7.0, 8.0, 13.0], [5, 1, 1, 1]).astype('float32')
    labels = np.ones([5, 1], 'float32')
    run = train(model_fn, [(features, labels)], 2, static=False)
    # The mean of the batch is 6, and squares are 36 + 16 + 1 + 4 + 49 = 106 off; fused ones have
    # Bessel's correction. Moving variances start from 1, moving means from 0.
    variance = 106 / 4 if fused else 106 / 5
    np.testing.assert_allclose(run.values['norm/moving_variance'], [(1 + variance) / 2], rtol=1e-6)
    np.testing.assert_allclose(run.values['norm/moving_mean'], [3.0], rtol=1e-6)


LAYOUTS = {'NHWC': [4, 5, 3], 'NCHW': [3, 4, 5], 'NDHWC': [2, 4, 5, 3], 'NCDHW': [3, 2, 4, 5]}


@pytest.mark.parametrize('dtype', [tf.float32, tf.float16], ids=['float32', 'float16'])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_layouts(layout, dtype):
    """Second derivatives too; of images with a large mean, where differences of sums are off."""
    shape, half = LAYOUTS[layout], dtype == tf.float16

    def model_fn(features, labels, mode):
        scale = tf.get_variable('scale', [3], initializer=tf.ones_initializer())
        offset = tf.get_variable('offset', [3], initializer=tf.zeros_initializer())
        x = tf.cast(features, dtype)
        y, mean, variance = tf.nn.fused_batch_norm(x, scale, offset, data_format=layout)
        net = tf.cast(y, tf.float32) * labels
        loss = tf.reduce_mean(tf.nn.sigmoid(net)) + tf.reduce_sum(mean) / 1e3
        [slope] = tf.gradients(loss, scale)
        loss += tf.reduce_sum(tf.square(slope)) + tf.reduce_sum(variance)
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(1.0).minimize(loss, step()))

    rows = [12, 10, 2]
    labels = [floats(n, *shape, seed=9 + n) for n in rows]
    mean = 0 if half else 100
    batches = [(floats(n, *shape, seed=n) + mean, y) for n, y in zip(rows, labels)]
    compare(model_fn, batches, 5, static=False, rtol=2e-3 if half else 1e-4)


@pytest.mark.parametrize('rows', [1024, None], ids='rows={}'.format)
def test_more_entries_than_an_int32_counts(rows):
    """Of the whole batch, all channels together; only the count is computed here."""

    def model_fn(features, labels, mode):
        wide = features * tf.get_variable('w', [224 * 224 * 64])
        norm = fused(tf.reshape(wide, [-1, 224, 224, 64]))
        return spec_of(mode, tf.reduce_mean(norm), tf.no_op())

    with tf.Graph().as_default() as graph:
        images = tf.placeholder(tf.float32, [rows, 1])
        estimator_mgpu.replicate(model_fn, devices=8)(features=images, labels=None, mode='train')
        [count] = [
            op.outputs[0]
            for op in graph.get_operations()
            if op.type == 'Cast' and '/sums/' in op.name and op.outputs[0].shape.rank == 0
        ]
        with tf.Session(config=estimator_mgpu.session_config(8)) as session:
            found = session.run(count, {images: floats(1024, 1)})
    assert found == 1024 * 224 * 224


@pytest.mark.parametrize('norm', [fused, keras_layer], ids=lambda f: f.__name__)
def test_statistics_of_each_device(norm):
    """For speed: other numbers, and a loss that falls all the same."""
    batches = images(12) * 15
    values = train(model_of(norm), batches, 0, steps=0).values
    one = train(model_of(norm), batches, 0, values=values)
    exact = train(model_of(norm), batches, 3, values=values)
    ours = train(model_of(norm), batches, 3, values=values, batch_norm='device')
    np.testing.assert_allclose(exact.losses, one.losses, rtol=1e-4)
    assert abs(ours.losses[0] / one.losses[0] - 1) > 1e-3
    assert np.isfinite(ours.losses).all() and ours.losses[-1] < 0.7 * ours.losses[0]


@pytest.mark.parametrize('sizes', [(12, 12), (12, 10, 2)], ids=['static', 'dynamic'])
def test_inference(sizes):
    """By the moving averages, in towers: row by row."""

    def model_fn(features, labels, mode):
        x = tf.layers.batch_normalization(features, training=mode == 'train', name='norm')
        output = tf.layers.dense(tf.layers.flatten(x), 1)
        return tf.estimator.EstimatorSpec(
            mode, loss=tf.reduce_mean(output), predictions={'output': output}
        )

    static = len(set(sizes)) == 1
    one, ours = (
        evaluate(model_fn, images(*sizes), towers, static=static, mode='eval') for towers in (0, 5)
    )
    assert [p['output'].shape for p in ours.predictions] == [(rows, 1) for rows in sizes]
    assert_close([len(p['output']) for p in ours.predictions], list(sizes), 0)
    assert len(one.losses) == len(ours.losses)


def test_an_unknown_kind():
    with pytest.raises(
        ValueError, match="batch_norm='tower' is not known. Legal are batch, device"
    ):
        estimator_mgpu.replicate(model_of(fused), batch_norm='tower')


def by_averages(features, labels, mode):
    """The recipe of many: ExponentialMovingAverage in a `cond` whose results are used."""
    training = tf.placeholder_with_default(mode == tf.estimator.ModeKeys.TRAIN, [])
    x = features
    for name in ('first', 'second'):
        with tf.variable_scope(name):
            mean, variance = tf.nn.moments(x, [0, 1, 2])
            averages = tf.train.ExponentialMovingAverage(MOMENTUM)

            def updated(mean=mean, variance=variance, averages=averages):
                with tf.control_dependencies([averages.apply([mean, variance])]):
                    return tf.identity(mean), tf.identity(variance)

            def kept(mean=mean, variance=variance, averages=averages):
                return averages.average(mean), averages.average(variance)

            x = tf.nn.batch_normalization(x, *tf.cond(training, updated, kept), 0.5, None, 1e-3)
    output = tf.layers.dense(tf.layers.flatten(x), 1)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=output)
    loss = tf.losses.mean_squared_error(labels, output)
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode, loss=loss, predictions=output)
    return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.0).minimize(loss, step()))


@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
def test_averages_in_a_branch_that_is_used(static, behavior):
    batches = images(12, 12) if static else images(12, 10, 2)
    _, one = compare(by_averages, batches, 3, static=static)
    [name] = [name for name in one.values if 'first/moments/Squeeze/' in name]
    assert np.abs(one.values[name]).min() > 0.1
    for mode in (tf.estimator.ModeKeys.EVAL, tf.estimator.ModeKeys.PREDICT):
        found = [
            evaluate(by_averages, batches, n, mode=mode, values=one.values, static=static)
            for n in (0, 3)
        ]
        assert_close(found[1], found[0], 1e-5)
