"""The tasks of a cluster within this process: how they wait, meet, lead, serve and end."""

import json
import os
import signal
import socket
import sys
import threading
import types
from unittest import mock

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.cluster import chief as chief_module
from estimator_mgpu.cluster import end_of_chief, ending, join, reach, saving, serve
from estimator_mgpu.cluster import task as task_module
from estimator_mgpu.cluster.chief import Chief
from estimator_mgpu.cluster.notes import Notes, version
from estimator_mgpu.cluster.task import Task, addresses
from models import adam, regression
from towers import free_addresses

CHIEF, WORKER, PS = '/job:chief/task:0', '/job:worker/task:0', '/job:ps/task:0'
NOWHERE = '/no/such/directory'
TASKS = {'worker': ['w0:1', 'w1:1'], 'ps': ['p0:1'], 'chief': ['c0:1']}


@pytest.fixture
def config_of(monkeypatch):
    """Makes the RunConfig of a task, by default in the cluster TASKS."""

    def make(job='chief', index=0, cluster=TASKS):
        tf_config = {'cluster': cluster, 'task': {'type': job, 'index': index}}
        monkeypatch.setenv('TF_CONFIG', json.dumps(tf_config))
        return tf.estimator.RunConfig()

    return make


linear = regression(adam)


@pytest.mark.core
def test_the_config_of_a_task(config_of):
    """What evaluates, predicts and exports does so by itself, on any machine."""
    found = addresses(config_of('worker', 1, {**TASKS, 'evaluator': ['e0:1']}))
    assert [*found] == [CHIEF, WORKER, '/job:worker/task:1', PS]  # An evaluator is none of them.
    assert [*found.values()] == ['c0:1', 'w0:1', 'w1:1', 'p0:1']
    two = ['/device:CPU:0', '/device:CPU:1']
    config = estimator_mgpu.Estimator(linear, config=config_of('worker', 1), devices=two).config
    assert config.cluster_spec.as_dict() == {'chief': ['w1:1']}
    assert config.is_chief and not config.master and not config.evaluation_master
    assert not config.session_config.device_filters
    assert config.session_config.device_count['CPU'] == 2
    assert config.session_config.graph_options.rewrite_options.disable_meta_optimizer
    one = estimator_mgpu.Estimator(linear, config=config_of(cluster={'chief': ['c0:1']}))
    assert one._cluster_config is None  # One machine is no cluster.


@pytest.mark.core
def test_estimators_that_train_on_no_cluster(config_of, tmp_path):
    replicated = estimator_mgpu.replicate(linear, devices=2)
    plain = tf.estimator.Estimator(replicated, str(tmp_path), config_of())
    with pytest.raises(ValueError, match='Use estimator_mgpu.Estimator'):
        plain.train(lambda: (tf.ones([4, 3]), tf.ones([4, 1])))
    config = config_of('evaluator', 0, {**TASKS, 'evaluator': ['e0:1']})
    evaluator = estimator_mgpu.Estimator(linear, config=config)
    with pytest.raises(ValueError, match='the evaluator, which'):
        evaluator.train(None)


@pytest.mark.core
def test_a_port_that_is_taken(config_of):
    with socket.create_server(('127.0.0.1', 0)) as other:
        address = '{}:{}'.format(*other.getsockname())
        config = config_of('worker', 0, {'chief': ['c0:1'], 'worker': [address]})
        match = rf"^{WORKER} can't listen at {address} \(.*If another process has that port, end it"
        with pytest.raises(RuntimeError, match=match):
            Task(config)


@pytest.mark.core
def test_a_proxy_is_for_other_hosts(config_of, monkeypatch):
    """What the user names for gRPC counts, or otherwise for all programs."""
    monkeypatch.setattr(tf.train, 'Server', lambda *args, **kwargs: None)
    monkeypatch.setattr(signal, 'signal', lambda *args: None)
    monkeypatch.delenv('no_grpc_proxy', raising=False)
    monkeypatch.setenv('no_proxy', 'a.org,w0')
    cluster = {'chief': ['[::1]:1'], 'worker': ['w0:1', 'w1:1', 'w1:2']}
    Task(config_of(cluster=cluster))
    assert os.environ[task_module._NO_PROXY] == 'a.org,w0,::1,w1'
    monkeypatch.setenv('no_grpc_proxy', 'b.org')
    Task(config_of(cluster=cluster))
    assert os.environ[task_module._NO_PROXY] == 'b.org,::1,w0,w1'


