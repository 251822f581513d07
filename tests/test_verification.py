"""`verify()` tells a user whether, and why, several devices differ from one."""

import itertools
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import private, verification
from estimator_mgpu.trial import Run
from estimator_mgpu.verification import Difference
from models import adam, floats, of_all_modes, predict, spec_of, step

FEATURES, LABELS = floats(40, 3), floats(40, 1, seed=1) + 2


def input_fn():
    return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).shuffle(40).repeat().batch(10)


def failed(result):
    return {(d.mode, d.what) for d in result.differences if not d.exact}


@pytest.mark.core
@pytest.mark.parametrize('devices', [2, 4], ids='devices={}'.format)
def test_an_exact_model(devices, capsys, behavior):
    original = getattr(*private.GRADIENTS)
    result = estimator_mgpu.verify(of_all_modes(predict), input_fn, devices=devices)
    assert getattr(*private.GRADIENTS) is original
    assert failed(result) == set() and result.exact and result.exit_status == 0
    assert result.causes == []
    names = ['net/w', 'net/b', 'net/v']
    slots = [f'{name}/Adam{i}' for name in names for i in ('', '_1')]
    written = [*names, *slots, 'beta1_power', 'beta2_power', 'global_step']
    assert {d.what for d in result.differences if d.mode == 'train'} == {
        'loss',
        *(f'gradient of {name}' for name in names),
        *(f'update of {name}' for name in written),
    }
    assert {d.what for d in result.differences if d.mode == 'eval'} == {
        'loss',
        'metric above',
        'metric error',
        "predictions['output']",
    }
    assert [d.what for d in result.differences if d.mode == 'infer'] == ["predictions['output']"]
    printed = capsys.readouterr().out
    assert re.search(r'train gradient of net/w +\d\.\de-\d\d ok', printed)
    assert printed.endswith(f'0 of {len(result.differences)} differ from one device.\n')


def dropout(features):
    return tf.layers.dense(tf.nn.dropout(features, rate=0.5, name='drop'), 1)


def dropout_in_a_function(features):
    return tf.layers.dense(tf.function(lambda x: tf.nn.dropout(x, rate=0.5))(features), 1)


def batch_norm(features):
    return tf.layers.dense(tf.layers.batch_normalization(features, training=True), 1)


def fused_batch_norm(features):
    x = tf.layers.batch_normalization(features[:, None, None], training=True, name='norm')
    return tf.layers.dense(x[:, 0, 0], 1)


def dropout_beside_slices(features):
    """Nothing of this gives a row what other rows are."""
    x = tf.nn.dropout(features, rate=0.5, name='drop')[None][0, :, :2]
    x = tf.gather(tf.roll(tf.cumsum(x, 1), 1, 1), [1, 0], axis=1)
    x = tf.gather(*tf.unique(tf.boolean_mask(x, x[:, 0] < 9)[:, 1]))[:, None] + x
    pairs = tf.einsum('ij,ik->ijk', x, x)
    return tf.layers.dense(tf.reverse(tf.nn.softmax(tf.sort(pairs[..., 0])), [1]), 1)


CAUSES = {
    dropout: "(?s)Random numbers.*'drop",
    dropout_in_a_function: '(?s)Random numbers.*RandomUniform.*PartitionedCall',
    dropout_beside_slices: "(?s)Random numbers.*'drop",
    batch_norm: "Rows are combined with a value of all rows.*'batch_normalization/",
    fused_batch_norm: 'Rows are combined.*FusedBatchNorm',
}


@pytest.mark.parametrize('forward', CAUSES, ids=lambda f: f.__name__)
def test_likely_causes(forward):
    result = estimator_mgpu.verify(of_all_modes(forward), input_fn)
    assert not result.exact and result.exit_status == 1
    assert ('train', 'loss') in failed(result)
    assert len(result.causes) == 1
    assert re.search(CAUSES[forward], result.causes[0])
    assert result.causes[0] in str(result)


def in_batch_softmax(features):
    x = tf.layers.dense(features, 3, name='net')
    pairs = tf.matmul(x, x, transpose_b=True, name='pairs')
    return tf.layers.dense(tf.matmul(tf.nn.softmax(pairs), x, name='other'), 1)


def softmax_over_rows(features):
    return tf.nn.softmax(tf.layers.dense(features, 1), 0, name='weights')


def shifted(features):
    return tf.layers.dense(tf.roll(features, 1, 0), 1)


def sorted_rows(features):
    return tf.layers.dense(tf.sort(features, 0), 1)


def ranks(features):
    return tf.layers.dense(tf.cast(tf.argsort(features, 0), tf.float32), 1)


