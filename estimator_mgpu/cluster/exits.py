"""How this process ends, for a function that `atexit` calls: Python doesn't tell it that.

`sys.exit()` raises SystemExit. If nobody catches it, the interpreter reads its `code`, and nothing
of it is left by the time that `atexit` calls functions. So `NotedExit` notes what is read there.
How other tasks end by it is in `ending`.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import signal
import sys
from typing import Any, NoReturn

SIGTERM_STATUS = 128 + signal.SIGTERM  # the exit status of a process that SIGTERM has ended


class NotedExit:
    """Notes the SystemExit that ends the program.

    Attributes:
      was_seen: whether there is one: nobody has caught it.
      argument: its `code`; None before.
    """

    def __init__(self) -> None:
        self.was_seen = False
        self.argument: Any = None

    def install(self) -> None:
        """Replaces `SystemExit.code` and `sys.exit` by ones that give the program the same."""
        original_code = vars(SystemExit)['code']

        def read_code(error: SystemExit) -> Any:
            argument = original_code.__get__(error)
            if sys._getframe().f_back is None:  # No Python code reads it: the interpreter does.
                self.was_seen, self.argument = True, argument
            return argument

        # The class itself is read-only, and its attributes are cached.
        (attributes,) = gc.get_referents(vars(SystemExit))
        attributes['code'] = property(read_code, original_code.__set__, original_code.__delete__)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))

        original_exit = sys.exit

        @functools.wraps(original_exit)
        def exit_by_system_exit(*args: Any) -> NoReturn:
            try:
                original_exit(*args)
            except SystemExit:  # Up to Python 3.11, it's only made if Python code catches it.
                raise

        sys.exit = exit_by_system_exit

    def error_and_status(self) -> tuple[str | None, int]:
        """How the program, which is over, has ended: its error as text, or None, and its status."""
        uncaught = getattr(sys, 'last_value', None)
        # A program may also end by `sys.exit()` after that, as one that runs tests does.
        if uncaught is not None and not self.was_seen:
            name, message = type(uncaught).__name__, _text(uncaught)
            return f'{name}: {message}' if message else name, 1
        if self.argument is None:
            return None, 0
        if isinstance(self.argument, int):
            return None, self.argument & 0xFF  # The system keeps only these bits.
        return _text(self.argument), 1


def _text(value: Any) -> str:
    """Returns `str(value)`, or why there is none: the process ends in any case."""
    try:
        return str(value)
    except BaseException:
        return 'it has no message, as its str() fails'
