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
        # A weak reference: otherwise the session would refer to itself, and only the garbage
        # collector would free its memory.
        run = functools.partial(_run, weakref.ref(session))
    session.run = functools.partial(_run_within, make_context, run)


def _run(reference: weakref.ref[tf.Session], *args: Any, **kwargs: Any) -> Any:
    """Runs a session as its class does."""
    session: Any = reference()
    if session is None:
        raise RuntimeError('This session no longer exists: keep it as long as you call its run.')
    return type(session).run(session, *args, **kwargs)


def _run_within(
    make_context: Callable[[], contextlib.AbstractContextManager[None]],
    run: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a `run` of a session within a context."""
    with make_context():
        return run(*args, **kwargs)
