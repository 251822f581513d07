"""Sessions that are lost without a new step, and by which errors."""

import pathlib
import shutil

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.training import monitored_session

from estimator_mgpu.cluster import restarts, saving
from estimator_mgpu.tf_internals import lost_sessions
from models import adam, floats, regression

ERROR = tf.errors.UnavailableError(
    None,
    None,
    """Graph execution error:

Detected at node 'Adam' defined at (most recent call last):
  File "train.py", line 3, in <module>
Node: 'Adam'
=====================
failed to connect to 10.0.0.1:2222
:{"created":"@1.2","description":"Failed to pick subchannel"}
\t [[{{node Adam}}]]
Original stack trace for 'Adam':
""",
)


@pytest.fixture
def clock(monkeypatch):
    """A list whose entry is the time; pausing takes it."""
    now = [100.0]
    monkeypatch.setattr(restarts.time, 'monotonic', lambda: now[0])

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(restarts.time, 'sleep', sleep)
    return now


def made_again(told):
    told.lost(ERROR)
    told.pause()
    told.begin()


@pytest.mark.core
def test_restarts_without_a_step(clock, caplog, tmp_path):
    """Each waits longer than the one before, and their time is limited."""
    told = restarts.Restarts(200, str(tmp_path))
    told.pause()
    told.begin()
    starts = []
    with pytest.raises(TimeoutError) as error:
        while True:
            made_again(told)
            starts.append(clock[0] - 100)
    assert starts == [0, 1, 3, 7, 15, 31, 61, 91, 121, 151, 181, 211]
    assert str(error.value).startswith(
        '13 sessions in 211 seconds made no new step (session_creation_timeout_secs of RunConfig '
        'is 200). The last one was lost by: UnavailableError: failed to connect to 10.0.0.1:2222. '
    )
    assert error.value.__cause__ is ERROR
    first, second = caplog.messages[:2]
    assert first == (
        'The session was lost: UnavailableError: failed to connect to 10.0.0.1:2222. There is no '
        f'checkpoint in {tmp_path}, so training starts from its beginning, in a new session.'
    )
    assert second == f'{first} These are 2 lost sessions without a new step.'


@pytest.mark.core
def test_where_training_goes_on(caplog, tmp_path):
    """From the last checkpoint; somebody may have removed all."""
    told = restarts.Restarts(200, str(tmp_path))
    path = str(tmp_path / 'model.ckpt-5')
    with tf.Graph().as_default(), tf.Session() as session:
        tf.get_variable('v', [])
        session.run(tf.global_variables_initializer())
        tf.train.Saver().save(session, path)
    told.lost(ERROR)
    assert f'. Training goes on from the last checkpoint, {path}, in a new' in caplog.text
    shutil.rmtree(tmp_path)
    told.lost(ERROR)
    assert f'There is no checkpoint in {tmp_path}, so training starts from' in caplog.text


@pytest.mark.core
def test_a_step_counts_if_it_is_new(clock, tmp_path):
    told = restarts.Restarts(200, str(tmp_path))
    for step in (10, 11):
        told.stepped(step)
    for _ in range(5):
        made_again(told)
        told.stepped(11)  # from the checkpoint of step 10
    assert clock[0] == 115
    told.stepped(12)
    clock[0] += 1000
    made_again(told)  # at once
    assert clock[0] == 1115


@pytest.mark.core
def test_the_time_for_which_a_task_was_waited_for_does_not_count(clock, tmp_path):
    told = restarts.Restarts(200, str(tmp_path))
    told.lost(ERROR)
    told.pause()
    clock[0] += 190  # for a machine to come back
    told.begin()
    clock[0] += 50
    made_again(told)


class LosesSession(tf.train.SessionRunHook):
    """Loses the first session after a step, or as hooks come to their end."""

    def __init__(self, step):
        self.step = step
        self.has_failed = False

    def lose(self):
        if not self.has_failed:
            self.has_failed = True
            raise tf.errors.UnavailableError(None, None, 'lost')

    def after_run(self, run_context, run_values):
        if run_context.session.run(tf.train.get_global_step()) == self.step:
            self.lose()

    def end(self, session):
        self.lose()


