"""Batches of unknown rank, as `Dataset.from_generator` gives: they train as on one device.

What the model_fn says of shapes counts. What nobody says of is never divided.
"""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import steps
from models import batches, floats, of_all_modes, predict, weights
from towers import behavior_of, compare, compare_modes, train

both_behaviors = pytest.mark.usefixtures('behavior')


def hide(tensor):
    """The tensor, of whose shape the graph knows nothing."""
    return None if tensor is None else tf.placeholder_with_default(tensor, None)


def hide_features(features, labels):
    return hide(features), labels


def hide_all(features, labels):
    return hide(features), hide(labels)


@of_all_modes
def set_shape(features):
    features.set_shape([None, 3])
    return predict(features)


@of_all_modes
def ensure_shape(features):
    return predict(tf.ensure_shape(features, [None, 3]))


@of_all_modes
def shape_of_a_cast(features):
    """It has the feature's shape, and so has what is made of it by scalars."""
    scaled = tf.cast(features, tf.float64) / 2.0 - 1.0
    scaled.set_shape([None, 3])
    return predict(tf.cast(scaled, tf.float32))


@of_all_modes
def ensured_after_a_cast(features):
    same = tf.stop_gradient(features)
    return predict(tf.ensure_shape(same + same, [None, 3]))


@of_all_modes
def ensures_nothing(features):
    """That itself runs once."""
    same = tf.ensure_shape(features, None)
    same.set_shape([None, 3])
    return predict(same)


@of_all_modes
def reshape(features):
    """Rows of what is reshaped may not be the batch's; the network is divided by itself."""
    return predict(tf.reshape(features, [-1, 3]))


@of_all_modes
def add(features):
    """Where shapes are those of two tensors, neither has to be the feature's."""
    made = features + tf.zeros([1, 3])
    made.set_shape([None, 3])
    return predict(made)


SAY = [set_shape, ensure_shape, shape_of_a_cast, ensured_after_a_cast, ensures_nothing]
SILENT = [reshape, add]

REMEDY = 'give it a shape in the input_fn or the model_fn, say by tensor.set_shape([None, 3])'
WHY = f'has an unknown rank: {REMEDY}'


def even():
    return batches(9, steps=3)


def short_last():
    return [*batches(9, steps=3), *batches(2, steps=1)]


def plan_of(run):
    return steps.of_graph(run.graph).plan


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ('data', 'towers', 'version'),
    [(even, 4, 'v2'), (short_last, 1, 'v2'), (short_last, 2, 'v1')],
    ids=['even-4 towers', 'short_last-1 tower', 'short_last-2 towers-v1'],
)
@pytest.mark.parametrize('model_fn', [*SAY, *SILENT], ids=lambda fn: fn.__name__)
def test_features(model_fn, data, towers, version):
    options = dict(preprocess=hide_features, static=data is even)
    with behavior_of(version):
        ours = compare_modes(model_fn, data, towers, **options)
    if towers > 1:
        unsharded = [op for op, (why, _) in plan_of(ours).once.items() if 'unknown' in why]
        assert bool(unsharded) == (model_fn in SILENT)
        assert any('MatMul' in op for op in plan_of(ours).ops)


@pytest.mark.parametrize('model_fn', [*SAY, *SILENT], ids=lambda fn: fn.__name__)
def test_features_and_labels(model_fn):
    """The labels are never said to have any shape; if the features aren't, nothing is divided."""
    ours = compare_modes(model_fn, short_last, 3, preprocess=hide_all, static=False)
    plan = plan_of(ours)
    assert steps.of_graph(ours.graph).unknown == ['features', 'labels'][model_fn in SAY :]
    assert (plan is None) == (model_fn in SILENT)
    if plan:
        whys = {why for why, _ in plan.once.values()}
        assert f'labels {WHY}' in whys


@both_behaviors
def test_labels_that_the_model_fn_says_the_shape_of():
    def model_fn(features, labels, mode):
        labels = tf.ensure_shape(labels, [None, 1])
        return set_shape(features, labels, mode)

    ours, _ = compare(model_fn, short_last(), 3, preprocess=hide_all, static=False)
    assert not plan_of(ours).once


@both_behaviors
def test_scalars_that_the_model_fn_says_the_shape_of():
    """They have no rows, so they keep nothing else from being divided."""

    def model_fn(features, labels, mode):
        features['scale'].set_shape([])
        scale = features['scale'] * tf.ensure_shape(features['more'], [])
        return of_all_modes(predict)(features['x'] * scale, labels, mode)

    def preprocess(features, labels):
        return {**features, **{name: hide(features[name]) for name in more}}, labels

    more = {'scale': np.float32(2), 'more': np.float32(0.5)}
    data = [({'x': x, **more}, y) for x, y in short_last()]
    ours, _ = compare(model_fn, data, 3, preprocess=preprocess, static=False)
    assert not plan_of(ours).once and not steps.of_graph(ours.graph).unknown