class Clock:
    """Stands for the module time: sleeping takes no time, and may come to what happens then."""

    def __init__(self):
        self.now = 1000.0
        self.events = {}  # functions, by the time at which they are called

    def monotonic(self):
        return self.now

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.events.get(self.now, lambda: None)()


@pytest.fixture
def clock(monkeypatch):
    """The time of all tasks."""
    clock = Clock()
    for module in (chief_module, end_of_chief, ending, serve, task_module):
        monkeypatch.setattr(module, 'time', clock)
    return clock


@pytest.fixture
def task(config_of, clock, monkeypatch):
    """A worker that has no server, and can reach no other task."""
    monkeypatch.setattr(tf.train, 'Server', lambda *args, **kwargs: None)
    monkeypatch.setattr(signal, 'signal', lambda *args: None)
    monkeypatch.setattr(Task, 'check_alone', lambda self: None)
    monkeypatch.setattr(reach, 'listens', lambda address: False)
    monkeypatch.setattr(socket, 'getaddrinfo', mock.Mock(return_value=[]))  # Any name resolves.
    return Task(config_of('worker', 0).replace(session_creation_timeout_secs=100))


@pytest.fixture
def chief(task):
    """What a chief does, as this task."""
    return Chief(task)


@pytest.mark.core
def test_waiting(task, clock, caplog, monkeypatch):
    """What is waited for is said each half a minute, up to the limit."""
    with pytest.raises(TimeoutError, match='^/job:ps/task:0 at p0:1: not reached in 100 seconds'):
        task.wait([PS])
    line = (
        'Waiting for /job:ps/task:0 at p0:1: the script has to run there, too, with the same '
        'cluster in TF_CONFIG.'
    )
    assert [m for m in caplog.messages if 'Waiting' in m] == [line] * 4
    assert clock.now == 1101
    with monkeypatch.context() as context:
        context.setattr(socket, 'getaddrinfo', mock.Mock(side_effect=socket.gaierror))
        with pytest.raises(TimeoutError, match=r'p0:1 \(the name p0 does not resolve\): not reach'):
            task.wait([PS])
    monkeypatch.setattr(reach, 'listens', lambda address: address != 'w1:1')
    caplog.clear()
    assert task.wait(ended=lambda: 'over' if clock.now > 1210 else None) == 'over'
    assert '/job:worker/task:1 at w1:1: ' in caplog.text and 'p0:1' not in caplog.text
    with pytest.raises(SystemExit, match='143'):  # It neither trains nor serves.
        task._handle_sigterm(signal.SIGTERM, None)
    with pytest.raises(SystemExit, match='143'):
        task.wait()
    monkeypatch.setattr(reach, 'listens', lambda address: True)
    task.wait()


class Pad:
    """Stands for the notes of a task."""

    def __init__(self, **notes):
        self.notes = notes

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def read(self, name):
        return self.notes.get(name, '')

    def write(self, name, text):
        self.notes[name] = text


class Silent(Pad):
    """Those of a task whose process is stopped."""

    def read(self, name):
        raise tf.errors.DeadlineExceededError(None, None, 'Deadline Exceeded')


def ending_of(chief, error=None, status=0):
    return ending.Ending(chief, error, status).text()


@pytest.mark.core
def test_a_task_that_listens_and_does_not_answer(task, caplog, monkeypatch):
    monkeypatch.setattr(reach, 'listens', lambda address: True)
    monkeypatch.setattr(task, 'notes_on', lambda name: Silent() if name == PS else Pad())
    task.wait()
    with pytest.raises(TimeoutError, match=f'^{PS} at p0:1 .there, but without an answer.*100 sec'):
        task.wait(answering=True)
    assert caplog.text.count('is its process stopped, or') == 4 and CHIEF not in caplog.text
    assert not task.waits
    for addresses_there in (task.addresses, {CHIEF: 'c0:1'}):
        leads = json.dumps(addresses_there)
        monkeypatch.setattr(task, 'notes_on', lambda name: Pad(leads=leads))  # noqa: B023
        found = task.wait([CHIEF], lambda: 'over', answering=True)
        assert found == (None if addresses_there == task.addresses else 'over')


