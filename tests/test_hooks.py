"""`ProgressHook` and `ThroughputHook`: what they count and show."""

import contextlib
import io
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu import hooks
from models import adam, floats, predict, spec_of

pytestmark = pytest.mark.core


def model_fn(features, labels, mode):
    loss = tf.losses.mean_squared_error(labels, predict(features))
    return spec_of(mode, loss, adam(loss))


def dataset(rows, batch):
    """Without repetition, so that the last batch may have fewer rows."""
    return tf.data.Dataset.from_tensor_slices((floats(rows, 3), floats(rows, 1))).batch(batch)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal():
    """As the test itself runs: pytest puts stderr back after fixtures."""
    return contextlib.redirect_stderr(Terminal())


class Timer:
    """Half a second a step, from the first one on, for what is told at every step."""

    def __init__(self):
        self.last = None

    def reset(self):
        self.last = None

    def should_trigger_for_step(self, step):
        return self.last is None or step > self.last

    def update_last_triggered_step(self, step):
        steps = None if self.last is None else step - self.last
        self.last = step
        return (None, None) if steps is None else (0.5 * steps, steps)


def throughput(**options):
    hook = estimator_mgpu.ThroughputHook(1, **options)
    hook._timer = Timer()
    return hook


def told(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith('step ')]


@pytest.mark.parametrize('devices, on', [(2, 'on each of 2 devices'), (1, 'on one device')])
def test_throughput_counts_the_whole_batch(devices, on, caplog):
    """Batches of 10, 10 and 6 rows, half a second each; the first starts the clock."""
    estimator = estimator_mgpu.Estimator(model_fn, devices=devices)
    estimator.train(lambda: dataset(26, 10), [throughput()])
    rates = [(2, 20.0), (3, 12.0)]
    assert told(caplog) == [
        f'step {step}: {rate:.1f} examples/s, {rate / devices:.1f} {on}' for step, rate in rates
    ]


def test_a_device_with_two_towers_is_one_device(caplog):
    estimator = estimator_mgpu.Estimator(model_fn, devices=['/cpu:0', '/cpu:0', '/cpu:1'])
    estimator.train(lambda: dataset(20, 10), [throughput()])
    assert told(caplog) == ['step 2: 20.0 examples/s, 10.0 on each of 2 devices']


def test_throughput_in_tensorboard(tmp_path):
    estimator = estimator_mgpu.Estimator(model_fn, str(tmp_path), devices=2)
    hook = throughput(output_dir=estimator.model_dir)
    estimator.train(lambda: dataset(20, 10), [hook])
    estimator.train(lambda: dataset(30, 10), [hook])  # A clock of its own for each call.
    tf.summary.FileWriterCache.clear()
    found = {}
    for path in sorted(tmp_path.glob('events*')):
        for event in tf.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.tag.startswith('examples/'):
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert found == {
        'examples/sec': [(2, 20.0), (4, 20.0), (5, 20.0)],
        'examples/sec/device': [(2, 10.0), (4, 10.0), (5, 10.0)],
    }


def test_throughput_every_few_steps(caplog):
    """TensorFlow's own timer: steps 1 (which starts it), 4 and 7 of 8."""
    estimator = estimator_mgpu.Estimator(model_fn, devices=2)
    estimator.train(lambda: dataset(80, 10), [estimator_mgpu.ThroughputHook(3)])
    assert [line.partition(':')[0] for line in told(caplog)] == ['step 4', 'step 7']
    rates = [float(re.search(r': (\S+) examples/s', line)[1]) for line in told(caplog)]
    assert all(0 < rate < np.inf for rate in rates)


def test_throughput_of_a_model_fn_that_is_not_replicated(caplog):
    estimator = tf.estimator.Estimator(model_fn)
    with pytest.raises(ValueError, match=r'how many examples.*replicate\(devices=1\).*batch_size'):
        estimator.train(lambda: dataset(20, 10), [throughput()])
    estimator.train(lambda: dataset(20, 10), [throughput(batch_size=10)])
    assert told(caplog) == ['step 2: 20.0 examples/s, 20.0 on one device']


@pytest.mark.parametrize('broadcast', [False, True])
def test_examples_are_rows_of_labels_or_features(broadcast):
    """What goes whole to every tower has other rows."""
    with tf.Graph().as_default(), tf.Session() as session:
        features = {'a': tf.zeros([7, 2]), 'b': tf.sparse.eye(5), 'scalar': tf.constant(1.0)}
        find = estimator_mgpu.batch.examples_of
        assert find(features, None, ['a'] if broadcast else []) == (5 if broadcast else 7)
        assert find(features, tf.zeros([3]), []) == 3
        fed = tf.placeholder(tf.float32, [None, 1])
        assert session.run(find(features, fed, []), {fed: [[1.0], [2.0]]}) == 2
        assert find({'scalar': features['scalar']}, None, []) is None
        assert find(object(), None, []) is None


def in_a_session(hook, batch_rows, devices=2, replicated=True):
    """Trains in a MonitoredTrainingSession, until the data ends."""
    with tf.Graph().as_default():
        step = tf.train.get_or_create_global_step()
        features, labels = tf.data.make_one_shot_iterator(dataset(26, batch_rows)).get_next()
        fn = estimator_mgpu.replicate(model_fn, devices=devices) if replicated else model_fn
        spec = fn(features, labels, 'train')
        losses = []
        config = estimator_mgpu.session_config(devices)
        with tf.train.MonitoredTrainingSession(config=config, hooks=[hook]) as session:
            while not session.should_stop():
                losses.append(session.run([spec.loss, spec.train_op, step])[0])
        return losses


