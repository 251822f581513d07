"""Starts training sooner: a graph is serialized once, and its text is made by protobuf's C code.

As training begins, TensorFlow serializes the graph four times for `graph.pbtxt` and TensorBoard,
and once for the first checkpoint; then again for each checkpoint. Python spends time on every op,
as it does on the text of `graph.pbtxt`, and a graph for several devices has several times as many
ops.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals.garbage_collection import no_garbage_collection
from estimator_mgpu.tf_internals.private import graph_text_format

# Bytes of a GraphDef that is kept. A graph with large constants is serialized each time.
_MOST_BYTES = 50_000_000


def serialize_once(graph: tf.Graph) -> None:
    """Lets a graph, once it's finalized and can't change any more, keep its GraphDef."""
    if not isinstance(graph.as_graph_def, _Serializer):  # for an earlier model_fn in this graph
        graph.as_graph_def = _Serializer(graph, graph.as_graph_def)


class _Serializer:
    """What a graph has in the place of its method `as_graph_def`.

    Args:
      graph: the graph.
      serialize: its method.
    """

    def __init__(self, graph: tf.Graph, serialize: Callable[..., tf.GraphDef]) -> None:
        self._graph = graph
        self._serialize = serialize
        # By the graph's version, and whether shapes are in it.
        self._kept: dict[tuple[int, bool], tf.GraphDef] = {}

    def __call__(
        self, from_version: int | None = None, add_shapes: bool = False, **kwargs: Any
    ) -> tf.GraphDef:
        if from_version is not None or not self._graph.finalized:
            with no_garbage_collection():
                return self._serialize(from_version, add_shapes, **kwargs)

        key = self._graph.version, add_shapes
        if key not in self._kept:
            with no_garbage_collection():
                definition = self._serialize(add_shapes=add_shapes, **kwargs)
            if definition.ByteSize() > _MOST_BYTES:
                return definition
            self._kept[key] = definition
        copy = tf.GraphDef()  # for whoever changes it
        copy.CopyFrom(self._kept[key])
        return copy


def write_text_by_c() -> None:
    """Lets TensorFlow write each graph as text in about a tenth of the time, from now on.

    The text means the same, but the attributes of an op have another order.
    """
    module: Any = importlib.import_module('tensorflow.python.framework.graph_io')
    module.text_format = _TextFormat()


class _TextFormat:
    """Protobuf's module `text_format`, but for how it prints a GraphDef."""

    def __getattr__(self, name: str) -> Any:
        return getattr(graph_text_format, name)

    def MessageToString(self, message: Any, *args: Any, **kwargs: Any) -> str:
        if isinstance(message, tf.GraphDef):
            return str(message)
        return graph_text_format.MessageToString(message, *args, **kwargs)
