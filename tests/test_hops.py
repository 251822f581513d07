"""How many messages between devices follow each other: a step waits for each of them."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.partition.messages import slices
from estimator_mgpu.partition.towers import everywhere
from estimator_mgpu.tf_internals import graphs, op_types
from models import floats, sgd, spec_of, step
from test_samples import SAMPLES
from towers import behavior_of, compare, compare_outputs, session

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SAMPLES))
    import traffic

pytestmark = pytest.mark.core


def normalized(layers, fused, trained='.*'):
    def model_fn(features, labels, mode):
        net = features
        for _ in range(layers):
            net = tf.layers.dense(net, 4, use_bias=False)[:, None, None, :]
            net = tf.layers.batch_normalization(net, training=True, fused=fused)[:, 0, 0]
            net = tf.nn.relu(net)
        loss = tf.reduce_mean(tf.square(tf.layers.dense(net, 1) - labels))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            optimizer = tf.train.GradientDescentOptimizer(0.1)
            variables = tf.trainable_variables(trained)
            return spec_of(mode, loss, optimizer.minimize(loss, step(), variables))

    return model_fn


@pytest.fixture
def own_memory(monkeypatch):
    """Lets logical CPU devices send each other what GPUs would."""
    monkeypatch.setattr(everywhere, 'memory_of', lambda device: device)


def hops(model_fn, devices):
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        batch = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None, 1])
        spec = estimator_mgpu.replicate(model_fn, devices=devices)(*batch, 'train')
        return traffic.hops([spec.train_op, spec.loss.op], '/device:CPU:0')


@pytest.mark.parametrize('fused, each', [(True, 2), (False, 3)], ids=['fused', 'unfused'])
@pytest.mark.parametrize('devices', [3, 8])
def test_batch_normalization_waits_twice(fused, each, devices, behavior, own_memory):
    """For the statistics, and in the gradient for sums; unfused, the mean comes before the rest.

    What is combined with a reference variable is made on each device, as with another variable.
    """
    for trained in ('.*', 'dense'):  # Of the others, only moving averages are written.
        of_two, of_five = (hops(normalized(layers, fused, trained), devices) for layers in (2, 5))
        assert of_five - of_two == 3 * each


def test_a_reference_variable_is_copied_before_the_write(own_memory):
    """Devices use its value at any time, as does the user's op, if somebody fetches it."""

    def model_fn(features, labels, mode):
        scale = tf.get_variable('scale', initializer=floats(3, seed=1), use_resource=False)
        of_sum = tf.tanh(tf.reduce_mean(features, 0))
        loss = tf.reduce_mean(tf.square(features * tf.add(scale, of_sum, name='sum') - labels))
        return spec_of(mode, loss, tf.assign(scale, of_sum).op)

    with tf.Graph().as_default() as graph, session(3) as run:
        batch = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None, 1])
        spec = estimator_mgpu.replicate(model_fn, devices=3)(*batch, 'train')
        [copy] = [op for op in graph.get_operations() if op.type == op_types.DEEP_COPY]
        assert copy.device == graph.get_operation_by_name('scale').device
        assert len({user.device for user in copy.outputs[0].consumers()}) == 3
        combined = graph.get_tensor_by_name('sum:0')
        before = graphs.ancestors([spec.train_op])
        assert copy in before and combined.op not in before

        fed = {batch[0]: floats(7, 3), batch[1]: floats(7, 1)}
        expected = floats(3, seed=1) + np.tanh(floats(7, 3).mean(0))
        for _ in range(30):
            run.run(tf.global_variables_initializer())
            value, _ = run.run([combined, spec.train_op], fed)
            np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_branches_of_small_values(behavior, own_memory):
    """Of the gradients of both branches, which are sums, only that of the one taken is there."""

    def model_fn(features, labels, mode):
        scale = tf.get_variable('scale', initializer=floats(3, seed=1))
        mean = tf.reduce_mean(features, 0)
        is_low = tf.reduce_sum(mean) < 0
        factor = tf.cond(is_low, lambda: scale * mean, lambda: mean + tf.square(scale))
        loss = tf.reduce_mean(tf.square(features * factor - labels))
        return spec_of(mode, loss, sgd(loss, 0.1))

    batches = [(floats(7, 3, seed=n) + n % 2, floats(7, 1, seed=10 + n)) for n in range(4)]
    compare(model_fn, batches, 3, static=False)


