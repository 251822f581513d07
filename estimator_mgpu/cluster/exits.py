"""How this process ends, for a function that `atexit` calls: Python doesn't tell it that.

`sys.exit()` raises SystemExit, of which nothing is left by then. So `NotedExit` notes its argument.
"""

from __future__ import annotations

import functools
import signal
import sys
import threading
from typing import Any, NoReturn

SIGTERM_STATUS = 128 + signal.SIGTERM  # the exit status of a process that SIGTERM has ended


class NotedExit:
    """Notes what `sys.exit()` is called with in the main thread.

    Attributes:
      argument: what it was called with; None if it wasn't called.
    """

    def __init__(self) -> None:
        self.argument: Any = None

    def install(self) -> None:
        """Replaces `sys.exit` by a function that notes its argument, and then does the same."""
        original_exit = sys.exit

        @functools.wraps(original_exit)
        def noting_exit(status: Any = None) -> NoReturn:
            # In another thread it ends only that thread.
            if threading.current_thread() is threading.main_thread():
                self.argument = status
            original_exit(status)

        sys.exit = noting_exit


def error_text(error: BaseException) -> str:
    """Returns an error's class and message."""
    try:
        message = str(error)
    except Exception:
        message = 'it has no message, as its str() fails'
    return f'{type(error).__name__}: {message}'


def error_and_status(argument: Any) -> tuple[str | None, int]:
    """Returns the error, as text, and the status of a process that calls `sys.exit(argument)`."""
    if argument is None:
        return None, 0
    if isinstance(argument, int):
        return None, argument & 0xFF  # The system keeps only these bits.
    return str(argument), 1
