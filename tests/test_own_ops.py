"""`register_rule` and `check_rule`: ops of one's own are divided, by rules that hold."""

import pathlib
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
import towers
from estimator_mgpu import check_rule, register_rule
from estimator_mgpu.partition.rules import RULES
from models import batches, floats, spec_of, step

ROWS = floats(7, 3)


@pytest.fixture(autouse=True)
def no_rules_are_left(monkeypatch):
    for name in ('Dawsn', 'Centered', 'EuclideanNorm'):
        monkeypatch.setitem(RULES, name, None)
        del RULES[name]


@pytest.fixture(scope='module')
def ops(tmp_path_factory):
    """The module of the op that centered.cc has."""
    if not shutil.which('g++'):
        pytest.skip('there is no g++ to compile an op with')
    library = tmp_path_factory.mktemp('ops') / 'centered.so'
    source = pathlib.Path(__file__).with_name('centered.cc')
    flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
    command = ['g++', '-std=c++17', '-shared', '-fPIC', '-w', '-o', library, source, *flags]
    subprocess.run(command, check=True)
    return tf.load_op_library(str(library))


def by_axis(op, sizes):
    return 'n_ -> n_' if op.get_attr('axis') == 1 else None


@pytest.mark.core
def test_a_compiled_op(ops):
    """Along each row it's divided, and over the batch it isn't; both are one device's."""

    def model_fn(features, labels, mode):
        net = ops.centered(features, axis=1) + ops.centered(features, axis=0)
        loss = tf.reduce_mean(tf.square(net @ tf.get_variable('w', [3, 1]) - labels))
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss, step()))

    def what_runs_once():
        estimator = estimator_mgpu.Estimator(model_fn, devices=2)
        found = estimator.explain(lambda: tf.data.Dataset.from_tensors(batches(7)[0]))
        return {op.name: op.why for op in found.once if 'Centered' in op.name}

    assert what_runs_once() == dict.fromkeys(['Centered', 'Centered_1'], 'no rule for Centered')
    register_rule('Centered', by_axis)
    assert what_runs_once() == {'Centered_1': 'this Centered needs all rows'}
    towers.compare(model_fn, batches(7), 3)
    assert check_rule(lambda x: ops.centered(x, axis=1), ROWS) == {'Centered'}
    assert check_rule(lambda x: ops.centered(x, axis=0), ROWS) == set()


@pytest.mark.core
def test_a_rule_that_does_not_hold(ops):
    register_rule('Centered', 'row by row')
    assert check_rule(lambda x: ops.centered(x, axis=1), ROWS) == {'Centered'}
    with pytest.raises(AssertionError, match='Mismatched elements'):
        check_rule(lambda x: ops.centered(x, axis=0), ROWS)


@pytest.mark.core
@pytest.mark.parametrize('rule', ['elementwise', 'row by row', 'S_ -> S_', lambda op, _: 'S -> S'])
def test_an_op_of_tensorflow_without_a_rule(rule):
    register_rule('Dawsn', lambda op, sizes: None)
    assert check_rule(tf.math.special.dawsn, ROWS) == set()
    register_rule('Dawsn', rule)
    assert check_rule(tf.math.special.dawsn, ROWS) == {'Dawsn'}


def test_an_op_in_a_loop():
    register_rule('Dawsn', 'elementwise')
    inside = check_rule(lambda x: tf.map_fn(tf.math.special.dawsn, tf.transpose(x)), ROWS)
    assert inside > {'Dawsn', 'StatelessWhile'}


@pytest.mark.parametrize('value', [1.0, 1e8, np.inf])
def test_a_rule_that_does_not_hold_beside_large_numbers(value):
    register_rule('EuclideanNorm', 'n_ * -> _ (sum)')
    rows = ROWS.copy()
    rows[0, 0] = value
    with pytest.raises(AssertionError, match='Mismatched elements'):
        check_rule(lambda x: tf.raw_ops.EuclideanNorm(input=x, axis=0), rows)


def test_what_is_compared():
    """Numbers that are none, strings, and nests of tensors, of several arrays."""
    assert check_rule(tf.sqrt, ROWS) == {'Sqrt'}  # nan of those below 0
    assert 'NotEqual' in check_rule(tf.sparse.from_dense, ROWS)
    assert 'Sum' in check_rule(lambda x: tf.metrics.mean(x)[1], ROWS)
    assert check_rule(tf.strings.length, np.array([b'a', b'bc', b'd', b'e'])) == {'StringLength'}
    types = check_rule(lambda x, y: {'sum': x + y, 'all': [tf.reduce_sum(x)]}, ROWS, ROWS * 2)
    assert types == {'AddV2', 'Sum'}


@pytest.mark.parametrize(('name', 'rule'), [('Dawsn', None), (3, 'S -> S'), ('Dawsn', ['S -> S'])])
def test_what_is_no_rule(name, rule):
    with pytest.raises(TypeError, match='give a type by name, and a text or a function'):
        register_rule(name, rule)


def test_rules_that_cannot_be():
    with pytest.raises(ValueError, match="'by rows' isn't a rule.*'mk kn -> mn"):
        register_rule('Dawsn', 'by rows')
    assert 'Dawsn' not in RULES
    with pytest.raises(ValueError, match='Softmax has a rule already'):
        register_rule('Softmax', 'elementwise')


@pytest.mark.parametrize(
    ('rows', 'count'), [([], 3), ([ROWS[:3]], 3), ([ROWS, ROWS[:5]], 3), ([ROWS], 1)]
)
def test_rows_that_do_not_do(rows, count):
    with pytest.raises(ValueError, match=f'Give arrays with as many rows each.*towers={count}'):
        check_rule(tf.math.special.dawsn, *rows, towers=count)
