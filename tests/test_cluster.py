"""Several machines, as processes on this one: that they train as one device does, and how they end.

Each process is a machine with two logical CPU devices that runs cluster_script.py. It is forked
from one that has imported TensorFlow.
"""

import contextlib
import http.server
import io
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import cluster_script
import estimator_mgpu
from cluster_script import STEPS, told
from estimator_mgpu.cluster import ending
from forks import Popen
from towers import assert_close, free_addresses, saved_in

CHIEF, WORKER, PS = '/job:chief/task:0', '/job:worker/task:0', '/job:ps/task:0'
LIMIT = 300  # seconds for whatever a test waits for


def environment(**more):
    """Returns the environment variables of a machine."""
    sources = os.path.dirname(os.path.dirname(estimator_mgpu.__file__))
    fixed = {'CUDA_VISIBLE_DEVICES': '-1', 'TF_CPP_MIN_LOG_LEVEL': '2', 'PYTHONPATH': sources}
    return {**os.environ, **fixed, **more}


class Machine:
    """A process that runs the script: a fork, or, `within` another command, one of its own.

    Its environment has a proxy that nobody listens at.
    """

    def __init__(self, tf_config, model_dir, log, options, within=()):
        self.text = log.read_text
        proxy = {'http_proxy': 'http://127.0.0.1:9', 'no_proxy': 'example.org'}
        variables = environment(TF_CONFIG=json.dumps(tf_config), **proxy)
        command = [*within, sys.executable, cluster_script.__file__]
        command += [str(model_dir), json.dumps(options)]
        with open(log, 'w') as file:
            self.process = Popen(command, env=variables, stdout=file, stderr=file)

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

    def __init__(self, folder, **jobs):
        free = iter(free_addresses(sum(jobs.values())))
        self.jobs = {job: [next(free) for _ in range(count)] for job, count in jobs.items()}
        self.folder, self.model_dir = folder, folder / 'model'
        self.machines = []

    def listen_at(self, **hosts):
        """Gives the tasks of each job another host, before they are started."""
        for job, host in hosts.items():
            ports = [address.rpartition(':')[2] for address in self.jobs[job]]
            self.jobs[job] = [f'{host}:{port}' for port in ports]

    def start(self, job, index=0, within=(), **options):
        """Starts the script as a task, maybe by another command."""
        tf_config = {'cluster': self.jobs, 'task': {'type': job, 'index': index}}
        log = self.folder / f'{len([*self.folder.iterdir()])}_{job}_{index}.log'
        machine = Machine(tf_config, self.model_dir, log, options, within)
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


@pytest.fixture
def make(tmp_path):
    """Makes a cluster; whatever of it still runs at the end is killed."""
    made = []
    yield lambda **jobs: made.append(Cluster(tmp_path, **jobs)) or made[-1]
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
    """The script trains twice; a machine starts late, and the chief is killed and starts again.

    The new chief waits for a machine that is stopped for a while.
    """
    three = make(chief=1, worker=2)
    worker = three.start('worker', 0)
    worker.says(f'Waiting for {three.at("chief")}: the script has to run there, too')
    stops = [10, STEPS]
    killed = three.start('chief', stops=stops, sleep=0.3)
    killed.says(f'Waiting for {three.at("worker", 1)}: the script has to run there, too')
    late = three.start('worker', 1)
    killed.says('STEP 12\n')
    killed.kill()
    assert killed.told('STEP')[-1] < STEPS
    worker.send_signal(signal.SIGSTOP)
    chief = three.start('chief', stops=stops, closely=True)
    chief.says(f'Waiting for {three.at("worker")} (there, but without an answer')
    worker.send_signal(signal.SIGCONT)
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
    """train_and_evaluate() with each kind of task there is, where each tower's machine reads.

    Memory is too small after step 8, so training goes on from step 5 with two micro-batches.
    """
    four = make(chief=1, worker=1, ps=1)
    jobs = ('chief', 'worker', 'ps', 'evaluator')
    chief, *others = [four.start(job, parts=True, scarce_at=8) for job in jobs]
    for machine in (chief, *others):
        machine.ends()
    values, of_one = one_device
    four.comes_to(values)
    assert chief.told('STEP') == [*range(1, 9), *range(6, STEPS + 1)]
    assert 'each device runs 2 micro-batches' in chief.text()
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


