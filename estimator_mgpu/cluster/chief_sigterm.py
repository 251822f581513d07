"""SIGTERM ends a chief within 10 seconds, or 30 if a disk hangs, also if its main thread hangs.

The step that runs is the chief's last one: `chief` sees to that, with the handler in `task`. But
Python runs a signal's handler in the main thread, once TensorFlow returns to it: never, if a step
waits for an input that hangs. It also writes the signal's number to a pipe, and at once, if it's
given one (`signal.set_wakeup_fd`). Here a thread reads from it. Only a checkpoint that is being
saved is finished first, unless that takes an hour, as on a disk that hangs.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster import saving
from estimator_mgpu.cluster.end_of_chief import LONGEST_TELLING, EndOfChief
from estimator_mgpu.cluster.exits import SIGTERM_STATUS
from estimator_mgpu.cluster.task import Task
from estimator_mgpu.cluster.watch import Watch
from estimator_mgpu.errors import user_lines

_FOR_MAIN_THREAD = 7  # seconds; with what follows, the process ends within 10
_LONGEST_SAVE = 3600  # seconds


class ChiefSigterm:
    """Ends this process some seconds after SIGTERM, if the main thread doesn't.

    `watch` returns the watch of the training that goes on, or None if none does.
    """

    def __init__(self, task: Task, end: EndOfChief, watch: Callable[[], Watch | None]) -> None:
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
                time.sleep(LONGEST_TELLING)  # It tells the others, and ends the process meanwhile.
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
