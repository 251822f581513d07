"""The cluster that this process has joined. It stays in it for as long as it lives."""

from __future__ import annotations

from typing import Any

from estimator_mgpu.cluster.chief import Chief
from estimator_mgpu.cluster.task import Task, addresses
from estimator_mgpu.devices import CHIEF

_task: Task | None = None  # this process; None until it joins
_chief: Chief | None = None  # None if it's another task


def join(config: Any) -> Chief | Task:
    """Makes this process a task of its RunConfig's cluster, unless it is one already.

    Returns:
      A `Chief` if the RunConfig's task is the chief, and otherwise a `Task`.
    """
    global _task, _chief
    if _task is None:
        _task = Task(config)
        if _task.name == CHIEF:
            _chief = Chief(_task)
            _chief.prepare_end()

    if _task.addresses != addresses(config):
        raise RuntimeError(
            f'This process is in the cluster {_task.addresses} already, and TF_CONFIG has '
            f'{addresses(config)} now. Start another process for another cluster.'
        )
    return _chief or _task


def chief() -> Chief:
    """Returns this process, which has joined as the chief."""
    assert _chief is not None
    return _chief
