"""`verify()` tells a user whether, and why, several devices differ from one."""

import itertools
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import verification
from models import adam, floats, of_all_modes, predict, spec_of, step

FEATURES, LABELS = floats(40, 3), floats(40, 1, seed=1) + 2


def input_fn():
    return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).shuffle(40).repeat().batch(10)


def failed(result):
    return {(d.mode, d.what) for d in result.differences if not d.exact}


@pytest.mark.core
@pytest.mark.parametrize('devices', [2, 4], ids='devices={}'.format)
def test_an_exact_model(devices, capsys, behavior):
    original = tf.train.Optimizer.__init__
    result = estimator_mgpu.verify(of_all_modes(predict), input_fn, devices=devices)
    assert tf.train.Optimizer.__init__ is original
    assert failed(result) == set() and result.exact
    assert str(result).endswith('differ from one device.')
    names = ['net/w', 'net/b', 'net/v']
    slots = [f'{name}/Adam{i}' for name in names for i in ('', '_1')]
    written = [*names, *slots, 'beta1_power', 'beta2_power', 'global_step']
    assert {d.what for d in result.differences if d.mode == 'train'} == {
        'loss',
        *(f'gradient of {name}' for name in names),
        *(f'variable {name}' for name in written),
    }
    assert {d.what for d in result.differences if d.mode == 'eval'} == {
        'loss',
        'above',
        'error',
        'global_step',
    }
    assert [d.what for d in result.differences if d.mode == 'infer'] == ['output']
    printed = capsys.readouterr().out
    assert re.search(r'train gradient of net/w +\d\.\de-\d\d ok', printed)
    assert printed.endswith(f'0 of {len(result.differences)} differ from one device.\n')


def dropout(features):
    return tf.layers.dense(tf.nn.dropout(features, rate=0.5), 1)


def batch_norm(features):
    return tf.layers.dense(tf.layers.batch_normalization(features, training=True), 1)


def in_batch_softmax(features):
    x = tf.layers.dense(features, 3)
    pairs = tf.matmul(x, x, transpose_b=True)
    return tf.layers.dense(tf.matmul(tf.nn.softmax(pairs), x), 1)


def train_by_sgd(loss):
    """For the gradient of a bias before a normalization is 0 but for rounding."""
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return tf.train.GradientDescentOptimizer(0.01).minimize(loss, step())


@pytest.mark.parametrize(
    'forward', [dropout, batch_norm, in_batch_softmax], ids=lambda f: f.__name__
)
def test_what_goes_by_the_whole_batch_is_exact(forward):
    """Dropout, too, as both runs' graphs have a seed."""
    result = estimator_mgpu.verify(of_all_modes(forward, train_by_sgd), input_fn, devices=3)
    assert failed(result) == set()


def test_an_option_of_the_users_own_is_used():
    fn = estimator_mgpu.replicate(of_all_modes(batch_norm), devices=3, batch_norm='device')
    # It's of two statistics that the option is: unfused ones are those of the whole batch.
    assert estimator_mgpu.verify(fn, input_fn, devices=2).exact

    def fused(features):
        x = tf.layers.batch_normalization(features[:, None, None], training=True)
        return tf.layers.dense(x[:, 0, 0], 1)

    fn = estimator_mgpu.replicate(of_all_modes(fused), devices=3, batch_norm='device')
    result = estimator_mgpu.verify(fn, input_fn, devices=2)
    assert ('train', 'loss') in failed(result) and not result.exact


def test_what_differs_is_told():
    """Here it's the loss, and what follows from it, by a number that is another in each call."""
    calls = itertools.count(1)

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(predict(features) - labels)) * next(calls)
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.01).minimize(loss, step()))

    result = estimator_mgpu.verify(model_fn, input_fn)
    assert not result.exact
    assert {('train', 'loss'), ('train', 'variable net/w')} <= failed(result)
    assert ('train', 'variable global_step') not in failed(result)
    assert re.search(r'train loss +\d\.\de[+-]\d\d DIFFERS', str(result))
    hint = str(result).splitlines()[-1]
    assert 'without a seed' in hint and 'float64' in hint


def test_an_error_on_several_devices_is_raised():
    calls = itertools.count(1)

    def model_fn(features, labels, mode):
        if next(calls) == 2:
            raise ValueError('Not on several.')
        loss = tf.reduce_mean(tf.square(predict(features) - labels))
        return spec_of(mode, loss, adam(loss))

    with pytest.raises(ValueError, match='Not on several.'):
        estimator_mgpu.verify(model_fn, input_fn)


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
        'variable global_step',
        'variable table',
        'variable unused',
    ]
    assert len(begun) == 2


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
    two = [np.array([x, np.nan, -np.inf]) for x in (1.0, 1.0 + 1e-6)]
    relative, exact = verification._compare(two[1], two[0], 0.0, 1e-4)
    assert exact and relative == pytest.approx(1e-6, rel=1e-3)
    other = np.array([1.0, 2.0, -np.inf])
    assert not verification._compare(other, two[0], 0.0, 1e-4)[1]


def test_an_input_fn_of_arrays():
    result = estimator_mgpu.verify(of_all_modes(predict), lambda: (FEATURES[:6], LABELS[:6]))
    assert result.exact


def test_metrics_that_scatter_rows():
    """By an op without outputs."""

    def model_fn(features, labels, mode):
        output = predict(features)
        loss = tf.reduce_mean(tf.square(output - labels))
        classes, found = (tf.cast(t[:, 0] > 2, tf.int64) for t in (labels, output))
        metrics = {'accuracy': tf.metrics.mean_per_class_accuracy(classes, found, 2)}
        return spec_of(mode, loss, adam(loss))._replace(eval_metric_ops=metrics)

    result = estimator_mgpu.verify(model_fn, input_fn, devices=3)
    assert result.exact and {d.mode for d in result.differences} == {'train', 'eval'}


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
        estimator_mgpu.verify(of_all_modes(predict), input_fn, steps=steps)


@pytest.mark.parametrize('tolerance', [-1, 1, float('nan'), None, 'a'])
def test_a_wrong_tolerance(tolerance):
    with pytest.raises(ValueError, match=f'tolerance={tolerance!r} is no relative difference'):
        estimator_mgpu.verify(of_all_modes(predict), input_fn, tolerance=tolerance)
