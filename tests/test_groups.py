"""Examples in groups, as by ghost batch normalization: each tower has as many whole groups."""

import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu import steps
from models import adam, floats, spec_of
from towers import (
    MODES,
    TRAIN,
    assert_close,
    behavior_of,
    compare_modes,
    evaluate,
    types_run_once,
)

GROUPS = 12


def ghost_norm(features, labels, mode):
    net = features
    for units in (6, 5):
        net = tf.layers.dense(net, units, use_bias=False)
        norm = dict(momentum=0.8, virtual_batch_size=GROUPS, fused=False)
        net = tf.tanh(tf.layers.batch_normalization(net, training=mode == TRAIN, **norm))
    net = tf.layers.dense(net, 24, tf.tanh)  # so that micro-batches save enough
    output = tf.layers.dense(net, 1)
    if mode == MODES.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=output)

    loss = tf.losses.mean_squared_error(labels, output)
    if mode == MODES.EVAL:
        return tf.estimator.EstimatorSpec(mode, loss=loss, predictions=output)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return spec_of(mode, loss, adam(loss))


def of_two_sizes():
    """The last batch is shorter, but has whole groups as well."""
    return [(floats(rows, 3, seed=i), floats(rows, 1)) for i, rows in enumerate([36, 36, 12])]


def of_one_size():
    return of_two_sizes()[:2]


@pytest.mark.core
@pytest.mark.parametrize(('devices', 'version'), [(2, 'v2'), (3, 'v1'), (4, 'v2')])
def test_ghost_batch_norm(devices, version):
    with behavior_of(version):
        ours = compare_modes(ghost_norm, of_two_sizes, devices, static=False)
    assert not types_run_once(ours.graph)


@pytest.mark.parametrize('make_batches', [of_two_sizes, of_one_size], ids=['dynamic', 'static'])
def test_ghost_batch_norm_with_microbatches(make_batches):
    options = dict(static=make_batches is of_one_size, microbatches=2)
    ours = compare_modes(ghost_norm, make_batches, 3, **options)
    assert not types_run_once(ours.graph)


def test_towers_that_cannot_have_as_many_groups():
    """12 groups on 5 towers: the layers run once from the first normalization on."""
    ours = compare_modes(ghost_norm, of_two_sizes, 5, static=False)
    assert 'Reshape' in types_run_once(ours.graph)


def centered(groups):
    return groups - tf.reduce_mean(groups, 0, keepdims=True)


def of_images(x):
    images = tf.reshape(x, [-1, 2, 3])
    groups = centered(tf.reshape(images, [4, -1, 2, 3]))
    return tf.reshape(groups, [-1, 6])


def gathered(x):
    return centered(tf.reshape(x, [4, -1, 6]))


def numbered(x):
    """With a number for each group, and ones of the groups' shape, that towers make themselves."""
    groups = tf.reshape(x, [4, -1, 6])
    numbers = tf.reshape(tf.range(4.0), [4, 1, 1])
    return tf.reshape(groups * numbers + tf.ones(tf.shape(groups)), tf.shape(x))


def groups_of_groups(x):
    groups = tf.reshape(x, [4, -1, 6])
    outer = tf.reshape(groups, tf.concat([[2, -1], tf.shape(groups)[1:]], 0))
    return tf.reshape(tf.reshape(centered(outer), tf.shape(groups)), tf.shape(x))


def of_a_size_by_hand(x):
    return centered(tf.reshape(x, [4, tf.shape(x)[0] // 4, 6]))


def by_its_own_group(x):
    groups = tf.reshape(x, [4, -1, 6])
    mean, variance = tf.nn.moments(groups, 1, keepdims=True)
    return tf.reshape((groups - mean) * tf.rsqrt(variance + 1), tf.shape(x))


def first_of_each(x):
    groups = centered(tf.reshape(x, [4, -1, 6]))
    return tf.reshape(groups[:, :1], [-1, 6])


def slope_of_mean(x):
    means = tf.reduce_mean(tf.reshape(x, [4, -1, 6]), 0)
    return tf.gradients(tf.reduce_sum(means**3), x)[0]


SHARDED = [
    *(of_images, gathered, numbered, groups_of_groups, of_a_size_by_hand),
    *(by_its_own_group, first_of_each, slope_of_mean),
]


def parts_of_examples(x):
    """Of 4 numbers for each of 5 examples, a row has 5: those of an example and a quarter."""
    rows = tf.reshape(x[:, :4], [4, -1])
    return tf.reshape(rows * [[1.0], [2.0], [3.0], [4.0]], [-1, 4])


def to_wider_rows(x):
    return tf.reshape(centered(tf.reshape(x, [4, -1, 6])), [-1, 12])


def predict(forward, sizes, devices, static=False):
    """What is predicted for batches of these sizes, and the graph."""
    graphs = []

    def model_fn(features, labels, mode):
        graphs.append(tf.get_default_graph())
        return tf.estimator.EstimatorSpec(mode, predictions=forward(features))

    batches = [(floats(size, 6), None) for size in sizes]
    found = evaluate(model_fn, batches, devices, mode=MODES.PREDICT, static=static)
    return found.predictions, graphs[0]


@pytest.mark.parametrize('static', [False, True], ids=['dynamic', 'static'])
@pytest.mark.parametrize('forward', SHARDED, ids=lambda f: f.__name__)
def test_reshapes(forward, static):
    sizes = [8] if static else [8, 4]
    found, graph = predict(forward, sizes, 2, static)
    expected, _ = predict(forward, sizes, 0, static)
    assert_close(found, expected, 1e-6)
    assert not types_run_once(graph)


@pytest.mark.parametrize('forward', [parts_of_examples, to_wider_rows], ids=lambda f: f.__name__)
def test_reshapes_that_run_once(forward):
    sizes = [5, 3] if forward is parts_of_examples else [8, 4]
    found, graph = predict(forward, sizes, 2)
    expected, _ = predict(forward, sizes, 0)
    assert_close(found, expected, 1e-6)
    assert 'Reshape' in types_run_once(graph)


def test_what_is_broadcast_to_groups():
    """By each tower, to its own: the gradient of a mean."""
    _, graph = predict(slope_of_mean, [4], 2)
    sharded = {graph.get_operation_by_name(name).type for name in steps.of_graph(graph).plan.ops}
    assert 'BroadcastTo' in sharded


@pytest.mark.parametrize('devices', [0, 4])
def test_a_batch_that_has_no_such_groups(devices):
    """Of 6 examples, two towers have 2 and two have 1: each could make a group of these."""
    with pytest.raises(tf.errors.InvalidArgumentError):
        predict(of_images, [6], devices)


@pytest.mark.parametrize('devices', [0, 2])
def test_groups_that_make_another_batch(devices):
    def of_8_examples(x):
        return tf.reshape(tf.reshape(x, [4, -1, 6]), [8, 6])

    with pytest.raises(tf.errors.InvalidArgumentError):
        predict(of_8_examples, [4], devices)
