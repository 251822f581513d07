"""`verify()` tells a user whether, and why, several devices differ from one."""

import itertools
import os
import re
import warnings

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.reports.verify import _compare
from models import adam, floats, of_all_modes, predict, spec_of, step
from towers import behavior_of

FEATURES, LABELS = floats(40, 3), floats(40, 1, seed=1) + 2


def input_fn():
    return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).shuffle(40).repeat().batch(10)


def failed(result):
    return {(d.mode, d.what) for d in result.differences if not d.exact}


@pytest.mark.core
@pytest.mark.parametrize(('devices', 'version'), [(2, 'v1'), (4, 'v2')])
def test_an_exact_model(devices, version, capsys):
    with warnings.catch_warnings(), behavior_of(version):
        warnings.simplefilter('error')  # Only a user's own code may warn.
        result = estimator_mgpu.verify(of_all_modes(predict), input_fn, devices=devices)
    assert failed(result) == set() and result.exact
    assert str(result).endswith('differ from one device.')
    names = ['net/w', 'net/b', 'net/v']
    slots = [f'{name}/Adam{i}' for name in names for i in ('', '_1')]
    written = [*names, *slots, 'beta1_power', 'beta2_power', 'global_step']
    gradients = [f'gradient of {name}' for name in names]
    found = {(d.mode, d.what) for d in result.differences}
    expected = {
        'train': ['loss', *gradients, *(f'variable {name}' for name in written)],
        'eval': ['loss', 'above', 'error', 'global_step'],
        'infer': ['output'],
    }
    assert found == {(mode, what) for mode, whats in expected.items() for what in whats}
    printed = capsys.readouterr().out
    assert re.search(r'train gradient of net/w +\d\.\de-\d\d ok', printed)
    assert printed.endswith(f'0 of {len(result.differences)} differ from one device.\n')


def train_by_sgd(loss):
    """For the gradient of a bias before a normalization is 0 but for rounding."""
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        return tf.train.GradientDescentOptimizer(0.01).minimize(loss, step())


def test_what_is_drawn_is_exact():
    """Both runs' graphs have a seed."""

    def dropout(features):
        return tf.layers.dense(tf.nn.dropout(features, rate=0.5), 1)

    assert estimator_mgpu.verify(of_all_modes(dropout, train_by_sgd), input_fn, devices=3).exact


def test_an_option_of_the_users_own_is_used():
    """It's of two statistics that it is: unfused ones are those of the whole batch."""

    def unfused(features):
        return tf.layers.dense(tf.layers.batch_normalization(features, training=True), 1)

    def fused(features):
        x = tf.layers.batch_normalization(features[:, None, None], training=True)
        return tf.layers.dense(x[:, 0, 0], 1)

    for forward, exact in (unfused, True), (fused, False):
        fn = estimator_mgpu.replicate(of_all_modes(forward), devices=3, batch_norm='device')
        result = estimator_mgpu.verify(fn, input_fn, devices=2)
        assert result.exact == exact == (('train', 'loss') not in failed(result))


def test_what_differs_is_told():
    """Here it's the loss, and what follows from it, by a number that is another in each call."""
    calls = itertools.count(1)

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(predict(features) - labels)) * next(calls)
        return spec_of(mode, loss, train_by_sgd(loss))

    result = estimator_mgpu.verify(model_fn, input_fn)
    assert not result.exact
    assert {('train', 'loss'), ('train', 'variable net/w')} <= failed(result)
    assert ('train', 'variable global_step') not in failed(result)
    assert re.search(r'train loss +\d\.\de[+-]\d\d DIFFERS', str(result))
    hint = str(result).splitlines()[-1]
    assert 'without a seed' in hint and 'float64' in hint
    html, count = result._repr_html_(), len(failed(result))
    assert html.count('>DIFFERS<') == count > 0 and '>variable net/w<' in html
    assert repr(result) == (
        f'<Verification: {count} of {len(result.differences)} differ from one device.>'
    )