def test_a_worker_that_is_back_before_the_next_step(make, one_device):
    """The chief, which is stopped meanwhile, asks the new process for a session of the old one."""
    three = make(chief=1, worker=2)
    workers = [three.start('worker', index) for index in range(2)]
    chief = three.start('chief', sleep=0.3)
    for step, index in [(2, 0), (6, 1), (11, 0), (16, 1)]:
        chief.says(f'STEP {step}\n')
        chief.send_signal(signal.SIGSTOP)
        workers[index].kill()
        workers[index] = three.start('worker', index)
        workers[index].says('listens on all addresses')
        chief.send_signal(signal.SIGCONT)
    three.hurry()
    for machine in (chief, *workers):
        machine.ends()
    assert chief.text().count('The session was lost: ') >= 4
    three.comes_to(one_device[0])


def test_a_worker_that_dies_in_the_last_save(make, one_device):
    three = make(chief=1, worker=2)
    chief = three.start('chief', stops=[STEPS - 1, STEPS], waits_to_save=True)
    worker, other = [three.start('worker', index) for index in range(2)]
    chief.says(f'SAVES {STEPS - 1}')
    worker.kill()
    (three.folder / 'save').touch()
    chief.says('The session was lost: ')
    worker = three.start('worker', 0)
    for machine in (chief, worker, other):
        machine.ends()
    steps = [*range(1, STEPS), *range(STEPS - 4, STEPS + 1)]
    assert chief.told('STEP') == steps
    three.comes_to(one_device[0])


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


@pytest.mark.parametrize('where', ['input_fn', 'generator', 'evaluate', 'predict', 'close'])
def test_sigterm_while_the_input_hangs(where, make):
    """The chief is still in the user's function, or a step waits for its batch."""
    two = make(chief=1, worker=1)
    chief, worker = two.start('chief', hangs=where, closely=True, stops=[3]), two.start('worker')
    chief.says('HANGS')
    chief.terminate()
    for machine in (chief, worker):
        machine.ends(143)
    assert re.search(
        'SIGTERM came .* the program is at .*cluster_script.py:.* in hang', chief.text()
    )


def test_sigterm_while_a_listener_hangs(make):
    """The checkpoint is complete, so nothing has to be waited for."""
    two = make(chief=1, worker=1)
    chief, worker = two.start('chief', hangs='after_save'), two.start('worker')
    chief.says('HANGS')
    start = time.monotonic()
    chief.terminate()
    chief.ends(143)
    assert time.monotonic() - start < 15  # 10 seconds, on a machine that is busy
    worker.ends(143)
    assert re.search('SIGTERM came 7 .*cluster_script.py:.* in hang', chief.text())
    assert saved_in(two.model_dir)['global_step'] == 5


def test_sigterm_while_the_script_cleans_up(make):
    """train() has saved and raised SystemExit; a `finally` around it doesn't end."""
    two = make(chief=1, worker=1)
    chief, worker = two.start('chief', hangs='cleanup', sleep=0.5), two.start('worker')
    chief.says('STEP')
    chief.terminate()
    chief.says('HANGS')
    for machine in (chief, worker):
        machine.ends(143)
    assert re.search('SIGTERM came .*cluster_script.py:.* in hang', chief.text())
    assert saved_in(two.model_dir)['global_step'] == chief.told('STEP')[-1]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM], ids=['Ctrl-C', 'SIGTERM'])
def test_ends_while_all_workers_are_stopped(number, make):
    """They are asked together whether they are there: one by one, that would take 12 seconds."""
    five = make(chief=1, worker=4)
    chief = five.start('chief', hangs='cleanup', stops=[2])
    workers = [five.start('worker', index) for index in range(4)]
    chief.says('HANGS')
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    chief.send_signal(number)
    chief.ends(-signal.SIGINT if number == signal.SIGINT else 143)
    assert time.monotonic() - start < 12


