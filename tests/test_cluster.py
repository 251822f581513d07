"""Several machines, as processes on this one: that they train as one device does, and how they end.

Each process is a machine with two logical CPU devices that runs cluster_script.py. It is forked
from one that has imported TensorFlow.
"""

import contextlib
import http.server
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import cluster_script
import estimator_mgpu
from cluster_script import STEPS, told
from estimator_mgpu import devices
from estimator_mgpu.cluster import ending
from estimator_mgpu.cluster import task as cluster
from estimator_mgpu.cluster.notes import Notes
from forks import Forks
from models import adam, regression
from towers import assert_close, free_addresses, saved_in

CHIEF, WORKER, PS = '/job:chief/task:0', '/job:worker/task:0', '/job:ps/task:0'
LIMIT = 300  # seconds for whatever a test waits for
TASKS = {'worker': ['w0:1', 'w1:1'], 'ps': ['p0:1'], 'chief': ['c0:1']}


def environment(**more):
    """Returns the environment variables of a machine."""
    sources = os.path.dirname(os.path.dirname(estimator_mgpu.__file__))
    fixed = {'CUDA_VISIBLE_DEVICES': '-1', 'TF_CPP_MIN_LOG_LEVEL': '2', 'PYTHONPATH': sources}
    return {**os.environ, **fixed, **more}


class Machine:
    """A process that runs the script: a fork, or, `within` another command, one of its own."""

    def __init__(self, forks, tf_config, model_dir, log, options, within=()):
        self.text = log.read_text
        variables = environment(TF_CONFIG=json.dumps(tf_config))
        if within:
            command = [*within, sys.executable, cluster_script.__file__]
            command += [str(model_dir), json.dumps(options)]
            with open(log, 'w') as file:
                self.process = subprocess.Popen(command, env=variables, stdout=file, stderr=file)
        else:
            log.touch()
            self.process = forks.start([str(model_dir), options], variables, str(log))

    def poll(self):
        return self.process.poll()

    def send_signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        """Ends the process, and waits until its port is free."""
        self.send_signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def told(self, name):
        return told(self.text(), name)

    def says(self, text):
        """Waits for a text in the log."""
        end = time.monotonic() + LIMIT
        while text not in self.text():
            assert self.poll() is None and time.monotonic() < end, self.text()
            time.sleep(0.05)

    def ends(self, status=0):
        """Waits for the end, and returns the last line."""
        try:
            found = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            found = 'no end'
        assert found == status, self.text()
        return self.text().splitlines()[-1]


class Cluster:
    """The tasks of a TF_CONFIG, each on a free port, and what has been started of them."""

    def __init__(self, forks, folder, **jobs):
        free = iter(free_addresses(sum(jobs.values())))
        self.jobs = {job: [next(free) for _ in range(count)] for job, count in jobs.items()}
        self.forks = forks
        self.folder, self.model_dir = folder, folder / 'model'
        self.machines = []

    def start(self, job, index=0, within=(), **options):
        """Starts the script as a task, maybe by another command."""
        tf_config = {'cluster': self.jobs, 'task': {'type': job, 'index': index}}
        log = self.folder / f'{len([*self.folder.iterdir()])}_{job}_{index}.log'
        machine = Machine(self.forks, tf_config, self.model_dir, log, options, within)
        self.machines.append(machine)
        return machine

    def hurry(self):
        """Lets tasks sleep no more after their steps."""
        (self.folder / 'hurry').touch()

    def at(self, job, index=0):
        """A task as messages name it."""
        return f'/job:{job}/task:{index} at {self.jobs[job][index]}'

    def comes_to(self, expected):
        """Asserts the variables of the last checkpoint."""
        assert {'first', 'hidden3/Adam', 'last/Adam_1', 'global_step', 'beta2_power'} <= {*expected}
        assert expected['global_step'] == STEPS
        assert_close(saved_in(self.model_dir), expected, 1e-5)


@pytest.fixture(scope='module')
def forks():
    with contextlib.closing(Forks(environment())) as forks:
        yield forks


@pytest.fixture
def make(forks, tmp_path):
    """Makes a cluster; whatever of it still runs at the end is killed."""
    made = []
    yield lambda **jobs: made.append(Cluster(forks, tmp_path, **jobs)) or made[-1]
    for machine in [machine for one in made for machine in one.machines]:
        machine.kill()


@pytest.fixture(scope='module')
def one_device(tmp_path_factory):
    """What one device comes to: the variables, and what the script tells of a name."""
    model_dir = tmp_path_factory.mktemp('one')
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cluster_script.main(str(model_dir), devices=1)
    return saved_in(model_dir), lambda name: told(printed.getvalue(), name)


def two_each(*tasks):
    return [f'{task}/device:CPU:{i}' for task in tasks for i in range(2)]


