"""Batch normalization, by the statistics of the whole batch unless one asks for a device's."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import check_rule
from estimator_mgpu.tf_internals import graphs
from models import floats, sgd, spec_of, step
from towers import behavior_of, compare, session, train

MOMENTUM = 0.8


def fused(x):
    return tf.layers.batch_normalization(
        x, momentum=MOMENTUM, training=True, name='norm', fused=True
    )


def keras_layer(x):
    layer = tf.keras.layers.BatchNormalization(momentum=MOMENTUM, name='norm')
    output = layer(x, training=True)
    for update in layer.updates or layer.get_updates_for(x):
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, update)
    return output


def model_of(norm):
    def model_fn(features, labels, mode):
        output = tf.layers.dense(tf.layers.flatten(norm(features)), 1)
        loss = tf.losses.mean_squared_error(labels, output)
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            return spec_of(mode, loss, sgd(loss, 0.02))

    return model_fn


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


def test_devices_wait_once_for_statistics():
    """The second device sends its mean and variance, and later its part of the loss."""

    def model_fn(features, labels, mode):
        return spec_of(mode, tf.reduce_mean(tf.square(fused(features))), tf.no_op())

    with tf.Graph().as_default() as graph:
        images = tf.placeholder(tf.float32, [12, 4, 4, 3])
        replicated = estimator_mgpu.replicate(model_fn, devices=2)
        spec = replicated(features=images, labels=None, mode='train')

    # How often something on the way to an op is sent by the second device.
    sent = {}
    for op in graphs.topological_order(graph.get_operations()):
        counts = [
            sent[before] + (before.device.endswith(':1') and op.device != before.device)
            for before in {tensor.op for tensor in op.inputs}
        ]
        sent[op] = max(counts, default=0)
    assert sent[spec.loss.op] == 2


def test_on_three_machines(three_machines):
    """With two devices each. Of three examples, the second machine has one, and the third none."""
    tasks = ['/job:chief/task:0', '/job:worker/task:0', '/job:worker/task:1']
    devices = [f'{task}/device:CPU:{i}' for task in tasks for i in range(2)]

    def trained(target, devices):
        with tf.Graph().as_default():
            tf.train.get_or_create_global_step()
            batch = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None, 3])

            def model_fn(features, labels, mode):
                x = tf.layers.dense(features, 3, kernel_initializer=tf.ones_initializer())
                x = x * tf.constant([1.0, -2.0, 3.0]) + 5
                net = tf.sigmoid(fused(x[:, None, None])[:, 0, 0] * labels)
                return spec_of(mode, tf.reduce_mean(net), sgd(tf.reduce_mean(net), 10.0))

            spec = estimator_mgpu.replicate(model_fn, devices=devices)(*batch, 'train')
            variables = {v.op.name: v for v in tf.trainable_variables()}
            with tf.Session(target) if target else session(0) as sess:
                sess.run(tf.global_variables_initializer())
                for rows in (9, 3):
                    values = floats(rows, 3, seed=rows), floats(rows, 3, seed=20 + rows)
                    sess.run(spec.train_op, dict(zip(batch, values)))
                return sess.run(variables)

    expected = trained(None, 1)
    found = trained(three_machines, devices)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def in_a_loop(x):
    def body(i, x):
        return i + 1, tf.nn.fused_batch_norm(x, [2.0] * 3, [0.5] * 3)[0]

    return tf.while_loop(lambda i, x: i < 2, body, [0, x])[1]


def test_in_a_loop_of_tensorflow_1():
    batches = [(floats(n, 4, 4, 3), floats(n, 1, seed=n)) for n in (12, 7)]
    with behavior_of('v1'):
        compare(model_of(in_a_loop), batches, 3, static=False)


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
            if op.type == 'Cast' and '/moments/' in op.name and op.outputs[0].shape.rank == 0
        ]
        with tf.Session(config=estimator_mgpu.session_config(8)) as session:
            found = session.run(count, {images: floats(1024, 1)})
    assert found == 1024 * 224 * 224


@pytest.mark.parametrize('norm', [fused, keras_layer], ids=lambda f: f.__name__)
def test_statistics_of_each_device(norm):
    """For speed: other numbers, and a loss that falls all the same."""
    batches = [(floats(12, 4, 4, 3) + 1, floats(12, 1, seed=100) + 2)] * 15
    one = train(model_of(norm), batches, 0)
    exact = train(model_of(norm), batches, 3, values=one.start)
    ours = train(model_of(norm), batches, 3, values=one.start, batch_norm='device')
    np.testing.assert_allclose(exact.losses, one.losses, rtol=1e-4)
    assert abs(ours.losses[0] / one.losses[0] - 1) > 1e-3
    assert np.isfinite(ours.losses).all() and ours.losses[-1] < 0.7 * ours.losses[0]


def test_the_fused_op_moves_averages():
    def fused(x):
        given = dict(x=tf.reshape(x, [-1, 1, 2, 2]), scale=[1.0, 2.0], offset=[0.0, 1.0])
        moving = dict(mean=[0.5, 1.5], variance=[2.0, 0.25], exponential_avg_factor=0.1)
        made = tf.raw_ops.FusedBatchNormV3(**given, **moving, is_training=True)
        return made.y, made.batch_mean, made.batch_variance

    check_rule(fused, floats(7, 4))