def test_ops_that_need_a_reference(own_memory):
    """A `RefSwitch`, by which a branch reads a variable, isn't given a copy of it."""

    def model_fn(features, labels, mode):
        scale = tf.get_variable('scale', initializer=floats(3, seed=1), use_resource=False)
        mean = tf.reduce_mean(features, 0)
        read = tf.cond(tf.reduce_sum(mean) > 9, lambda: mean, lambda: scale.read_value())
        loss = tf.reduce_mean(tf.square(features * (scale + mean) + read - labels))
        return spec_of(mode, loss, sgd(loss, 0.1))

    batches = [(floats(7, 3, seed=n), floats(7, 1, seed=10 + n)) for n in range(3)]
    with behavior_of('v1'):
        compare(model_fn, batches, 3, static=False)


@pytest.mark.parametrize('microbatches', [1, 2])
def test_what_is_read_after_an_update(microbatches, own_memory):
    """It depends on the batch, and isn't copied: turns know that it comes after all of them."""

    def model_fn(features, labels, mode):
        scale = tf.get_variable('scale', initializer=floats(3, seed=1), use_resource=False)
        update = tf.no_op()
        for reduce in (tf.reduce_mean, tf.reduce_max):
            with tf.control_dependencies([update]):
                combined = scale.read_value() + tf.tanh(reduce(features, 0))
                loss = tf.reduce_mean(tf.square(features * combined - labels))
                update = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        return spec_of(mode, loss, update)

    batches = [(floats(n, 3, seed=n), floats(n, 1, seed=10 + n)) for n in (9, 7)]
    compare(model_fn, batches, 3, static=False, rtol=1e-4, microbatches=microbatches)


@pytest.mark.parametrize(
    'network, version', [('deep', 'v2'), ('transformer', 'v2'), ('cnn', 'v2'), ('cnn', 'v1')]
)
def test_as_many_with_any_number_of_devices(network, version):
    with behavior_of(version):
        counts = [traffic.count_on_devices(network, devices).hops for devices in (4, 5, 8)]
    assert len(set(counts)) == 1
    # Variables to towers, gradients to variables, and six batch normalizations.
    assert counts[0] <= {'deep': 6, 'transformer': 6, 'cnn': 6 + 2 * 6}[network]


@pytest.mark.parametrize('fused', [True, False], ids=['fused', 'unfused'])
def test_numbers(fused, behavior, own_memory):
    """With towers that have no example, too."""
    batches = [(floats(n, 3, seed=n), floats(n, 1, seed=10 + n)) for n in (9, 2, 7)]
    compare(normalized(2, fused), batches, 3, static=False, rtol=1e-4)


def test_what_follows_from_a_sum_is_made_on_each_device(own_memory):
    """By ops that run once; but a value that is large is made on one device only."""

    def small(x):
        return x - tf.reduce_mean(x, 0) / (1 + tf.reduce_max(tf.abs(x)))

    def large(x):
        products = tf.matmul(x, tf.tile(x, [1, 400]), transpose_a=True)  # 50 x 20,000: 4 MB
        return tf.matmul(x, tf.tanh(products))

    compare_outputs([small, large], [floats(n, 50) for n in (9, 2)], 3, static=False)

    def hops_of(program):
        def model_fn(features):
            return tf.estimator.EstimatorSpec('infer', predictions=program(features))

        with tf.Graph().as_default():
            replicated = estimator_mgpu.replicate(model_fn, devices=3)
            spec = replicated(tf.placeholder(tf.float32, [9, 50]))
            return traffic.hops([spec.predictions.op], '/device:CPU:0')

    # The batch arrives, the mean and the maximum are exchanged, and the result is gathered. A large
    # sum is made on one device, and sent back.
    assert hops_of(small) == 3
    assert hops_of(large) == 4


def test_small_sums_are_not_made_in_slices(own_memory, monkeypatch):
    """Not even if a variable has as many bytes, and most of all: here 40 kB, and 40 bytes."""
    monkeypatch.setattr(slices, 'memory_of', lambda device: device)

    def with_columns(columns):
        def model_fn(features, labels, mode):
            net = tf.tile(features, [1, columns]) * tf.get_variable('w', [3 * columns])
            loss = tf.reduce_mean(tf.square(tf.tanh(net - tf.reduce_mean(net, 0)) - labels))
            return spec_of(mode, loss, sgd(loss, 0.1))

        return model_fn

    assert hops(with_columns(3333), 4) == hops(with_columns(3), 4)


def test_many_ops_that_run_once(own_memory):
    """More than Python's functions may call each other."""

    def model_fn(features):
        net = tf.reduce_mean(features, 0)
        for _ in range(1500):
            net = net + 1
        return tf.estimator.EstimatorSpec('infer', predictions=features - net)

    with tf.Graph().as_default(), session(3) as sess:
        batch = tf.placeholder(tf.float32, [None, 2])
        spec = estimator_mgpu.replicate(model_fn, devices=3)(batch)
        found = sess.run(spec.predictions, {batch: [[1, 2], [3, 4], [5, 9]]})
    assert found.tolist() == [[-1502, -1503], [-1500, -1501], [-1498, -1496]]