@pytest.mark.parametrize(
    'where, argument, status, last',
    [
        ('hook', 3, 3, ''),
        ('hook', 0, 0, ''),
        ('input_fn', 'Boo', 1, 'RuntimeError: The chief has failed: Boo'),
        ('script', 3, 3, ''),
    ],
)
def test_system_exit(where, argument, status, last, make):
    """Without sys.exit()."""
    two = make(chief=1, worker=1)
    chief, worker = two.start('chief', exits_in=where, status=argument), two.start('worker')
    chief.ends(status)
    assert worker.ends(status).endswith(last)


def test_processes_that_the_chief_forks(make, one_device):
    """SIGTERM ends them, and not the chief, whose end isn't theirs."""
    two = make(chief=1, worker=1)
    options = {'stops': [15, STEPS], 'sleep': 0.4, 'closely': True}
    chief, worker = two.start('chief', forks=True, **options), two.start('worker')
    for machine in (chief, worker):
        machine.ends()
    assert chief.told('FORKED') == [-signal.SIGTERM]
    two.comes_to(one_device[0])


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
        assert f'Waiting for {told}: the script has to run' in chiefs[1].text()
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
        'worker': two.start('worker', elsewhere=here, closely=True),
        'chief': two.start('chief', elsewhere=there, closely=True),
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


def test_nobody_ends_the_training_of_others(make, tmp_path, one_device):
    """Not another cluster whose TF_CONFIG lists one of its tasks, nor a second chief.

    A task that nobody leads, as only its own TF_CONFIG lists it, says so.
    """
    two = make(chief=1, worker=1)
    chief, worker = two.start('chief', sleep=1.5), two.start('worker')
    chief.says('STEP 1\n')
    other = make(chief=1, worker=2)
    other.jobs['worker'][0] = two.jobs['worker'][0]
    waits = other.start('chief')
    waits.says(f'Waiting for {other.at("worker", 1)}')
    twin = two.start('chief', elsewhere=other.jobs['worker'][1])
    twin.says(f'Another process is {CHIEF}, and answers at {two.jobs["chief"][0]}: waiting 30 s')
    # As it sleeps: TensorFlow makes another error of one that comes while it builds ops.
    twin.send_signal(signal.SIGINT)
    twin.ends(-signal.SIGINT)
    waits.terminate()
    waits.ends(143)
    stray = make(chief=1, worker=1)
    stray.jobs['chief'] = two.jobs['chief']
    stray.start('worker', closely=True).says(
        f'{two.at("chief")} (there, but its TF_CONFIG has another cluster: {{"{CHIEF}": '
    )
    two.hurry()
    for machine in (chief, worker):
        machine.ends()
    assert chief.told('STEP') == list(range(1, STEPS + 1))
    two.comes_to(one_device[0])


def test_a_task_of_another_cluster_in_the_place_of_one_that_died(make):
    """It goes on to serve its own chief, while the chief whose task died fails."""
    two = make(chief=1, worker=1)
    chief, worker = two.start('chief', sleep=0.3), two.start('worker')
    chief.says('STEP 2\n')
    worker.kill()
    other = make(chief=1, worker=1)
    other.jobs['worker'] = two.jobs['worker']
    stranger = other.start('worker')
    assert chief.ends(1).startswith('ValueError: TF_CONFIG differs between machines')
    other.model_dir = two.folder / 'other'
    other.start('chief', stops=[2]).ends()
    stranger.ends()


def test_worker_0_is_the_chief_of_workers(make):
    """Their hosts have names, for which gRPC would ask the proxy."""
    two = make(worker=2)
    two.listen_at(worker='localhost')
    chief, worker = [two.start('worker', index, stops=[2]) for index in range(2)]
    for machine in (chief, worker):
        machine.ends()
        assert 'TF_CONFIG names no chief, so worker 0 becomes it' in machine.text()
    assert chief.told('DEVICES') == [two_each(CHIEF, WORKER)]