def cumulated(features):
    return tf.layers.dense(tf.cumsum(features, -2), 1)


def reversed_rows(features):
    return tf.layers.dense(tf.reverse(features, [0]), 1)


def other_rows(features):
    rows = tf.range(tf.shape(features)[0])
    return tf.layers.dense(tf.gather(features, tf.maximum(rows - 1, 0)), 1)


def distances(features):
    x = tf.layers.dense(features, 3)
    return tf.reduce_mean(tf.squared_difference(x[:, None], x[None]), [1, 2])[:, None]


def by_einsum(features):
    pairs = tf.einsum('ij,kj->ik', features, features, name='pairs')
    return tf.layers.dense(tf.reduce_max(pairs, 1, keepdims=True), 1)


def neighbours(features):
    return tf.layers.dense(features - tf.concat([features[:1], features[:-1]], 0), 1)


OTHER_ROWS = {
    in_batch_softmax: ["'pairs' (MatMul)", "'other' (MatMul)"],
    softmax_over_rows: ["'Softmax' (Softmax)"],
    shifted: ["'Roll' (Roll)"],
    sorted_rows: ["'sort/TopKV2' (TopKV2)"],
    ranks: ["'argsort/TopKV2' (TopKV2)"],
    cumulated: ["'Cumsum' (Cumsum)"],
    reversed_rows: ["'ReverseV2' (ReverseV2)"],
    other_rows: ["'GatherV2' (GatherV2)"],
    distances: ["'SquaredDifference' (SquaredDifference)"],
    by_einsum: ["'pairs/Einsum' (Einsum)"],
    neighbours: ["'strided_slice' (StridedSlice)", "'strided_slice_1' (StridedSlice)"],
}


@pytest.mark.parametrize('forward', OTHER_ROWS, ids=lambda f: f.__name__)
def test_what_combines_rows_is_named(forward):
    result = estimator_mgpu.verify(of_all_modes(forward), input_fn)
    assert not result.exact
    said = [cause for cause in result.causes if 'combined with other rows of their shard' in cause]
    assert all(op in said[0] for op in OTHER_ROWS[forward])


@pytest.mark.parametrize(
    ('reduce', 'taken', 'right'),
    [(tf.reduce_sum, 'mean', 'sum'), (tf.reduce_mean, 'sum', 'mean')],
    ids=['sum', 'mean'],
)
def test_a_loss_reduced_otherwise_than_assumed(reduce, taken, right):
    def model_fn(features, labels, mode):
        loss = reduce(tf.square(predict(features) - labels))
        return spec_of(mode, loss, adam(loss))

    wrong = estimator_mgpu.replicate(model_fn, loss_reduction=taken, devices=3)
    result = estimator_mgpu.verify(wrong, input_fn, devices=2)
    assert ('train', 'loss') in failed(result)
    assert f"Try loss_reduction='{right}'." in result.causes[0]
    corrected = estimator_mgpu.replicate(model_fn, loss_reduction=right)
    assert estimator_mgpu.verify(corrected, input_fn, devices=2).exact


@pytest.mark.parametrize('level', [tf.logging.INFO, tf.logging.FATAL])
def test_warnings_are_causes(level):
    """A statistic of the shard that no list of causes knows, whatever the log shows."""
    tf.logging.set_verbosity(level)

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(predict(features) - labels))
        largest = tf.get_variable('largest', [], trainable=False)
        update = largest.assign(tf.reduce_max(features))
        return spec_of(mode, loss, adam(loss), update)

    result = estimator_mgpu.verify(model_fn, input_fn)
    assert failed(result) == {('train', 'update of largest')}
    assert 'averaged over the shards' in result.causes[0]


