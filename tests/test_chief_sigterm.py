"""SIGTERM of a chief, beside its main thread."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from estimator_mgpu.cluster import end_of_chief
from towers import wait_for

pytestmark = pytest.mark.core

WORKER = '/job:worker/task:0'


class Task:
    """The process of the chief."""

    def handle(self, number, frame):
        """What SIGTERM does in the main thread."""

    def handles_sigterm(self):
        return signal.getsignal(signal.SIGTERM) == self.handle


class End:
    """How the process has ended."""

    main_thread_ends = False
    ending = None

    def end_process(self, error, status):
        self.ending = error, status


class Watch:
    """Knows for how many seconds the worker hasn't answered."""

    silence = 0

    def silent_tasks(self, seconds=10):
        return f'{WORKER} is silent' if self.silence > seconds else ''


@pytest.fixture
def task():
    task = Task()
    before = signal.signal(signal.SIGTERM, task.handle)
    yield task
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def end():
    return End()


@pytest.fixture
def each_second(monkeypatch):
    """What is called each second: a list of functions of the number of seconds so far."""
    functions = []
    seconds = []

    def sleep(_):
        seconds.append(1)
        for function in functions:
            function(len(seconds))

    monkeypatch.setattr(end_of_chief.time, 'sleep', sleep)
    return functions


def test_whatever_the_main_thread_does(task, end, each_second):
    """The log has the user's line."""
    end_of_chief.ChiefSigterm(task, end, lambda: None).end_process_soon()
    error, status = end.ending
    assert error.startswith('SIGTERM came 7 seconds ago, and this process has not ended: ')
    assert f'the program is at {__file__}:' in error and ' in test_whatever' in error
    assert status == 143


def test_the_main_thread_ends(task, end, each_second, monkeypatch):
    """It has some more seconds for that, as the disk of the chief's file may hang."""
    each_second.append(lambda seconds: setattr(end, 'main_thread_ends', seconds >= 3))
    sleep, slept = time.sleep, []
    monkeypatch.setattr(time, 'sleep', lambda seconds: (slept.append(seconds), sleep(seconds)))
    monkeypatch.setattr(os, '_exit', mock.Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):  # It's the thread that gets here, if the process has not ended.
        end_of_chief.ChiefSigterm(task, end, lambda: None).end_process_soon()
    assert end.ending is None
    os._exit.assert_called_once_with(143)
    assert slept == [1, 1, 1, 20]


def test_a_step_waits_for_a_task(task, end, each_second):
    watch = Watch()
    watch.silence = 9
    end_of_chief.ChiefSigterm(task, end, lambda: watch).end_process_soon()
    error, _ = end.ending
    assert f'has not ended: {WORKER} is silent. Nothing is saved' in error


@pytest.mark.parametrize(
    'ends, after',
    [('the save', 66), ('the worker', 66), ('nothing', 3607)],
    ids=['saved', 'silent', 'never'],
)
def test_a_checkpoint_is_saved(ends, after, task, end, each_second, caplog, monkeypatch):
    """It's finished, and the log says so, unless a task that saves doesn't answer."""
    watch = Watch()
    is_saving = True

    def change(seconds):
        nonlocal is_saving
        if seconds == 60:
            is_saving = ends != 'the save'
            watch.silence = 11 if ends == 'the worker' else 0

    monkeypatch.setattr(end_of_chief.saving, 'is_saving', lambda: is_saving)
    each_second.append(change)
    end_of_chief.ChiefSigterm(task, end, lambda: watch).end_process_soon()
    assert f'SIGTERM came {after} seconds ago' in end.ending[0]
    said = 'SIGTERM came 7 seconds ago. A checkpoint is being saved. This process ends after that'
    assert f'{said}, or if it takes more than 3600 seconds.' in caplog.text


def test_a_save_outside_of_training(task, end, each_second, monkeypatch):
    """SIGTERM breaks it off, so nothing is waited for."""
    monkeypatch.setattr(end_of_chief.saving, 'is_saving', lambda: True)
    end_of_chief.ChiefSigterm(task, end, lambda: None).end_process_soon()
    assert 'SIGTERM came 7 seconds ago' in end.ending[0]


@pytest.fixture
def no_pipe():
    """A process without a pipe for signals, also at the end."""
    before = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(before)


@pytest.fixture
def came(task, end, no_pipe, monkeypatch):
    """A list that has an entry for each SIGTERM that a thread has heard of."""
    came = []
    monkeypatch.setattr(
        end_of_chief.ChiefSigterm, 'end_process_soon', lambda self: came.append(self)
    )
    return came


def test_a_thread_hears_of_it(task, end, came):
    """Not of other signals, nor if the user handles SIGTERM, nor of those of forked processes."""
    end_of_chief.ChiefSigterm(task, end, lambda: None).listen()
    thread = threading.enumerate()[-1]
    assert thread.daemon
    before = signal.signal(signal.SIGUSR1, task.handle)
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)

    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    os.waitpid(child, 0)

    signal.signal(signal.SIGTERM, lambda number, frame: None)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    assert not came
    signal.signal(signal.SIGTERM, task.handle)
    for count in (1, 2):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: len(came) == count)  # noqa: B023
    os.close(signal.set_wakeup_fd(-1))
    thread.join(60)
    assert not thread.is_alive()


def test_the_pipe_of_another_library(task, end, came):
    reading_end, writing_end = os.pipe()
    os.set_blocking(writing_end, False)
    signal.set_wakeup_fd(writing_end)
    end_of_chief.ChiefSigterm(task, end, lambda: None).listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert os.read(reading_end, 1)[0] == signal.SIGTERM
    assert not came
    assert signal.set_wakeup_fd(-1) == writing_end
    os.close(reading_end)
    os.close(writing_end)


def test_beside_the_main_thread(task, end, came):
    """Only the main thread may listen to signals."""
    listens = end_of_chief.ChiefSigterm(task, end, lambda: None).listen
    count = threading.active_count()
    with ThreadPoolExecutor() as pool:
        pool.submit(listens).result()
    assert threading.active_count() == count
    assert signal.set_wakeup_fd(-1) == -1