THREE = two_each(CHIEF, WORKER, '/job:worker/task:1')


def test_training_equals_that_of_one_device(make, one_device):
    """The script trains twice; a machine starts late, and the chief is killed and starts again."""
    three = make(chief=1, worker=2)
    worker = three.start('worker', 0)
    worker.says(f'Waiting for {three.at("chief")}: the script has to be started there, too.')
    stops = [10, STEPS]
    killed = three.start('chief', stops=stops, sleep=0.3)
    killed.says(f'Waiting for {three.at("worker", 1)}: the script has to be started there, too.')
    late = three.start('worker', 1)
    killed.says('STEP 12\n')
    killed.kill()
    assert killed.told('STEP')[-1] < STEPS
    chief = three.start('chief', stops=stops)
    for machine in (chief, worker, late):
        machine.ends()
    values, of_one = one_device
    three.comes_to(values)
    # No step is lost beyond the last checkpoint, and none is applied twice.
    assert chief.told('STEP') == list(range(11, STEPS + 1))
    assert killed.told('DEVICES') == chief.told('DEVICES') == [THREE]
    assert {*THREE} <= {*chief.told('VARIABLES')[0].values()}
    # What comes after train() happens on the chief only, and there as on one device.
    assert killed.told('EVALUATED')[0]['global_step'] == 10
    assert chief.told('EVALUATED')[-1] == pytest.approx(*of_one('EVALUATED'), rel=1e-5)
    predicted = [np.array(tell('PREDICTED')) for tell in (chief.told, of_one)]
    assert_close(*predicted, 1e-5)
    for other in (worker, late):
        assert not other.told('EVALUATED') and not other.told('PREDICTED')


def test_variables_on_a_ps_and_an_evaluator(make, one_device):
    """train_and_evaluate() with each kind of task there is, where each tower's machine reads."""
    four = make(chief=1, worker=1, ps=1)
    jobs = ('chief', 'worker', 'ps', 'evaluator')
    chief, *others = [four.start(job, parts=True) for job in jobs]
    for machine in (chief, *others):
        machine.ends()
    values, of_one = one_device
    four.comes_to(values)
    assert chief.told('DEVICES') == [two_each(CHIEF, WORKER)]
    (on,) = chief.told('VARIABLES')
    assert on.pop('global_step') == CHIEF  # The model_fn doesn't make it.
    assert set(on.values()) == {'/job:ps/task:0/device:CPU:0'}
    events = sorted((four.model_dir / 'eval').iterdir())
    summaries = [e.summary.value for path in events for e in tf.train.summary_iterator(str(path))]
    found = {value.tag: value.simple_value for value in summaries[-2]}
    assert found['loss'] == pytest.approx(of_one('EVALUATED')[0]['loss'], rel=1e-5)


def test_a_lost_machine_that_never_comes_back(make):
    """The limit holds in the middle of training, too, and the chief's error ends all."""
    three = make(chief=1, worker=2)
    workers = [three.start('worker', index) for index in range(2)]
    for worker in workers:
        worker.says('Waiting for /job:chief/task:0')
    chief = three.start('chief', sleep=0.3, limit=2)
    chief.says('STEP 2\n')
    workers[1].kill()
    error = f'TimeoutError: {three.at("worker", 1)}: not reached in 2 seconds'
    assert chief.ends(1).startswith(error)
    assert f'Waiting for {three.at("worker", 1)}:' in chief.text()
    assert workers[0].ends(1).startswith(f'RuntimeError: The chief has failed: {error}')


def test_sigterm(make):
    """Sent to all, it lets a step and a last checkpoint be finished; all end.

    Here each task saves the variables that it has, as they aren't resource variables.
    """
    two = make(chief=1, worker=1)
    chief, worker = two.start('chief', sleep=0.3, v1=True), two.start('worker')
    chief.says('STEP 7\n')
    for machine in (worker, chief):
        machine.terminate()
    for machine in (chief, worker):
        machine.ends(143)
    reached = chief.told('STEP')[-1]
    assert 7 <= reached < STEPS and saved_in(two.model_dir)['global_step'] == reached
    assert not chief.told('EVALUATED')
    parts = two.model_dir.glob(f'model.ckpt-{reached}.data-*')
    assert len([*parts]) == 5  # of each device, and of the global step