@pytest.fixture
def serves(task, monkeypatch):
    """Gives the task, which is about to serve, notes of its own, and others theirs."""

    def prepare(own, others=None):
        monkeypatch.setattr(serve, 'Notes', lambda name, target, seconds: own)
        monkeypatch.setattr(reach, 'listens', lambda address: True)
        monkeypatch.setattr(task, 'notes_on', lambda name: others or Pad())
        task.server = mock.Mock()

    return prepare


@pytest.mark.core
def test_a_task_that_got_sigterm_serves_on_for_a_while(task, serves, clock, monkeypatch):
    pad = Pad()  # The chief has said nothing.
    serves(pad)
    clock.events[1050] = lambda: task._handle_sigterm(signal.SIGTERM, None)
    with pytest.raises(SystemExit, match='143'):
        serve.serve(task, NOWHERE)
    assert clock.now == 1071
    assert json.loads(pad.read('cluster')) == task.addresses
    assert pad.read('version') == version()
    monkeypatch.setattr(reach, 'listens', lambda address: address != 'c0:1')
    task.sigterm_at = None
    with pytest.raises(TimeoutError, match=f'^{CHIEF} at c0:1: not reached'):
        serve.serve(task, NOWHERE)


@pytest.mark.core
def test_a_chief_that_is_stopped_is_not_waited_for_for_ever(task, serves, clock):
    serves(Pad(), Silent())
    with pytest.raises(TimeoutError, match=f'^{CHIEF} at c0:1 .there, but without an answer'):
        serve.serve(task, NOWHERE)
    assert 1000 + 30 + 100 < clock.now < 1000 + 30 + 110


@pytest.mark.core
def test_whose_end_it_is(task, serves, clock):
    """A task ends as the chief does that leads it now."""
    pad = Pad(chief='new', end=ending_of('old', 'Boo', 1))
    serves(pad)
    clock.events[1050] = lambda: pad.write('end', ending_of('new', status=7))
    with pytest.raises(SystemExit, match='7'):
        serve.serve(task, NOWHERE)
    assert clock.now == 1050


@pytest.mark.core
def test_a_task_that_was_away_as_the_chief_ended(
    task, serves, clock, caplog, monkeypatch, tmp_path
):
    """A chief that is there may be another one. A damaged file is told of each half minute."""
    folder = str(tmp_path)
    (tmp_path / ending.FILE).write_text('garbage')
    missed = ending.Ending('old', None, 0, 1050.0, (task.addresses[task.name],))
    there = ['w0:1']
    serves(Pad())
    monkeypatch.setattr(reach, 'listens', lambda address: address in there)

    def come_and_end():
        there.append('c0:1')
        (tmp_path / ending.FILE).write_text(missed.text())

    clock.events = {1050: come_and_end, 1080: lambda: there.remove('c0:1')}
    with pytest.raises(SystemExit, match='0'):
        serve.serve(task, folder)
    assert clock.now == 1080
    assert caplog.text.count('is damaged') == 3  # also as it begins
    assert f'The chief has ended with 0 while {task.name} was away' in caplog.text


@pytest.mark.core
@pytest.mark.parametrize('led_by', ['', 'old'])
def test_a_task_that_was_led_and_then_away(led_by, task, serves, clock, monkeypatch, tmp_path):
    """It ends as its chief, or a later one, has ended since; what the file said before is old."""
    folder = str(tmp_path)
    ending.write(folder, ending.Ending('older', None, 7))
    serves(Pad(chief=led_by))
    monkeypatch.setattr(reach, 'listens', lambda address: address != 'c0:1')

    def train_and_end():
        ending.write(folder, ending.Ending('new'))
        ending.write(folder, ending.Ending('new', None, 3))

    clock.events[1050] = train_and_end
    with pytest.raises(SystemExit if led_by else TimeoutError, match='3' if led_by else CHIEF):
        serve.serve(task, folder)
    assert clock.now == (1060 if led_by else 1101)


@pytest.mark.core
def test_a_task_that_serves_looks_around_every_half_minute(task, serves, clock, monkeypatch):
    """Whether the chief answers, and whether no other process is this task."""
    pad = Pad(chief='one')
    serves(pad)
    asked, checked = [], []

    def wait(tasks, ended, answering):
        if answering:
            asked.append(clock.now - 1000)
        if clock.now > 1100:
            pad.write('end', ending_of('one'))

    monkeypatch.setattr(task, 'wait', wait)
    monkeypatch.setattr(task, 'check_alone', lambda: checked.append(clock.now - 1000))
    with pytest.raises(SystemExit):
        serve.serve(task, NOWHERE)
    assert asked == [31, 62, 93] and checked == [0, 30, 60, 90]


