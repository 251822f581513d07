"""What TF_CONFIG has to be: at import, and where a RunConfig has read it."""

import json
import os

import pytest
import tensorflow.compat.v1 as tf

import estimator_mgpu
from estimator_mgpu.cluster import tf_config
from models import adam, regression

pytestmark = pytest.mark.core

TASKS = {'worker': ['w0:1', 'w1:1'], 'ps': ['p0:1'], 'chief': ['c0:1']}
TASK = {'type': 'worker', 'index': 0}
NO_ADDRESSES = ['w0', 'http://w0:1', 'w0:0', 'w0:port', ':1', 'w0:65536', 'host..domain:1', '.:1']
NO_ADDRESSES += [f'{64 * "a"}.org:1', 'w 0:1']
NO_TASKS = [('worker', 'x', 'an index'), ('worker', 2, 'an index'), ('worker', -1, 'an index')]
NO_TASKS += [
    ('ps', 1.5, 'an index'),
    ('evaluator', None, 'an index'),
    ('boss', 0, 'a task of a job in'),
    (['worker'], 0, 'a task of a job in'),
    ('master', 0, 'a task of a job in'),
]


def workers(*addresses):
    return {'cluster': {**TASKS, 'worker': addresses}}


WRONG = [
    ('exactly one chief, or a worker', {'cluster': {'ps': ['p0:1']}}),
    ('exactly one chief, or a worker', {'cluster': {**TASKS, 'master': ['m0:1']}}),
    ('exactly one chief, or a worker', {'cluster': {'master': ['m0:1', 'm1:1']}}),
    ('a list of addresses for each job', {'cluster': {**TASKS, 'worker': {'0': 'w0:1'}}}),
    ('a list of addresses for each job', {'cluster': {'chief': 'c0:1'}}),
    ("an address .*: 7 isn't", {'cluster': {**TASKS, 'worker': [7]}}),
    ('exactly one chief, or a worker', {'cluster': {**TASKS, 'chief': ['c0:1', 'c1:1']}}),
    ('only the jobs chief, worker and ps', {'cluster': {**TASKS, 'boss': ['b0:1']}}),
    ('tasks of each job', workers()),
    *[(f"an address .*65535: '{address}' isn't", workers(address)) for address in NO_ADDRESSES],
    ("an address of its own for each task: 'c0:1' is there twice", workers('c0:1')),
    ("the task's type and index", {'task': {'type': 'worker'}}),
    *[
        (f'{what}.* is none', {'task': {'type': job, 'index': index}})
        for job, index, what in NO_TASKS
    ],
]


@pytest.mark.parametrize('needs, changed', WRONG)
def test_what_tf_config_lacks(needs, changed):
    match = rf'It needs {needs}\. On each machine it has the same'
    with pytest.raises(ValueError, match=match):
        tf_config.with_chief(json.dumps({'cluster': TASKS, 'task': TASK, **changed}))


@pytest.mark.parametrize(
    'text',
    [
        *['{"cluster": ', '[]', '', '7', '{"cluster": 1}', '{"task": [1]}', 100_000 * '['],
        *['{"cluster": [["chief", ["c0:1"]]]}', '{"task": [["type", "chief"], ["index", 0]]}'],
    ],
    ids=range(9),
)
def test_no_json_of_objects(text, monkeypatch):
    """At import, and of a RunConfig that reads it later."""
    match = 'It needs to be a JSON object of objects .* On each machine it has the same'
    with pytest.raises(ValueError, match=match) as error:
        tf_config.with_chief(text)
    assert len(str(error.value)) < 3000
    monkeypatch.setenv('TF_CONFIG', text)
    with pytest.raises(ValueError, match=match):
        tf.estimator.RunConfig()


def as_it_is(text):
    assert tf_config.with_chief(text) == text


def test_what_is_right():
    as_it_is('{}')
    as_it_is('{"task": {"type": "worker", "index": 0}}')
    evaluator = {'type': 'evaluator', 'index': 3}
    for task in (TASK, {'type': 'ps', 'index': '0'}, evaluator):
        as_it_is(json.dumps({'cluster': TASKS, 'task': task}))
    for host in ('10.0.0.1', '[::1]', 'näme.org', 'a-b.svc.cluster.local.', 'under_score'):
        as_it_is(json.dumps({**workers(f'{host}:65535'), 'task': TASK}))


