"""What is made without garbage collections counts as old, so that none visits it soon."""

import gc
import weakref

import pytest

from estimator_mgpu.tf_internals.garbage_collection import (
    collect_earlier_graphs,
    no_garbage_collection,
)


@pytest.fixture
def nothing_frozen():
    """The tests' own frozen objects are free for a while."""
    gc.unfreeze()
    yield
    gc.freeze()


def is_in_generation(thing, generation):
    return any(other is thing for other in gc.get_objects(generation))


def test_objects_are_old_afterwards(nothing_frozen):
    with no_garbage_collection():
        assert not gc.isenabled()
        made = [[]]
        assert is_in_generation(made, 0)
    assert gc.isenabled()
    assert is_in_generation(made, 2)


def test_cycles_are_still_collected(nothing_frozen):
    with no_garbage_collection():
        node = Node()
        node.itself = node
        freed = weakref.ref(node)
        del node
    assert freed() is not None
    gc.collect()
    assert freed() is None


def test_what_was_made_old_is_collected_before_the_next_graph(nothing_frozen):
    with no_garbage_collection():
        node = Node()
        node.itself = node
        freed = weakref.ref(node)
    del node
    collect_earlier_graphs()
    assert freed() is None

    collections = gc.get_stats()[2]['collections']
    collect_earlier_graphs()
    assert gc.get_stats()[2]['collections'] == collections


class Node:
    """May have attributes."""


def test_an_outer_context_goes_on():
    with no_garbage_collection():
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_others_have_frozen_stays_frozen(nothing_frozen):
    gc.freeze()
    frozen = gc.get_freeze_count()
    with no_garbage_collection():
        made = [[]]
    assert gc.get_freeze_count() == frozen
    assert not is_in_generation(made, 2)
