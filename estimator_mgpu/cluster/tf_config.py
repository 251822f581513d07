"""What the environment variable TF_CONFIG has to be.

It's checked as this module is imported, and again for each RunConfig, as that reads it anew.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, NoReturn

JOBS = ('chief', 'worker', 'ps')  # An evaluator is in no cluster.


def check(text: str) -> None:
    """Raises ValueError if a TF_CONFIG isn't as it has to be.

    It has a cluster with a chief, and a task; or it has neither, on one machine.

    Args:
      text: the value of the environment variable.
    """
    try:
        tf_config = json.loads(text)
        cluster = dict(tf_config.get('cluster', {}))
        task = dict(tf_config.get('task', {}))
        need = _need(cluster, task) if cluster else ''
    except (AttributeError, TypeError, ValueError) as error:
        need = f'to be a JSON object of objects ({error})'
    if need:
        _refuse(text, need)


def check_read(config: Any) -> None:
    """Raises ValueError if the TF_CONFIG that a RunConfig has read isn't as it has to be.

    The RunConfig reads it as it's made, which may be long after this package was imported.
    """
    cluster = config.cluster_spec.as_dict()
    task = {'type': config.task_type, 'index': config.task_id}
    need = _need(cluster, task) if cluster else ''
    if need:
        _refuse(json.dumps({'cluster': cluster, 'task': task}), need)


def _need(cluster: dict[str, Any], task: dict[str, Any]) -> str:
    """Says what a cluster and a task need; '' if they need nothing."""
    if not set(cluster) <= {*JOBS, 'evaluator'}:
        return 'no job but chief, worker and ps'
    if len(cluster.get('chief', ())) != 1:
        return 'one chief'
    if not all(cluster.values()):
        return 'tasks of each job'

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
    count = len(cluster.get(job, ()))
    if not is_evaluator and not count:
        return f'a task of a job in the cluster: {job!r} is none'
    is_number = re.fullmatch('[0-9]+', index)
    if not is_number or (not is_evaluator and int(index) >= count):
        return f'an index of the task that counts the tasks of its job from 0: {index!r} is none'
    return ''


def _is_address(text: Any) -> bool:
    """Whether a text could be an address. Nobody is asked whether the host exists."""
    match = re.fullmatch(r'([^/\s]+):([1-9][0-9]{0,4})', text)
    if not match:
        return False
    host, port = match.groups()
    try:
        host.encode('idna')
    except UnicodeError:  # A part of the name is empty, or too long.
        return False
    return int(port) < 65536


def _refuse(text: str, need: str) -> NoReturn:
    raise ValueError(
        f'The environment variable TF_CONFIG is {text!r}. It needs {need}. On each machine it has '
        'the same cluster and its own task, as in {"cluster": {"chief": ["host0:2222"], "worker": '
        '["host1:2222"]}, "task": {"type": "worker", "index": 0}}.'
    )


# Whoever reads TF_CONFIG later, such as the first RunConfig, reads one that has been checked.
check(os.environ.get('TF_CONFIG', '{}'))
