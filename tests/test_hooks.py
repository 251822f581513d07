"""`ProgressHook` and `ThroughputHook`: what they count and show."""

import contextlib
import io
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import hooks
from estimator_mgpu.batches import batch
from models import adam, floats, predict, regression, spec_of

pytestmark = pytest.mark.core

model_fn = regression(adam)


def batches_of_10(rows=100):
    """Without repetition, so that the last batch may have fewer rows."""
    return tf.data.Dataset.from_tensor_slices((floats(rows, 3), floats(rows, 1))).batch(10)


def train_on(rows, *hooks, devices=2, **options):
    estimator = estimator_mgpu.Estimator(model_fn, devices=devices)
    estimator.train(lambda: batches_of_10(rows), hooks, **options)


def on_terminal():
    """As the test itself runs: pytest puts stderr back after fixtures."""
    stream = io.StringIO()
    stream.isatty = lambda: True
    return contextlib.redirect_stderr(stream)


class Timer(tf.train.SecondOrStepTimer):
    """Half a second a step, whatever it takes."""

    def update_last_triggered_step(self, step):
        _, steps = super().update_last_triggered_step(step)
        return steps and 0.5 * steps, steps


def throughput(**options):
    hook = estimator_mgpu.ThroughputHook(1, **options)
    hook._timer = Timer(every_steps=1)
    return hook


def told(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith('step ')]


TWO = 'on each of 2 devices'


@pytest.mark.parametrize(
    'devices, count, on',
    [(2, 2, TWO), (1, 1, 'on one device'), (['/cpu:0', '/cpu:0', '/cpu:1'], 2, TWO)],
)
def test_throughput_counts_the_whole_batch(devices, count, on, caplog):
    """Batches of 10, 10 and 6 rows, half a second each; the first starts the clock."""
    train_on(26, throughput(), devices=devices)
    assert told(caplog) == [
        f'step {step}: {rate:.1f} examples/s, {rate / count:.1f} {on}'
        for step, rate in [(2, 20.0), (3, 12.0)]
    ]


def test_throughput_in_tensorboard(tmp_path):
    hook = throughput(output_dir=str(tmp_path))
    estimator = estimator_mgpu.Estimator(model_fn, devices=2)
    estimator.train(lambda: batches_of_10(20), [hook])
    estimator.train(lambda: batches_of_10(30), [hook])  # A clock of its own for each call.
    tf.summary.FileWriterCache.clear()
    [path] = tmp_path.iterdir()
    found = [
        (event.step, {value.tag: value.simple_value for value in event.summary.value})
        for event in tf.train.summary_iterator(str(path))
        if event.summary.value
    ]
    rates = {'examples/sec': 20.0, 'examples/sec/device': 10.0}
    assert found == [(step, rates) for step in (2, 4, 5)]


def test_throughput_every_few_steps(caplog):
    """TensorFlow's own timer: steps 1 (which starts it), 4 and 7 of 8."""
    train_on(80, estimator_mgpu.ThroughputHook(3))
    found = [re.fullmatch(r'(step \d): (\S+) examples/s, .*', line) for line in told(caplog)]
    assert [one[1] for one in found] == ['step 4', 'step 7']
    assert all(0 < float(one[2]) < np.inf for one in found)


def test_examples_are_rows_of_labels_or_features():
    """What goes whole to every tower has other rows."""
    with tf.Graph().as_default(), tf.Session() as session:
        features = {'a': tf.zeros([7, 2]), 'b': tf.sparse.eye(5), 'scalar': tf.constant(1.0)}

        def find(features, labels, broadcast):
            return batch.examples_of(batch.leaves_of(features, labels, broadcast))

        assert find(features, None, []) == 7 and find(features, None, ['a']) == 5
        assert find({'deep': {'a': tf.zeros([7]), 'b': tf.zeros([5])}}, None, ['deep/a']) == 5
        assert find(features, tf.zeros([3]), []) == 3
        fed = tf.placeholder(tf.float32, [None, 1])
        assert session.run(find(features, fed, []), {fed: [[1.0], [2.0]]}) == 2
        assert find({'scalar': features['scalar']}, None, []) is None
        assert find(object(), None, []) is None


def in_a_session(*hooks, model_fn=model_fn, replicated=True):
    """Trains in a MonitoredTrainingSession, until the data ends; returns the losses."""
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        features, labels = tf.data.make_one_shot_iterator(batches_of_10(26)).get_next()
        fn = estimator_mgpu.replicate(model_fn, devices=2) if replicated else model_fn
        spec = fn(features, labels, 'train')
        losses = []
        config = estimator_mgpu.session_config(2)
        with tf.train.MonitoredTrainingSession(config=config, hooks=hooks) as session:
            while not session.should_stop():
                losses.append(session.run([spec.loss, spec.train_op, step])[0])
        return losses


def bars(stream):
    """The last thing that each bar showed."""
    return [line.split('\r')[-1].strip() for line in stream.getvalue().split('\n') if line]


