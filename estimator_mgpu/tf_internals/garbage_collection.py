"""Keeps Python's garbage collector from visiting all ops of a graph over and over."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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


def _let_objects_be_old() -> None:
    """Moves all objects to the collector's oldest generation, without visiting any of them."""
    if gc.get_freeze_count() == 0:  # Otherwise somebody wants objects to stay frozen.
        gc.freeze()
        gc.unfreeze()
