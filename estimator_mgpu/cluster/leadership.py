"""Which chief leads the other tasks, and how they learn of its end.

Each task has a note with the incarnation of the chief that leads it. A chief that begins writes its
own incarnation there. If it later finds another one, it has been replaced: somebody has started
another process as the chief, while this one was stopped or cut off. Then it must write nothing
more.

A chief tells how it ends only to tasks of its own cluster, and only if it has led them: others may
be in the midst of somebody else's training.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from typing import NoReturn

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster import ending, reach
from estimator_mgpu.cluster.exits import SIGTERM_STATUS
from estimator_mgpu.cluster.notes import Notes
from estimator_mgpu.cluster.task import Task

LONGEST_TELLING = 20  # seconds that a process takes to tell others how it ends
_REPLACED = (
    'it was started in the place of this one, which was stopped or cut off for a while. This one '
    'ends, and writes nothing more.'
)


class Leadership:
    """The leadership of this process, which is the chief, over the other tasks.

    Args:
      task: this process.

    Attributes:
      has_begun: whether this chief has left its notes on the other tasks.
      replaced_on: the name of a task that another chief leads, in the place of this one; or ''.
      untold: the tasks that have to be told how this chief ends; none if that isn't its to tell.
      model_dirs: where this chief has trained. An evaluator looks there for the chief's ending.
    """

    def __init__(self, task: Task) -> None:
        self.has_begun = False
        self.replaced_on = ''
        self.untold: list[str] = []
        self.model_dirs: list[str] = []
        self._task = task

    def begin_training(self, model_dir: str) -> None:
        """Has to be called with the model_dir of each training, before `lead()`."""
        self._model_dir = model_dir
        self._file = ending.FileReader(model_dir)

    def lead(self) -> None:
        """Leaves a note on each task that this chief leads it, and a file in the model_dir.

        A chief that begins takes all tasks over from the chief before. Later, it only takes over
        those that have been started again.

        Raises:
          RuntimeError: if this chief has begun earlier, and another chief leads a task now.
        """
        with contextlib.ExitStack() as stack:
            notes = {}
            for task in self._task.others:
                notes[task] = stack.enter_context(self._task.notes_on(task))
            chiefs = {task: self.chief_of(notes[task]) for task in notes}

            for task, chief in chiefs.items():
                if self.has_begun and self.is_another(chief):
                    self.replaced_on = task
                    raise RuntimeError(self.replacement_error())
            for task, chief in chiefs.items():
                if chief != self._task.incarnation:
                    notes[task].write('end', '')
                    notes[task].write('chief', self._task.incarnation)

        if not self.has_begun:
            self.has_begun = True
            self.untold = list(self._task.others)
        if self._model_dir not in self.model_dirs:
            ending.write(self._model_dir, ending.Ending(self._task.incarnation))
            self.model_dirs.append(self._model_dir)

    def chief_of(self, notes: Notes) -> str:
        """The incarnation of the chief that leads a task of this cluster.

        Args:
          notes: those on the task.

        Returns:
          '' if no chief has led it yet, and for a task of another cluster.
        """
        return notes.read('chief') if self._is_own(notes) else ''

    def _is_own(self, notes: Notes) -> bool:
        """Whether the task that notes are on serves in this cluster."""
        cluster = notes.read('cluster')
        return bool(cluster) and json.loads(cluster) == self._task.addresses

    def is_another(self, chief: str) -> bool:
        """Whether another chief leads a task.

        Args:
          chief: what the task's note says; '' if the task has just begun.
        """
        return chief not in ('', self._task.incarnation)

    def replacement_error(self) -> str:
        """The text of the error of this chief, which was replaced."""
        task = self.replaced_on
        return f'Another chief leads {task} at {self._task.addresses[task]}: {_REPLACED}'

    def fail_if_followed(self) -> None:
        """Raises RuntimeError if another chief has trained while this one waits for tasks.

        The file in model_dir tells it, also if that chief and its tasks have ended since. It's read
        now and then.
        """
        written = self._file.read_now_and_then()
        if written is None or written.chief == self._task.incarnation:
            return
        before = self._file.before
        if before is not None and written.chief == before.chief:
            return
        status = 'trains' if written.status is None else f'has ended with {written.status}'
        raise RuntimeError(f'Another chief {status} in {self._model_dir}: {_REPLACED}')

    def tell_ending(self, error: str | None, status: int) -> None:
        """Tells the other tasks and an evaluator how this chief ends.

        A chief that hasn't led them tells nobody, nor does one that was replaced.

        Args:
          error: the error that it ends by, as text; None if it ends without one.
          status: its exit status.
        """
        if not self.has_begun:
            return
        end = ending.Ending(self._task.incarnation, error, status)
        self.tell_tasks(end)
        if self.replaced_on:
            return
        untold = tuple(self._task.addresses[task] for task in self.untold)
        end = end._replace(at=time.time(), untold=untold)
        for model_dir in self.model_dirs:
            with contextlib.suppress(tf.errors.OpError):
                ending.write(model_dir, end)

    def tell_tasks(self, end: ending.Ending) -> None:
        """Tells those of the other tasks that haven't been told yet how this chief ends.

        A chief that was replaced tells nobody: a task that hasn't been led yet may be its
        successor's.

        Args:
          end: how it ends.
        """
        if self.replaced_on:
            self.untold = []
        addresses = self._task.addresses
        there = reach.that_answer(addresses[task] for task in self.untold)
        with contextlib.ExitStack() as stack:
            reached = {}
            for task in self.untold:
                if addresses[task] not in there:
                    continue
                with contextlib.suppress(tf.errors.OpError):  # The other tasks are told anyway.
                    notes = stack.enter_context(self._task.notes_on(task))
                    if not self._is_own(notes):
                        continue
                    if self.is_another(notes.read('chief')):
                        self.replaced_on = task
                        self.untold = []
                        return
                    reached[task] = notes

            for task, notes in reached.items():
                with contextlib.suppress(tf.errors.OpError):
                    notes.write('end', end.text())
                    notes.write('chief', self._task.incarnation)
                    # Another thread that ends this process may have told it meanwhile.
                    self.untold = [other for other in self.untold if other != task]

    def end_process(self, error: str, status: int) -> NoReturn:
        """Ends this process from another thread than the main one, which may be in TensorFlow.

        The other tasks are told before, as nothing of `atexit` runs. That and the log may hang, as
        their disks may, so each is given a while.

        Args:
          error: why, for the log, and for the other tasks unless it's by SIGTERM.
          status: the exit status.
        """

        def log() -> None:
            tf.logging.error(f'{error}. This process ends.')
            sys.stdout.flush()
            sys.stderr.flush()

        def tell() -> None:
            self.tell_ending(None if status == SIGTERM_STATUS else error, status)

        end = time.monotonic() + LONGEST_TELLING
        try:
            threads = [threading.Thread(target=action, daemon=True) for action in (log, tell)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0, end - time.monotonic()))
        finally:
            os._exit(status)