@pytest.mark.core
@pytest.mark.parametrize('lost_at', [3, 5, 9], ids=['in a step', 'in the last step', 'in the end'])
@pytest.mark.parametrize('steps, max_steps', [(4, None), (None, 5)])
def test_no_step_is_made_after_the_last_one(steps, max_steps, lost_at, behavior, tmp_path):
    """Each step is saved. Training begins after step 1, and again if a hook's end has failed."""
    folder, made = str(tmp_path), []
    one = tf.estimator.Estimator(regression(adam), folder)
    data = lambda: tf.data.Dataset.from_tensors((floats(8, 3), floats(8, 1))).repeat()  # noqa: E731
    one.train(data, steps=1)
    config = tf.estimator.RunConfig(folder, save_checkpoints_steps=1)
    loses, last = LosesSession(lost_at), restarts.LastStep(steps, max_steps)

    class Counts(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            made.append(int(run_context.session.run(tf.train.get_global_step())))

    def train():
        again = tf.estimator.Estimator(regression(adam), folder, config)
        again.train(data, [Counts(), loses, last])

    if lost_at == 9:
        with pytest.raises(tf.errors.UnavailableError) as error:
            train()
        assert saving.is_of_end(error.value)
    train()
    assert loses.has_failed and made == [2, 3, 4, 5]
    assert tf.train.latest_checkpoint(folder) == f'{folder}/model.ckpt-5'


class Fails(tf.train.SessionRunHook):
    """Fails as sessions are made, and as they run, in turn."""

    def __init__(self):
        self.errors = [
            tf.errors.AbortedError(None, None, 'one'),
            tf.errors.UnavailableError(None, None, 'two'),
        ]

    def after_create_session(self, session, coord):
        if len(self.errors) == 2:
            raise self.errors[0]

    def after_run(self, run_context, run_values):
        raise self.errors[1]


@pytest.mark.core
def test_what_sessions_are_lost_by():
    """MonitoredSession tells nobody of it."""
    hook, told = Fails(), []

    def tell(error):
        told.append(error)
        if len(told) == 1:
            hook.after_create_session = lambda session, coord: None
        else:
            hook.after_run = lambda run_context, run_values: None

    with tf.Graph().as_default(), lost_sessions.lost_sessions(tell):
        value = tf.constant(1.0)
        with tf.train.MonitoredSession(hooks=[hook]) as session:
            assert session.run(value) == 1
    assert told == hook.errors


# What TensorFlow 2.15 and 2.21 raise for a task that can't be reached, if a `_Send` sees it first.
REPLACED = """From /job:chief/replica:0/task:0:
failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling \
/tensorflow.WorkerService/RecvTensor:
\t [[{{node MatMul/ReadVariableOp_S183}}]]
Executing non-communication op <MatMul_G24> originally returned UnavailableError, and was replaced \
by InternalError to avoid invoking TF network error handling logic.
"""


def raise_once(error):
    """Returns a function that raises an error at its first call, and then does nothing."""
    errors = [error]

    def call(*args):
        if errors:
            raise errors.pop()

    return call


# What they raise if a task has been started again, and a step is cancelled on another one first.
CANCELLED = """Graph execution error:

Detected at node 'IteratorGetNext' defined at (most recent call last):
    File "train.py", line 3, in <module>
Node: 'IteratorGetNext'
=====================
CANCELLED: From /job:chief/replica:0/task:0:
Operation was cancelled
\t [[{{node IteratorGetNext}}]]
ABORTED: From /job:worker/replica:0/task:1:
Session handle is not found: f4544aa. Possibly this worker ("/job:worker/replica:0/task:1") just \
restarted.
=====================
"""
# As executors of one process put several errors together.
SEVERAL = """2 root error(s) found.
  (0) CANCELLED: Operation was cancelled
  (1) UNAVAILABLE: Socket closed
0 successful operations.
"""
OF_LOST_TASKS = {
    'replaced': (tf.errors.InternalError, REPLACED),
    'cancelled': (tf.errors.CancelledError, CANCELLED),
    'several': (tf.errors.CancelledError, SEVERAL),
}


@pytest.mark.core
@pytest.mark.parametrize('part', ['initializing', 'step'])
@pytest.mark.parametrize('kind', OF_LOST_TASKS)
def test_an_error_of_a_lost_task_that_has_another_class(part, kind, monkeypatch):
    error_class, message = OF_LOST_TASKS[kind]
    error, told = error_class(None, None, message), []
    init_fn = None
    if part == 'initializing':
        init_fn = raise_once(error)
    else:
        run, fail = tf.Session.run, raise_once(error)

        def run_or_fail(session, fetches, *args, **kwargs):
            if isinstance(fetches, dict):  # made by MonitoredSession, which adds what hooks fetch
                fail()
            return run(session, fetches, *args, **kwargs)

        monkeypatch.setattr(tf.Session, 'run', run_or_fail)

    with tf.Graph().as_default(), lost_sessions.lost_sessions(told.append):
        value = tf.constant(1.0)
        scaffold = tf.train.Scaffold(init_fn=init_fn)
        with tf.train.MonitoredTrainingSession(scaffold=scaffold) as session:
            assert session.run([value]) == [1]
    (lost,) = told
    assert isinstance(lost, tf.errors.UnavailableError)
    assert lost.message == message and lost.__cause__ is error


@pytest.mark.core
def test_tensorflow_words_it_like_this():
    """It can't be raised at will: whether it's raised is chance."""
    directory = pathlib.Path(tf.sysconfig.get_lib())
    [library] = directory.glob('libtensorflow_framework.*')
    words = b' originally returned UnavailableError, and was replaced by InternalError'
    assert words in library.read_bytes()


@pytest.mark.core
@pytest.mark.parametrize(
    'message',
    [
        REPLACED.replace('WorkerService', 'X'),
        CANCELLED.replace('ABORTED', 'INTERNAL'),
        'CANCELLED: the user says\nABORTED: nothing is lost',
        'Blas failed',
    ],
)
def test_another_error_ends_the_session(message):
    error, told = tf.errors.InternalError(None, None, message), []
    with tf.Graph().as_default(), lost_sessions.lost_sessions(told.append):
        scaffold = tf.train.Scaffold(init_fn=raise_once(error))
        with pytest.raises(tf.errors.InternalError) as raised:
            tf.train.MonitoredTrainingSession(scaffold=scaffold)
    assert raised.value is error and not told


def test_other_messages_are_logged(caplog):
    """By any function of the log, and with other arguments than errors."""
    told = []
    with lost_sessions.lost_sessions(told.append):
        monitored_session.logging.info('%d steps', 3)
        monitored_session.logging.warning('It takes long.')
    assert caplog.messages == ['3 steps', 'It takes long.'] and not told


@pytest.mark.core
def test_in_the_end_tensorflow_is_as_before():
    log = monitored_session.logging
    with pytest.raises(RuntimeError), lost_sessions.lost_sessions([].append):
        assert monitored_session.logging is not log
        assert monitored_session.ChiefSessionCreator is not tf.train.ChiefSessionCreator
        raise RuntimeError
    assert monitored_session.logging is log
    assert monitored_session.ChiefSessionCreator is tf.train.ChiefSessionCreator
