"""What is made without garbage collections counts as old, so that none visits it soon."""

import gc
import subprocess
import sys
import textwrap
import weakref

import pytest
import tensorflow.compat.v1 as tf

from estimator_mgpu import replicate
from estimator_mgpu.tf_internals.garbage_collection import (
    collect_earlier_graphs,
    no_garbage_collection,
)
from models import regression, sgd


@pytest.fixture
def nothing_frozen():
    """Undoes conftest's `gc.freeze()` during a test."""
    gc.unfreeze()
    yield
    gc.collect()
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


def test_what_the_program_froze_stays_frozen(nothing_frozen):
    frozen = [[] for _ in range(2000)]
    gc.freeze()
    with no_garbage_collection():
        pass
    assert not any(other is frozen for other in gc.get_objects())


def test_a_graph_is_freed_before_the_next_one_is_built(nothing_frozen):
    def build():
        with tf.Graph().as_default() as graph:
            replicate(regression(sgd), devices=2)(tf.zeros([4, 3]), tf.zeros([4, 1]), 'train')
        return weakref.ref(graph)

    first = build()
    assert first() is not None
    build()
    assert first() is None


def test_a_collector_that_is_off_collects_nothing(nothing_frozen):
    with no_garbage_collection():
        pass
    collections = gc.get_stats()[2]['collections']
    gc.disable()
    try:
        collect_earlier_graphs()
    finally:
        gc.enable()
    assert gc.get_stats()[2]['collections'] == collections


def test_objects_are_made_old_in_a_new_process():
    """On Python 3.12, one begins with frozen objects of its own."""
    code = """
        import gc
        from estimator_mgpu.tf_internals.garbage_collection import no_garbage_collection
        with no_garbage_collection():
            made = [[]]
        print(any(other is made for other in gc.get_objects(2)))
    """
    printed = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == ['True']
