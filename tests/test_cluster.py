"""Several machines, as processes on this one: that they train as one device does, and how they end.

Each process is a machine with two logical CPU devices that runs cluster_script.py.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from cluster_script import STEPS, told
from estimator_mgpu import cluster, compat, devices
from models import weights
from towers import assert_close

LIMIT = 120  # seconds for whatever a test waits for
TASKS = {
    'worker': ['w0:1', 'w1:1'],
    'ps': ['p0:1'],
    'chief': ['c0:1'],
}


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
    for each in made:
        for machine in each.machines:
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
    assert {'first', 'hidden3/Adam', 'last/Adam_1', 'global_step', 'beta2_power'} <= ours.keys()
    assert ours['global_step'] == STEPS
    for name, expected in one.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(ours[name], expected, 1e-5, 1e-5 * scale, err_msg=name)


def two_each(*tasks):
    return [f'/job:{task}/device:CPU:{i}' for task in tasks for i in range(2)]


THREE = two_each('chief/task:0', 'worker/task:0', 'worker/task:1')


def test_training_equals_that_of_one_device(make, one_device):
    """The script trains twice, and one machine starts late."""
    three = make(chief=1, worker=2)
    worker = three.start('worker', 0)
    worker.says(f'Waiting for {three.at("chief")}: the script has to be started there, too.')
    chief = three.start('chief', stops=[10, STEPS])
    chief.says(f'Waiting for {three.at("worker", 1)}: the script has to be started there, too.')
    late = three.start('worker', 1)
    for machine in (chief, worker, late):
        machine.ends()
    values, one = one_device
    assert_same(three.values(), values)
    assert chief.told('DEVICES') == [THREE, THREE]
    assert {*THREE} <= {*chief.told('VARIABLES')[0].values()}
    # What comes after train() happens on the chief only, and there as on one device.
    first, last = chief.told('EVALUATED')
    assert first['global_step'] == 10
    assert last == pytest.approx(*one.told('EVALUATED'), rel=1e-5)
    predicted = [np.array(machine.told('PREDICTED')) for machine in (chief, one)]
    assert_close(*predicted, 1e-5)
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
    assert chief.told('DEVICES') == [two_each('chief/task:0', 'worker/task:0')]
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
    worker = two.start('worker')
    worker.says('Waiting for /job:chief/task:0')
    chief = two.start('chief', sleep=0.3, limit=2)
    chief.says('STEP 2\n')
    worker.kill()
    chief.ends(1)
    assert chief.last_line().startswith(f'TimeoutError: {two.at("worker")}: not reached in 2 sec')


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
            'that machine has /job:worker/task:0/device:CPU:0.'
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
    """SIGTERM, sent to all, lets a step and a last checkpoint be finished; all end."""
    two = make(chief=1, worker=1)
    chief, worker = two.start('chief', sleep=0.3), two.start('worker')
    chief.says('STEP 7\n')
    if number == signal.SIGTERM:
        worker.process.send_signal(number)
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


# From here on everything is in this process.


@pytest.fixture
def config_of(monkeypatch):
    """Makes the RunConfig of a task, by default in the cluster TASKS."""

    def make(job='chief', index=0, cluster=TASKS):
        tf_config = {'cluster': cluster, 'task': {'type': job, 'index': index}}
        monkeypatch.setenv('TF_CONFIG', json.dumps(tf_config))
        return tf.estimator.RunConfig()

    return make


def linear(features, labels, mode):
    loss = tf.reduce_mean(features * weights('w', 1) - labels)
    train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def batch():
    return tf.ones([4, 1]), tf.ones([4, 1])


@pytest.mark.core
def test_addresses(config_of):
    """The chief is the first, and an evaluator is none of them."""
    config = config_of('worker', 1, {**TASKS, 'evaluator': ['e0:1']})
    assert list(cluster.addresses(config).items()) == [
        ('/job:chief/task:0', 'c0:1'),
        ('/job:worker/task:0', 'w0:1'),
        ('/job:worker/task:1', 'w1:1'),
        ('/job:ps/task:0', 'p0:1'),
    ]


@pytest.mark.core
def test_the_config_of_a_task(config_of):
    """What evaluates, predicts and exports does so by itself, on any machine."""
    config = estimator_mgpu.Estimator(linear, config=config_of('worker', 1), devices=2).config
    assert config.cluster_spec.as_dict() == {'chief': ['w1:1']}
    assert config.is_chief and not config.master and not config.evaluation_master
    assert not config.session_config.device_filters
    assert config.session_config.device_count['CPU'] == 2
    assert config.session_config.graph_options.rewrite_options.disable_meta_optimizer
    one = estimator_mgpu.Estimator(linear, config=config_of(cluster={'chief': ['c0:1']}))
    assert one._joins is None  # One machine is no cluster.


TASK = {'type': 'worker', 'index': 0}
WRONG = {
    'one chief': {'cluster': {'worker': ['w0:1']}},
    'no job but chief, worker and ps': {'cluster': {**TASKS, 'master': ['m0:1']}},
    'tasks of each job': {'cluster': {**TASKS, 'worker': []}},
    'an address host:port of its own for each task': {'cluster': {**TASKS, 'worker': ['c0:1']}},
    "the task's type and index": {'task': {'type': 'worker'}},
}


@pytest.mark.core
@pytest.mark.parametrize('address', ['w0', 'http://w0:1', 'w0:0', 'w0:port', ':1'])
def test_what_is_no_address(address):
    with pytest.raises(ValueError, match='needs an address host:port of its own for each task'):
        compat.check_tf_config(
            json.dumps({'cluster': {**TASKS, 'worker': [address]}, 'task': TASK})
        )


@pytest.mark.core
def test_what_tf_config_lacks(config_of):
    for text in ('{"cluster": ', '[]', '', '{"cluster": {"chief": 1}}', '{"task": [1]}'):
        with pytest.raises(ValueError, match='It needs to be a JSON object of objects'):
            compat.check_tf_config(text)
    for needs, changed in WRONG.items():
        with pytest.raises(ValueError, match=f'needs {needs}: on each machine it has the same'):
            compat.check_tf_config(json.dumps({'cluster': TASKS, 'task': TASK, **changed}))
    compat.check_tf_config(json.dumps({'cluster': TASKS, 'task': TASK}))
    compat.check_tf_config('{}')
    with pytest.raises(ValueError, match='2 is not a valid task_id for task_type worker'):
        config_of('worker', 2)
    with pytest.raises(ValueError, match='(?s)ps is not a valid task_type'):
        config_of('ps', 0, {'chief': ['c0:1'], 'worker': ['w0:1']})


@pytest.mark.core
def test_estimators_that_train_on_no_cluster(config_of, tmp_path):
    replicated = estimator_mgpu.replicate(linear, devices=2)
    plain = tf.estimator.Estimator(replicated, str(tmp_path), config_of())
    with pytest.raises(ValueError, match='Use estimator_mgpu.Estimator'):
        plain.train(batch)
    cluster_and_evaluator = {**TASKS, 'evaluator': ['e0:1']}
    config = config_of('evaluator', 0, cluster_and_evaluator)
    evaluator = estimator_mgpu.Estimator(linear, config=config)
    with pytest.raises(ValueError, match='the evaluator, which'):
        evaluator.train(batch)


class Clock:
    """Stands for the module time: sleeping takes no time."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def task(config_of, monkeypatch):
    """A worker that has no server, and to which no other task listens."""
    monkeypatch.setattr(tf.train, 'Server', lambda *args, **kwargs: None)
    monkeypatch.setattr(signal, 'signal', lambda *args: None)
    monkeypatch.setattr(cluster, '_listens', lambda address: False)
    monkeypatch.setattr(cluster, 'time', Clock())
    return cluster.Task(config_of('worker', 0).replace(session_creation_timeout_secs=100))


