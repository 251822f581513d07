"""What the environment variable TF_CONFIG has to be."""

from __future__ import annotations

import json
import os
import re
from typing import Any

JOBS = ('chief', 'worker', 'ps')  # An evaluator is in no cluster.


def check(text: str) -> None:
    """Raises ValueError if a TF_CONFIG isn't a cluster with a chief, and a task; or has neither."""
    try:
        given = json.loads(text)
        cluster, task = dict(given.get('cluster', {})), dict(given.get('task', {}))
        needs = _needs(cluster, task) if cluster else ''
    except (AttributeError, TypeError, ValueError) as error:
        needs = f'to be a JSON object of objects ({error})'
    _refuse(text, needs)


def check_read(config: Any) -> None:
    """Raises ValueError if the TF_CONFIG that a RunConfig has read isn't as it has to be.

    It reads it as it's made, which may be long after this package was imported.
    """
    cluster = config.cluster_spec.as_dict()
    task = {'type': config.task_type, 'index': config.task_id}
    if cluster:
        _refuse(json.dumps({'cluster': cluster, 'task': task}), _needs(cluster, task))


def _needs(cluster: dict[str, Any], task: dict[str, Any]) -> str:
    """What a cluster and a task lack; '' if they lack nothing."""
    if not {*cluster} <= {*JOBS, 'evaluator'}:
        return 'no job but chief, worker and ps'
    if len(cluster.get('chief', ())) != 1:
        return 'one chief'
    if not all(cluster.values()):
        return 'tasks of each job'
    addresses = [address for job in cluster.values() for address in job]
    for address in addresses:
        if not _can_be(address):
            return f"an address host:port for each task, with a port up to 65535: {address!r} isn't"
        if addresses.count(address) > 1:
            return f'an address of its own for each task: {address!r} is there twice'
    if not {'type', 'index'} <= {*task}:
        return "the task's type and index"
    job, index = task['type'], str(task['index'])
    count = len(cluster.get(job, ()))
    if job != 'evaluator' and not count:
        return f'a task of a job in the cluster: {job!r} is none'
    if not re.fullmatch('[0-9]+', index) or job != 'evaluator' and int(index) >= count:
        return f'an index of the task that counts the tasks of its job from 0: {index!r} is none'
    return ''


def _can_be(address: Any) -> bool:
    """Whether an address can be one, be it there or not."""
    match = re.fullmatch(r'([^/\s]+):([1-9][0-9]{0,4})', address)
    try:
        return bool(match and match[1].encode('idna') and int(match[2]) < 65536)
    except UnicodeError:  # A part of the name is empty, or too long.
        return False


def _refuse(text: str, needs: str) -> None:
    if needs:
        raise ValueError(
            f'The environment variable TF_CONFIG is {text!r}. It needs {needs}. On each machine it '
            'has the same cluster and its own task, as in {"cluster": {"chief": ["host0:2222"], '
            '"worker": ["host1:2222"]}, "task": {"type": "worker", "index": 0}}.'
        )


# Whoever reads TF_CONFIG, the first RunConfig say, reads one that has been checked.
check(os.environ.get('TF_CONFIG', '{}'))