def test_an_order_that_the_model_leaves_open_is_told():
    def model_fn(features, labels, mode):
        count = tf.get_variable('count', [], trainable=False, initializer=tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(predict(features) - labels)) * count
        return spec_of(mode, loss, train_by_sgd(loss), count.assign_add(1.0))

    result = estimator_mgpu.verify(model_fn, input_fn)
    assert result.exact
    [pair] = result.open_pairs
    assert pair.state == 'count' and pair.second.startswith('AssignAdd')
    assert f'whether {pair.first} or {pair.second} comes first, and both use count' in str(result)
    cells = re.findall('<td[^>]*>([^<]*)</td>', result._repr_html_())
    assert cells[-3:] == ['count', pair.first, pair.second]


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
        table = tf.get_variable('table', [7, 2])
        tf.get_variable('unused', [2])
        rows = tf.nn.embedding_lookup_sparse(table, features['ids'], None, combiner='sum')
        loss = tf.reduce_mean(tf.square(rows - features['dense'][0]))
        optimizer = tf.train.GradientDescentOptimizer(params['rate'])
        first = [(g, v) for g, v in optimizer.compute_gradients(loss) if g is not None]
        second = optimizer.compute_gradients(0.5 * loss, [table])
        with tf.control_dependencies([optimizer.apply_gradients(first)]):
            # At once, one may undo the other: TensorFlow's sparse updates don't lock.
            train_op = optimizer.apply_gradients(second, step())
        return spec_of(mode, loss, train_op)._replace(training_hooks=[Hook()])

    def sparse_input_fn(params):
        ids = tf.SparseTensor([[i, 0] for i in range(20)], [i % 7 for i in range(20)], [20, 2])
        features = {'ids': ids, 'dense': (np.ones([20, 2], 'float32'),)}
        return tf.data.Dataset.from_tensor_slices(features).batch(params['batch'])

    result = estimator_mgpu.verify(model_fn, sparse_input_fn, {'rate': 0.1, 'batch': 5}, 3)
    assert result.exact and len(begun) == 2
    variables = [f'variable {name}' for name in ('global_step', 'table', 'unused')]
    assert {d.mode for d in result.differences} == {'train', 'eval'}  # Predictions it has none.
    found = [d.what for d in result.differences if d.mode == 'train']
    assert found == ['loss', 'gradient of table', *variables]


@pytest.mark.parametrize('dtype', [tf.float16, tf.bfloat16, tf.float64], ids=lambda t: t.name)
def test_rounding_of_other_types(dtype):
    def model_fn(features, labels, mode):
        w = tf.get_variable('w', [3, 1], dtype, tf.ones_initializer())
        output = tf.matmul(tf.cast(features, dtype), w)
        loss = tf.reduce_mean(tf.square(output - tf.cast(labels, dtype)))
        return spec_of(mode, loss, train_by_sgd(loss))._replace(predictions=output)

    arrays = FEATURES[:9], LABELS[:9]
    assert estimator_mgpu.verify(model_fn, lambda: arrays, devices=3).exact


def test_values_that_are_no_numbers_are_compared():
    two = [np.array([x, np.nan, -np.inf]) for x in (1.0, 1.0 + 1e-6)]
    relative, exact = _compare(two[1], two[0], 0.0, 1e-4)
    assert exact and relative == pytest.approx(1e-6, rel=1e-3)
    other = np.array([1.0, 2.0, -np.inf])
    assert not _compare(other, two[0], 0.0, 1e-4)[1]


def test_numbers_of_numpy():
    options = {'devices': np.int64(2), 'steps': np.int32(1), 'tolerance': np.float32(1e-4)}
    assert estimator_mgpu.verify(of_all_modes(predict), input_fn, **options).exact


