"""Masks, and indices of the rows in which they stand: towers need no rows but their own."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import steps
from estimator_mgpu.custom_ops.check_rule import check_rule
from estimator_mgpu.partition.plan import LOCAL, CountedFromFirst
from models import floats, sgd, spec_of, weights
from towers import compare

IDS = np.random.RandomState(0).randint(0, 3, [7, 4]).astype(np.int32)
ROWS = floats(7, 4, 3)


def without_padding(x, ids):
    """A layer that is only given what isn't padding."""
    places = tf.where(ids > 0)
    tokens = tf.tanh(tf.gather_nd(x, places) @ weights('w', 3, 3))
    return x + tf.scatter_nd(places, tokens, tf.shape(x, out_type=tf.int64))


def without_padding_by_tokens(x, ids):
    """The same by numbers of tokens, as `PadRemover` of Tensor2Tensor does."""
    tokens = tf.reshape(x, [-1, 3])
    places = tf.cast(tf.where(tf.reshape(ids, [-1]) > 0), tf.int32)
    left = tf.tanh(tf.gather_nd(tokens, places) @ weights('w', 3, 3))
    rows = tf.squeeze(places, 1)
    restored = tf.scatter_nd(
        tf.expand_dims(rows, 1), left, tf.concat([tf.shape(tokens)[:1], [3]], 0)
    )
    return x + tf.reshape(restored, tf.shape(x))


def masked_loss(x, ids):
    """Logits and labels that one mask selects."""
    mask = ids > 0
    logits = tf.boolean_mask(x, mask) @ weights('w', 3, 3)
    labels = tf.boolean_mask(ids, mask)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_mean(losses)


def places_as_numbers(x, ids):
    """Places that towers use, and that are needed in full as well."""
    places = tf.where(ids > 0)
    values = tf.reduce_sum(tf.gather_nd(x, places), 1)
    sparse = tf.SparseTensor(places, values, tf.shape(ids, out_type=tf.int64))
    return [
        tf.sparse.sparse_dense_matmul(sparse, weights('w', 4, 2)),
        tf.sort(tf.cast(places, tf.float32), 0),
        tf.shape(places)[0] / tf.shape(ids)[0],
    ]


MODELS = [without_padding, without_padding_by_tokens, masked_loss, places_as_numbers]


@pytest.mark.parametrize('function', MODELS, ids=lambda f: f.__name__)
def test_masks(function):
    """Also if a device has no example, and where gradients go back to what the mask selected."""
    assert 'Where' in check_rule(function, ROWS, IDS, types=[])


def test_places_that_are_used_in_other_ways():
    """Other ops, or of other ranks or sizes, than those to which towers give their own places."""

    def used(x, ids):
        tokens = tf.reshape(x, [-1, 3])
        places = tf.where(tf.reshape(ids, [-1]) > 0)
        rows = tf.squeeze(places, 1)
        left = tf.tanh(tf.gather_nd(tokens, places))
        pairs = tf.where(ids > 0)
        places_of_left = tf.where(left[:, 0] > 0)
        return [
            tf.gather(tokens, places),
            tf.gather_nd(tokens, places[:, None]),
            tf.gather(tf.transpose(tokens), rows, axis=1),
            tf.gather_nd(x, pairs),
            tf.reshape(pairs, [-1]),
            tf.gather(rows, [0, 1]),
            tf.math.unsorted_segment_sum(rows, tf.zeros_like(rows), 1),
            tf.scatter_nd(places_of_left, tf.gather_nd(left, places_of_left), [100, 3]),
            tf.scatter_nd(places, left, [100, 3]),
            tf.math.unsorted_segment_sum(left, rows, 100),
            tf.math.unsorted_segment_sum(left[:, None], places, tf.shape(tokens)[0]),
        ]

    assert 'Tanh' in check_rule(used, ROWS, IDS, types=[])


def test_what_sparse_tensors_are_made_of():
    """Each device finds the entries of its examples."""

    def sparse(x, ids):
        places = tf.where(ids > 0)
        values = tf.gather_nd(x[:, :, 0], places)
        tensor = tf.SparseTensor(places, values, tf.shape(ids, out_type=tf.int64))
        return tf.sparse.sparse_dense_matmul(tensor, weights('w', 4, 2))

    used = check_rule(sparse, ROWS, IDS, types=[])
    assert {'Where', 'GatherNd', 'SparseTensorDenseMatMul'} <= used


