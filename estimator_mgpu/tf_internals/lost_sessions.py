"""Observes the errors for which a `MonitoredSession` makes a new session, and corrects their class.

It makes one after an AbortedError or an UnavailableError, without telling anyone. TensorFlow has no
hook for that. So for as long as `lost_sessions` lasts, two names of its module `monitored_session`
refer to something else:

`logging`: `_RecoverableSession` catches such an error, logs it at the level INFO, and goes on with
a new session. In the place of the log is an object that passes everything on to it, and looks at
the errors among the arguments.

`ChiefSessionCreator`: if a task is lost, ops that receive its tensors fail with an
UnavailableError, or with an AbortedError if it has been started again. Other ops may fail before,
with errors for which no new session is made: a step is cancelled on the other tasks, and if an op
sends a tensor at this moment, TensorFlow doesn't know that this op uses the network, and replaces
the error by an InternalError. Which one a session raises is chance. In the class's place is one
whose sessions always raise an UnavailableError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import error_messages
from estimator_mgpu.tf_internals.private import ChiefSessionCreator, monitored_session, session_log
from estimator_mgpu.tf_internals.session_runs import run_within

# The errors for which a `MonitoredSession` makes a new session.
LOST = (tf.errors.AbortedError, tf.errors.UnavailableError)


@contextlib.contextmanager
def lost_sessions(tell: Callable[[Exception], None]) -> Iterator[None]:
    """Calls `tell` with each error for which a `MonitoredSession` makes a new session.

    In its sessions, any error that a lost task has caused is one of these.
    """

    class Log:
        """TensorFlow's log, but for `info`, by which the error is logged."""

        def __getattr__(self, name: str) -> Any:
            return getattr(session_log, name)

        def info(self, text: str, *args: Any) -> None:
            session_log.info(text, *args)
            for error in args:
                if isinstance(error, LOST):
                    tell(error)

    monitored_session.logging = Log()
    monitored_session.ChiefSessionCreator = _Creator
    try:
        yield
    finally:
        monitored_session.logging = session_log
        monitored_session.ChiefSessionCreator = ChiefSessionCreator


class _Creator(ChiefSessionCreator):
    """Makes sessions that raise UnavailableError for a lost task, also as they are made."""

    def create_session(self) -> tf.Session:
        with _right_class():
            session = super().create_session()
        run_within(session, _right_class)
        return session


@contextlib.contextmanager
def _right_class() -> Iterator[None]:
    """Raises an UnavailableError for what is cancelled, or called internal, by a lost task."""
    try:
        yield
    except (tf.errors.CancelledError, tf.errors.InternalError) as error:
        if not error_messages.is_of_lost_task(error):
            raise
        raise tf.errors.UnavailableError(error.node_def, error.op, error.message) from error
