"""Several machines, as processes on this one: that they train as one device does, and how they end.

Each process is a machine with two logical CPU devices that runs cluster_script.py.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from cluster_script import STEPS, told
from estimator_mgpu import cluster as cluster_lib
from estimator_mgpu import compat, devices

LIMIT = 60  # seconds for whatever a test waits for


class Machine:
    """A process that runs the script."""

    def __init__(self, tf_config, model_dir, log, cwd, **options):
        sources = os.path.dirname(os.path.dirname(estimator_mgpu.__file__))
        given = {'CUDA_VISIBLE_DEVICES': '-1', 'TF_CPP_MIN_LOG_LEVEL': '2', 'PYTHONPATH': sources}
        if tf_config:
            given['TF_CONFIG'] = json.dumps(tf_config)
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'cluster_script.py')
        self.log = log
        with open(log, 'w') as file:
            self.process = subprocess.Popen(
                [sys.executable, script, str(model_dir), json.dumps(options)],
                env={**os.environ, **given},
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=cwd,
            )

    def text(self):
        return self.log.read_text()

    def last_line(self):
        return self.text().splitlines()[-1]

    def told(self, name):
        return told(self.text(), name)

    def says(self, text, times=1):
        """Waits for a text in the log."""
        end = time.monotonic() + LIMIT
        while self.text().count(text) < times:
            assert self.process.poll() is None and time.monotonic() < end, self.text()
            time.sleep(0.05)

    def kill(self):
        """As it is when a machine breaks down."""
        self.process.kill()
        self.process.wait()

    def ends(self, status=0):
        try:
            found = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            found = 'no end'
        assert found == status, self.text()


class Cluster:
    """The tasks of a TF_CONFIG, each on a free port, and what has been started of them."""

    def __init__(self, folder, **jobs):
        sockets = {job: [socket.socket() for _ in range(count)] for job, count in jobs.items()}
        for one in sum(sockets.values(), []):
            one.bind(('127.0.0.1', 0))
        self.jobs = {
            job: [f'127.0.0.1:{one.getsockname()[1]}' for one in some]
            for job, some in sockets.items()
        }
        for one in sum(sockets.values(), []):
            one.close()
        self.folder = folder
        self.model_dir = folder / 'model'
        self.machines = []

    def start(self, job=None, index=0, *, jobs=None, model_dir=None, cwd=None, **options):
        """Starts the script as a task, or without a cluster."""
        task = {'type': job, 'index': index}
        tf_config = job and {'cluster': jobs or self.jobs, 'task': task}
        log = self.folder / f'{len(self.machines)}_{job}_{index}.log'
        machine = Machine(
            tf_config, model_dir or self.model_dir, log, cwd or self.folder, **options
        )
        self.machines.append(machine)
        return machine

    def at(self, job, index=0):
        """A task as messages name it."""
        return f'/job:{job}/task:{index} at {self.jobs[job][index]}'

    def values(self):
        """The variables of the last checkpoint."""
        reader = tf.train.load_checkpoint(str(self.model_dir))
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


@pytest.fixture
def make(tmp_path):
    """Makes clusters; whatever of them still runs at the end is killed."""
    made = []

    def one(**jobs):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Cluster(folder, **jobs))
        return made[-1]

    yield one
    for cluster in made:
        for machine in cluster.machines:
            machine.kill()


@pytest.fixture(scope='module')
def one_device(tmp_path_factory):
    """What one device comes to: the variables, and the process."""
    alone = Cluster(tmp_path_factory.mktemp('one'))
    machine = alone.start(devices=1)
    try:
        machine.ends()
    finally:
        machine.kill()
    return alone.values(), machine


def assert_same(ours, one):
    """Asserts equal variables: within 1e-5 of the largest entry of each."""
    assert ours.keys() == one.keys()
    assert {'first', 'first/Adam', 'second/Adam_1', 'global_step', 'beta2_power'} <= ours.keys()
    assert ours['global_step'] == STEPS
    for name, expected in one.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(ours[name], expected, 1e-5, 1e-5 * scale, err_msg=name)


def devices_of(*tasks):
    return [f'/job:{task}/device:CPU:{i}' for task in tasks for i in range(2)]


THREE = devices_of('chief/task:0', 'worker/task:0', 'worker/task:1')


def test_training_equals_that_of_one_device(make, one_device):
    """The script trains twice, and one machine starts late."""
    three = make(chief=1, worker=2)
    chief, worker = three.start('chief', stops=[10, STEPS]), three.start('worker', 0)
    chief.says(f'Waiting for {three.at("worker", 1)}: the script has to be started there, too.')
    late = three.start('worker', 1)
    for machine in (chief, worker, late):
        machine.ends()
    values, one = one_device
    assert_same(three.values(), values)
    assert chief.told('DEVICES') == [THREE, THREE]
    # What comes after train() happens on the chief only, and there as on one device.
    first, last = chief.told('EVALUATED')
    assert first['global_step'] == 10
    assert last == pytest.approx(*one.told('EVALUATED'), rel=1e-5)
    np.testing.assert_allclose(chief.told('PREDICTED'), one.told('PREDICTED'), 1e-5, 1e-5)
    for other in (worker, late):
        assert not other.told('EVALUATED') and not other.told('PREDICTED')


def test_variables_on_a_ps_and_an_evaluator(make, one_device):
    """train_and_evaluate() with each kind of task there is."""
    four = make(chief=1, worker=1, ps=1)
    jobs = ('chief', 'worker', 'ps', 'evaluator')
    chief, *others = [four.start(job, and_evaluate=True) for job in jobs]
    for machine in (chief, *others):
        machine.ends()
    values, one = one_device
    assert_same(four.values(), values)
    assert chief.told('DEVICES') == [devices_of('chief/task:0', 'worker/task:0')]
    (on,) = chief.told('VARIABLES')
    assert on.pop('global_step') == '/job:chief/task:0'  # The model_fn doesn't make it.
    assert set(on.values()) == {'/job:ps/task:0/device:CPU:0'}
    events = sorted((four.model_dir / 'eval').iterdir())
    summaries = [e.summary.value for path in events for e in tf.train.summary_iterator(str(path))]
    found = {value.tag: value.simple_value for value in summaries[-2]}
    assert found['loss'] == pytest.approx(one.told('EVALUATED')[0]['loss'], rel=1e-5)


def test_killed_machines_that_start_again(make, one_device):
    """No step is lost beyond the last checkpoint, and none is applied twice."""
    three = make(chief=1, worker=2)
    chief = three.start('chief', sleep=0.3)
    workers = [three.start('worker', index) for index in range(2)]
    chief.says('STEP 7\n')
    waiting = f'Waiting for {three.at("worker", 1)}:'
    before = chief.text().count(waiting)
    workers[1].kill()
    chief.says(waiting, before + 1)
    workers[1] = three.start('worker', 1)
    chief.says('STEP 7\n', 2)  # From the checkpoint at 5 on.
    chief.says('STEP 12\n')
    chief.kill()
    assert chief.told('STEP')[-1] < STEPS
    chief = three.start('chief')
    for machine in (chief, *workers):
        machine.ends()
    values, one = one_device
    assert_same(three.values(), values)
    assert chief.told('STEP') == list(range(11, STEPS + 1))
    assert chief.told('DEVICES') == [THREE]
    assert chief.told('EVALUATED')[0] == pytest.approx(one.told('EVALUATED')[0], rel=1e-5)


def test_machines_that_never_start(make):
    """Each ends by its own limit, or with the chief's error, and names what it lacks."""
    three, orphan = make(chief=1, worker=2), make(chief=1, worker=1)
    lonely = orphan.start('worker', limit=1)
    worker = three.start('worker', 0)
    worker.says('Waiting for /job:chief/task:0')
    chief = three.start('chief', limit=1)
    chief.ends(1)
    error = f'TimeoutError: {three.at("worker", 1)}: not reached in 1 seconds'
    assert chief.last_line().startswith(error)
    assert f'Waiting for {three.at("worker", 1)}:' in chief.text()
    worker.ends(1)
    assert worker.last_line().startswith(f'RuntimeError: The chief has failed: {error}')
    lonely.ends(1)
    error = f'TimeoutError: {orphan.at("chief")}: not reached in 1 seconds'
    assert lonely.last_line().startswith(error)