def test_all_end_as_the_chief(make):
    """The evaluator, too: after the last checkpoint, however few steps that has.

    What a damaged file says of an earlier chief doesn't count.
    """
    three = make(chief=1, worker=1, ps=1)
    three.model_dir.mkdir()
    (three.model_dir / ending.FILE).write_text('garbage')
    jobs = ('chief', 'worker', 'ps', 'evaluator')
    chief, *others = [three.start(job, parts=True, stops=[10], status=3) for job in jobs[:3]]
    # It waits for more steps than the chief makes.
    evaluator = three.start('evaluator', parts=True)
    for machine in (chief, *others, evaluator):
        machine.ends(3)
    for machine, name in zip((*others, evaluator), (WORKER, PS, 'the evaluator')):
        assert f'The chief has ended with 3, and so does {name}.' in machine.text()
    assert 'Saving dict for global step 10:' in evaluator.text()


def test_a_worker_that_is_away_as_the_chief_ends(make):
    two = make(chief=1, worker=1)
    chief, worker = [two.start(job, stops=[2]) for job in ('chief', 'worker')]
    chief.says('EVALUATED')
    chief.send_signal(signal.SIGSTOP)
    worker.kill()
    chief.send_signal(signal.SIGCONT)
    chief.says(f'seconds for {WORKER} to come back')
    worker = two.start('worker')
    for machine in (chief, worker):
        machine.ends()


def test_a_worker_that_comes_back_after_the_chief_has_ended(make):
    """Nobody is there to tell it, but for the chief's file."""
    two = make(chief=1, worker=1)
    chief, worker = [two.start(job, stops=[2], closely=True) for job in ('chief', 'worker')]
    chief.says('EVALUATED')
    chief.send_signal(signal.SIGSTOP)
    worker.kill()
    chief.send_signal(signal.SIGCONT)
    chief.ends()
    worker = two.start('worker')
    worker.ends()
    assert f'The chief has ended with 0 while {WORKER} was away, which ends, too.' in worker.text()


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
    assert ' These are 2 lost sessions without a new step.' in chief.text()
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
    chief.terminate()
    chief.ends(143)
    assert f'has not ended: {three.at("worker")} has not answered for' in chief.text()
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


class Proxy:
    """Forwards connections to an address that may change.

    If what is at the address ends, connections to it stay open, and nothing comes of them.
    """

    def __init__(self, to):
        self.to = to
        self.server = socket.create_server(('127.0.0.1', 0))
        self.address = '{}:{}'.format(*self.server.getsockname())
        self.held = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):  # The server has been closed.
            while True:
                self.forward(self.server.accept()[0])

    def forward(self, near):
        host, port = self.to.split(':')
        try:
            far = socket.create_connection((host, int(port)))
        except OSError:
            near.close()
            return
        self.held.append(near)
        threading.Thread(target=self.send, args=[near, far], daemon=True).start()
        threading.Thread(target=self.send, args=[far, near], daemon=True).start()

    def send(self, source, to):
        with contextlib.suppress(OSError):
            data = source.recv(65536)
            while data:
                to.sendall(data)
                data = source.recv(65536)

    def close(self):
        self.server.close()
        for connection in self.held:
            connection.close()


@pytest.mark.parametrize('moves', ['worker', 'chief'])
def test_a_task_that_moves_behind_a_proxy(moves, make, one_device):
    """The proxy, at the task's address, holds the connections to where the task was before."""
    two = make(chief=1, worker=1)
    before, after = free_addresses(2)
    proxy = Proxy(before)
    two.jobs[moves] = [proxy.address]
    options = {'sleep': 0.3, 'closely': True}
    tasks = {job: two.start(job, **options) for job in two.jobs if job != moves}
    tasks[moves] = two.start(moves, elsewhere=before, **options)
    try:
        tasks['chief'].says('STEP 7\n')
        tasks[moves].kill()
        proxy.to = after
        two.hurry()
        tasks[moves] = two.start(moves, elsewhere=after, **options)
        for machine in tasks.values():
            machine.ends()
        two.comes_to(one_device[0])
    finally:
        proxy.close()


