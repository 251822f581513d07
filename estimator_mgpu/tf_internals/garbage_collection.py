"""Keeps Python's garbage collector from visiting all ops of a graph over and over."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_OLDEST = 2  # the generation that only a full collection visits

# How many full collections there had been when objects were last made old; None before that.
_full_collections: int | None = None


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turns the garbage collector off while a whole graph is changed or read.

    Afterwards the graph's objects count as old ones. Otherwise the collector would visit them three
    times in the next moments, to find that all of them are still used.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _let_objects_be_old()
            gc.enable()


def collect_earlier_graphs() -> None:
    """Frees the graphs that are no longer used, before another one is built.

    Python starts a full collection when many objects have become old. It doesn't know of those that
    were made old here, so that several large graphs could be left. This runs one collection, unless
    there was one since.
    """
    if _full_collections == _count_full_collections():
        gc.collect()


def _let_objects_be_old() -> None:
    """Moves all objects to the collector's oldest generation, without visiting any of them."""
    global _full_collections
    if gc.get_freeze_count() == 0:  # Otherwise somebody wants objects to stay frozen.
        gc.freeze()
        gc.unfreeze()
        _full_collections = _count_full_collections()


def _count_full_collections() -> int:
    return gc.get_stats()[_OLDEST]['collections']