def test_a_lost_machine_that_never_comes_back(make):
    """The limit holds in the middle of training, too."""
    two = make(chief=1, worker=1)
    chief, worker = two.start('chief', sleep=0.3, limit=20), two.start('worker')
    chief.says('STEP 2\n')
    worker.kill()
    chief.ends(1)
    assert chief.last_line().startswith(f'TimeoutError: {two.at("worker")}: not reached in 20 sec')


def test_a_port_that_is_taken(make):
    two = make(chief=1, worker=1)
    with socket.socket() as other:
        host, port = two.jobs['worker'][0].split(':')
        other.bind((host, int(port)))
        other.listen()
        worker = two.start('worker')
        worker.ends(1)
    address = two.jobs['worker'][0]
    error = f"RuntimeError: /job:worker/task:0 can't listen at {address} ("
    assert worker.last_line().startswith(error)
    assert 'If another process has that port, end it' in worker.last_line()


@pytest.mark.parametrize('case', ['model_fn', 'devices', 'model_dir', 'cluster'])
def test_errors_of_the_chief_end_all(make, case):
    two = make(chief=1, worker=1)
    given, of_worker = {}, {}
    if case == 'model_fn':
        given, error = {'error': 'No such layer.'}, 'ValueError: No such layer.'
    elif case == 'devices':
        of_worker = {'devices': 1}
        error = (
            "ValueError: devices=2 asks for '/job:worker/task:0/device:CPU:1', but "
            '/job:worker/task:0 has /job:worker/task:0/device:CPU:0.'
        )
    elif case == 'model_dir':
        given = of_worker = {'model_dir': 'model'}
        of_worker = {**of_worker, 'cwd': two.model_dir}
        two.model_dir.mkdir()
        error = "ValueError: /job:worker/task:0 does not see model_dir='model' of /job:chief/task:0"
    else:
        of_worker = {'jobs': {**two.jobs, 'ps': ['other:1']}}
        error = 'ValueError: TF_CONFIG differs between machines: /job:worker/task:0 has the cluster'
    chief, worker = two.start('chief', **given), two.start('worker', **of_worker)
    chief.ends(1)
    assert chief.last_line().startswith(error), chief.text()
    worker.ends(1)
    assert worker.last_line().startswith(f'RuntimeError: The chief has failed: {error}')
    assert not chief.told('STEP')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_signals(make, number):
    """SIGTERM lets a step and a last checkpoint be finished; the other machines end, too."""
    two = make(chief=1, worker=1)
    chief, worker = two.start('chief', sleep=0.3), two.start('worker')
    chief.says('STEP 7\n')
    chief.process.send_signal(number)
    if number == signal.SIGTERM:
        chief.ends(128 + number)
        worker.ends(128 + number)
        reached = chief.told('STEP')[-1]
        assert 7 <= reached < STEPS and two.values()['global_step'] == reached
    else:
        chief.ends(-number)
        worker.ends(1)
        assert 'The chief has failed: KeyboardInterrupt' in worker.last_line()
    assert not chief.told('EVALUATED')
