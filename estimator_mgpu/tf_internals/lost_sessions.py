"""Observes the errors for which a `MonitoredSession` makes a new session.

TensorFlow has no hook for that: `_RecoverableSession` catches the error, logs it at the level INFO,
and goes on with a new session. So for as long as `lost_sessions` lasts, the name `logging` in
TensorFlow's module `monitored_session` refers to an object that passes everything on to the real
log, and looks at the errors among the arguments.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals.private import session_log


@contextlib.contextmanager
def lost_sessions(tell: Callable[[Exception], None]) -> Iterator[None]:
    """Calls `tell` with each error for which a `MonitoredSession` makes a new session."""
    module = importlib.import_module('tensorflow.python.training.monitored_session')

    class Log:
        """TensorFlow's log, but for `info`, by which the error is logged."""

        def __getattr__(self, name: str) -> Any:
            return getattr(session_log, name)

        def info(self, text: str, *args: Any) -> None:
            session_log.info(text, *args)
            for error in args:
                if isinstance(error, (tf.errors.AbortedError, tf.errors.UnavailableError)):
                    tell(error)

    module.logging = Log()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.logging = session_log  # type: ignore[attr-defined]
