"""Lets a thread hear of signals while the main thread is in TensorFlow and runs no handler.

Python's own handler, which runs at once, writes the number of each signal to a pipe if it's given
one (`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import os
import select
import signal
import threading


class SignalPipe:
    """The pipe to which the numbers of signals are written.

    Args:
      reading_end: a file descriptor.
      writing_end: a file descriptor.
    """

    def __init__(self, reading_end: int, writing_end: int) -> None:
        self._reading_end = reading_end
        self._writing_end = writing_end

    def wait(self, seconds: float) -> bytes:
        """Waits for signals, and returns their numbers; none if no signal came in that time."""
        readable, _, _ = select.select([self._reading_end], [], [], seconds)
        return os.read(self._reading_end, 4096) if readable else b''

    def close(self) -> None:
        """Closes the pipe. Nothing is written to it any more."""
        signal.set_wakeup_fd(-1)
        os.close(self._reading_end)
        os.close(self._writing_end)


def open_signal_pipe() -> SignalPipe | None:
    """Opens a pipe for signals.

    Returns:
      The pipe; None outside the main thread, where Python forbids this, and if another library
      already has a pipe for signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return None

    reading_end, writing_end = os.pipe()
    os.set_blocking(writing_end, False)
    before = signal.set_wakeup_fd(writing_end, warn_on_full_buffer=False)
    if before == -1:
        return SignalPipe(reading_end, writing_end)

    signal.set_wakeup_fd(before)
    os.close(reading_end)
    os.close(writing_end)
    return None