@pytest.mark.core
def test_waiting(task, caplog, monkeypatch):
    """What is waited for is said each half a minute, up to the limit."""
    caplog.clear()
    with pytest.raises(TimeoutError, match='^/job:ps/task:0 at p0:1: not reached in 100 seconds'):
        task.wait(['/job:ps/task:0'])
    line = 'Waiting for /job:ps/task:0 at p0:1: the script has to be started there, too.'
    assert [record.message for record in caplog.records] == [line] * 4
    assert cluster.time.now == 1101
    monkeypatch.setattr(cluster, '_listens', lambda address: address != 'w1:1')
    caplog.clear()
    task.wait(ended=lambda: cluster.time.now > 1110)
    assert '/job:worker/task:1 at w1:1: ' in caplog.text and 'p0:1' not in caplog.text
    task._terminated = cluster.time.now
    with pytest.raises(SystemExit) as ended:
        task.wait()
    assert ended.value.code == 143
    monkeypatch.setattr(cluster, '_listens', lambda address: True)
    task.wait()


@pytest.mark.core
def test_a_task_that_got_sigterm_serves_on_for_a_while(task, monkeypatch):
    session = types.SimpleNamespace(run=lambda fetches: b'')  # The chief has said nothing.
    strings = [mock.Mock(), mock.Mock()]
    with_session = contextlib.nullcontext([session, *strings])
    monkeypatch.setattr(task, '_session_with', lambda name: with_session)
    monkeypatch.setattr(cluster, '_listens', lambda address: True)
    sleep = cluster.time.sleep

    def sleep_and_terminate(seconds):
        sleep(seconds)
        if cluster.time.now == 1050:
            task._terminate(signal.SIGTERM, None)

    cluster.time.sleep = sleep_and_terminate
    with pytest.raises(SystemExit) as ended:
        task.serve()
    assert ended.value.code == 143 and cluster.time.now == 1071


@pytest.mark.core
def test_all_are_told_of_the_end(task, monkeypatch):
    """Also if one doesn't answer, as it's frozen say."""
    asked = []

    def session_with(task):
        asked.append(task)
        raise tf.errors.DeadlineExceededError(None, None, 'No answer.')

    monkeypatch.setattr(cluster, '_listens', lambda address: address != 'c0:1')
    monkeypatch.setattr(task, '_session_with', session_with)
    task._end()
    assert asked == ['/job:worker/task:1', '/job:ps/task:0']


