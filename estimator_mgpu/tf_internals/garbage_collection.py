"""Keeps Python's garbage collector from visiting all ops of a graph over and over.

It visits objects up to three times before they count as old. Here, those of a graph do at once.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_OLDEST = 2  # the generation that only a full collection visits

# Python 3.12 begins with a few hundred frozen objects. If there are more, the program froze some.
_MOST_FROZEN_BY_PYTHON = 1000

# How many full collections there had been when objects were last made old; None before that.
_collections_when_made_old: int | None = None


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turns the garbage collector off while a whole graph is changed or read.

    Afterwards all objects of the process count as old, unless the collector was off before, or the
    program has frozen objects: these would be frozen no longer.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _make_objects_old()
            gc.enable()


def collect_earlier_graphs() -> None:
    """Frees graphs that aren't used any more, before another one is built.

    Python starts a full collection when many objects have become old. Objects that were made old
    here don't count for that, so several unused graphs could pile up. So this runs a collection,
    unless one has run since `no_garbage_collection` last ended. A graph that was still used in that
    one stays until the next one.
    """
    if gc.isenabled() and _collections_when_made_old == _count_full_collections():
        gc.collect()


def _make_objects_old() -> None:
    """Moves all objects to the collector's oldest generation, without visiting any of them."""
    global _collections_when_made_old
    if gc.get_freeze_count() <= _MOST_FROZEN_BY_PYTHON:
        gc.freeze()
        gc.unfreeze()
        _collections_when_made_old = _count_full_collections()


def _count_full_collections() -> int:
    return gc.get_stats()[_OLDEST]['collections']