@pytest.fixture
def shows_all(monkeypatch):
    """Without a pause between what a bar shows."""
    new = hooks._new_bar
    always = {'mininterval': 0, 'ncols': 150}
    monkeypatch.setattr(hooks, '_new_bar', lambda **options: new(**always, **options))


@pytest.mark.parametrize(
    'ends, totals', [({'steps': 4}, ('4/4', '8/8')), ({'max_steps': 8}, ('4/8', '8/8'))]
)
def test_progress(ends, totals, shows_all):
    """Step and, in the end, mean rates; the second training goes on where the first was."""
    estimator = estimator_mgpu.Estimator(model_fn, devices=2)
    bar = estimator_mgpu.ProgressHook(**ends)
    with on_terminal() as terminal:
        for stop in (4, 8):
            estimator.train(batches_of_10, [bar], max_steps=stop)
    found = bars(terminal)
    assert len(found) == 2
    for line, total in zip(found, totals):
        assert f'| {total} [' in line
        rate, unit = re.search(r'(\d\S*?)(step/s|s/step),', line).groups()
        steps = float(rate) if unit == 'step/s' else 1 / float(rate)
        examples = float(re.search(r'(\S+) examples/s', line)[1])
        # The two are computed one after the other: so many seconds for ten examples.
        assert 10 / examples == pytest.approx(1 / steps, rel=0.05, abs=0.005)
    assert re.search(r'\[\d\d:\d\d<00:00', found[1])  # Nothing is left.


def test_in_a_monitored_training_session(shows_all, caplog, behavior):
    """Of the replicated model_fn's loss, which isn't in tf.GraphKeys.LOSSES."""
    with on_terminal() as terminal:
        losses = in_a_session(estimator_mgpu.ProgressHook(), throughput())
    [line] = bars(terminal)
    assert line.startswith('3step [') and f'loss={losses[-1]:.4g}' in line
    assert told(caplog)[0] == 'step 2: 20.0 examples/s, 10.0 on each of 2 devices'


def test_a_model_fn_that_is_not_replicated(shows_all, caplog):
    with pytest.raises(ValueError, match=r'how many examples.*replicate\(devices=1\).*batch_size'):
        in_a_session(throughput(), replicated=False)
    with on_terminal() as terminal:
        losses = in_a_session(estimator_mgpu.ProgressHook(), replicated=False)
        size = {'batch_size': 10}
        in_a_session(estimator_mgpu.ProgressHook(**size), throughput(**size), replicated=False)
    without, given = bars(terminal)
    assert f'loss={losses[-1]:.4g}' in without and 'examples/s' not in without
    assert 'loss=' in given and 'examples/s' in given
    assert told(caplog)[0] == 'step 2: 20.0 examples/s, 20.0 on one device'


def test_steps_that_are_not_counted(shows_all, caplog):
    """No rate is told, and of a loss that TensorFlow doesn't know, nothing."""

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(tf.square(predict(features) - labels))
        return spec_of(mode, loss, tf.train.GradientDescentOptimizer(0.1).minimize(loss))

    size = {'batch_size': 10}
    with on_terminal() as terminal:
        bar = estimator_mgpu.ProgressHook(**size)
        in_a_session(bar, throughput(**size), model_fn=model_fn, replicated=False)
    assert told(caplog) == []
    [line] = bars(terminal)
    assert line.startswith('0step [') and 'loss=' not in line


def test_no_bar_where_there_is_no_terminal():
    fetched = []

    class Fetched(estimator_mgpu.ProgressHook):
        def before_run(self, run_context):
            fetched.append(super().before_run(run_context))
            return fetched[-1]

    with contextlib.redirect_stderr(io.StringIO()) as stream:
        in_a_session(Fetched())
    assert len(fetched) >= 3 and set(fetched) == {None}
    assert stream.getvalue() == ''


def test_a_bar_that_a_failure_left_is_closed(shows_all):
    class Fails(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            raise RuntimeError('stop')

    bar = estimator_mgpu.ProgressHook(steps=3)
    with on_terminal() as terminal:
        with pytest.raises(RuntimeError, match='stop'):
            train_on(100, bar, Fails(), steps=3)
        left = bar._bar
        train_on(100, bar, steps=3)
    assert left.disable  # tqdm's word for closed
    assert '3/3' in bars(terminal)[-1]


@pytest.mark.parametrize(
    'hook, wrong',
    [
        (estimator_mgpu.ProgressHook, [('steps', 0), ('max_steps', '9'), ('batch_size', 2.0)]),
        (estimator_mgpu.ThroughputHook, [('every_n_steps', True), ('batch_size', -1)]),
    ],
)
def test_wrong_arguments(hook, wrong):
    for name, given in wrong:
        hook(**{name: np.int64(2)})
        with pytest.raises(ValueError, match=f'{name}={given!r} is no number of'):
            hook(**{name: given})
    with tf.Graph().as_default(), pytest.raises(ValueError, match='Hook needs a global step'):
        hook(batch_size=1).begin()
    with pytest.raises(ValueError, match='steps=1 and max_steps=2 are'):
        estimator_mgpu.ProgressHook(steps=1, max_steps=2)