@pytest.mark.core
def test_a_process_is_in_one_cluster(task, config_of, monkeypatch):
    monkeypatch.setattr(cluster, '_joined', [task])
    assert cluster.join(config_of('worker', 0)) is task
    with pytest.raises(RuntimeError, match='Start another process for another cluster'):
        cluster.join(config_of('worker', 0, {**TASKS, 'ps': ['p1:1']}))


@pytest.mark.core
def test_what_is_on_no_machine_goes_to_the_chief():
    with tf.Graph().as_default() as graph:
        variable = tf.get_variable('v', [], use_resource=True)
        free = tf.constant(1.0)
        with tf.device('/device:CPU:1'):
            second = tf.constant(1.0)
        with tf.device('/job:worker/task:1/device:CPU:1'):
            far = tf.get_variable('far', [], use_resource=True)
        with tf.device(None):
            reads = tf.raw_ops.ReadVariableOp(resource=far.handle, dtype=tf.float32)
        with tf.colocate_with(far.handle.op):
            near = tf.constant(1.0)
        cluster.pin(graph)
        assert variable.device == free.device == '/job:chief/task:0'
        assert second.device == '/job:chief/task:0/device:CPU:1'
        assert far.device == '/job:worker/task:1/device:CPU:1'
        assert reads.device == ''
        assert near.device in ('', far.device)


CHIEF, WORKER, PS = '/job:chief/task:0', '/job:worker/task:0', '/job:ps/task:0'


def has(*names):
    return {task: [f'{task}/device:{name}' for name in some.split()] for task, some in names}


GPUS = has((CHIEF, 'CPU:0 GPU:0'), (WORKER, 'CPU:0 GPU:0 GPU:1'), (PS, 'CPU:0 GPU:0'))
CPUS = has((CHIEF, 'CPU:0 CPU:1'), (WORKER, 'CPU:0 CPU:1'), (PS, 'CPU:0'))


@pytest.mark.core
@pytest.mark.parametrize(
    'given, machines, expected',
    [
        (None, GPUS, [f'{CHIEF}/device:GPU:0', f'{WORKER}/device:GPU:0', f'{WORKER}/device:GPU:1']),
        (1, GPUS, [f'{CHIEF}/device:GPU:0', f'{WORKER}/device:GPU:0']),
        ('cpu:0', GPUS, [f'{CHIEF}/device:CPU:0', f'{WORKER}/device:CPU:0']),
        (None, CPUS, [f'{CHIEF}/device:CPU:0', f'{WORKER}/device:CPU:0']),
        (2, CPUS, CPUS[CHIEF] + CPUS[WORKER]),
    ],
)
def test_devices_of_machines(given, machines, expected):
    """Those of each machine, in the order of tasks, and none of a ps."""
    assert devices.resolve(given, machines) == expected


@pytest.mark.core
def test_devices_that_a_machine_lacks():
    with pytest.raises(
        ValueError, match=f"'{CHIEF}/device:GPU:1', but that machine has {CHIEF}/device"
    ):
        devices.resolve(2, GPUS)
    with pytest.raises(
        ValueError, match="are those of each machine, without its job: .'/device:GPU"
    ):
        estimator_mgpu.Estimator(linear, devices='/job:worker/task:7/cpu:0')


@pytest.mark.core
def test_machines_of_devices():
    assert devices.machine_of('/device:GPU:1') == CHIEF
    assert devices.machine_of('/job:worker/task:3/device:CPU:0') == '/job:worker/task:3'
    assert devices.host_of(f'{WORKER}/device:GPU:1') == f'{WORKER}/device:CPU:0'
    assert devices.host_of('/device:GPU:1') == '/device:CPU:0'
    both = CPUS[CHIEF] + CPUS[WORKER]
    # As on the home's machine, if there is such a device, and else the first.
    assert devices.relay(both, both[2], both[1]) == both[3]
    assert devices.relay(both, both[0], both[3]) == both[1]
    assert devices.relay(both[:3], both[2], both[1]) == both[2]


def test_each_training_begins_without_the_tables_of_the_last(three_machines, tmp_path, task):
    """Servers keep what a session has made, and a session of one machine begins with nothing."""
    task.server = types.SimpleNamespace(target=three_machines)
    task._check, task.wait = (lambda *args: None), (lambda: None)
    devices = CPUS[CHIEF][0], CPUS[WORKER][0]
    with tf.Graph().as_default():
        variables = []
        for i, device in enumerate(devices):
            with tf.device(device):
                variables.append(tf.get_variable(f'kept{i}', [], use_resource=True))
        known = [tf.is_variable_initialized(variable) for variable in variables]
        initializer = tf.global_variables_initializer()
        with tf.Session(three_machines) as session:
            session.run(initializer)
        with tf.Session(three_machines) as session:
            assert session.run(known) == [True, True]
        found = task.devices(str(tmp_path))
        assert found[CHIEF] == CPUS[CHIEF] and found[WORKER] == CPUS[WORKER]
        with tf.Session(three_machines) as session:
            assert session.run(known) == [False, False]
    assert not [*tmp_path.iterdir()]