def nine_rows(features, labels, mode):
    return of_all_modes(predict)(tf.ensure_shape(features, [9, 3]), labels, mode)


@both_behaviors
@pytest.mark.parametrize('preprocess', [None, hide_features], ids=['known rank', 'unknown rank'])
def test_rows_that_are_ensured(preprocess):
    """It's ensured of the whole batch, whatever towers have of it."""
    ours, _ = compare(nine_rows, even(), 2, preprocess=preprocess, static=False)
    assert 'EnsureShape' in plan_of(ours).once and 'net/MatMul' in plan_of(ours).ops
    # Which op finds out first is chance, on one device as well.
    match = r'not compatible with expected|Incompatible shapes: .(9,1. vs. .8|8,1. vs. .9),1'
    for towers in (0, 2):
        with pytest.raises(tf.errors.InvalidArgumentError, match=match):
            train(nine_rows, batches(8), towers, preprocess=preprocess, static=False)


@both_behaviors
def test_a_shape_that_differs_from_the_feature():
    """A wrong one is an error, as on one device, rather than another number."""

    def model_fn(features, labels, mode):
        return of_all_modes(predict)(tf.ensure_shape(features, [None, 4]), labels, mode)

    for towers in (0, 2):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            train(model_fn, even(), towers, preprocess=hide_features, static=False)


@both_behaviors
@pytest.mark.parametrize('static', [True, False], ids=['static', 'dynamic'])
@pytest.mark.parametrize('kind', ['sparse', 'ragged'])
def test_sparse_and_ragged(kind, static):
    """A ragged tensor has rows in any case; of a sparse one nobody knows."""

    def preprocess(features, labels):
        ids = tf.cast(tf.abs(features['x']) * 10, tf.int64) % 5
        ragged = tf.RaggedTensor.from_tensor(ids, 1 + tf.range(tf.shape(ids)[0]) % 3)
        if kind == 'ragged':
            values = tf.placeholder_with_default(ragged.flat_values, None)
            made = tf.RaggedTensor.from_row_splits(values, ragged.row_splits, validate=False)
        else:
            made = ragged.to_sparse()
            shape = tf.placeholder_with_default(made.dense_shape, [None])
            made = tf.SparseTensor(made.indices, made.values, shape)
        assert made.shape.rank is None
        return {**features, 'ids': made}, labels

    def model_fn(features, labels, mode):
        table = weights('table', 5, 3)
        if kind == 'ragged':
            splits = features['ids'].row_splits
            flat = tf.gather(table, tf.reshape(features['ids'].flat_values, [-1]))
            rows = tf.RaggedTensor.from_row_splits(flat, splits, validate=False)
            looked_up = tf.reduce_sum(rows, 1)
        else:
            looked_up = tf.nn.embedding_lookup_sparse(table, features['ids'], None, combiner='sum')
        looked_up = tf.reshape(looked_up, [-1, 3])
        return of_all_modes(predict)(features['x'] + looked_up, labels, mode)

    data = [({'x': x}, y) for x, y in (even() if static else short_last())]
    ours, _ = compare(model_fn, data, 3, preprocess=preprocess, static=static)
    titles = {'sparse': ["feature 'ids'"], 'ragged': []}
    assert steps.of_graph(ours.graph).unknown == titles[kind]


def generated(known_labels):
    """A Dataset of a Python generator, whose last batch is a short one."""

    def batches():
        for first in range(0, 20, 8):
            yield floats(20, 3)[first : first + 8], floats(20, 1)[first : first + 8]

    dataset = tf.data.Dataset.from_generator(batches, (tf.float32, tf.float32))
    return dataset.map(lambda x, y: (x, tf.ensure_shape(y, [None, 1]))) if known_labels else dataset


@pytest.mark.parametrize('known_labels', [True, False])
def test_the_log_and_explain_say_so(known_labels, caplog):
    estimator = estimator_mgpu.Estimator(reshape, devices=2)
    estimator.train(lambda: generated(known_labels))
    names = 'features' if known_labels else 'features, labels'
    [told] = [record for record in caplog.records if 'rank of' in record.getMessage()]
    end = f' The rank of {names} is unknown, so ops on it run once: {REMEDY}.'
    assert told.getMessage().endswith(end)
    assert told.levelname == ('INFO' if known_labels else 'WARNING')
    assert ('Nothing is sharded' in told.getMessage()) != known_labels
    found = estimator.explain(lambda: generated(known_labels))
    assert found.unknown == found.as_dict()['unknown'] == names.split(', ')
    assert f'of unknown rank, so it runs once: {REMEDY}\n  features\n' in str(found)
    assert bool(found.sharded) == known_labels
    assert ('  none is sharded: all run once, on the global batch' in str(found)) != known_labels
    if found.sharded:
        [op] = [op for op in found.once if op.name == 'Reshape']
        assert op.why == f'features {WHY}'
