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

LIMIT = 90  # seconds for whatever a test waits for


class Machine:
    """A process that runs the script."""

    def __init__(self, tf_config, model_dir, log, cwd=None, **options):
        tests = os.path.dirname(__file__)
        sources = os.path.dirname(os.path.dirname(estimator_mgpu.__file__))
        given = {'CUDA_VISIBLE_DEVICES': '-1', 'TF_CPP_MIN_LOG_LEVEL': '2', 'PYTHONPATH': sources}
        if tf_config:
            given['TF_CONFIG'] = json.dumps(tf_config)
        script = os.path.join(tests, 'cluster_script.py')
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

    def kill(self):
        """As it is when a machine breaks down."""
        self.process.kill()
        self.process.wait()

    def ends(self, status=0):
        found = self.process.wait(LIMIT)
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

    def start(self, job=None, index=0, model_dir=None, jobs=None, **options):
        """Starts the script as a task, or without a cluster."""
        task = {'type': job, 'index': index}
        tf_config = job and {'cluster': jobs or self.jobs, 'task': task}
        log = self.folder / f'{len(self.machines)}_{job}_{index}.log'
        self.machines.append(Machine(tf_config, model_dir or self.model_dir, log, **options))
        return self.machines[-1]

    def values(self):
        """The variables of the last checkpoint."""
        reader = tf.train.load_checkpoint(str(self.model_dir))
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}

    def reaches(self, step):
        """Waits for a checkpoint at a step, or a later one."""
        wait_for(lambda: self.step() >= step, self)

    def step(self):
        path = tf.train.latest_checkpoint(str(self.model_dir))
        return int(path.rpartition('-')[2]) if path else -1


def wait_for(condition, cluster):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, '\n'.join(one.text() for one in cluster.machines)
        time.sleep(0.05)


@pytest.fixture
def cluster(tmp_path):
    """Returns a function that makes a cluster; whatever still runs at the end is killed."""
    made = []

    def make(**jobs):
        made.append(Cluster(tmp_path / str(len(made)), **jobs))
        made[-1].folder.mkdir()
        return made[-1]

    yield make
    for machine in sum((one.machines for one in made), []):
        machine.kill()


@pytest.fixture(scope='module')
def one_device(tmp_path_factory):
    """What one device comes to: the variables, and what the script tells."""
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


def test_training_equals_that_of_one_device(cluster, one_device):
    """The script trains twice, and one machine starts late."""
    three = cluster(chief=1, worker=2)
    chief, *workers = three.start('chief', stops=[10, STEPS]), three.start('worker', 0)
    late = f'/job:worker/task:1 at {three.jobs["worker"][1]}'
    wait_for(lambda: f'Waiting for {late}' in chief.text(), three)
    workers.append(three.start('worker', 1))
    for machine in [chief, *workers]:
        machine.ends()
    values, one = one_device
    assert_same(three.values(), values)
    assert chief.told('DEVICES') == [THREE, THREE]
    # What comes after train() happens on the chief only, and there as on one device.
    first, last = chief.told('EVALUATED')
    assert first['global_step'] == 10
    assert last == pytest.approx(*one.told('EVALUATED'), rel=1e-5)
    np.testing.assert_allclose(*chief.told('PREDICTED'), *one.told('PREDICTED'), 1e-5, 1e-5)
    for worker in workers:
        assert not worker.told('EVALUATED') and not worker.told('PREDICTED')


def test_variables_on_a_ps_and_an_evaluator(cluster, one_device):
    """train_and_evaluate() with each kind of task there is."""
    four = cluster(chief=1, worker=1, ps=1)
    machines = [four.start(job, evaluates=True) for job in ('chief', 'worker', 'ps', 'evaluator')]
    for machine in machines:
        machine.ends()
    values, one = one_device
    assert_same(four.values(), values)
    assert machines[0].told('DEVICES') == [devices_of('chief/task:0', 'worker/task:0')]
    graph = tf.GraphDef()
    with open(four.model_dir / 'graph.pbtxt') as file:
        tf.io.gfile  # noqa: B018
        from google.protobuf import text_format

        text_format.Parse(file.read(), graph)
    on = {node.name: node.device for node in graph.node if node.op == 'VarHandleOp'}
    assert on['first'] == on['second/Adam'] == '/job:ps/task:0/device:CPU:0'
    found = [
        {value.tag: value.simple_value for value in event.summary.value}
        for path in (four.model_dir / 'eval').iterdir()
        for event in tf.train.summary_iterator(str(path))
    ]
    expected = one.told('EVALUATED')[0]
    assert found[-1]['loss'] == pytest.approx(expected['loss'], rel=1e-5)


def test_killed_machines_that_start_again(cluster, one_device):
    """No step is lost beyond the last checkpoint, and none is applied twice."""
    three = cluster(chief=1, worker=2)
    chief = three.start('chief', sleep=0.3)
    workers = [three.start('worker', index) for index in range(2)]
    three.reaches(5)
    workers[1].kill()
    waiting = f'Waiting for /job:worker/task:1 at {three.jobs["worker"][1]}'
    before = chief.text().count(waiting)
    wait_for(lambda: chief.text().count(waiting) > before, three)
    workers[1] = three.start('worker', 1)
    three.reaches(10)
    chief.kill()
    assert three.step() < STEPS
    chief = three.start('chief')
    for machine in [chief, *workers]:
        machine.ends()
    values, one = one_device
    assert_same(three.values(), values)
    assert chief.told('DEVICES') == [THREE]
    assert chief.told('EVALUATED')[0] == pytest.approx(one.told('EVALUATED')[0], rel=1e-5)
