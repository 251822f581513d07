"""What TF_CONFIG has to be: at import, and where a RunConfig has read it."""

import json

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
]


def workers(*addresses):
    return {'cluster': {**TASKS, 'worker': addresses}}


WRONG = [
    ('one chief', {'cluster': {'worker': ['w0:1']}}),
    ('one chief', {'cluster': {**TASKS, 'chief': ['c0:1', 'c1:1']}}),
    ('no job but chief, worker and ps', {'cluster': {**TASKS, 'master': ['m0:1']}}),
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
        tf_config.check(json.dumps({'cluster': TASKS, 'task': TASK, **changed}))


@pytest.mark.parametrize('text', ['{"cluster": ', '[]', '', '{"cluster": {"chief": 1}}'])
def test_no_json_of_objects(text):
    with pytest.raises(ValueError, match='It needs to be a JSON object of objects'):
        tf_config.check(text)


def test_what_is_right():
    tf_config.check('{}')
    tf_config.check('{"task": {"type": "worker", "index": 0}}')
    evaluator = {'type': 'evaluator', 'index': 3}
    for task in (TASK, {'type': 'ps', 'index': '0'}, evaluator):
        tf_config.check(json.dumps({'cluster': TASKS, 'task': task}))
    for host in ('10.0.0.1', '[::1]', 'näme.org', 'a-b.svc.cluster.local.', 'under_score'):
        tf_config.check(json.dumps({**workers(f'{host}:65535'), 'task': TASK}))


def use(config):
    """As a user's script does: an Estimator of ours, with or without a config, and a plain one."""
    model_fn = regression(adam)
    yield lambda: estimator_mgpu.Estimator(model_fn, config=config)
    plain = tf.estimator.Estimator(estimator_mgpu.replicate(model_fn, devices=2), config=config)
    yield lambda: plain.train(lambda: (tf.ones([4, 3]), tf.ones([4, 1])))


def test_one_that_was_set_after_the_import(monkeypatch):
    """A RunConfig takes what this package doesn't: a master, addresses of any kind."""
    given = [
        ({'master': ['m0:1'], 'worker': ['w0:1']}, 'no job but'),
        ({**TASKS, 'worker': ['host..domain:1']}, 'an address'),
        ({**TASKS, 'worker': ['w0:65536']}, 'an address'),
        ({**TASKS, 'worker': ['c0:1']}, 'an address of its own'),
    ]
    for cluster, needs in given:
        monkeypatch.setenv('TF_CONFIG', json.dumps({'cluster': cluster, 'task': TASK}))
        for make in use(tf.estimator.RunConfig()):
            with pytest.raises(ValueError, match=f'TF_CONFIG is .* It needs {needs}'):
                make()
    task = {'type': 'worker', 'index': 'x'}
    monkeypatch.setenv('TF_CONFIG', json.dumps({'cluster': TASKS, 'task': task}))
    with pytest.raises(ValueError, match="It needs an index of the task .*: 'x' is none"):
        estimator_mgpu.Estimator(regression(adam))