def test_throughput_in_a_monitored_training_session(caplog, behavior):
    in_a_session(throughput(), 10)
    assert told(caplog)[0] == 'step 2: 20.0 examples/s, 10.0 on each of 2 devices'


def bars(stream):
    """The last thing that each bar showed."""
    return [line.split('\r')[-1].strip() for line in stream.getvalue().split('\n') if line]


@pytest.fixture
def shows_all(monkeypatch):
    """Without a pause between what a bar shows."""
    tqdm = hooks.tqdm
    monkeypatch.setattr(hooks, 'tqdm', lambda **options: tqdm(mininterval=0, ncols=150, **options))


def test_progress(shows_all):
    """Step, loss and, in the end, mean rates; the loss is that of the whole batch."""
    estimator = estimator_mgpu.Estimator(model_fn, devices=2)
    losses = []

    class Loss(tf.train.SessionRunHook):
        def begin(self):
            self.loss = tf.get_collection(tf.GraphKeys.LOSSES)[-1]

        def before_run(self, run_context):
            return tf.train.SessionRunArgs(self.loss)

        def after_run(self, run_context, run_values):
            losses.append(run_values.results)

    bar = estimator_mgpu.ProgressHook(max_steps=8)
    with on_terminal() as terminal:
        estimator.train(lambda: dataset(100, 10), [bar, Loss()], max_steps=4)
        estimator.train(lambda: dataset(100, 10), [bar, Loss()], max_steps=8)
    found = bars(terminal)
    assert len(found) == 2
    for line, step, loss in zip(found, (4, 8), (losses[3], losses[7])):
        assert f'| {step}/8 [' in line
        assert f'loss={loss:.4g}, ' in line
        rate, unit = re.search(r'(\d\S*?)(step/s|s/step),', line).groups()
        steps = float(rate) if unit == 'step/s' else 1 / float(rate)
        assert float(re.search(r'(\S+) examples/s', line)[1]) == pytest.approx(10 * steps, rel=0.05)


def test_progress_by_steps_goes_on_where_training_was(shows_all):
    estimator = estimator_mgpu.Estimator(model_fn, devices=2)
    bar = estimator_mgpu.ProgressHook(steps=3)
    with on_terminal() as terminal:
        for _ in range(2):
            estimator.train(lambda: dataset(100, 10), [bar], steps=3)
    assert [re.search(r'\| (\S+) \[', line)[1] for line in bars(terminal)] == ['3/3', '6/6']
    assert re.search(r'\[\d\d:\d\d<00:00', bars(terminal)[1])  # Nothing is left.


def test_progress_without_an_end_in_a_session(shows_all, behavior):
    """Of the replicated model_fn's loss, which isn't in tf.GraphKeys.LOSSES."""
    with on_terminal() as terminal:
        losses = in_a_session(estimator_mgpu.ProgressHook(), 10)
    [line] = bars(terminal)
    assert line.startswith('3step [') and f'loss={losses[-1]:.4g}' in line


def test_progress_of_a_model_fn_that_is_not_replicated(shows_all):
    with on_terminal() as terminal:
        in_a_session(estimator_mgpu.ProgressHook(), 10, replicated=False)
        in_a_session(estimator_mgpu.ProgressHook(batch_size=10), 10, replicated=False)
    without, given = bars(terminal)
    assert 'loss=' in without and 'examples/s' not in without
    assert 'loss=' in given and 'examples/s' in given


def test_no_bar_where_there_is_no_terminal():
    fetched = []

    class Fetched(estimator_mgpu.ProgressHook):
        def before_run(self, run_context):
            fetched.append(super().before_run(run_context))
            return fetched[-1]

    with contextlib.redirect_stderr(io.StringIO()) as stream:
        in_a_session(Fetched(), 10)
    assert len(fetched) >= 3 and set(fetched) == {None}
    assert stream.getvalue() == ''


def test_a_bar_that_a_failure_left_is_closed(shows_all):
    class Fails(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            raise RuntimeError('stop')

    bar = estimator_mgpu.ProgressHook(steps=3)
    estimator = estimator_mgpu.Estimator(model_fn, devices=2)
    with on_terminal() as terminal:
        with pytest.raises(RuntimeError, match='stop'):
            estimator.train(lambda: dataset(100, 10), [bar, Fails()], steps=3)
        left = bar._bar
        estimator.train(lambda: dataset(100, 10), [bar], steps=3)
    assert left.disable  # tqdm's word for closed
    assert '3/3' in bars(terminal)[-1]


@pytest.mark.parametrize('hook', [estimator_mgpu.ProgressHook(), throughput(batch_size=1)])
def test_no_global_step(hook):
    with tf.Graph().as_default(), pytest.raises(ValueError, match='Hook needs a global step'):
        hook.begin()


@pytest.mark.parametrize(
    'make, error, message',
    [
        (lambda: estimator_mgpu.ProgressHook(steps=1, max_steps=2), ValueError, 'steps=1 and max'),
        (lambda: estimator_mgpu.ProgressHook(steps=0), ValueError, 'steps=0 is no count'),
        (
            lambda: estimator_mgpu.ProgressHook(max_steps='9'),
            ValueError,
            "max_steps='9' is no count",
        ),
        (lambda: estimator_mgpu.ProgressHook(batch_size=2.0), ValueError, 'batch_size=2.0 is no'),
        (lambda: estimator_mgpu.ThroughputHook(True), ValueError, 'every_n_steps=True is no'),
        (lambda: estimator_mgpu.ThroughputHook(batch_size=-1), ValueError, 'batch_size=-1 is no'),
    ],
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()