WORKERS = {'worker': ['w0:1', 'w1:1', 'w2:1']}
LED_BY_WORKER = {'chief': ['w0:1'], 'worker': ['w1:1', 'w2:1']}
MASTER = {'master': ['m0:1'], 'worker': ['w0:1'], 'ps': ['p0:1']}
LED_BY_MASTER = {'chief': ['m0:1'], 'worker': ['w0:1'], 'ps': ['p0:1']}
WITHOUT_CHIEF = [
    (WORKERS, ('worker', 0), LED_BY_WORKER, ('chief', 0)),
    (WORKERS, ('worker', '2'), LED_BY_WORKER, ('worker', 1)),
    (WORKERS, ('evaluator', 0), LED_BY_WORKER, ('evaluator', 0)),
    ({'worker': ['w0:1']}, ('worker', 0), {'chief': ['w0:1']}, ('chief', 0)),
    (MASTER, ('master', 0), LED_BY_MASTER, ('chief', 0)),
    (MASTER, ('worker', 0), LED_BY_MASTER, ('worker', 0)),
    (MASTER, ('ps', 0), LED_BY_MASTER, ('ps', 0)),
]


def text_of(cluster, task):
    task = {'type': task[0], 'index': task[1]}
    return json.dumps({'cluster': cluster, 'task': task, 'environment': 'cloud'})


@pytest.mark.parametrize('cluster, task, led, task_there', WITHOUT_CHIEF)
def test_a_cluster_without_a_chief(cluster, task, led, task_there, monkeypatch, caplog):
    """Worker 0 is the chief, as in TensorFlow 2, or the master, as in TensorFlow 1."""
    monkeypatch.setenv('TF_CONFIG', text_of(cluster, task))
    config = tf.estimator.RunConfig()
    tf_config.check_read(config)
    assert (config.task_type, config.task_id) == task_there
    if task[0] != 'evaluator':
        assert config.cluster_spec.as_dict() == led
    assert json.loads(os.environ['TF_CONFIG']) == json.loads(text_of(led, task_there))
    tf.estimator.RunConfig()  # It isn't said again.
    chief = 'the master' if cluster is MASTER else 'worker 0'
    (said,) = [message for message in caplog.messages if 'TF_CONFIG names no chief' in message]
    assert f'so {chief} becomes it' in said


def use(config):
    """As a user's script does: an Estimator of ours, with or without a config, and a plain one."""
    model_fn = regression(adam)
    yield lambda: estimator_mgpu.Estimator(model_fn, config=config)
    plain = tf.estimator.Estimator(estimator_mgpu.replicate(model_fn, devices=2), config=config)
    yield lambda: plain.train(lambda: (tf.ones([4, 3]), tf.ones([4, 1])))


def test_one_that_was_set_after_the_import(monkeypatch):
    """A RunConfig that was made before takes what this package doesn't."""
    given = [
        ({'master': ['m0:1'], 'worker': ['w0:1']}, 'a chief, or to be read by a RunConfig that is'),
        ({**TASKS, 'worker': ['host..domain:1']}, 'an address'),
        ({**TASKS, 'worker': ['w0:65536']}, 'an address'),
        ({**TASKS, 'worker': ['c0:1']}, 'an address of its own'),
    ]
    for cluster, needs in given:
        monkeypatch.setenv('TF_CONFIG', json.dumps({'cluster': cluster, 'task': TASK}))
        with monkeypatch.context() as context:
            kind = tf.estimator.RunConfig
            context.setattr(kind, '__init__', kind.__init__.__wrapped__)
            config = tf.estimator.RunConfig()
        for make in use(config):
            with pytest.raises(ValueError, match=f'TF_CONFIG is .* It needs {needs}'):
                make()
    task = {'type': 'worker', 'index': 'x'}
    monkeypatch.setenv('TF_CONFIG', json.dumps({'cluster': TASKS, 'task': task}))
    with pytest.raises(ValueError, match="It needs an index of the task .*: 'x' is none"):
        estimator_mgpu.Estimator(regression(adam))
