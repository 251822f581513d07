"""Sessions that are lost without a new step."""

import pytest
import tensorflow.compat.v1 as tf
from tensorflow.python.training import monitored_session

from estimator_mgpu.cluster import restarts
from estimator_mgpu.tf_internals import lost_sessions

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
def test_restarts_without_a_step(clock, caplog):
    """Each waits longer than the one before, and their time is limited."""
    told = restarts.Restarts(limit=200)
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
        'The session was lost: UnavailableError: failed to connect to 10.0.0.1:2222. Training goes '
        'on from the last checkpoint, in a new session.'
    )
    assert second == f'{first} It is loss 2 without a new step.'


@pytest.mark.core
def test_a_step_counts_if_it_is_new(clock):
    told = restarts.Restarts(limit=200)
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
def test_the_time_for_which_a_task_was_waited_for_does_not_count(clock):
    told = restarts.Restarts(limit=200)
    told.lost(ERROR)
    told.pause()
    clock[0] += 190  # for a machine to come back
    told.begin()
    clock[0] += 50
    made_again(told)


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


def test_other_messages_are_logged(caplog):
    """By any function of the log, and with other arguments than errors."""
    told = []
    with lost_sessions.lost_sessions(told.append):
        monitored_session.logging.info('%d steps', 3)
        monitored_session.logging.warning('It takes long.')
    assert caplog.messages == ['3 steps', 'It takes long.'] and not told
