"""What is fetched from a divided graph, and what is built on it later: values of the step itself.

The user's ops stay in a divided graph. If somebody fetches the output of a sharded one, the op runs
once more, on full values. Nothing is wrong with that as long as it only computes. But a second read
of a variable may come after the step's update, and a second write is one too many:

    towers' copies:  read ----> loss ----> gradients ----> update
    user's op:       read again ----> fetched                        before the update, or after it

So where an op touches state, whoever fetches its output gets the value that the towers' copies
have made. Ops that are added later, such as those of a hook's `begin()`, get it when the graph is
finalized.

In: a divided graph, and the full values of such outputs. Out: the same graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import private

# What a session asks of a graph for each thing that it fetches; it asks for nothing else like this.
_ASKED_BY_FETCH = dict(allow_tensor=True, allow_operation=True)


def give_values(graph: tf.Graph, values: Mapping[str, tf.Tensor]) -> None:
    """Gives values to whoever fetches or uses the user's tensors from now on.

    Args:
      graph: the graph. Another model in it may have been divided before.
      values: by the names of the user's tensors.
    """
    if not values:
        return
    if not isinstance(graph.as_graph_element, _Elements):
        elements = _Elements(graph.as_graph_element)
        graph.as_graph_element = elements
        graph.finalize = functools.partial(_finalize, graph, elements, graph.finalize)
    graph.as_graph_element.add(graph, values)


class _Elements:
    """A graph's `as_graph_element`, which has other tensors for sessions that fetch.

    Args:
      find: what the graph had in this one's place.
    """

    def __init__(self, find: Callable[..., Any]) -> None:
        self._find = find
        self._values: dict[str, tf.Tensor] = {}
        self._ops_seen = 0
        functools.update_wrapper(self, find)

    def add(self, graph: tf.Graph, values: Mapping[str, tf.Tensor]) -> None:
        """Adds values; the ops that the graph has now are as they should be."""
        self._values.update(values)
        self._ops_seen = len(graph.get_operations())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        element = self._find(*args, **kwargs)
        if kwargs == _ASKED_BY_FETCH and isinstance(element, tf.Tensor):
            return self._values.get(element.name, element)
        return element

    def give_to_added_ops(self, graph: tf.Graph) -> None:
        """Gives values to the ops that were added since the last call."""
        added = graph.get_operations()[self._ops_seen :]
        self._ops_seen += len(added)
        for op in added:
            for index, tensor in enumerate(op.inputs):
                if tensor.name in self._values:
                    private.set_input(op, index, self._values[tensor.name])


def _finalize(graph: tf.Graph, elements: _Elements, finalize: Callable[[], None]) -> None:
    elements.give_to_added_ops(graph)
    finalize()
