"""Observes the errors for which a `MonitoredSession` makes a new session, and corrects their class.

It makes one after an AbortedError or an UnavailableError, without telling anyone. TensorFlow has no
hook for that. So for as long as `lost_sessions` lasts, two names of its module `monitored_session`
refer to something else:

`logging`: `_RecoverableSession` catches such an error, logs it at the level INFO, and goes on with
a new session. In the place of the log is an object that passes everything on to it, and looks at
the errors among the arguments.

`ChiefSessionCreator`: if a task can't be reached, ops that receive its tensors fail with an
UnavailableError. An op that sends a tensor at this moment fails as well, but TensorFlow doesn't
know that this op uses the network, and replaces the error by an InternalError, for which no new
session is made. Which of the two a session raises is chance. In the class's place is one whose
sessions always raise the UnavailableError.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import error_messages
from estimator_mgpu.tf_internals.private import ChiefSessionCreator, session_log
from estimator_mgpu.tf_internals.session_runs import run_within


@contextlib.contextmanager
def lost_sessions(tell: Callable[[Exception], None]) -> Iterator[None]:
    """Calls `tell` with each error for which a `MonitoredSession` makes a new session.

    In its sessions, an InternalError that stands for a lost connection is an UnavailableError.
    """
    module: Any = importlib.import_module('tensorflow.python.training.monitored_session')

    class Log:
        """TensorFlow's log, but for `info`, by which the error is logged."""

        def __getattr__(self, name: str) -> Any:
            return getattr(session_log, name)

        def info(self, text: str, *args: Any) -> None:
            session_log.info(text, *args)
            for error in args:
                if isinstance(error, (tf.errors.AbortedError, tf.errors.UnavailableError)):
                    tell(error)

    module.logging = Log()
    module.ChiefSessionCreator = _Creator
    try:
        yield
    finally:
        module.logging = session_log
        module.ChiefSessionCreator = ChiefSessionCreator


class _Creator(ChiefSessionCreator):
    """Makes sessions that raise UnavailableError for a lost connection, also as they are made."""

    def create_session(self) -> tf.Session:
        with _right_class():
            session = super().create_session()
        run_within(session, _right_class)
        return session


@contextlib.contextmanager
def _right_class() -> Iterator[None]:
    """Raises the UnavailableError that TensorFlow has replaced by an InternalError."""
    try:
        yield
    except tf.errors.InternalError as error:
        if not error_messages.is_of_network(error):
            raise
        raise tf.errors.UnavailableError(error.node_def, error.op, error.message) from error
