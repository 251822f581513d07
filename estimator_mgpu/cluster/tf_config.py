"""What the environment variable TF_CONFIG has to be, and which of its tasks is the chief.

This is settled as this module is imported, and again as each RunConfig is made, which reads the
variable anew.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import tf_estimator

JOBS = ('chief', 'worker', 'ps')  # An evaluator serves nobody, also if TF_CONFIG lists it.
_VARIABLE = 'TF_CONFIG'
_LONGEST = 2000  # characters of it that an error repeats


def settle() -> None:
    """Checks the environment variable, and gives it a chief if it has a `master`, or only workers.

    Raises:
      ValueError: if it isn't as it has to be.
    """
    text = os.environ.get(_VARIABLE, '{}')
    settled = with_chief(text)
    if settled != text:
        os.environ[_VARIABLE] = settled
        first_task = 'the master' if 'master' in json.loads(text)['cluster'] else 'worker 0'
        tf.logging.warning(
            f'TF_CONFIG names no chief, so {first_task} becomes it. TF_CONFIG is now '
            f'{_shortened(settled)}.'
        )


def with_chief(text: str) -> str:
    """Returns a TF_CONFIG that has a chief, if it has a cluster.

    It's the task `master`, as in TensorFlow 1, or worker 0, as in TensorFlow 2. The workers after
    that are numbered from 0 again.

    Args:
      text: has a cluster and a task; or neither, on one machine.

    Raises:
      ValueError: if it isn't like this.
    """
    try:
        tf_config = json.loads(text)
        cluster = tf_config.get('cluster', {})
        task = tf_config.get('task', {})
        if not isinstance(cluster, dict) or not isinstance(task, dict):
            raise TypeError('"cluster" and "task" have to be objects')
        need = _need(cluster, task) if cluster else ''
    except RecursionError:
        need = 'to be a JSON object of objects (it has too many brackets)'
    except (AttributeError, TypeError, ValueError) as error:
        need = f'to be a JSON object of objects ({error})'
    if need:
        _refuse(text, need)

    if not cluster or 'chief' in cluster:
        return text
    cluster, task = dict(cluster), dict(task)
    if 'master' in cluster:
        cluster['chief'] = cluster.pop('master')
        if task['type'] == 'master':
            task['type'] = 'chief'
    else:
        first, *others = cluster.pop('worker')
        cluster['chief'] = [first]
        if others:
            cluster['worker'] = others
        if task['type'] == 'worker':
            index = int(task['index'])
            task.update({'index': index - 1} if index else {'type': 'chief', 'index': 0})
    return json.dumps({**tf_config, 'cluster': cluster, 'task': task})


def check_read(config: Any) -> None:
    """Raises ValueError if the TF_CONFIG that a RunConfig has read isn't as it has to be.

    The RunConfig may have been made before this package was imported.
    """
    cluster = config.cluster_spec.as_dict()
    task = {'type': config.task_type, 'index': config.task_id}
    need = _need(cluster, task) if cluster else ''
    if cluster and not need and 'chief' not in cluster:
        need = 'a chief, or to be read by a RunConfig that is made after estimator_mgpu is imported'
    if need:
        _refuse(json.dumps({'cluster': cluster, 'task': task}), need)


def _need(cluster: dict[str, Any], task: dict[str, Any]) -> str:
    """Says what a cluster and a task need; '' if they need nothing."""
    if not set(cluster) <= {*JOBS, 'master', 'evaluator'}:
        return 'only the jobs chief, worker and ps'
    if not all(isinstance(tasks, list) for tasks in cluster.values()):
        return 'a list of addresses for each job'
    if not all(cluster.values()):
        return 'tasks of each job'
    chiefs = [*cluster.get('chief', ()), *cluster.get('master', ())]
    if len(chiefs) > 1 or not (chiefs or cluster.get('worker')):
        return 'exactly one chief, or a worker'

    addresses = [address for tasks in cluster.values() for address in tasks]
    for address in addresses:
        if not _is_address(address):
            return f"an address host:port for each task, with a port up to 65535: {address!r} isn't"
        if addresses.count(address) > 1:
            return f'an address of its own for each task: {address!r} is there twice'

    if not {'type', 'index'} <= set(task):
        return "the task's type and index"
    job = task['type']
    index = str(task['index'])
    is_evaluator = job == 'evaluator'
    count = len(cluster.get(str(job), ()))
    if not isinstance(job, str) or (not is_evaluator and not count):
        return f'a task of a job in the cluster: {job!r} is none'
    is_number = re.fullmatch('[0-9]+', index)
    if not is_number or (not is_evaluator and int(index) >= count):
        return f'an index of the task that counts the tasks of its job from 0: {index!r} is none'
    return ''


def _is_address(text: Any) -> bool:
    """Whether it could be an address. Nobody is asked whether the host exists."""
    if not isinstance(text, str):
        return False
    match = re.fullmatch(r'([^/\s]+):([1-9][0-9]{0,4})', text)
    if not match:
        return False
    host, port = match.groups()
    try:
        host.encode('idna')
    except UnicodeError:  # A part of the name is empty, or too long.
        return False
    return int(port) < 65536


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f'{text[:_LONGEST]} ...'


def _refuse(text: str, need: str) -> NoReturn:
    raise ValueError(
        f'The environment variable TF_CONFIG is {_shortened(text)!r}. It needs {need}. On each '
        'machine it has the same cluster and its own task, as in {"cluster": {"chief": '
        '["host0:2222"], "worker": ["host1:2222"]}, "task": {"type": "worker", "index": 0}}.'
    )


settle()
tf_estimator.before_each_run_config(settle)
