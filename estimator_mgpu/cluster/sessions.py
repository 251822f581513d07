"""What a session on several machines needs: that all tasks are there, and that each op has one.

In: the scaffold of a training's EstimatorSpec. Out: the same, whose `finalize()` sees to both.
`MonitoredSession` calls it before the first session, and again before each one after a fault.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster import join
from estimator_mgpu.devices import CHIEF, device_spec
from estimator_mgpu.tf_internals import graphs, private


def wait_for_tasks(scaffold: tf.train.Scaffold) -> tf.train.Scaffold:
    """Lets a scaffold's sessions wait for all tasks."""
    finalize = scaffold.finalize

    def finalize_and_wait() -> Any:
        result = finalize()
        place_on_chief(tf.get_default_graph())
        join.chief().begin_session()
        return result

    scaffold.finalize = finalize_and_wait
    return scaffold


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