@pytest.mark.parametrize('away', ['worker', 'chief', 'chief that waits'])
def test_a_task_that_is_back_after_the_end(away, make, one_device):
    """Another process has taken its place, and all others have ended with 0."""
    two = make(chief=1, worker=1)
    job = away.split()[0]
    before, after = free_addresses(2)
    proxy = Proxy(before)
    two.jobs[job] = [proxy.address]
    options = {'sleep': 0.3, 'closely': True}
    old = two.start(job, elsewhere=before, **options)
    try:
        if away == 'chief that waits':
            old.says(f'Waiting for {two.at("worker")}')
            tasks = {}
        else:
            (other,) = {*two.jobs} - {job}
            tasks = {other: two.start(other, **options)}
            tasks.get('chief', old).says('STEP 7\n')
        old.send_signal(signal.SIGSTOP)
        proxy.to = after
        two.hurry()
        tasks[job] = two.start(job, elsewhere=after, **options)
        if 'worker' not in tasks:
            tasks['worker'] = two.start('worker', **options)
        for machine in tasks.values():
            machine.ends()
        old.send_signal(signal.SIGCONT)
        if job == 'worker':
            old.ends()
            assert f'The chief has ended with 0 while {WORKER} was away' in old.text()
        else:
            said = f'RuntimeError: Another chief has ended with 0 in {two.model_dir}: it was'
            assert old.ends(1).startswith(said)
        two.comes_to(one_device[0])
    finally:
        proxy.close()


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

    def resolve(self, names):
        """Has names resolve to addresses on all hosts: each has a file /etc/hosts of its own."""
        for host in self.hosts:
            folder = pathlib.Path('/etc/netns') / host
            folder.mkdir(parents=True, exist_ok=True)
            lines = ['127.0.0.1 localhost', *[f'{names[name]} {name}' for name in names]]
            (folder / 'hosts').write_text('\n'.join(lines) + '\n')

    def cable(self, host, state):
        """Cuts a host's cable (`down`), or mends it (`up`)."""
        self.ip(f'link set {self.hosts[host]} {state}')

    def address(self, number):
        return f'{self.network}.{number}'

    def close(self):
        for host in self.hosts:
            self.ip(f'link del {host}')  # The namespace would free its name only some time later.
            self.ip(f'netns del {host}')
            shutil.rmtree(f'/etc/netns/{host}', ignore_errors=True)
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
    two.listen_at(chief=here, worker=there)
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
    three.listen_at(chief=there, worker=here)
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


def test_a_chief_that_is_cut_off_while_it_waits_and_replaced(make, network, one_device):
    """Another process, with the same TF_CONFIG, answers at its address, and writes in model_dir."""
    first, second = network.host(), network.host()
    here, there = network.address(254), network.address(1)
    network.move(there, None, 0)
    two = make(chief=1, worker=1)
    two.listen_at(chief=there, worker=here)
    cut_off = two.start('chief', within=first, closely=True)
    cut_off.says(f'Waiting for {two.at("worker")}')
    network.cable(0, 'down')
    network.move(there, 0, 1)
    chief, worker = two.start('chief', within=second, sleep=1.5), two.start('worker')
    chief.says('STEP 1\n')
    network.cable(0, 'up')
    said = f'(Two processes are {CHIEF}: this one|Another chief trains in {two.model_dir}: it was)'
    assert re.match(f'RuntimeError: {said}', cut_off.ends(1))
    two.hurry()
    for machine in (chief, worker):
        machine.ends()
    assert chief.told('STEP') == list(range(1, STEPS + 1))
    two.comes_to(one_device[0])


@pytest.mark.parametrize('moves', ['worker', 'chief'])
def test_a_task_that_moves(moves, make, network, one_device):
    """Its machine is lost in a step, and closes no connection; it has another address elsewhere."""
    hosts = [network.host() for _ in range(3)]
    for host in range(3):
        network.move(network.address(host + 1), None, host)
    names = {'the-chief': network.address(1), 'the-worker': network.address(2)}
    network.resolve(names)
    two = make(chief=1, worker=1)
    two.listen_at(chief='the-chief', worker='the-worker')
    tasks = {
        job: two.start(job, within=host, sleep=0.3, closely=True)
        for job, host in zip(two.jobs, hosts)
    }
    tasks['chief'].says('STEP 7\n')
    network.cable([*two.jobs].index(moves), 'down')
    tasks.pop(moves)
    network.resolve({**names, f'the-{moves}': network.address(3)})
    two.hurry()
    tasks[moves] = two.start(moves, within=hosts[2], closely=True)
    for machine in tasks.values():
        machine.ends()
    two.comes_to(one_device[0])
