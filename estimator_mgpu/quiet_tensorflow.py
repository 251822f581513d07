"""Leaves the log of TensorFlow's C++ code out of what `python -m estimator_mgpu` prints.

Much of it is written while TensorFlow is imported. Python imports the package, and so TensorFlow,
before it runs `__main__`: so the package imports this module first.

If the import fails, all of the log is printed. TensorFlow may end the process, for example on a
CPU that it wasn't built for: then another process prints it.
"""

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, NoReturn

_LEVEL = 'TF_CPP_MIN_LOG_LEVEL'


def _is_command() -> bool:
    """Whether Python is about to run this package, rather than to import it for a program.

    While Python looks for the module of `-m`, `sys.argv[0]` is '-m'.
    """
    arguments = getattr(sys, 'orig_argv', [])  # since Python 3.10
    return sys.argv[:1] == ['-m'] and 'estimator_mgpu' in arguments


@contextlib.contextmanager
def _log_if_it_fails() -> Iterator[None]:
    """Drops what is written to the standard error, also by C++ code, unless the block fails."""
    sys.stderr.flush()
    sys.stdout.flush()
    with tempfile.TemporaryFile() as log:
        end, success = os.pipe()
        printer = os.fork()
        if not printer:
            os.close(success)
            _print_unless(end, log)

        os.close(end)
        stderr = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield
            os.write(success, b'1')
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            os.close(success)
            os.waitpid(printer, 0)


def _print_unless(end: int, log: IO[bytes]) -> NoReturn:
    """Waits for the other process, prints the log unless that has written to a pipe, and exits.

    Args:
      end: the pipe's end that is read.
      log: what the other process has written to its standard error.
    """
    try:
        if not os.read(end, 1):
            log.seek(0)
            os.write(2, log.read())
    finally:
        os._exit(0)


_can_fork = hasattr(os, 'fork')  # Windows has none, so no other process can print the log.
if _is_command() and _can_fork and _LEVEL not in os.environ:
    os.environ[_LEVEL] = '3'
    with _log_if_it_fails():  # During its import, TensorFlow 2.21 doesn't look at the level.
        importlib.import_module('tensorflow')
