"""How a graph is serialized and written as text: as TensorFlow does it, and sooner."""

import pytest
import tensorflow.compat.v1 as tf
from google.protobuf import text_format

from estimator_mgpu.tf_internals import graph_defs

pytestmark = pytest.mark.core


@pytest.fixture
def graph(monkeypatch):
    """A graph, and how many times it was really serialized."""
    count = []
    serialize = tf.Graph.as_graph_def

    def counted(*args, **kwargs):
        count.append(1)
        return serialize(*args, **kwargs)

    monkeypatch.setattr(tf.Graph, 'as_graph_def', counted)
    graph = tf.Graph()
    graph.count = count
    with graph.as_default():
        tf.reduce_sum(tf.placeholder(tf.float32, [None, 4]), axis=0)
    return graph


def test_a_finalized_graph_is_serialized_once(graph):
    without, with_shapes = graph.as_graph_def(), graph.as_graph_def(add_shapes=True)
    assert without != with_shapes
    for _ in range(2):
        graph_defs.serialize_once(graph)
    graph.finalize()
    graph.count.clear()
    for _ in range(3):
        assert graph.as_graph_def() == graph.as_graph_def(None, False) == without
        assert graph.as_graph_def(add_shapes=True) == with_shapes
    assert len(graph.count) == 2


def test_a_graph_that_can_change_is_serialized_each_time(graph):
    graph_defs.serialize_once(graph)
    [op, *_] = graph.get_operations()
    for device in ('/device:CPU:0', '/device:CPU:1'):
        op._set_device(device)  # The version of the graph stays the same.
        assert graph.as_graph_def().node[0].device == device
    graph.finalize()
    assert graph.as_graph_def().node[0].device == device


def test_what_is_changed_is_not_kept(graph):
    graph_defs.serialize_once(graph)
    graph.finalize()
    graph.as_graph_def().node[0].name = 'other'
    assert 'other' not in {node.name for node in graph.as_graph_def().node}


def test_a_graph_with_large_constants_is_not_kept(graph, monkeypatch):
    monkeypatch.setattr(graph_defs, '_MOST_BYTES', 100)
    graph_defs.serialize_once(graph)
    graph.finalize()
    assert graph.as_graph_def() == graph.as_graph_def()
    assert len(graph.count) == 2


def test_text(tmp_path):
    """All that a graph may have, as TensorFlow would read it."""
    graph_defs.write_text_by_c()
    with tf.Graph().as_default() as graph:
        tf.constant([b'\xff\x00', 'é'.encode(), b'"\n'])
        tf.constant([1e-30, float('inf'), 3.1415927, 16777217.0])
        total = tf.while_loop(lambda i: i < 3, lambda i: i + 1, [0])
        tf.debugging.Assert(total > 0, ['ü'])
    definition = graph.as_graph_def(add_shapes=True)
    tf.train.write_graph(definition, str(tmp_path), 'graph.pbtxt')
    tf.train.write_graph(definition.versions, str(tmp_path), 'versions.pbtxt')

    text = (tmp_path / 'graph.pbtxt').read_text()
    assert text_format.Parse(text, tf.GraphDef()) == definition
    versions = (tmp_path / 'versions.pbtxt').read_text()
    assert versions == text_format.MessageToString(definition.versions)