@pytest.mark.parametrize(('static', 'microbatches'), [(True, 1), (False, 2)])
def test_training_on_what_masks_select(static, microbatches, behavior):
    """In the second batch, one device has nothing but padding; in the third, all have."""

    def model_fn(features, labels, mode):
        net = without_padding(features['x'], features['ids'])
        net = without_padding_by_tokens(net, features['ids'])
        mask = features['ids'] > 0
        logits = tf.boolean_mask(net, mask) @ weights('out', 3, 3)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=tf.boolean_mask(features['ids'], mask), logits=logits
        )
        loss = tf.reduce_sum(losses) / 10 + tf.reduce_mean(tf.square(net))
        return spec_of(mode, loss, sgd(loss))

    ids = [IDS[:6], np.where(np.arange(6)[:, None] < 3, 0, IDS[:6]), 0 * IDS[:6]]
    batches = [({'x': floats(6, 4, 3, seed=i), 'ids': one}, None) for i, one in enumerate(ids)]
    runs = compare(model_fn, batches, 2, static=static, microbatches=microbatches)
    plan = steps.of_graph(runs[0].graph).plan
    assert not {name for name in plan.once if not name.startswith('GradientDescent')}
    # What one mask selects of two tensors are the same rows.
    [losses] = [name for name in plan.ops if name.endswith('WithLogits')]
    assert plan.ops[losses].needs == (LOCAL, LOCAL)


def indices_of_rows(x):
    rows = tf.range(tf.shape(x)[0])
    columns = tf.argmax(x, 1, output_type=tf.int32)
    pairs = tf.tile(rows[:, None], [1, 3])
    return {
        'stacked': tf.stack([rows, columns], 1),
        'stacked_along_last': tf.stack([rows, columns], -1),
        'concatenated': tf.concat([rows[:, None], columns[:, None]], 1),
        'of_another_type': tf.cast(tf.stack([tf.cast(rows, tf.int64)] * 2, 1), tf.int32),
        'several': tf.stack([pairs, tf.zeros_like(pairs)], 2),
        'reshaped': tf.stack([tf.reshape(rows, [-1, 1]), columns[:, None]], 2),
        'transposed': tf.stack([tf.transpose(tf.transpose(pairs)), pairs], 2),
        'broadcast': tf.stack([tf.broadcast_to(rows[:, None], tf.shape(x)), pairs[:, :2]], 2),
    }