class Scaled(estimator_mgpu.Estimator):
    """A user's own, whose model_fn is a method that looks at its attributes, params and config."""

    def __init__(self, scale, **options):
        self.scale = scale
        config = tf.estimator.RunConfig(keep_checkpoint_max=1, save_checkpoints_secs=None)
        super().__init__(self._build, config=config, params={'shift': 1.0}, **options)

    def output(self, features, params):
        return self.scale * predict(features) + params['shift']

    def _build(self, features, labels, mode, params, config):
        self.scales.append((self.scale, config.keep_checkpoint_max))
        return of_all_modes(lambda x: self.output(x, params))(features, labels, mode)


def test_an_estimator_is_verified(capsys):
    Scaled.scales = []
    estimator = Scaled(2.0, devices=4, microbatches=2)
    estimator.scale = 3.0
    result = estimator_mgpu.verify(estimator, input_fn, devices=2)
    assert result.exact and {d.mode for d in result.differences} == {'train', 'eval', 'infer'}
    assert {scale for scale, _ in Scaled.scales} == {3.0}
    assert os.listdir(estimator.model_dir) == []

    devices = {op.device for op in graph_of(estimator).get_operations()}
    assert '/device:CPU:3' in devices  # It's left as it was.


def graph_of(estimator):
    """The graph that an estimator trains."""
    graphs = []

    class Hook(tf.train.SessionRunHook):
        def begin(self):
            graphs.append(tf.get_default_graph())

    estimator.train(input_fn, [Hook()], steps=1)
    return graphs[0]


def test_what_differs_of_an_estimator_is_told():
    """Its option is used: statistics are those of a device."""

    def fused(features):
        x = tf.layers.batch_normalization(features[:, None, None], training=True)
        return tf.layers.dense(x[:, 0, 0], 1)

    options = dict(devices=3, batch_norm='device')
    estimator = estimator_mgpu.Estimator(of_all_modes(fused), **options)
    assert ('train', 'loss') in failed(estimator_mgpu.verify(estimator, input_fn))


@pytest.mark.parametrize('replicated', [False, True])
def test_a_canned_estimator_is_verified(replicated):
    columns = [tf.feature_column.numeric_column('x', shape=[3])]
    estimator = tf.estimator.DNNLinearCombinedRegressor(
        None,
        columns,
        dnn_feature_columns=columns,
        dnn_hidden_units=[4],
        dnn_optimizer=tf.train.GradientDescentOptimizer(0.1),
    )
    if replicated:
        estimator = estimator_mgpu.replicate_estimator(estimator, devices=4)
    named = lambda: input_fn().map(lambda x, y: ({'x': x}, y))  # noqa: E731
    result = estimator_mgpu.verify(estimator, named, devices=3)
    assert result.exact and ('eval', 'average_loss') in {
        (d.mode, d.what) for d in result.differences
    }


def test_an_estimator_has_its_own_params():
    with pytest.raises(TypeError, match='given with an Estimator.*Leave out params'):
        estimator_mgpu.verify(tf.estimator.LinearRegressor([]), input_fn, {'rate': 0.1})


@pytest.mark.parametrize('given', ['model', None])
def test_what_is_no_model_fn(given):
    with pytest.raises(TypeError, match='Give a model_fn or an Estimator'):
        estimator_mgpu.verify(given, input_fn)


BAD = {
    'devices=1 is one device': {'devices': 1},
    'gives no batch to train on': {'input_fn': lambda: input_fn().take(0)},
    'gives no batch': {'input_fn': lambda: None},
    'Give a function that makes the batches': {'input_fn': (FEATURES, LABELS)},
    **{f'steps={n!r} is no number of batches': {'steps': n} for n in (0, 1.5, 'all', True)},
    r'params=4 .*by name: verify\(model_fn, input_fn, devices=4\)': {'params': 4},
    **{
        f'tolerance={x!r} is no relative difference': {'tolerance': x}
        for x in (-1, 1, float('nan'), None)
    },
}


@pytest.mark.parametrize('message', BAD)
def test_bad_arguments(message):
    with pytest.raises((TypeError, ValueError), match=message):
        estimator_mgpu.verify(of_all_modes(predict), **{'input_fn': input_fn, **BAD[message]})
