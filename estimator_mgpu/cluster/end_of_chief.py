"""How this process, the chief, ends: it tells all others, and then it's gone.

Most often its program ends, by an error or not, and `atexit` calls what tells the others. If the
main thread hangs in TensorFlow, another thread ends the process: one of `watch`, if a task doesn't
answer or another chief leads; or one of `ChiefSigterm`, if SIGTERM came.

A chief tells how it ends only to tasks of its own cluster, and only if it has led them: others may
be in the midst of somebody else's training. Nor does it tell anybody after it was replaced: a task
that isn't led yet may be its successor's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster import ending, reach, saving
from estimator_mgpu.cluster.ending import Ending
from estimator_mgpu.cluster.exits import SIGTERM_STATUS, NotedExit
from estimator_mgpu.cluster.leadership import Leadership
from estimator_mgpu.cluster.task import Task
from estimator_mgpu.errors import user_lines

_LONGEST_TELLING = 20  # seconds that a process takes to tell others how it ends
_WAIT_FOR_LOST = 30  # seconds, at the end, for tasks that are about to be started again
# After SIGTERM, in seconds: how long the main thread has, so that the process ends within 10; and
# how long a checkpoint may take that is being saved.
_FOR_MAIN_THREAD = 7
_LONGEST_SAVE = 3600


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

        deadline = time.monotonic() + _LONGEST_TELLING
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


class ChiefSigterm:
    """Ends a chief within 10 seconds of SIGTERM, or 30 if a disk hangs, if the main thread doesn't.

    The step that runs is the chief's last one: `chief` sees to that, with the handler in `task`.
    But Python runs a signal's handler in the main thread, once TensorFlow returns to it: never, if
    a step waits for an input that hangs. It also writes the signal's number to a pipe, and at once,
    if it's given one (`signal.set_wakeup_fd`). Here a thread reads from it. Only a checkpoint that
    is being saved is finished first, unless that takes an hour, as on a disk that hangs.

    `watch` returns the `Watch` of the training that goes on, or None if none does.
    """

    def __init__(self, task: Task, end: EndOfChief, watch: Callable[[], Any]) -> None:
        self._task = task
        self._end = end
        self._watch = watch
        self._has_pipe = False
        self._masks = threading.local()  # of the signals that a thread which forks has blocked

    def listen(self) -> None:
        """Starts a thread that hears of SIGTERM for as long as this process lives.

        SIGTERM ends a process that this one forks, as multiprocessing does, and only that.
        """
        os.register_at_fork(
            before=self._block,
            after_in_parent=self._unblock,
            after_in_child=self._leave_to_system,
        )
        reading_end = _open_signal_pipe()
        if reading_end is not None:
            self._has_pipe = True
            threading.Thread(target=self._listen, args=[reading_end], daemon=True).start()

    def _block(self) -> None:
        """Has SIGTERM wait, as a process that was just forked may get it at once."""
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _leave_to_system(self) -> None:
        """Lets SIGTERM end this process, which was forked, as it does by default."""
        if self._has_pipe:
            signal.set_wakeup_fd(-1)
        if self._task.handles_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._unblock()

    def _listen(self, reading_end: int) -> None:
        numbers = os.read(reading_end, 4096)
        while numbers:
            if signal.SIGTERM in numbers and self._task.handles_sigterm():
                self.end_process_soon()
            numbers = os.read(reading_end, 4096)

    def end_process_soon(self) -> None:
        """Ends the process, unless the main thread begins to do so in its time.

        Time in which a checkpoint is saved doesn't count, unless a task doesn't answer.
        """
        waited = 0
        patience = _FOR_MAIN_THREAD
        while patience > 0:
            time.sleep(1)
            waited += 1
            if not self._is_saving() or waited > _LONGEST_SAVE:
                patience -= 1
            elif waited == _FOR_MAIN_THREAD:
                tf.logging.warning(
                    f'SIGTERM came {waited} seconds ago. A checkpoint is being saved. This process '
                    f'ends after that, or if it takes more than {_LONGEST_SAVE} seconds.'
                )
            if self._end.main_thread_ends:
                time.sleep(_LONGEST_TELLING)  # It tells the others, and ends the process meanwhile.
                os._exit(SIGTERM_STATUS)

        watch = self._watch()
        silent = watch.silent_tasks(_FOR_MAIN_THREAD) if watch else ''
        where = silent or f'the program is at {", ".join(user_lines.running())}'
        self._end.end_process(
            f'SIGTERM came {waited} seconds ago, and this process has not ended: {where}. Nothing '
            'is saved after the last checkpoint',
            SIGTERM_STATUS,
        )

    def _is_saving(self) -> bool:
        watch = self._watch()
        return watch is not None and saving.is_saving() and not watch.silent_tasks()


def _open_signal_pipe() -> int | None:
    """Opens a pipe to which the numbers of signals are written.

    Returns:
      Its end to read from; None outside the main thread, where Python forbids this, and if another
      library already has a pipe for signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return None

    reading_end, writing_end = os.pipe()
    os.set_blocking(writing_end, False)
    before = signal.set_wakeup_fd(writing_end, warn_on_full_buffer=False)
    if before == -1:
        return reading_end

    signal.set_wakeup_fd(before)
    os.close(reading_end)
    os.close(writing_end)
    return None