def test_ports_of_others(make):
    """Another program at a worker's port, and a name that doesn't resolve, end in a sentence."""
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever).start()
    taken, nowhere = '{}:{}'.format(*server.server_address), 'no-such-host.invalid:2222'
    chiefs = []
    for address in (taken, nowhere):
        one = make(chief=1, worker=1)
        one.jobs['worker'] = [address]
        chiefs.append(one.start('chief', limit=2))
    try:
        told = f'RuntimeError: {WORKER} should be at {taken}, but another program has that port'
        assert chiefs[0].ends(1).startswith(told)
        told = f'{WORKER} at {nowhere} (the name no-such-host.invalid does not resolve)'
        assert chiefs[1].ends(1).startswith(f'TimeoutError: {told}: not reached in 2 seconds')
        assert f'Waiting for {told}: the script has to be' in chiefs[1].text()
    finally:
        server.shutdown()
        server.server_close()


def test_two_processes_that_are_one_task(make, one_device):
    """On other machines, with the same TF_CONFIG: they end, and disturb nobody."""
    two = make(chief=1, worker=1)
    chief, worker = two.start('chief', sleep=1.5), two.start('worker')
    chief.says('STEP 1\n')
    here, there = free_addresses(2)
    twins = {
        'worker': two.start('worker', elsewhere=here),
        'chief': two.start('chief', elsewhere=there),
    }
    for job, twin in twins.items():
        told = f'this one, and one that answers at {two.jobs[job][0]}. End one, or give'
        assert twin.ends(1).startswith(f'RuntimeError: Two processes are /job:{job}/task:0: {told}')
        assert not twin.told('STEP')
    two.hurry()
    for machine in (chief, worker):
        machine.ends()
    assert chief.told('STEP') == list(range(1, STEPS + 1))
    two.comes_to(one_device[0])


def test_all_end_as_the_chief(make):
    """The evaluator, too: after the last checkpoint, however few steps that has."""
    three = make(chief=1, worker=1, ps=1)
    jobs = ('chief', 'worker', 'ps', 'evaluator')
    chief, *others = [three.start(job, parts=True, stops=[10], status=3) for job in jobs[:3]]
    # It waits for more steps than the chief makes.
    evaluator = three.start('evaluator', parts=True)
    for machine in (chief, *others, evaluator):
        machine.ends(3)
    for machine, name in zip((*others, evaluator), (WORKER, PS, 'the evaluator')):
        assert f'The chief has ended with 3, and so does {name}.' in machine.text()
    assert 'Saving dict for global step 10:' in evaluator.text()


def test_the_evaluator_ends_by_the_error_of_the_chief(make):
    two = make(chief=1, worker=1)
    chief, worker = [two.start(job, parts=True, error='Boo') for job in ('chief', 'worker')]
    evaluator = two.start('evaluator', parts=True, stops=[STEPS + 1])
    assert chief.ends(1) == 'RuntimeError: Boo'
    for machine in (worker, evaluator):
        assert machine.ends(1) == 'RuntimeError: The chief has failed: RuntimeError: Boo'
    assert f'Saving dict for global step {STEPS}:' in evaluator.text()


def test_a_worker_that_another_one_cannot_reach(make):
    """The chief reaches both; what a step fails by is in the log, and ends all in the end."""
    three = make(chief=1, worker=2)
    far = three.jobs['worker'][1]
    chief, *workers = [
        three.start('chief', limit=10),
        three.start('worker', 0, unreached=[far]),
        three.start('worker', 1),
    ]
    error = chief.ends(1)
    assert re.match(r'TimeoutError: [0-9]+ sessions in [0-9]+ seconds made no new step', error)
    assert 'UnavailableError: ' in error and '/job:worker/replica:0/task:1' in error
    assert 'WARNING:tensorflow:The session was lost: UnavailableError: ' in chief.text()
    assert ' It is loss 2 without a new step.' in chief.text()
    for worker in workers:
        assert worker.ends(1) == f'RuntimeError: The chief has failed: {error}'


def test_a_worker_that_is_stopped_and_goes_on(make, one_device):
    """It's named, and the step goes on when it does; SIGTERM ends the chief when it doesn't."""
    three = make(chief=1, worker=2)
    stopped, other = three.start('worker', 0), three.start('worker', 1)
    chief = three.start('chief', sleep=0.3, step_limit=200, closely=True)
    chief.says('STEP 3\n')
    stopped.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    chief.says(f'{three.at("worker")} has not answered for ')
    assert time.monotonic() - start < 60
    stopped.send_signal(signal.SIGCONT)
    chief.says(f'{three.at("worker")} answers again.')
    reached = chief.told('STEP')[-1]
    chief.says(f'STEP {reached + 2}\n')
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(2)
    start = time.monotonic()
    chief.terminate()
    chief.ends(143)
    assert time.monotonic() - start < 30
    assert f'SIGTERM came while a step waited: {three.at("worker")}' in chief.text()
    other.ends(143)
    stopped.send_signal(signal.SIGCONT)
    stopped.kill()


