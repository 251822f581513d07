"""How this process, the chief, ends: it tells all others, and then it's gone.

It ends in one of two ways. Most often its program does, by an error or not, and `atexit` calls what
tells the others. Or another thread ends it, as the main thread hangs in TensorFlow: `watch` and
`chief_sigterm` have the reasons.

A chief tells how it ends only to tasks of its own cluster, and only if it has led them: others may
be in the midst of somebody else's training. Nor does it tell anybody after it was replaced: a task
that isn't led yet may be its successor's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import NoReturn

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster import ending, reach
from estimator_mgpu.cluster.ending import Ending
from estimator_mgpu.cluster.exits import SIGTERM_STATUS, NotedExit
from estimator_mgpu.cluster.leadership import Leadership
from estimator_mgpu.cluster.task import Task

LONGEST_TELLING = 20  # seconds that a process takes to tell others how it ends
_WAIT_FOR_LOST = 30  # seconds, at the end, for tasks that are about to be started again


class EndOfChief:
    """The end of this process, which is the chief: `Watch` and `ChiefSigterm` may end it, too.

    Attributes:
      main_thread_ends: whether the main thread has left TensorFlow, and is ending the process.
    """

    def __init__(self, task: Task, leadership: Leadership) -> None:
        self.main_thread_ends = False
        self._task = task
        self._leadership = leadership
        self._noted_exit = NotedExit()
        self._told: set[str] = set()  # the names of the tasks that know how this chief ends

    def tell_at_exit(self) -> None:
        """Makes this process tell the others how it ends, as it ends; not one that it forks."""
        self._noted_exit.install()
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=lambda: atexit.unregister(self._at_exit))

    def _at_exit(self) -> None:
        """Tells the others how the program has ended."""
        self.main_thread_ends = True
        self._task.busy = True  # SIGTERM only sets `sigterm_at` now: all tasks are told first.
        error, status = self._noted_exit.error_and_status()
        try:
            self.tell(error, status)
            if status == 0:
                self._tell_those_that_come_back()
        finally:  # What Python does after this may hang: it joins other processes, say.
            self._task.busy = False

    def end_process(self, error: str, status: int) -> NoReturn:
        """Ends this process from another thread than the main one, which may be in TensorFlow.

        The others are told before, as nothing of `atexit` runs. That and the log may hang, as their
        disks may, so each is given a while.

        Args:
          error: why, for the log, and for the other tasks unless it's by SIGTERM.
          status: the exit status.
        """

        def log() -> None:
            tf.logging.error(f'{error}. This process ends.')
            sys.stdout.flush()
            sys.stderr.flush()

        def tell() -> None:
            self.tell(None if status == SIGTERM_STATUS else error, status)

        deadline = time.monotonic() + LONGEST_TELLING
        try:
            threads = [threading.Thread(target=action, daemon=True) for action in (log, tell)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0, deadline - time.monotonic()))
        finally:
            os._exit(status)

    def tell(self, error: str | None, status: int) -> None:
        """Tells the other tasks and an evaluator how this chief ends, if that is its to tell.

        Args:
          error: the error that it ends by, as text; None if it ends without one.
          status: its exit status.
        """
        how = Ending(self._task.incarnation, error, status)
        self._tell_tasks(how)
        if self._leadership.replaced_on:
            return
        untold = tuple(self._task.addresses[name] for name in self._untold())
        how = how._replace(at=time.time(), untold=untold)
        for model_dir in self._leadership.model_dirs:
            with contextlib.suppress(tf.errors.OpError):
                ending.write(model_dir, how)

    def _untold(self) -> list[str]:
        """The tasks that have to be told yet; none if how this chief ends isn't its to tell."""
        if not self._leadership.has_begun or self._leadership.replaced_on:
            return []
        return [name for name in self._task.others if name not in self._told]

    def _tell_tasks(self, how: Ending) -> None:
        """Tells those tasks that have to be told yet, and can be reached."""
        addresses = self._task.addresses
        untold = self._untold()
        there = reach.that_answer(addresses[name] for name in untold)
        names = [name for name in untold if addresses[name] in there]

        with contextlib.ExitStack() as stack:
            reached = {}
            for name in names:
                with contextlib.suppress(tf.errors.OpError):  # The other tasks are told anyway.
                    notes = stack.enter_context(self._task.notes_on(name))
                    if not self._leadership.is_of_cluster(notes):
                        continue
                    if self._leadership.is_another(notes.read('chief')):
                        self._leadership.replaced_on = name
                        return
                    reached[name] = notes

            for name, notes in reached.items():
                with contextlib.suppress(tf.errors.OpError):
                    notes.write('end', how.text())
                    notes.write('chief', self._task.incarnation)
                    self._told.add(name)

    def _tell_those_that_come_back(self) -> None:
        """Waits a little for tasks that were lost: without a chief, they would wait for hours."""
        deadline = time.monotonic() + _WAIT_FOR_LOST
        untold = self._untold()
        if untold:
            tf.logging.warning(
                f'Training has ended. Waiting up to {_WAIT_FOR_LOST} seconds for '
                f'{", ".join(untold)} to come back, which would wait for this chief otherwise.'
            )
        while self._untold() and time.monotonic() < deadline and self._task.sigterm_at is None:
            time.sleep(1)
            self._tell_tasks(Ending(self._task.incarnation, None, 0))
