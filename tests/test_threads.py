"""Trainings at once in several threads: what each changes is its own, and undone at the end."""

import threading

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import TowerOptimizer, optimizer
from estimator_mgpu.reports.verify import _errors_only
from models import adam, batches, predict, regression, sgd, spec_of
from towers import TRAIN, assert_close, train

pytestmark = pytest.mark.core
CONSTRUCTOR = tf.train.Optimizer.__init__


def in_threads(*functions):
    """Calls functions at once, each in a thread; raises what the first of them raised."""
    errors = []

    def call(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=[function]) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def made():
    return tf.train.GradientDescentOptimizer(0.1)


def build(model_fn, devices=2):
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        replicated = estimator_mgpu.replicate(model_fn, devices=devices)
        return replicated(features=tf.zeros([4, 3]), labels=tf.zeros([4, 1]), mode=TRAIN)


@pytest.mark.parametrize('devices', [1, 2])
def test_the_first_one_ends_first(devices):
    """What holds in the second one's thread goes on to hold there, and nowhere else."""
    both_in = threading.Barrier(3, timeout=60)
    ended = threading.Event()

    def first(features, labels, mode):
        both_in.wait()
        return regression(adam)(features, labels, mode)

    def second(features, labels, mode):
        both_in.wait()
        assert ended.wait(60)
        assert isinstance(made(), TowerOptimizer)
        w = tf.get_variable('w', [3, 1])
        assert tf.get_variable('w', [3, 1]) is w
        with pytest.raises(ValueError, match='Replicate it once'):
            nested(features, labels, mode)
        return regression(adam)(features, labels, mode)

    def neither():
        both_in.wait()
        assert type(made()) is tf.train.GradientDescentOptimizer
        with tf.Graph().as_default():
            tf.get_variable('w', [3, 1])
            with pytest.raises(ValueError, match='already exists'):
                tf.get_variable('w', [3, 1])

    def build_first():
        build(first, devices)
        ended.set()

    nested = estimator_mgpu.replicate(regression(adam), devices=devices)
    in_threads(build_first, lambda: build(second, devices), neither)
    assert tf.train.Optimizer.__init__ is CONSTRUCTOR
    assert type(made()) is tf.train.GradientDescentOptimizer


def test_pairs_that_overlap():
    """Each time the one that has entered first leaves first: nothing is left over."""
    barrier, pairs = threading.Barrier(2, timeout=60), 1100

    def first():
        for _ in range(pairs):
            with optimizer.tower_optimizers():
                barrier.wait()  # The first one is in,
                barrier.wait()  # the second one is in,
            barrier.wait()  # the first one is out,
            barrier.wait()  # and the second one is out.

    def second():
        for _ in range(pairs):
            barrier.wait()
            with optimizer.tower_optimizers():
                barrier.wait()
                barrier.wait()
                assert isinstance(made(), TowerOptimizer)
            barrier.wait()

    in_threads(first, second)
    assert tf.train.Optimizer.__init__ is CONSTRUCTOR
    assert not isinstance(made(), TowerOptimizer)


def test_trainings_in_threads():
    """Four models are built, divided and trained at once, each as alone."""
    barrier = threading.Barrier(4, timeout=60)
    steps = batches(6, steps=3)
    values = train(regression(sgd), steps, 0, steps=0).values
    expected = [train(regression(make), steps, 0, values=values).values for make in (adam, sgd)]
    found = {}

    def training(i):
        def model_fn(features, labels, mode):
            loss = tf.losses.mean_squared_error(labels, predict(features))
            barrier.wait()
            train_op = (adam, sgd)[i % 2](loss)
            barrier.wait()
            return spec_of(mode, loss, train_op)

        def run():
            found[i] = train(model_fn, steps, 1 + i % 3, values=values).values

        return run

    in_threads(*map(training, range(4)))
    for i in range(4):
        assert_close(found[i], expected[i % 2], 1e-5)
    assert tf.train.Optimizer.__init__ is CONSTRUCTOR


def test_verifications_that_overlap(caplog):
    """The log is muted until the last one ends, and then as before."""
    level = tf.get_logger().level
    first, second = _errors_only(), _errors_only()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    tf.logging.info('meanwhile')
    tf.logging.error('an error')
    second.__exit__(None, None, None)
    tf.logging.info('afterwards')
    assert [record.message for record in caplog.records] == ['an error', 'afterwards']
    assert tf.get_logger().level == level