def test_a_step_that_takes_too_long(make):
    three = make(chief=1, worker=2)
    stopped, other = three.start('worker', 0), three.start('worker', 1)
    chief = three.start('chief', sleep=0.3, step_limit=10, closely=True)
    chief.says('STEP 3\n')
    stopped.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    error = chief.ends(1)
    assert time.monotonic() - start < 60
    assert error.startswith('TimeoutError: A call of the session took more than 10.0 seconds')
    assert f'{three.at("worker")} has not answered for' in error
    assert other.ends(1) == f'RuntimeError: The chief has failed: {error}'


class Network:
    """A bridge, and hosts at it that have an address each, or take that of another one.

    Tests that run at the same time have networks of their own, of addresses that are for tests.
    """

    def __init__(self):
        self.name = f'em{os.getpid() % 100_000}'
        self.network = f'198.18.{os.getpid() % 256}'
        self.hosts = []
        self.ip(f'link add {self.name} type bridge')
        self.ip(f'addr add {self.network}.254/24 dev {self.name}')
        self.ip(f'link set {self.name} up')

    def ip(self, arguments):
        subprocess.run(['ip', *arguments.split()], check=True)

    def host(self):
        """Adds a host without an address; returns the words before a command that runs there."""
        host = f'{self.name}{len(self.hosts)}'
        self.hosts.append(host)
        self.ip(f'netns add {host}')
        self.ip(f'link add {host} type veth peer name eth netns {host}')
        self.ip(f'link set {host} master {self.name} up')
        self.ip(f'-n {host} link set lo up')
        self.ip(f'-n {host} link set eth up')
        return ['ip', 'netns', 'exec', host]

    def move(self, address, host, to):
        """Takes an address from one host, if it has it, and gives it to another one."""
        if host is not None:
            self.ip(f'-n {self.hosts[host]} addr del {address}/24 dev eth')
            self.ip(f'-n {self.hosts[host]} addr add {self.network}.{100 + host}/24 dev eth')
        self.ip(f'-n {self.hosts[to]} addr add {address}/24 dev eth')
        self.ip(f'neigh flush dev {self.name}')

    def cable(self, host, state):
        """Cuts a host's cable (`down`), or mends it (`up`)."""
        self.ip(f'link set {self.hosts[host]} {state}')

    def address(self, number):
        return f'{self.network}.{number}'

    def close(self):
        for host in self.hosts:
            self.ip(f'netns del {host}')
        self.ip(f'link del {self.name}')


@pytest.fixture
def network():
    if os.geteuid() or not shutil.which('ip'):
        pytest.skip('Networks are made by root, and by ip.')
    made = Network()
    yield made
    made.close()


def test_a_cable_that_is_cut_for_a_while(make, network, one_device):
    """No packet gets through, and nobody hears of that; then the step goes on."""
    host = network.host()
    here, there = network.address(254), network.address(1)
    network.move(there, None, 0)
    two = make(chief=1, worker=1)
    ports = [address.rpartition(':')[2] for tasks in two.jobs.values() for address in tasks]
    two.jobs = {'chief': [f'{here}:{ports[0]}'], 'worker': [f'{there}:{ports[1]}']}
    worker, chief = two.start('worker', within=host), two.start('chief', sleep=0.3, closely=True)
    chief.says('STEP 7\n')
    network.cable(0, 'down')
    start = time.monotonic()
    chief.says(f'{two.at("worker")} has not answered for ')
    assert time.monotonic() - start < 60
    network.cable(0, 'up')
    two.hurry()
    for machine in (chief, worker):
        machine.ends(0)
    assert f'{two.at("worker")} answers again.' in chief.text()
    two.comes_to(one_device[0])


def test_a_chief_that_was_stopped_and_replaced(make, network, one_device):
    """As it goes on, at another address, it ends, and leaves the training to the other one."""
    first, second = network.host(), network.host()
    here, there = network.address(254), network.address(1)
    network.move(there, None, 0)
    three = make(chief=1, worker=2)
    ports = [address.rpartition(':')[2] for tasks in three.jobs.values() for address in tasks]
    three.jobs = {
        'chief': [f'{there}:{ports[0]}'],
        'worker': [f'{here}:{port}' for port in ports[1:]],
    }
    workers = [three.start('worker', index) for index in range(2)]
    stopped = three.start('chief', within=first, sleep=0.3)
    stopped.says('STEP 7\n')
    stopped.send_signal(signal.SIGSTOP)
    network.move(there, 0, 1)
    chief = three.start('chief', within=second, sleep=1.5)
    chief.says('STEP 7\n')
    stopped.send_signal(signal.SIGCONT)
    stopped.ends(1)
    three.hurry()
    assert re.search('Another chief leads /job:worker/task:[01] at ', stopped.text())
    for machine in (chief, *workers):
        machine.ends(0)
    three.comes_to(one_device[0])


