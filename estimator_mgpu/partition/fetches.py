"""What is fetched from a divided graph, and what is built on it later: values of the step itself.

The user's ops stay in a divided graph. If somebody fetches the output of a sharded one, the op runs
once more, on full values. Nothing is wrong with that as long as it only computes. But a second read
of a variable may come after the step's update, and a second write is one too many:

    towers' copies:  read ----> loss ----> gradients ----> update
    user's op:       read again ----> fetched                        before the update, or after it

So where an op touches state, whoever fetches its output gets the value that the towers' copies
have made. Ops that are added later, such as those of a hook's `begin()`, get it when the graph is
finalized, or before something is fetched.

In: a divided graph, and the full values of such outputs. Out: the same graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs, private


def give_values(graph: tf.Graph, values: Mapping[str, tf.Tensor]) -> None:
    """Gives values to sessions that fetch the user's tensors, and to ops that are added later.

    Args:
      graph: the graph. Another model in it may have been divided before.
      values: by the names of the user's tensors.
    """
    if not values:
        return
    if not isinstance(graph.as_graph_element, _FetchedTensors):
        fetched = _FetchedTensors(graph, graph.as_graph_element)
        graph.as_graph_element = fetched
        graph.finalize = functools.partial(_finalize, fetched, graph.finalize)
    graph.as_graph_element.add(values)


class _FetchedTensors:
    """A graph's `as_graph_element`, which has other tensors for sessions that fetch.

    Args:
      as_graph_element: what the graph had in this one's place.
    """

    def __init__(self, graph: tf.Graph, as_graph_element: Callable[..., Any]) -> None:
        self._graph = graph
        self._as_graph_element = as_graph_element
        self._values: dict[str, tf.Tensor] = {}
        self._version = 0  # of the graph, which grows with each op that is added
        self._ops_seen = 0
        functools.update_wrapper(self, as_graph_element)

    def add(self, values: Mapping[str, tf.Tensor]) -> None:
        """Adds the values of a model, whose towers keep their inputs."""
        if self._values:  # A second model may use tensors of the first one.
            self.give_to_added_ops()
        self._values.update(values)
        self._note_ops()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        element = self._as_graph_element(*args, **kwargs)
        if kwargs != private.ASKED_BY_FETCH:
            return element
        if not self._graph.finalized:  # Otherwise they have got them.
            self.give_to_added_ops()
        if isinstance(element, tf.Operation):
            return self._op_in_use(element)
        return self._values.get(element.name, element)

    def give_to_added_ops(self) -> None:
        """Gives values to the ops that were added since the last call."""
        if self._graph.version == self._version:
            return
        for op in self._graph.get_operations()[self._ops_seen :]:
            for index, tensor in enumerate(op.inputs):
                if tensor.name in self._values:
                    private.set_input(op, index, self._values[tensor.name])
            before = op.control_inputs
            in_use = [self._op_in_use(other) for other in before]
            if in_use != before:
                graphs.set_control_inputs(op, in_use)
        self._note_ops()

    def _op_in_use(self, op: tf.Operation) -> tf.Operation:
        """The op that makes the value of an op's first output; the op itself if that has none."""
        value = self._values.get(f'{op.name}:0')
        return op if value is None else value.op

    def _note_ops(self) -> None:
        self._version = self._graph.version
        self._ops_seen = len(self._graph.get_operations())


def _finalize(fetched: _FetchedTensors, finalize: Callable[[], None]) -> None:
    fetched.give_to_added_ops()
    finalize()
