"""How a graph is serialized and written as text: as TensorFlow does it, and sooner."""

import functools

import pytest
import tensorflow.compat.v1 as tf
from google.protobuf import text_format

import estimator_mgpu
from estimator_mgpu.tf_internals import graph_defs
from models import sgd, spec_of

pytestmark = pytest.mark.core


@pytest.fixture
def graph(monkeypatch):
    """A graph, and how many times it was really serialized."""
    count = []
    serialize = tf.Graph.as_graph_def

    @functools.wraps(serialize)
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
    graph_defs.serialize_once(graph)
    serializer = graph.as_graph_def
    graph_defs.serialize_once(graph)  # for another model_fn
    assert graph.as_graph_def is serializer
    graph.finalize()
    graph.count.clear()
    for _ in range(3):
        assert graph.as_graph_def() == graph.as_graph_def(None, False) == without
        assert graph.as_graph_def(add_shapes=True) == with_shapes
    assert len(graph.count) == 2
    assert graph.as_graph_def.__name__ == 'as_graph_def'
    with pytest.raises(TypeError, match='add_shape'):
        graph.as_graph_def(add_shape=True)


def test_a_graph_that_can_change_is_serialized_each_time(graph):
    graph_defs.serialize_once(graph)
    [op, *_] = graph.get_operations()
    for device in ('/device:CPU:0', '/device:CPU:1'):
        op._set_device(device)  # The version of the graph stays the same.
        assert graph.as_graph_def().node[0].device == device
    graph.finalize()
    assert graph.as_graph_def().node[0].device == device


def test_a_graph_may_change_between_sessions(graph):
    graph_defs.serialize_once(graph)
    op, *_ = graph.get_operations()
    for device in ('/device:CPU:0', '/device:CPU:1'):
        with graph.as_default(), tf.train.MonitoredSession():
            assert graph.finalized
            assert graph.as_graph_def().node[0].device == op.device
        op._set_device(device)
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
    assert text == str(definition) != text_format.MessageToString(definition)
    assert text_format.Parse(text, tf.GraphDef()) == definition
    versions = (tmp_path / 'versions.pbtxt').read_text()
    assert versions == text_format.MessageToString(definition.versions)


def test_training(tmp_path, monkeypatch):
    """Three times: twice before the graph is finalized, and then for all of three checkpoints."""
    count, serialize = [], tf.Graph.as_graph_def

    @functools.wraps(serialize)
    def counted(graph, *args, **kwargs):
        count.append(graph.finalized)
        return serialize(graph, *args, **kwargs)

    monkeypatch.setattr(tf.Graph, 'as_graph_def', counted)
    printed, print_in_python = [], text_format.MessageToString

    def printing(message, *args, **kwargs):
        printed.append(type(message))
        return print_in_python(message, *args, **kwargs)

    monkeypatch.setattr(text_format, 'MessageToString', printing)

    def input_fn():
        return tf.data.Dataset.from_tensors(tf.ones([4, 2])).repeat()

    def model_fn(features, mode):
        loss = tf.reduce_mean(tf.layers.dense(features, 1))
        return spec_of(mode, loss, sgd(loss))

    config = estimator_mgpu.estimator.RunConfig(save_checkpoints_steps=2)
    trained = estimator_mgpu.Estimator(model_fn, tmp_path, config, devices=2)
    trained.train(input_fn, steps=4)
    assert count == [False, False, True] and tf.GraphDef not in printed
    assert (tmp_path / 'graph.pbtxt').stat().st_size > 1000
    with tf.Graph().as_default(), tf.Session(config=estimator_mgpu.session_config(2)) as session:
        saver = tf.train.import_meta_graph(f'{trained.latest_checkpoint()}.meta')
        saver.restore(session, trained.latest_checkpoint())
        assert session.run(tf.train.get_global_step()) == 4
