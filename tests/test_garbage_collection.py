"""What is made without garbage collections counts as old, so that none visits it soon."""

import gc
import subprocess
import sys
import textwrap
import weakref

import tensorflow.compat.v1 as tf

from estimator_mgpu import replicate
from estimator_mgpu.tf_internals.garbage_collection import (
    collect_earlier_graphs,
    no_garbage_collection,
)
from models import regression, sgd


def is_in_generation(thing, generation):
    return any(other is thing for other in gc.get_objects(generation))


def test_objects_are_old_afterwards():
    with no_garbage_collection():
        assert not gc.isenabled()
        made = [[]]
        assert is_in_generation(made, 0)
    assert gc.isenabled()
    assert is_in_generation(made, 2)


def test_cycles_are_still_collected():
    with no_garbage_collection():
        node = Node()
        node.itself = node
        freed = weakref.ref(node)
        del node
    assert freed() is not None
    gc.collect()
    assert freed() is None


def make_old(node, count):
    """Makes a cycle of many objects old, without a reference to it."""
    with no_garbage_collection():
        node.itself = node
        node.others = [[] for _ in range(count)]


def test_what_was_made_old_is_collected_before_a_graph_is_built():
    """If there is a quarter more memory than there was."""
    gc.collect()
    with no_garbage_collection():
        before = sys.getallocatedblocks()

    node = Node()
    freed = weakref.ref(node)
    make_old(node, before // 6)
    del node
    build_a_graph()
    assert freed() is not None

    node = Node()
    make_old(node, before // 6)
    del node
    build_a_graph()
    assert freed() is None


def build_a_graph():
    with tf.Graph().as_default():
        replicate(regression(sgd), devices=2)(tf.zeros([4, 3]), tf.zeros([4, 1]), 'train')


class Node:
    """May have attributes."""


def test_an_outer_context_goes_on():
    with no_garbage_collection():
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_the_program_froze_stays_frozen():
    frozen = [[] for _ in range(2000)]
    gc.freeze()
    try:
        with no_garbage_collection():
            pass
        assert not any(other is frozen for other in gc.get_objects())
    finally:
        gc.unfreeze()


def test_a_collector_that_is_off_collects_nothing():
    gc.collect()
    with no_garbage_collection():
        before = sys.getallocatedblocks()
    with no_garbage_collection():
        kept = [[] for _ in range(before // 3)]
    collections = gc.get_stats()[2]['collections']
    gc.disable()
    try:
        collect_earlier_graphs()
    finally:
        gc.enable()
    assert gc.get_stats()[2]['collections'] == collections
    assert len(kept) == before // 3


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
