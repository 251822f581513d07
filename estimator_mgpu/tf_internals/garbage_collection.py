"""Keeps Python's garbage collector from visiting all ops of a graph over and over.

It visits objects up to three times before they count as old. Here, those of a graph do at once.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import NamedTuple

_OLDEST = 2  # the generation that only a full collection visits
_MOST_GROWTH = 1.25  # as of Python itself: with more in memory, it's time for a full collection

# Python 3.12 begins with a few hundred frozen objects. If there are more, the program froze some.
_MOST_FROZEN_BY_PYTHON = 1000


class _MadeOld(NamedTuple):
    """What is remembered of the objects that were made old.

    Attributes:
      full_collections: how many there had been.
      first_size: how many blocks of memory Python had, when objects were first made old after the
        last one. To count all objects would take longer than to divide a small graph.
      last_size: the same when they were last made old.
    """

    full_collections: int
    first_size: int
    last_size: int


_made_old: _MadeOld | None = None


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
    """Runs a full collection before a graph is built, if earlier graphs have left many objects.

    Python does so when a quarter as many objects have become old as there were. Those that were
    made old here don't count for that, so unused graphs could pile up.
    """
    is_automatic = gc.isenabled() and gc.get_threshold()[0] > 0
    if not is_automatic or _made_old is None:
        return
    has_grown = _made_old.last_size > _MOST_GROWTH * _made_old.first_size
    if has_grown and _made_old.full_collections == _count_full_collections():
        gc.collect()


def _make_objects_old() -> None:
    """Moves all objects to the collector's oldest generation, without visiting any of them."""
    global _made_old
    if gc.get_freeze_count() > _MOST_FROZEN_BY_PYTHON:
        return
    gc.freeze()
    gc.unfreeze()

    size = sys.getallocatedblocks()
    full_collections = _count_full_collections()
    if _made_old is None or _made_old.full_collections != full_collections:
        _made_old = _MadeOld(full_collections, size, size)
    else:
        _made_old = _made_old._replace(last_size=size)


def _count_full_collections() -> int:
    return gc.get_stats()[_OLDEST]['collections']
