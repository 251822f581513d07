"""Lets training start sooner: finalized graphs are serialized once, and C code makes their text.

As training begins, TensorFlow serializes the graph five times for TensorBoard and `graph.pbtxt`, of
which it makes a text, and once for the first checkpoint; then again for each checkpoint. Both take
Python some time for every op, and a graph for several devices has several times as many ops.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals.garbage_collection import no_garbage_collection
from estimator_mgpu.tf_internals.private import graph_io, graph_text_format

# The largest GraphDef that is kept, in bytes: it stays in memory for as long as the graph does. The
# time goes by ops, of which 100,000 take about 30 MB. What is larger has large constants.
_MOST_BYTES = 50_000_000


def serialize_once(graph: tf.Graph) -> None:
    """Lets a graph keep its GraphDef from when it is finalized, and can't change any more."""
    # An earlier model_fn may have been replicated in the same graph.
    if not isinstance(graph.as_graph_def, _Serializer):
        serializer = _Serializer(graph)
        graph.as_graph_def = serializer
        graph.finalize = serializer.finalize


class _Serializer:
    """A graph's `as_graph_def`, which keeps its result.

    If something is set in a finalized graph, such as a tensor's shape, a result that was kept
    before doesn't have it.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self._graph = graph
        self._serialize = graph.as_graph_def
        self._finalize = graph.finalize
        functools.update_wrapper(self, graph.as_graph_def)
        # By the graph's version, and whether shapes are in it. As protos they'd need more memory.
        self._kept: dict[tuple[int, bool], bytes] = {}

    def finalize(self) -> None:
        """Finalizes the graph, which may have changed: a session that closes lets it."""
        self._kept.clear()
        self._finalize()

    def __call__(self, *args: Any, **kwargs: Any) -> tf.GraphDef:
        # Of the arguments, only these two change the result.
        arguments = inspect.signature(self._serialize).bind(*args, **kwargs).arguments
        key = self._graph.version, bool(arguments.get('add_shapes'))
        if arguments.get('from_version') is not None or not self._graph.finalized:
            with no_garbage_collection():
                return self._serialize(*args, **kwargs)

        if key in self._kept:
            return tf.GraphDef.FromString(self._kept[key])

        with no_garbage_collection():
            definition = self._serialize(*args, **kwargs)
        if definition.ByteSize() <= _MOST_BYTES:
            self._kept[key] = definition.SerializeToString()
        return definition


def write_text_by_c() -> None:
    """Lets TensorFlow write graphs as text in about a tenth of the time, from now on.

    That is all graphs of this process. The text means the same, but the attributes of an op have
    another order.
    """
    graph_io.text_format = _TextFormat()


class _TextFormat:
    """Protobuf's module `text_format`, but for how it prints a GraphDef."""

    def __getattr__(self, name: str) -> Any:
        return getattr(graph_text_format, name)

    def MessageToString(self, message: Any, *args: Any, **kwargs: Any) -> str:
        if isinstance(message, tf.GraphDef):
            return str(message)
        return graph_text_format.MessageToString(message, *args, **kwargs)