# From here on everything is in this process.


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
    found = cluster.addresses(config_of('worker', 1, {**TASKS, 'evaluator': ['e0:1']}))
    assert [*found] == [CHIEF, WORKER, '/job:worker/task:1', PS]  # An evaluator is none of them.
    assert [*found.values()] == ['c0:1', 'w0:1', 'w1:1', 'p0:1']
    config = estimator_mgpu.Estimator(linear, config=config_of('worker', 1), devices=2).config
    assert config.cluster_spec.as_dict() == {'chief': ['w1:1']}
    assert config.is_chief and not config.master and not config.evaluation_master
    assert not config.session_config.device_filters
    assert config.session_config.device_count['CPU'] == 2
    assert config.session_config.graph_options.rewrite_options.disable_meta_optimizer
    one = estimator_mgpu.Estimator(linear, config=config_of(cluster={'chief': ['c0:1']}))
    assert one._joins is None  # One machine is no cluster.


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
            cluster.Task(config)


class Clock:
    """Stands for the module time: sleeping takes no time."""

    now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def task(config_of, monkeypatch):
    """A worker that has no server, and to which no other task listens."""
    monkeypatch.setattr(tf.train, 'Server', lambda *args, **kwargs: None)
    monkeypatch.setattr(signal, 'signal', lambda *args: None)
    monkeypatch.setattr(cluster.Task, '_check_alone', lambda self: None)
    monkeypatch.setattr(cluster.reach, 'listens', lambda address: False)
    monkeypatch.setattr(cluster, 'time', Clock())
    monkeypatch.setattr(socket, 'getaddrinfo', mock.Mock())  # Any name resolves.
    return cluster.Task(config_of('worker', 0).replace(session_creation_timeout_secs=100))


@pytest.mark.core
def test_waiting(task, caplog, monkeypatch):
    """What is waited for is said each half a minute, up to the limit."""
    with pytest.raises(TimeoutError, match='^/job:ps/task:0 at p0:1: not reached in 100 seconds'):
        task.wait([PS])
    line = 'Waiting for /job:ps/task:0 at p0:1: the script has to be started there, too.'
    assert [m for m in caplog.messages if 'Waiting' in m] == [line] * 4
    assert cluster.time.now == 1101
    with monkeypatch.context() as context:
        context.setattr(socket, 'getaddrinfo', mock.Mock(side_effect=socket.gaierror))
        with pytest.raises(TimeoutError, match=r'p0:1 \(the name p0 does not resolve\): not reach'):
            task.wait([PS])
    monkeypatch.setattr(cluster.reach, 'listens', lambda address: address != 'w1:1')
    caplog.clear()
    task.wait(ended=lambda: cluster.time.now > 1210)
    assert '/job:worker/task:1 at w1:1: ' in caplog.text and 'p0:1' not in caplog.text
    with pytest.raises(SystemExit, match='143'):  # It neither trains nor serves.
        task._terminate(signal.SIGTERM, None)
    with pytest.raises(SystemExit, match='143'):
        task.wait()
    monkeypatch.setattr(cluster.reach, 'listens', lambda address: True)
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
    monkeypatch.setattr(cluster.reach, 'listens', lambda address: True)
    monkeypatch.setattr(task, 'notes_on', lambda name: Silent() if name == PS else Pad())
    task.wait()
    with pytest.raises(TimeoutError, match=f'^{PS} at p0:1 .there, but without an answer.*100 sec'):
        task.wait(answering=True)
    assert caplog.text.count('is its process stopped?') == 4 and CHIEF not in caplog.text
    assert not task.waits


@pytest.fixture
def serves(task, monkeypatch):
    """Gives the task, which is about to serve, notes of its own, and others theirs."""

    def prepare(own, others=None):
        monkeypatch.setattr(cluster, 'Notes', lambda name, target, seconds: own)
        monkeypatch.setattr(cluster.reach, 'listens', lambda address: True)
        monkeypatch.setattr(task, 'notes_on', lambda name: others or Pad())
        task.server = mock.Mock()

    return prepare


@pytest.mark.core
def test_a_task_that_got_sigterm_serves_on_for_a_while(task, serves, monkeypatch):
    pad = Pad()  # The chief has said nothing.
    serves(pad)
    sleep = cluster.time.sleep

    def sleep_and_terminate(seconds):
        sleep(seconds)
        if cluster.time.now == 1050:
            task._terminate(signal.SIGTERM, None)

    cluster.time.sleep = sleep_and_terminate
    with pytest.raises(SystemExit, match='143'):
        task.serve()
    assert cluster.time.now == 1071
    assert json.loads(pad.read('cluster')) == task.addresses
    monkeypatch.setattr(cluster.reach, 'listens', lambda address: address != 'c0:1')
    task.terminated = 0
    with pytest.raises(TimeoutError, match=f'^{CHIEF} at c0:1: not reached'):
        task.serve()