def test_every_call_and_kind_of_gradient():
    """Two optimizers, a sparse gradient, one of nothing, nests of features, params and hooks."""
    begun = []

    class Hook(tf.train.SessionRunHook):
        def begin(self):
            begun.append(1)

    def model_fn(features, labels, mode, params):
        assert labels is None
        table = tf.get_variable('table', [7, 2])
        tf.get_variable('unused', [2])
        ids = features['ids']
        rows = tf.nn.embedding_lookup_sparse(table, ids, None, combiner='sum')
        loss = tf.reduce_mean(tf.square(rows - features['dense'][0]))
        optimizer = tf.train.GradientDescentOptimizer(params['rate'])
        first = [(g, v) for g, v in optimizer.compute_gradients(loss) if g is not None]
        second = optimizer.compute_gradients(0.5 * loss, [table])
        with tf.control_dependencies([optimizer.apply_gradients(first)]):
            # At once, one may undo the other: TensorFlow's sparse updates don't lock.
            train_op = optimizer.apply_gradients(second, step())
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=train_op, training_hooks=[Hook()]
        )

    def sparse_input_fn(params):
        assert params['batch'] == 5
        ids = tf.SparseTensor([[i, 0] for i in range(20)], [i % 7 for i in range(20)], [20, 2])
        features = {'ids': ids, 'dense': (np.ones([20, 2], 'float32'),)}
        return tf.data.Dataset.from_tensor_slices(features).batch(params['batch'])

    result = estimator_mgpu.verify(model_fn, sparse_input_fn, {'rate': 0.1, 'batch': 5}, 3)
    assert result.exact, result
    assert [d.what for d in result.differences if d.mode == 'train'] == [
        'loss',
        'gradient of table',
        'gradient of table (call 2)',
        'update of global_step',
        'update of table',
        'update of unused',
    ]
    assert len(begun) == 2


@pytest.mark.parametrize('start', [np.inf, 1e9, 100.0])
def test_large_first_values_hide_nothing(start):
    """How far a variable moved would be the same to rounding."""

    def model_fn(features, labels, mode):
        errors = tf.square(predict(features) - labels)
        loss = tf.reduce_mean(errors)
        best = tf.get_variable(
            'best', [], initializer=tf.constant_initializer(start), trainable=False
        )
        update = best.assign(tf.minimum(best, tf.reduce_max(errors)))
        return spec_of(mode, loss, adam(loss), update)

    result = estimator_mgpu.verify(model_fn, input_fn)
    assert failed(result) == {('train', 'update of best')}


@pytest.mark.parametrize('dtype', [tf.float16, tf.bfloat16, tf.float64], ids=lambda t: t.name)
def test_rounding_of_other_types(dtype):
    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [3, 1], dtype, tf.ones_initializer())
        output = tf.matmul(tf.cast(features, dtype), w)
        loss = tf.reduce_mean(tf.square(output - tf.cast(labels, dtype)))
        train_op = tf.train.GradientDescentOptimizer(0.01).minimize(loss, step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, predictions=output)

    assert estimator_mgpu.verify(model_fn, input_fn, devices=3).exact


def test_values_that_are_no_numbers_are_compared():
    two = [np.array([1.0, np.nan, -np.inf]), np.array([1.0 + 1e-6, np.nan, -np.inf])]
    same = verification._difference('train', 'loss', two[1], two[0], 0.0, 1e-4)
    assert same.exact and same.relative == pytest.approx(1e-6, rel=1e-3)
    other = np.array([1.0, 2.0, -np.inf])
    assert not verification._difference('train', 'loss', other, two[0], 0.0, 1e-4).exact


def test_an_input_fn_of_arrays():
    result = estimator_mgpu.verify(of_all_modes(predict), lambda: (FEATURES[:6], LABELS[:6]))
    assert result.exact


