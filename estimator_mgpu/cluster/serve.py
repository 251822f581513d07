"""What workers and ps tasks do: they serve the chief, and end as it ends.

TensorFlow's server does all the work, in threads of its own. Here the main thread waits, and looks
whether the chief is there, and whether this process is the only one of its task. After SIGTERM it
serves for a while, as the chief may be saving.
"""

from __future__ import annotations

import json
import time
from typing import NoReturn

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster.ending import Ending, FileReader
from estimator_mgpu.cluster.exits import SIGTERM_STATUS
from estimator_mgpu.cluster.notes import Notes, version
from estimator_mgpu.cluster.task import Task
from estimator_mgpu.devices import CHIEF

_CHECK_EVERY = 30  # seconds from one check to the next
_AFTER_SIGTERM = 20  # seconds in which a task still serves the chief's last checkpoint


def serve(task: Task, model_dir: str) -> NoReturn:
    """Serves the chief, which trains in model_dir, and ends this process as the chief ends."""
    task.busy = True
    try:
        ending = _ending_of_service(task, model_dir)
    finally:  # What the script does after this may hang.
        task.busy = False
    ending.end_as_chief_did(task.name)


def _ending_of_service(task: Task, model_dir: str) -> Ending:
    """Serves the chief, and returns how its process has ended."""
    with Notes(task.name, task.server.target, seconds=0) as notes:
        notes.write('process', task.incarnation)
        notes.write('version', version())
        notes.write('cluster', json.dumps(task.addresses))
        next_answer_at = time.monotonic() + _CHECK_EVERY
        next_check_alone_at = time.monotonic()
        file = FileReader(model_dir)

        def look() -> Ending | None:
            _renew_connections(task, notes)
            return _ending_of_chief(notes)

        def look_without_chief() -> Ending | None:
            return look() or _missed_ending(task, notes, file)

        while True:
            now = time.monotonic()
            # A chief that saves is slow to answer.
            has_to_answer = now > next_answer_at and task.sigterm_at is None
            ending = look() or task.wait([CHIEF], look_without_chief, answering=has_to_answer)
            if ending is not None:
                return ending
            if has_to_answer:
                next_answer_at = now + _CHECK_EVERY

            if now >= next_check_alone_at:
                task.check_alone()
                next_check_alone_at = time.monotonic() + _CHECK_EVERY

            if task.sigterm_at is not None and time.monotonic() > task.sigterm_at + _AFTER_SIGTERM:
                raise SystemExit(SIGTERM_STATUS)
            time.sleep(1)


def _renew_connections(task: Task, notes: Notes) -> None:
    """Drops this task's connections once for each session of the chief, which waits for that."""
    session = notes.read('session')
    if session and session != notes.read('renewed'):
        task.drop_connections()
        notes.write('renewed', session)


def _ending_of_chief(notes: Notes) -> Ending | None:
    """How the chief that leads this task has ended; None while it runs.

    The ending of another chief, which led the task before, doesn't count.
    """
    text = notes.read('end')
    if not text:
        return None
    ending = Ending.from_text(text)
    return ending if ending.incarnation == notes.read('chief') else None


def _missed_ending(task: Task, notes: Notes, file: FileReader) -> Ending | None:
    """How the chief has ended while this task was away; None if that isn't known."""
    ending = file.read_now_and_then()
    if ending is None or ending.status is None or task.listens(CHIEF):
        return None

    # The chief that has led it, or a later one, has ended since this process began.
    was_led = notes.read('chief') != '' and ending != file.before
    if not was_led and not ending.was_missed(task.addresses[task.name], task.limit):
        return None
    tf.logging.warning(
        f'The chief has ended with {ending.status} while {task.name} was away, which ends, too. To '
        'train again, start the chief first.'
    )
    return ending