@pytest.mark.core
def test_a_chief_that_is_stopped_is_not_waited_for_for_ever(task, serves):
    serves(Pad(), Silent())
    with pytest.raises(TimeoutError, match=f'^{CHIEF} at c0:1 .there, but without an answer'):
        task.serve()
    assert 1000 + 30 + 100 < cluster.time.now < 1000 + 30 + 110


@pytest.mark.core
def test_whose_end_it_is(task, serves):
    """A task ends as the chief does that leads it now."""
    pad = Pad(chief='new', end=ending_of('old', 'Boo', 1))
    serves(pad)
    sleep = cluster.time.sleep

    def sleep_and_end(seconds):
        sleep(seconds)
        if cluster.time.now == 1050:
            pad.write('end', ending_of('new', status=7))

    cluster.time.sleep = sleep_and_end
    with pytest.raises(SystemExit, match='7'):
        task.serve()
    assert cluster.time.now == 1050


@pytest.fixture
def pads(task, monkeypatch, tmp_path):
    """The notes of other tasks, each of which is there; the task leads them."""
    pads = {name: Pad(chief=task.incarnation) for name in task.others}
    monkeypatch.setattr(cluster.reach, 'listens', lambda address: True)
    monkeypatch.setattr(task, 'notes_on', lambda name: pads[name])
    task._model_dirs = [str(tmp_path)]
    ending.leave(str(tmp_path), ending.Ending(task.incarnation))
    return pads


@pytest.mark.core
def test_all_are_told_of_the_end(task, pads, monkeypatch, tmp_path):
    """Also if one isn't there, doesn't answer, or has been started again."""
    pads[PS] = Silent()
    pads['/job:worker/task:1'] = Pad()
    monkeypatch.setattr(task, '_exit', 3)
    task._end()
    told = ending_of(task.incarnation, status=3)
    for name in (CHIEF, '/job:worker/task:1'):
        assert pads[name].notes == {'chief': task.incarnation, 'end': told}
    assert ending.read(str(tmp_path)) == (task.incarnation, None, 3)
    task.terminated = 1
    task._end()
    assert ending.read(str(tmp_path)).status == 143
    monkeypatch.setattr(sys, 'last_value', ValueError('Boo'), raising=False)
    task._end()
    assert ending.read(str(tmp_path)) == (task.incarnation, 'ValueError: Boo', 1)
    monkeypatch.setattr(cluster.reach, 'listens', lambda address: address != 'c0:1')
    task.tell(None, 5, but=['/job:worker/task:1'])
    statuses = [json.loads(pads[name].read('end'))[2] for name in (CHIEF, '/job:worker/task:1')]
    assert statuses == [1, 1]


@pytest.mark.core
def test_a_chief_that_was_replaced_tells_nobody(task, pads, tmp_path):
    before = ending.Ending('new')
    ending.leave(str(tmp_path), before)
    task.leads = True
    pads[PS].notes['chief'] = 'new'
    task.tell('Boo', 1)
    assert not any(pad.read('end') for pad in pads.values())
    pads[PS].notes['chief'] = ''
    task.tell('Boo', 1)
    assert ending.read(str(tmp_path)) == before  # It hasn't left a note on any task yet.


@pytest.mark.core
def test_a_chief_that_fails_before_it_leads(task, pads):
    """Those whom another process led until that was killed are told, too."""
    for pad in pads.values():
        pad.notes['chief'] = 'killed'
    task.tell('Boo', 1)
    told = {'chief': task.incarnation, 'end': ending_of(task.incarnation, 'Boo', 1)}
    assert [pad.notes for pad in pads.values()] == [told] * 3


@pytest.mark.core
def test_who_leads(task, pads):
    """A chief that begins takes over; later it leads what was started again, and nobody else's."""
    pads[PS].notes.update(chief='old', end=ending_of('old'))
    task._lead()
    assert [pad.notes['chief'] for pad in pads.values()] == [task.incarnation] * 3
    assert task.leads and pads[PS].notes['end'] == ''
    pads[PS].notes.clear()
    task._lead()
    assert pads[PS].notes['chief'] == task.incarnation
    pads[CHIEF].notes.clear()
    pads[PS].notes['chief'] = 'new'
    with pytest.raises(RuntimeError, match=f'Another chief leads {PS} at p0:1: it was started in'):
        task._lead()
    assert not pads[CHIEF].notes