@pytest.fixture
def pads(task, chief, monkeypatch, tmp_path):
    """The notes of other tasks, each of which is there; the task leads them."""
    cluster = json.dumps(task.addresses)
    notes = {'chief': task.incarnation, 'cluster': cluster, 'version': version(), 'process': 'p'}
    pads = {name: Pad(**notes) for name in task.others}
    monkeypatch.setattr(reach, 'listens', lambda address: True)
    monkeypatch.setattr(reach, 'that_answer', lambda addresses: {*addresses})
    monkeypatch.setattr(reach, 'check_server', lambda task, address: None)
    monkeypatch.setattr(task, 'notes_on', lambda name: pads[name])
    chief.leadership.begin_training(str(tmp_path))
    chief.leadership.lead()
    return pads


@pytest.mark.core
def test_all_are_told_of_the_end(task, chief, pads, monkeypatch, tmp_path):
    """Also if one isn't there, doesn't answer, or has been started again."""
    cluster = json.dumps(task.addresses)
    pads[PS] = Silent()
    pads['/job:worker/task:1'] = Pad(cluster=cluster, version=version())
    chief.end._noted_exit.argument = 3
    chief.end._at_exit()
    told = {'chief': task.incarnation, 'end': ending_of(task.incarnation, status=3)}
    for name in (CHIEF, '/job:worker/task:1'):
        assert pads[name].notes.items() >= told.items()
    found = ending.read(str(tmp_path))
    assert found[:3] == (task.incarnation, None, 3) and found.untold == ('p0:1',)
    assert chief.end._untold() == [PS]
    monkeypatch.setattr(sys, 'last_value', ValueError('Boo'), raising=False)
    chief.end._at_exit()
    assert ending.read(str(tmp_path))[:3] == (task.incarnation, 'ValueError: Boo', 1)
    # That error wasn't the end: sys.exit(pytest.main()), say.
    chief.end._noted_exit.was_seen = True
    chief.end._at_exit()
    assert ending.read(str(tmp_path))[:3] == (task.incarnation, None, 3)
    pads[PS] = Pad(cluster=cluster, version=version())
    monkeypatch.setattr(reach, 'that_answer', lambda addresses: {*addresses} - {'p0:1'})
    chief.end.tell(None, 5)
    assert not pads[PS].read('end')


@pytest.mark.core
def test_a_task_that_comes_back_as_the_chief_ends_is_told(chief, pads, clock, caplog):
    """It's waited for a little; if it doesn't come, the chief ends."""
    cluster = pads[PS].read('cluster')
    pads[PS] = Silent()
    # At first, its script hasn't called train() yet.
    clock.events[1005] = lambda: pads.update({PS: Pad()})
    clock.events[1007] = lambda: pads.update({PS: Pad(cluster=cluster)})
    chief.end._at_exit()
    assert clock.now == 1007 and json.loads(pads[PS].read('end'))[1:3] == [None, 0]
    assert f'Waiting up to 30 seconds for {PS} to come back' in caplog.text
    chief.end._at_exit()
    assert clock.now == 1007
    chief.end._told.remove(CHIEF)
    pads[CHIEF] = Silent()
    chief.end._at_exit()
    assert clock.now == 1037


@pytest.mark.core
@pytest.mark.parametrize('status', [0, 143])
def test_sigterm_while_it_tells(status, task, chief, pads, clock, monkeypatch):
    """All are told, of the end that had begun; it waits for nobody any more."""
    pads[PS] = Silent()
    chief.end._noted_exit.argument = status
    write = Pad.write

    def write_and_get_sigterm(pad, name, text):
        task._handle_sigterm(15, None)
        write(pad, name, text)

    monkeypatch.setattr(Pad, 'write', write_and_get_sigterm)
    chief.end._at_exit()
    told = [pads[name].read('end') for name in task.others if name != PS]
    assert told == [ending_of(task.incarnation, status=status)] * 2
    assert clock.now == 1000