def test_averages_of_what_shards_have_are_named():
    """Written by the step, but no part of the loss or its gradient."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(predict(features) - labels))
        spread = tf.get_variable('spread', [3], trainable=False)
        _, variance = tf.nn.moments(features, [0])
        moved = tf.assign_sub(spread, 0.1 * (spread - variance))
        return spec_of(mode, loss, adam(loss), moved)

    result = estimator_mgpu.verify(model_fn, input_fn)
    assert failed(result) == {('train', 'update of spread')}
    [cause] = result.causes
    assert re.search("Rows are combined with a value of all rows.*'moments/Squared", cause)


def test_metrics_that_scatter_rows():
    """By an op without outputs, on each tower."""

    def model_fn(features, labels, mode):
        output = predict(features)
        loss = tf.reduce_mean(tf.square(output - labels))
        classes, found = (tf.cast(t[:, 0] > 2, tf.int64) for t in (labels, output))
        metrics = {'accuracy': tf.metrics.mean_per_class_accuracy(classes, found, 2)}
        return spec_of(mode, loss, adam(loss))._replace(eval_metric_ops=metrics)

    result = estimator_mgpu.verify(model_fn, input_fn, devices=3)
    assert result.exact and {d.mode for d in result.differences} == {'train', 'eval'}


def test_rounding_of_half_precision_is_named():
    def in_halves(features):
        x = tf.layers.dense(features, 64, activation=tf.nn.tanh)
        w = tf.cast(tf.get_variable('w', initializer=floats(64, 1)), tf.float16)
        return tf.cast(tf.matmul(tf.cast(x, tf.float16), w, name='product'), tf.float32)

    result = estimator_mgpu.verify(of_all_modes(in_halves), input_fn, devices=3)
    assert not result.exact
    [cause] = result.causes
    assert cause.startswith('Some of it is computed in float16') and 'tolerance of 0.01' in cause
    assert estimator_mgpu.verify(of_all_modes(in_halves), input_fn, tolerance=0.01).exact


def test_no_cause_is_said_to_be_none():
    @tf.custom_gradient
    def averaged(x):
        return tf.identity(x), lambda upstream: upstream / tf.cast(tf.shape(upstream)[0], 'float')

    def with_own_gradient(features):
        return averaged(tf.layers.dense(features, 1))

    result = estimator_mgpu.verify(of_all_modes(with_own_gradient), input_fn)
    assert not result.exact and 'No cause was found' in result.causes[0]


def test_an_error_on_several_devices_is_a_difference():
    def model_fn(features, labels, mode):
        output = predict(features)
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions=tf.reduce_sum(output))
        loss = tf.reduce_mean(tf.square(output - labels))
        return spec_of(mode, loss, adam(loss))

    result = estimator_mgpu.verify(model_fn, input_fn)
    assert failed(result) == {('infer', 'whether it runs')}
    assert 'is a scalar (rank 0)' in result.causes[0]


def test_names_that_differ_with_each_call():
    """As those of Keras 3's layers."""
    calls = itertools.count()

    def model_fn(features, labels, mode):
        with tf.variable_scope(f'call_{next(calls)}'):
            loss = tf.reduce_mean(tf.square(predict(features) - labels))
        return spec_of(mode, loss, adam(loss))

    [cause] = estimator_mgpu.verify(model_fn, input_fn).causes
    assert 'Name what has variables' in cause and 'call_0/net/b' in cause and 'call_1/' in cause


def test_bad_arguments():
    with pytest.raises(TypeError, match='Give a function that makes the batches'):
        estimator_mgpu.verify(of_all_modes(predict), tf.data.Dataset.range(3))
    with pytest.raises(ValueError, match='devices=1 is one device'):
        estimator_mgpu.verify(of_all_modes(predict), input_fn, devices=1)
    with pytest.raises(ValueError, match='gives no batch to train on'):
        estimator_mgpu.verify(of_all_modes(predict), lambda: input_fn().take(0))


@pytest.mark.parametrize('steps', [0, -1, 1.5, 'all'])
def test_a_wrong_number_of_steps(steps):
    with pytest.raises(ValueError, match=f'steps={steps!r} is no number of batches'):
        estimator_mgpu.verify(of_all_modes(shifted), input_fn, steps=steps)


@pytest.mark.parametrize('tolerance', [-1, 1, float('nan'), None, 'a'])
def test_a_wrong_tolerance(tolerance):
    with pytest.raises(ValueError, match=f'tolerance={tolerance!r} is no relative difference'):
        estimator_mgpu.verify(of_all_modes(shifted), input_fn, tolerance=tolerance)


@pytest.mark.parametrize('ordered', [True, False], ids=['ordered', 'unordered'])
def test_what_is_read_and_written_in_no_order_is_named(ordered):
    def model_fn(features, labels, mode):
        book = tf.get_variable('book', [2, 3], trainable=False)
        ids = tf.cast(features[:, 0] > 0, tf.int32)
        output = predict(features - tf.reduce_mean(features, 0)) + tf.gather(book, ids)[:, :1]
        loss = tf.losses.mean_squared_error(labels, output)
        with tf.control_dependencies([loss] if ordered else []):
            update = book.assign(0.9 * book + tf.reduce_mean(features))
        return spec_of(mode, loss, adam(loss), update)

    result = estimator_mgpu.verify(model_fn, input_fn)
    assert not result.exact
    named = [cause for cause in result.causes if 'in no order' in cause]
    assert len(named) == (not ordered)
    assert all("'book' (read by" in cause for cause in named)


def test_gradients_that_are_rounding_are_named():
    slopes = {'gradient of w': [np.float32([3, -5])], 'gradient of b': [np.float32([0, 4e-6])]}
    one = Run({'loss': [np.float32(1)], **slopes}, {}, {}, [])
    same, other = (Difference('train', f'update of {v}', 1.0, v == 'w') for v in ('w', 'b/Adam'))
    [cause] = verification._of_rounding(one, [same, other])
    assert cause.startswith('The gradients of b are 0 but for rounding')
    assert verification._of_rounding(one, [same]) == []
    one.values['gradient of b'] = [np.float32([0, 0.01])]
    assert verification._of_rounding(one, [same, other]) == []