@pytest.mark.core
def test_meeting_again(task, pads, monkeypatch, tmp_path):
    """A task that goes as all meet is waited for again, up to the limit, by a chief that leads."""
    gone = tf.errors.UnavailableError(None, None, 'Socket closed')
    checks = mock.Mock(side_effect=[gone, None, None, None])
    monkeypatch.setattr(task, '_check', checks)
    with pytest.raises(tf.errors.UnavailableError):
        task._meet()
    task.leads = True
    checks.side_effect = [gone, None, None, None]
    task._meet()
    assert len(checks.mock_calls) == 5

    def check(name):
        cluster.time.sleep(70)
        raise gone

    monkeypatch.setattr(task, '_check', check)
    with pytest.raises(TimeoutError, match='did not all answer in 100 seconds'):
        task._meet()
    assert [path.name for path in tmp_path.iterdir()] == [ending.FILE]


@pytest.mark.core
def test_each_session_begins_as_all_meet(task, pads, monkeypatch, tmp_path):
    """So a worker that was started again with another cluster is found."""
    monkeypatch.setattr(cluster, '_joined', [task])
    monkeypatch.setattr(task, '_check', mock.Mock(side_effect=ValueError('TF_CONFIG differs')))
    task._restarts, task._model_dir = mock.Mock(), str(tmp_path)
    with tf.Graph().as_default():
        scaffold = cluster.hold(tf.train.Scaffold(init_op=tf.no_op()))
        with pytest.raises(ValueError, match='TF_CONFIG differs'):
            scaffold.finalize()
        task._restarts.begin.assert_not_called()
        task._check.side_effect = None
        scaffold.finalize()
    task._restarts.begin.assert_called_once_with()
    assert task._restarts.pause.call_count == 2


@pytest.mark.core
def test_a_call_beyond_its_limit(task, monkeypatch, tmp_path):
    """Without a limit of the user's, the error is somebody else's."""
    watching = mock.MagicMock()
    watching.__enter__.return_value.silent.return_value = f'{PS} is silent'
    monkeypatch.setattr(cluster, 'Watch', lambda task: watching)
    monkeypatch.setattr(task, 'devices', lambda: {})
    task.server = mock.Mock(target='grpc://c0:1')
    late = tf.errors.DeadlineExceededError(None, None, 'Deadline Exceeded')

    def train(**options):
        session_config = tf.ConfigProto(**options)
        config = types.SimpleNamespace(model_dir=str(tmp_path), session_config=session_config)
        with task.training(config):
            assert config._master == 'grpc://c0:1'
            raise late

    match = f'more than 1.5 seconds .operation_timeout_in_ms of the session config.. {PS} is silent'
    with pytest.raises(TimeoutError, match=match):
        train(operation_timeout_in_ms=1500)
    with pytest.raises(tf.errors.DeadlineExceededError):
        train()
    assert task._model_dirs == [str(tmp_path)]
    assert ending.read(str(tmp_path)) == (task.incarnation, None, None)


@pytest.mark.core
def test_a_limit_of_calls_holds_for_closing_sessions(config_of):
    """By gRPC, also to the chief itself; without a limit, values don't go that way."""
    for seconds in (0, 60):
        session_config = tf.ConfigProto(operation_timeout_in_ms=1000 * seconds)
        config = config_of().replace(session_config=session_config)
        found = estimator_mgpu.Estimator(linear, config=config).config.session_config
        assert found.rpc_options.use_rpc_for_inprocess_master == bool(seconds)
        assert not session_config.HasField('rpc_options')


class Trained:
    """Stands for Estimator.train(), and notes what it's given."""

    def __call__(self, estimator, input_fn, hooks, steps, max_steps, saving_listeners):
        self.hooks, self.saving_listeners = hooks, saving_listeners


@pytest.mark.core
@pytest.mark.parametrize('saves', [None, 5])
def test_a_checkpoint_is_looked_at_first_if_there_are_any(config_of, monkeypatch, saves):
    """TensorFlow refuses a listener where nothing is saved."""
    trained = Trained()
    task = mock.MagicMock()
    task.name = CHIEF
    task.training.return_value.__enter__.return_value = 'hook', 'listener'
    monkeypatch.setattr(cluster, 'join', lambda config: task)
    monkeypatch.setattr(
        'tensorflow_estimator.python.estimator.estimator.EstimatorV2.train',
        lambda *args: trained(*args),
    )
    config = config_of().replace(save_checkpoints_steps=saves, save_checkpoints_secs=None)
    estimator_mgpu.Estimator(linear, config=config, devices=1).train(lambda: None, ['own'])
    assert trained.hooks == ['own', 'hook']
    assert trained.saving_listeners == (['listener'] if saves else None)


@pytest.mark.core
def test_exits_are_noted(task, monkeypatch):
    monkeypatch.setattr(sys, 'exit', sys.exit)
    task._note_exit()
    with pytest.raises(SystemExit, match='3'):
        sys.exit(3)
    assert task._exit == 3
    with ThreadPoolExecutor() as pool, pytest.raises(SystemExit, match='4'):
        pool.submit(sys.exit, 4).result()
    assert task._exit == 3