@pytest.mark.core
def test_a_disk_that_hangs_as_the_process_ends(chief, monkeypatch):
    """Others have been told by then."""
    is_over = threading.Event()
    monkeypatch.setattr(end_of_chief, '_LONGEST_TELLING', 0.1)
    monkeypatch.setattr(chief.end, 'tell', lambda *ending: is_over.wait(60))
    monkeypatch.setattr(os, '_exit', mock.Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        chief.end.end_process('Boo', 1)
    os._exit.assert_called_once_with(1)
    is_over.set()


@pytest.mark.core
def test_a_log_that_hangs_as_the_process_ends(chief, monkeypatch):
    """Others are told, and the process ends."""
    is_over = threading.Event()
    told = []
    monkeypatch.setattr(end_of_chief, '_LONGEST_TELLING', 0.1)
    monkeypatch.setattr(tf.logging, 'error', lambda text: is_over.wait(60))
    monkeypatch.setattr(chief.end, 'tell', lambda *ending: told.append(ending))
    monkeypatch.setattr(os, '_exit', mock.Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        chief.end.end_process('Boo', 1)
    os._exit.assert_called_once_with(1)
    assert told == [('Boo', 1)]
    is_over.set()


@pytest.mark.core
def test_sigterm_after_all_are_told(task, chief, pads, serves):
    """It ends what the script does then, such as waiting for other processes."""
    chief.end._at_exit()
    with pytest.raises(SystemExit, match='143'):
        task._handle_sigterm(15, None)
    serves(Pad(chief='one', end=ending_of('one')))
    with pytest.raises(SystemExit, match='0'):
        serve.serve(task, NOWHERE)
    with pytest.raises(SystemExit, match='143'):
        task._handle_sigterm(15, None)


@pytest.mark.core
def test_a_file_of_the_chief_that_is_written_at_the_second_try(task, chief, pads, monkeypatch):
    """The file system has a bad moment as a training begins, so all tasks are asked again."""
    monkeypatch.setattr(
        ending, 'write', mock.Mock(side_effect=tf.errors.UnavailableError(None, None, 'Boo'))
    )
    chief.leadership.begin_training('elsewhere')
    with pytest.raises(tf.errors.UnavailableError):
        chief.leadership.lead()
    monkeypatch.setattr(ending, 'write', mock.Mock())
    chief.leadership.lead()
    chief.leadership.lead()
    ending.write.assert_called_once_with('elsewhere', ending.Ending(task.incarnation))


@pytest.mark.core
def test_a_chief_that_was_replaced_tells_nobody(chief, pads, tmp_path):
    before = ending.Ending('new')
    ending.write(str(tmp_path), before)
    pads[PS].notes['chief'] = 'new'
    chief.end.tell('Boo', 1)
    assert not any(pad.read('end') for pad in pads.values())
    pads[PS].notes['chief'] = ''
    chief.end.tell('Boo', 1)
    assert ending.read(str(tmp_path)) == before
    assert not pads[PS].read('end')  # Its successor hasn't left a note there yet.


@pytest.mark.core
def test_a_chief_that_fails_before_it_leads_tells_nobody(task, pads, tmp_path):
    """The other tasks may be in the midst of a training that another process leads."""
    folder = str(tmp_path / 'other')
    ending.write(folder, ending.Ending('another'))
    second = Chief(task)
    second.leadership.begin_training(folder)
    second.end.tell('Boo', 1)
    assert not any(pad.read('end') for pad in pads.values())
    assert ending.read(folder) == ending.Ending('another')


@pytest.mark.core
def test_a_task_of_another_cluster_is_told_nothing(task, chief, pads):
    """It has come up at the address of one of ours that died; the others are told."""
    pads[PS] = Pad(cluster='{}', chief='of that cluster')
    chief.end.tell('Boo', 1)
    assert pads[PS].notes == {'cluster': '{}', 'chief': 'of that cluster'}
    assert pads[CHIEF].read('end') == ending_of(task.incarnation, 'Boo', 1)


@pytest.mark.core
def test_who_leads(task, chief, pads):
    """A chief that begins takes over; later it leads what was started again, and nobody else's."""
    chief.leadership.has_begun = False
    pads[PS].notes.update(chief='old', end=ending_of('old'))
    chief.leadership.lead()
    assert [pad.notes['chief'] for pad in pads.values()] == [task.incarnation] * 3
    assert chief.leadership.has_begun and pads[PS].notes['end'] == ''
    cluster = pads[PS].notes['cluster']
    pads[PS].notes = {'cluster': cluster}
    chief.leadership.lead()
    assert pads[PS].notes['chief'] == task.incarnation
    pads[CHIEF].notes = {'cluster': cluster}
    pads[PS].notes['chief'] = 'new'
    with pytest.raises(RuntimeError, match=f'Another chief leads {PS} at p0:1: it was started in'):
        chief.leadership.lead()
    assert pads[CHIEF].notes == {'cluster': cluster}


@pytest.mark.core
def test_a_chief_that_waited_looks_again_for_its_successor(task, chief, pads, monkeypatch):
    """It may have been cut off meanwhile, and another one been started in its place."""
    chief.leadership.has_begun = False
    for pad in pads.values():
        pad.write('chief', 'successor')
    replaced = RuntimeError('Two processes are the chief')
    monkeypatch.setattr(task, 'check_alone', mock.Mock(side_effect=replaced))
    with pytest.raises(RuntimeError, match='Two processes are the chief'):
        chief._meet(mock.Mock())
    assert [pad.notes['chief'] for pad in pads.values()] == ['successor'] * 3


@pytest.mark.core
@pytest.mark.parametrize('status', [None, 0], ids=['trains', 'has ended'])
def test_a_chief_that_waits_after_another_has_trained(
    status, task, chief, pads, clock, monkeypatch, tmp_path
):
    """The other one and its tasks may be gone. The chief before this one doesn't count."""
    folder = str(tmp_path)
    for before in ('older', task.incarnation):
        ending.write(folder, ending.Ending(before))
        chief.leadership.begin_training(folder)
        chief.leadership.fail_if_followed()
        ending.write(folder, ending.Ending(task.incarnation))
        clock.now += 30
        chief.leadership.fail_if_followed()

    ending.write(folder, ending.Ending('new'))
    if status is not None:
        ending.write(folder, ending.Ending('new', None, status))
    monkeypatch.setattr(reach, 'listens', lambda address: False)
    does = 'trains' if status is None else 'has ended with 0'
    with pytest.raises(RuntimeError, match=f'^Another chief {does} in {folder}: it was started in'):
        chief._meet(mock.Mock())
    assert clock.now == 1090


@pytest.mark.core
@pytest.mark.parametrize('has_begun', [False, True], ids=['begins', 'leads'])
def test_a_chief_waits_for_a_stopped_task(has_begun, task, chief, pads, clock, caplog, monkeypatch):
    """Until it goes on, and the log names it, also if the chief begins."""
    chief.leadership.has_begun = has_begun
    stopped = pads[PS]
    pads[PS] = Silent()
    clock.events[1040] = lambda: pads.update({PS: stopped})
    assert chief._meet(lambda: 'met') == 'met'
    assert clock.now == 1040
    line = f'Waiting for {PS} at p0:1 (there, but without an answer: is its process stopped, or'
    assert caplog.text.count(line) == 2


@pytest.mark.core
def test_a_chief_fails_if_another_program_answers(chief, pads, monkeypatch):
    """It doesn't wait for an answer of TensorFlow's there."""
    pads[PS] = Silent()
    another = RuntimeError('another program has that port')
    server = mock.Mock(side_effect=[None, None, another])
    monkeypatch.setattr(reach, 'check_server', server)
    with pytest.raises(RuntimeError, match='another program has that port'):
        chief._meet(mock.Mock())
    assert server.mock_calls[-1] == mock.call(PS, 'p0:1')


@pytest.mark.core
@pytest.mark.parametrize(
    'lost',
    [tf.errors.UnavailableError, tf.errors.DeadlineExceededError],
    ids=['goes', 'is stopped'],
)
def test_meeting_again(lost, chief, pads, clock, monkeypatch, tmp_path):
    """A task that goes or is stopped as all meet is waited for again, up to the limit."""
    lost = lost(None, None, 'Socket closed')
    checks = mock.Mock(side_effect=[lost, *[None] * 6])
    monkeypatch.setattr(chief, '_check_cluster', checks)
    assert chief._meet(mock.Mock(side_effect=[lost, 'met'])) == 'met'
    assert len(checks.mock_calls) == 7

    def check(name):
        clock.sleep(70)
        raise lost

    monkeypatch.setattr(chief, '_check_cluster', check)
    with pytest.raises(TimeoutError, match='did not all answer in 100 seconds'):
        chief._meet(mock.Mock())
    assert [path.name for path in tmp_path.iterdir()] == [ending.FILE]


@pytest.mark.core
def test_each_session_begins_as_all_meet(chief, pads, monkeypatch, tmp_path):
    """So a worker that was started again with another cluster is found."""
    differs = ValueError('TF_CONFIG differs')
    monkeypatch.setattr(chief, '_check_cluster', mock.Mock(side_effect=differs))
    chief._restarts = mock.Mock()
    chief._model_dir = str(tmp_path)
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match='TF_CONFIG differs'):
            chief.begin_session()
        chief._restarts.begin.assert_not_called()
        chief._check_cluster.side_effect = None
        chief.begin_session()
    chief._restarts.begin.assert_called_once_with()
    assert chief._restarts.pause.call_count == 2


@pytest.mark.core
def test_a_call_beyond_its_limit(task, chief, monkeypatch, tmp_path):
    """Without a limit of the user's, the error is somebody else's."""
    watching = mock.MagicMock()
    watching.__enter__.return_value.silent_tasks.return_value = f'{PS} is silent'
    monkeypatch.setattr(chief_module, 'Watch', lambda *args: watching)
    monkeypatch.setattr(chief, 'devices', lambda: {})
    task.server = mock.Mock(target='grpc://c0:1')
    late = tf.errors.DeadlineExceededError(None, None, 'Deadline Exceeded')

    def train(**options):
        session_config = tf.ConfigProto(**options)
        config = types.SimpleNamespace(model_dir=str(tmp_path), session_config=session_config)
        with chief.training(config):
            assert config._master == 'grpc://c0:1'
            raise late

    match = f'more than 1.5 seconds .operation_timeout_in_ms of the session config.. {PS} is silent'
    with pytest.raises(TimeoutError, match=match):
        train(operation_timeout_in_ms=1500)
    with pytest.raises(tf.errors.DeadlineExceededError):
        train()


@pytest.mark.core
def test_a_limit_of_calls_holds_for_closing_sessions(config_of):
    """By gRPC, also to the chief itself; without a limit, values don't go that way."""
    for seconds in (0, 60):
        session_config = tf.ConfigProto(operation_timeout_in_ms=1000 * seconds)
        config = config_of().replace(session_config=session_config)
        found = estimator_mgpu.Estimator(linear, config=config).config.session_config
        assert found.rpc_options.use_rpc_for_inprocess_master == bool(seconds)
        assert not session_config.HasField('rpc_options')


@pytest.mark.core
def test_a_task_that_is_lost_in_the_last_save(chief, tmp_path):
    """Training goes on; an error of anything else is raised."""
    chief._restarts = mock.Mock()
    lost = tf.errors.UnavailableError(None, None, 'Socket closed')
    session = mock.Mock()
    session.run.side_effect = [3, lost]  # the step, and what a listener asks for

    class Asks(tf.train.CheckpointSaverListener):
        def before_save(self, session, global_step_value):
            session.run('loss')

    def train():
        if chief._restarts.lost.called:
            return 'trained'
        with tf.Graph().as_default():
            tf.train.create_global_step()
            hook = tf.train.CheckpointSaverHook(str(tmp_path), 1, listeners=[Asks()])
            hook.begin()
            hook.end(session)

    assert chief.until_saved(train) == 'trained'
    chief._restarts.lost.assert_called_once_with(lost)
    other = tf.errors.UnavailableError(None, None, 'Socket closed')
    with pytest.raises(tf.errors.UnavailableError):
        chief.until_saved(mock.Mock(side_effect=other))


class Trained:
    """Stands for Estimator.train(), and notes what it's given."""

    def __call__(self, estimator, input_fn, hooks, steps, max_steps, saving_listeners):
        self.hooks, self.saving_listeners = hooks, saving_listeners


@pytest.mark.core
@pytest.mark.parametrize('saves', [None, 5])
def test_a_checkpoint_is_looked_at_first_if_there_are_any(config_of, monkeypatch, saves):
    """TensorFlow refuses a listener where nothing is saved."""
    trained = Trained()
    chief = mock.MagicMock(spec=Chief)
    chief.training.return_value.__enter__.return_value = 'hook', 'listener'
    chief.until_saved.side_effect = lambda train: train()
    monkeypatch.setattr(join, 'join', lambda config: chief)
    monkeypatch.setattr(
        'tensorflow_estimator.python.estimator.estimator.EstimatorV2.train',
        lambda *args: trained(*args),
    )
    config = config_of().replace(save_checkpoints_steps=saves, save_checkpoints_secs=None)
    estimator_mgpu.Estimator(linear, config=config, devices=1).train(lambda: None, ['own'])
    assert trained.hooks == ['own', 'hook']
    assert trained.saving_listeners == (['listener'] if saves else None)


@pytest.mark.core
def test_a_process_is_in_one_cluster(task, config_of, monkeypatch):
    monkeypatch.setattr(join, '_task', task)
    assert join.join(config_of('worker', 0)) is task
    with pytest.raises(RuntimeError, match='Start another process for another cluster'):
        join.join(config_of('worker', 0, {**TASKS, 'ps': ['p1:1']}))


@pytest.mark.core
def test_what_is_on_no_machine_goes_to_the_chief():
    there = '/job:worker/task:1/device:CPU:1'
    with tf.Graph().as_default() as graph:
        free = [tf.get_variable('v', [], use_resource=True), tf.constant(1.0)]
        with tf.device('/device:CPU:1'):
            second = tf.constant(1.0)
        with tf.device(there):
            far = tf.get_variable('far', [], use_resource=True)
        reads = tf.raw_ops.ReadVariableOp(resource=far.handle, dtype=tf.float32)
        with tf.colocate_with(far.handle.op):
            near = tf.constant(1.0)
        saving.place_on_chief(graph)
        assert [one.device for one in (*free, second)] == [CHIEF, CHIEF, f'{CHIEF}/device:CPU:1']
        assert (far.device, reads.device) == (there, '')
        assert near.device in ('', there)


def test_each_training_begins_without_the_tables_of_the_last(three_machines, task, chief):
    """Servers keep what a session has made, and a session of one machine begins with nothing."""
    task.server = types.SimpleNamespace(target=three_machines)
    chief._meet = mock.Mock(side_effect=lambda prepare: prepare())
    with tf.Graph().as_default():
        known = []
        for machine in (CHIEF, WORKER):
            with tf.device(f'{machine}/device:CPU:0'), tf.variable_scope(None, 'kept'):
                variable = tf.get_variable('v', [], use_resource=True)
            known.append(tf.is_variable_initialized(variable))
        initializer = tf.global_variables_initializer()
        with tf.Session(three_machines) as session:
            session.run(initializer)
        with tf.Session(three_machines) as session:
            assert session.run(known) == [True, True]
        found = chief.devices()
        for machine in (CHIEF, WORKER):
            assert found[machine] == [f'{machine}/device:CPU:{i}' for i in range(2)]
        with tf.Session(three_machines) as session:
            assert session.run(known) == [False, False]
    chief._meet.assert_called_once()


def test_machines_that_do_not_fit(three_machines, task, chief):
    """A script that doesn't train, another version, another TF_CONFIG."""
    task.name = CHIEF
    task.notes_on = lambda name: Notes(name, three_machines)

    def check(known=None, version_there=''):
        if known is not None:
            with task.notes_on(WORKER) as notes:
                notes.write('version', version_there)
                notes.write('cluster', json.dumps(known))
        chief._check_cluster(WORKER)

    with pytest.raises(RuntimeError, match=f"{WORKER} listens at w0:1, but .* doesn't call train"):
        check()
    for there, said in [('', '0.2 or older'), ('9.0', '9.0')]:
        match = f'Two versions .*: {CHIEF} has {version()}, and {WORKER} at w0:1 has {said}. Inst'
        with pytest.raises(RuntimeError, match=match):
            check({'another': 'format'}, there)
    with pytest.raises(ValueError, match=f'TF_CONFIG differs .*: {WORKER} has the cluster {{}}'):
        check({}, version())
    check(task.addresses, version())


def test_a_second_process_of_a_task(config_of, monkeypatch):
    """It's told by the address: what answers there isn't this process."""
    here, there = free_addresses(2)
    task = Task(config_of(cluster={'chief': [here], 'worker': ['w0:1']}))
    other = tf.train.Server({'chief': [there]}, 'chief', 0)
    monkeypatch.setattr(task_module, '_TWIN_PATIENCE', 1)
    monkeypatch.setattr(signal, 'signal', lambda *args: None)
    task.check_alone()
    task.addresses[CHIEF] = there
    match = f'Two processes are {CHIEF}: this one, and one that answers at {there}. End one'
    with pytest.raises(RuntimeError, match=match):  # It has just begun.
        task.check_alone()
    with Notes(CHIEF, other.target) as notes:
        notes.write('process', 'another')
    with pytest.raises(RuntimeError, match=match):
        task.check_alone()
    lost = tf.errors.UnavailableError(None, None, 'gone')
    monkeypatch.setattr(task, 'notes_on', mock.Mock(side_effect=lost))
    task.check_alone()  # It isn't known who that was.
