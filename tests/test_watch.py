"""A chief's questions to the other tasks, while it trains."""

import json
import os

import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster import watch
from estimator_mgpu.cluster.end_of_chief import EndOfChief
from estimator_mgpu.cluster.leadership import Leadership
from towers import wait_for

WORKER, PS = '/job:worker/task:0', '/job:ps/task:0'


class Notes:
    """What a task's notes say, or the error if it doesn't answer."""

    def __init__(self, task, name):
        self.task, self.name = task, name

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def read(self, name):
        says = self.task.says[self.name]
        if isinstance(says, Exception):
            raise says
        if name == 'process':
            return self.task.processes_there[self.name]
        if name == 'cluster':
            return json.dumps(self.task.clusters.get(self.name, self.task.addresses))
        return says


SILENT = tf.errors.DeadlineExceededError(None, None, 'Deadline Exceeded')


class Task:
    """The process of the chief."""

    addresses = {WORKER: 'w0:1', PS: 'p0:1'}
    others = [WORKER, PS]
    limit = 100
    incarnation = 'this'
    waits = False

    def __init__(self):
        self.says = dict.fromkeys(self.others, 'this')
        self.gone = ()
        self.processes = {WORKER: 'first', PS: 'first'}
        self.processes_there = dict(self.processes)
        self.drops = 0
        self.clusters = {}  # those of tasks of other clusters

    def listens(self, name):
        return name not in self.gone

    def drop_connections(self):
        self.drops += 1

    def notes_on(self, name):
        return Notes(self, name)


@pytest.fixture
def task():
    return Task()


@pytest.fixture
def leadership(task):
    """That of the chief."""
    leadership = Leadership(task)
    leadership.has_begun = True
    return leadership


@pytest.fixture
def end(task, leadership):
    """That of the chief. It notes what the others are told."""
    end = EndOfChief(task, leadership)
    end.told = []
    end.tell = lambda *ending: end.told.append(ending)
    return end


@pytest.fixture
def watching(task, leadership, end, clock, monkeypatch):
    """A watch without threads, that looks after so many seconds, when tasks have been heard."""
    looks = watch.Watch(task, leadership, end)
    for name in task.others:
        looks.ask(name, task.notes_on(name))

    def exits(status):
        raise SystemExit(status)

    monkeypatch.setattr(os, '_exit', exits)

    def look(seconds, heard=(PS,)):
        clock[0] = 1000.0 + seconds
        for name in heard:
            looks.ask(name, task.notes_on(name))
        looks.judge(clock[0])

    looks.after = look
    return looks


@pytest.mark.core
def test_who_does_not_answer_is_named(watching, caplog):
    silent = f'{WORKER} at w0:1 has not answered for %d seconds. Is its process stopped, or'
    for seconds in (5, 20, 21, 22, 50, 51, 52):
        watching.after(seconds)
    found = [message[: message.index(' its machine')] for message in caplog.messages]
    assert found == [silent % 21, silent % 51]
    assert watching.silent_tasks() == f'{WORKER} at w0:1 has not answered for 52 seconds'
    watching.after(53, [WORKER, PS])
    watching.after(54)
    assert caplog.messages[2:] == [f'{WORKER} at w0:1 answers again.']
    assert not watching.silent_tasks()


@pytest.mark.core
def test_who_has_never_answered_is_named(task, leadership, end, clock, caplog):
    """It may be stopped after the chief has met it, and before the watch asks it."""
    looks = watch.Watch(task, leadership, end)
    looks.judge(clock[0] + 20)
    assert not caplog.messages
    looks.judge(clock[0] + 21)
    assert f'{WORKER} at w0:1 has not answered for 21 seconds' in caplog.text


@pytest.mark.core
def test_a_task_that_is_waited_for_is_not_named_twice(task, watching, caplog):
    task.waits = True
    watching.after(500)
    task.waits = False
    watching.after(515)
    assert not caplog.messages
    watching.after(521)
    assert f'{WORKER} at w0:1 has not answered for 21 seconds' in caplog.text


