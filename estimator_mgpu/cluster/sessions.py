"""What a session on several machines needs: that all tasks are there, and that each op has one.

In: the graph of a training, before each of its sessions. Out: the same graph, with a task
for each op, once all tasks are there.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster import join
from estimator_mgpu.devices import CHIEF, device_spec
from estimator_mgpu.tf_internals import graphs, private


def begin(graph: tf.Graph) -> None:
    """Prepares a graph for a session, and waits for all tasks."""
    place_on_chief(graph)
    join.chief().begin_session()


def place_on_chief(graph: tf.Graph) -> None:
    """Places ops on the chief that have been placed on no task, unless they belong to another op.

    Those that use a variable or another resource belong to it, and so do ops that are colocated.
    """
    for op in graph.get_operations():
        if device_spec(op.device).job is not None:
            continue
        uses_state = any(
            tensor.dtype == tf.resource or graphs.is_reference_variable(tensor)
            for tensor in op.inputs
        )
        colocated = set(graphs.colocated_with(op)) - {op.name}  # A variable names itself.
        if not uses_state and not colocated:
            private.set_device(op, CHIEF + op.device)