@pytest.mark.core
def test_a_process_is_in_one_cluster(task, config_of, monkeypatch):
    monkeypatch.setattr(cluster, '_joined', [task])
    assert cluster.join(config_of('worker', 0)) is task
    with pytest.raises(RuntimeError, match='Start another process for another cluster'):
        cluster.join(config_of('worker', 0, {**TASKS, 'ps': ['p1:1']}))


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
        cluster.pin(graph)
        assert [one.device for one in (*free, second)] == [CHIEF, CHIEF, f'{CHIEF}/device:CPU:1']
        assert (far.device, reads.device) == (there, '')
        assert near.device in ('', there)


def has(*names):
    return {task: [f'{task}/device:{name}' for name in some.split()] for task, some in names}


GPUS = has((CHIEF, 'CPU:0 GPU:0'), (WORKER, 'CPU:0 GPU:0 GPU:1'), (PS, 'CPU:0 GPU:0'))
CPUS = has((CHIEF, 'CPU:0 CPU:1'), (WORKER, 'CPU:0 CPU:1'), (PS, 'CPU:0'))


@pytest.mark.core
@pytest.mark.parametrize(
    'given, machines, chief, worker',
    [
        (None, GPUS, 'GPU:0', 'GPU:0 GPU:1'),
        (1, GPUS, 'GPU:0', 'GPU:0'),
        ('cpu:0', GPUS, 'CPU:0', 'CPU:0'),
        (None, CPUS, 'CPU:0', 'CPU:0'),
        (2, CPUS, 'CPU:0 CPU:1', 'CPU:0 CPU:1'),
    ],
)
def test_devices_of_machines(given, machines, chief, worker):
    """Those of each machine, in the order of tasks, and none of a ps."""
    expected = has((CHIEF, chief), (WORKER, worker))
    assert devices.resolve(given, machines) == expected[CHIEF] + expected[WORKER]


@pytest.mark.core
def test_devices_that_a_machine_lacks():
    lacks = f"'{CHIEF}/device:GPU:1', but that machine has {CHIEF}/device"
    with pytest.raises(ValueError, match=lacks):
        devices.resolve(2, GPUS)
    with pytest.raises(ValueError, match="are those of each machine, without its job: .'/device"):
        estimator_mgpu.Estimator(linear, devices='/job:worker/task:7/cpu:0')


@pytest.mark.core
def test_relay():
    """As on the home's machine, if there is such a device, and else the first."""
    both = CPUS[CHIEF] + CPUS[WORKER]
    assert devices.relay(both, both[2], both[1]) == both[3]
    assert devices.relay(both[:3], both[2], both[1]) == both[2]


def test_each_training_begins_without_the_tables_of_the_last(three_machines, task):
    """Servers keep what a session has made, and a session of one machine begins with nothing."""
    task.server = types.SimpleNamespace(target=three_machines)
    task._meet = mock.Mock()
    with tf.Graph().as_default():
        known = []
        for machine in (CHIEF, WORKER):
            with tf.device(CPUS[machine][0]), tf.variable_scope(None, 'kept'):
                variable = tf.get_variable('v', [], use_resource=True)
            known.append(tf.is_variable_initialized(variable))
        initializer = tf.global_variables_initializer()
        with tf.Session(three_machines) as session:
            session.run(initializer)
        with tf.Session(three_machines) as session:
            assert session.run(known) == [True, True]
        found = task.devices()
        assert found[CHIEF] == CPUS[CHIEF] and found[WORKER] == CPUS[WORKER]
        with tf.Session(three_machines) as session:
            assert session.run(known) == [False, False]
    task._meet.assert_called_once_with()


def test_machines_that_do_not_fit(three_machines, task, monkeypatch):
    """A port of something else, another TF_CONFIG."""
    task.name = CHIEF
    task.notes_on = lambda name, seconds=3: Notes(name, three_machines, seconds)
    server = mock.Mock(side_effect=[False, True, True, True])  # It has to be waited for again.
    monkeypatch.setattr(cluster.reach, 'check_server', server)
    monkeypatch.setattr(task, 'wait', mock.Mock())

    def check(known=None):
        if known is not None:
            with task.notes_on(WORKER) as notes:
                notes.write('cluster', json.dumps(known))
        task._check(WORKER)

    with pytest.raises(RuntimeError, match=f"{WORKER} listens at w0:1, but .* doesn't call train"):
        check()
    with pytest.raises(ValueError, match=f'TF_CONFIG differs .*: {WORKER} has the cluster {{}}'):
        check({})
    check(task.addresses)
    task.wait.assert_called_once_with()
    assert server.mock_calls == [mock.call(WORKER, 'w0:1')] * 4