def other_indices(x):
    rows = tf.range(tf.shape(x)[0])
    pairs = tf.tile(rows[:, None], [1, 2])
    evens_first = tf.reshape(tf.transpose(pairs), [-1, 2])[:, 0]
    some = tf.range(tf.placeholder_with_default(1, []))
    return {
        'second': tf.stack([0 * rows, rows], 1),
        'from_1': tf.stack([tf.range(1, tf.shape(x)[0] + 1), rows], 1),
        'every_other': tf.stack([tf.range(0, 2 * tf.shape(x)[0], 2), rows], 1),
        'computed': tf.stack([rows // 2, rows], 1),
        'reversed': tf.stack([rows[::-1], rows], 1),
        'more_rows': tf.stack([tf.range(tf.shape(x)[0] * 2)] * 2, 1),
        'each_twice': tf.stack([tf.reshape(pairs, [-1])] * 2, 1),
        'all_twice': tf.stack([tf.tile(rows, [2])] * 2, 1),
        'first_half_of_each_twice': tf.stack([tf.reshape(pairs, [-1])[: tf.shape(x)[0]]] * 2, 1),
        'evens_first': tf.stack([evens_first, rows], 1),
        'maybe_one_for_all': tf.stack([tf.broadcast_to(some, tf.shape(x)[:1]), rows], 1),
        'one': tf.stack([rows, rows], 0)[:, :2],
        'rows_alone': tf.stack([rows, rows], 1)[:, ::-1],
        'added': tf.stack([tf.ones_like(rows), rows], 1) + rows[:, None] * [1, 0],
    }


@pytest.mark.parametrize(
    ('make', 'expected'), [(indices_of_rows, True), (other_indices, False)], ids=['rows', 'other']
)
def test_which_indices_begin_with_their_rows(make, expected):
    """What is looked up by these is looked up in a device's own rows."""

    def model_fn(features):
        indices = make(features)
        found = {name: tf.gather_nd(features, indices[name], name=name) for name in indices}
        return tf.estimator.EstimatorSpec('infer', predictions=found)

    with tf.Graph().as_default() as graph:
        estimator_mgpu.replicate(model_fn, devices=3)(tf.placeholder(tf.float32, [None, 2]))
        plan = steps.of_graph(graph).plan
        names = make(tf.placeholder(tf.float32, [None, 2]))
    own_rows = {
        name
        for name in names
        if name in plan.ops and isinstance(plan.ops[name].needs[1], CountedFromFirst)
    }
    assert own_rows == (set(names) if expected else set())


def test_the_last_step_of_each_example_is_looked_up_by_its_device():
    """Only its own examples are, not those of all devices."""

    def model_fn(features, labels, mode):
        steps_of_all = tf.layers.dense(features['x'], 3, kernel_initializer='ones')
        rows = tf.range(tf.shape(steps_of_all)[0])
        last = tf.gather_nd(steps_of_all, tf.stack([rows, features['length']], 1))
        loss = tf.reduce_mean(tf.square(last))
        return spec_of(mode, loss, sgd(loss))

    batches = [({'x': ROWS, 'length': IDS[:, 0]}, None)] * 2
    runs = compare(model_fn, batches, 3, static=False)
    plan = steps.of_graph(runs[0].graph).plan
    [gather] = [name for name in plan.ops if name.endswith('GatherNd')]
    table, indices = plan.ops[gather].needs
    assert table == LOCAL and isinstance(indices, CountedFromFirst)
    assert not [name for name in plan.once if not name.startswith('GradientDescent')]


def test_indices_with_as_many_columns_as_the_sizes_tell():
    """TensorFlow doesn't know how many numbers such an index has."""

    def looked_up(x, ids):
        shape = tf.dynamic_stitch([[0], [1]], [tf.shape(ids)[:1], [1]])
        column = tf.reshape(ids[:, 0], shape)
        indices = tf.concat([tf.range(tf.shape(x)[0])[:, None], column], 1)
        assert indices.shape.as_list() == [None, None]
        return tf.gather_nd(x, indices)

    assert 'GatherNd' in check_rule(looked_up, ROWS, IDS, types=[])


def test_indices_of_rows_that_are_times():
    """The examples are along a later dimension, which indices of places in time don't name."""

    def of_times(x, ids):
        times = tf.range(4)
        net = tf.transpose(x, [1, 0, 2])
        ids = tf.transpose(ids)
        indices = tf.stack([tf.broadcast_to(times[:, None], tf.shape(ids)), ids], 2)
        return [
            tf.gather_nd(tf.constant(floats(4, 3)), indices),
            tf.scatter_nd(tf.stack([times], 1), net, tf.shape(net)),
            tf.tensor_scatter_nd_update(net, tf.stack([times], 1), 2 * net),
        ]

    sharded = check_rule(of_times, ROWS, IDS, types=[])
    assert {'GatherNd', 'ScatterNd', 'TensorScatterUpdate'} <= sharded


def test_a_loop_that_looks_rows_up_in_a_table(behavior):
    """In it, no device knows its first row; but each has all rows of the table."""

    def model_fn(features, labels, mode):
        table = tf.constant(floats(6, 3))

        def body(i, net):
            indices = tf.stack([tf.range(tf.shape(net)[0]), features['ids']], 1)
            found = tf.stop_gradient(tf.gather_nd(table, indices))
            return i + 1, tf.tanh(net + found[:, None])

        net = tf.layers.dense(features['x'], 3, kernel_initializer='ones')
        _, net = tf.while_loop(lambda i, _: i < 3, body, [0, net])
        loss = tf.reduce_mean(tf.square(net))
        return spec_of(mode, loss, sgd(loss))

    ours, _ = compare(model_fn, [({'x': floats(6, 3), 'ids': IDS[:6, 0]}, None)], 4)
    once = steps.of_graph(ours.graph).plan.once
    assert not [name for name in once if not name.startswith('GradientDescent')]