@pytest.mark.core
def test_a_task_that_never_answers_again(end, watching, caplog):
    """The chief ends a little later than one that waits for a task would."""
    watching.after(115)
    with pytest.raises(SystemExit, match='1'):
        watching.after(116)
    error = (
        f'{WORKER} at w0:1 has not answered for 116 seconds (session_creation_timeout_secs: 100)'
    )
    assert end.told == [(error, 1)]
    assert f'{error}. This process ends.' in caplog.messages


REPLACED = f'Another chief leads {WORKER} at w0:1'


@pytest.mark.core
def test_a_chief_that_was_replaced(task, end, watching):
    """It fails as its step ends, or saves, and if that doesn't happen, nevertheless."""
    watching.fail_if_replaced()
    task.says[WORKER] = ''  # It has been started again.
    watching.after(5, [WORKER])
    watching.fail_if_replaced()
    task.says[WORKER] = 'other'
    watching.after(6, [WORKER])
    with pytest.raises(RuntimeError, match=REPLACED):
        watching.fail_if_replaced()
    watching.after(21)
    with pytest.raises(SystemExit, match='1'):
        watching.after(22)
    assert end.told[0][0].startswith(REPLACED)


@pytest.mark.core
def test_a_task_that_is_another_process_now(task, watching, caplog):
    """A step may wait for the process before, of which nobody has closed the connections."""
    for seconds in (5, 10):
        watching.after(seconds, [WORKER, PS])
    assert not task.drops
    task.processes_there[WORKER] = ''  # It has just begun.
    watching.after(15, [WORKER, PS])
    assert not task.drops
    task.processes_there[WORKER] = 'second'
    for seconds in (20, 25):
        watching.after(seconds, [WORKER, PS])
    assert task.drops == 1
    assert f'{WORKER} at w0:1 has been started again' in caplog.text


@pytest.mark.core
def test_a_task_of_another_cluster_does_not_say_who_leads(task, watching):
    """It may come up at the address of a task that has died."""
    task.clusters[WORKER] = {}
    task.says[WORKER] = 'the chief of that cluster'
    watching.after(5, [WORKER])
    watching.fail_if_replaced()


@pytest.mark.core
def test_a_chief_that_begins_is_not_replaced_by_the_one_before(task, leadership, watching):
    leadership.has_begun = False
    task.says[WORKER] = 'before'
    watching.after(5, [WORKER])
    watching.fail_if_replaced()


@pytest.mark.core
def test_before_a_checkpoint(task, watching, clock):
    """Tasks are asked if they weren't lately, as after a stop of this process."""
    task.says[WORKER] = 'other'
    watching.check()
    clock[0] += 11
    with pytest.raises(RuntimeError, match=REPLACED):
        watching.check()


@pytest.mark.core
def test_a_checkpoint_does_not_wait_for_tasks_that_have_gone(task, watching, clock):
    task.says.update({WORKER: SILENT, PS: 'other'})
    task.gone = (PS,)
    clock[0] += 11
    watching.check()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watch, '_ASK_EVERY', 0.01)


def has_answered(looks, name):
    return looks._answered_at[name] > looks._awake_since


@pytest.mark.core
def test_threads(task, leadership, end, quick):
    """They ask until the end, whatever a task answers."""
    task.says[PS] = SILENT
    with watch.Watch(task, leadership, end) as looks:
        wait_for(lambda: has_answered(looks, WORKER))
        task.gone = (PS,)
        task.says[WORKER] = 'other'
        wait_for(lambda: leadership.replaced_on)
    assert not any(thread.is_alive() for thread in looks._threads)


@pytest.mark.core
def test_a_chief_that_was_stopped_blames_nobody(task, leadership, end, clock, monkeypatch):
    """The time for which its own process was stopped is no task's silence."""
    looks = watch.Watch(task, leadership, end)
    looks.ask(WORKER, task.notes_on(WORKER))
    seen = []

    def wait(seconds):
        clock[0] += 1 if seen else 500

    def judge(now):
        seen.append(now - looks._awake_since)
        if len(seen) == 3:
            looks._over.set()

    monkeypatch.setattr(looks._over, 'wait', wait)
    monkeypatch.setattr(looks, 'judge', judge)
    looks._judge_until_over()
    assert seen == [0, 1, 2]
