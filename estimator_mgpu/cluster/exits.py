"""How this process ends, for a function that `atexit` calls: Python doesn't tell it that.

`sys.exit()` raises SystemExit, of which nothing is left by then. So `NotedExit` notes its argument,
and that of a SystemExit that passes through our own calls.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

SIGTERM_STATUS = 128 + signal.SIGTERM  # the exit status of a process that SIGTERM has ended


class NotedExit:
    """Notes what the main thread ends with.

    Attributes:
      argument: that of `sys.exit()`, or of SystemExit; None if neither was seen.
    """

    def __init__(self) -> None:
        self.argument: Any = None

    def install(self) -> None:
        """Replaces `sys.exit` by a function that notes its argument, and then does the same."""
        original_exit = sys.exit

        @functools.wraps(original_exit)
        def noting_exit(status: Any = None) -> NoReturn:
            self._note(status)
            original_exit(status)

        sys.exit = noting_exit

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """A context that notes the argument of a SystemExit which leaves it."""
        try:
            yield
        except SystemExit as error:
            self._note(error.code)
            raise

    def _note(self, argument: Any) -> None:
        # In another thread it ends only that thread.
        if threading.current_thread() is threading.main_thread():
            self.argument = argument


def error_text(error: BaseException) -> str:
    """Returns an error's class and message."""
    try:
        message = str(error)
    except Exception:
        message = 'it has no message, as its str() fails'
    name = type(error).__name__
    return f'{name}: {message}' if message else name


def error_and_status(argument: Any) -> tuple[str | None, int]:
    """Returns the error, as text, and the status of a process that calls `sys.exit(argument)`."""
    if argument is None:
        return None, 0
    if isinstance(argument, int):
        return None, argument & 0xFF  # The system keeps only these bits.
    return str(argument), 1
