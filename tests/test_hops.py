"""How many messages between devices follow each other: a step waits for each of them."""

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.partition.messages import slices
from estimator_mgpu.partition.towers import everywhere
from models import floats, sgd, spec_of
from test_samples import SAMPLES
from towers import behavior_of, compare, compare_outputs, session

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(SAMPLES))
    import traffic

pytestmark = pytest.mark.core


def normalized(layers, fused):
    def model_fn(features, labels, mode):
        net = features
        for _ in range(layers):
            net = tf.layers.dense(net, 4, use_bias=False)[:, None, None, :]
            net = tf.layers.batch_normalization(net, training=True, fused=fused)[:, 0, 0]
            net = tf.nn.relu(net)
        loss = tf.reduce_mean(tf.square(tf.layers.dense(net, 1) - labels))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            return spec_of(mode, loss, sgd(loss, 0.1))

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
def test_batch_normalization_waits_twice(fused, each, own_memory):
    """For the statistics, and in the gradient for sums; unfused, the mean comes before the rest."""
    of_two, of_five = (hops(normalized(layers, fused), 3) for layers in (2, 5))
    assert of_five - of_two == 3 * each


@pytest.mark.parametrize('fused, each', [(True, 3), (False, 10)], ids=['fused', 'unfused'])
def test_reference_variables(fused, each, own_memory):
    """What a reference variable is combined with is made on its device, with any number of them.

    Which devices these are makes a difference of one.
    """
    with behavior_of('v1'):
        for devices in (3, 8):
            of_two, of_five = (hops(normalized(layers, fused), devices) for layers in (2, 5))
            assert 3 * each - 1 <= of_five - of_two <= 3 * each
        counts = [traffic.count_on_devices('cnn', devices).hops for devices in (4, 8)]
    assert max(counts) - min(counts) <= 1
    assert max(counts) <= 6 + 2 * 6


@pytest.mark.parametrize('network', ['deep', 'cnn', 'transformer'])
def test_as_many_with_any_number_of_devices(network):
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
