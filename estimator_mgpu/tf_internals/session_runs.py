"""Runs each `session.run` within a context manager, such as one that changes its errors."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf


def run_within(
    session: tf.Session, make_context: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    """Lets a session make a context for each of its runs, and run within it."""
    run = vars(session).get('run')  # set by an earlier call of this function, or by a hook
    if run is None:
        run = _run_of(session)

    @functools.wraps(run)
    def run_in_context(*args: Any, **kwargs: Any) -> Any:
        with make_context():
            return run(*args, **kwargs)

    session.run = run_in_context


def _run_of(session: tf.Session) -> Callable[..., Any]:
    """A session's method `run`, but without a reference to the session.

    Otherwise the session would refer to itself, and only the garbage collector would free it.
    """
    reference = weakref.ref(session)

    @functools.wraps(type(session).run)
    def run(*args: Any, **kwargs: Any) -> Any:
        session: Any = reference()
        if session is None:
            raise RuntimeError('This session no longer exists. Keep it to call its run.')
        return type(session).run(session, *args, **kwargs)

    return run
