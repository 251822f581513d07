"""Leaves the log of TensorFlow's C++ code out of what `python -m estimator_mgpu` prints.

Much of it is written while TensorFlow is imported. Python imports the package, and so TensorFlow,
before it runs `__main__`: so the package imports this module first.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator

_LEVEL = 'TF_CPP_MIN_LOG_LEVEL'


def _is_command() -> bool:
    """Whether Python is about to run this package, rather than to import it for a program.

    While Python looks for the module of `-m`, `sys.argv[0]` is '-m'.
    """
    arguments = getattr(sys, 'orig_argv', [])  # since Python 3.10
    return sys.argv[:1] == ['-m'] and 'estimator_mgpu' in arguments


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Drops what is written to the standard error, also by C++ code."""
    sys.stderr.flush()
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(nowhere)
        os.close(stderr)


if _is_command() and _LEVEL not in os.environ:
    os.environ[_LEVEL] = '3'
    with _without_stderr():  # During its import, TensorFlow 2.21 doesn't look at the level.
        importlib.import_module('tensorflow')
