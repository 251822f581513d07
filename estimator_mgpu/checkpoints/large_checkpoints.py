"""Checkpoints of tables that leave no room for a copy on their device.

In: a graph with a saver. Out: the same graph, in which a variable is saved without a copy of it.
TensorFlow makes one on the variable's device if a step has updated some rows: the op that turns
this off is in the graph, but nothing waits for it.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import function_calls, op_types


def save_without_copies(scaffold: tf.train.Scaffold) -> tf.train.Scaffold:
    """Lets a scaffold change how the graph saves, once it has a saver."""
    finalize = scaffold.finalize

    def finalize_and_change() -> Any:
        result = finalize()
        _save_without_copies(tf.get_default_graph())
        return result

    scaffold.finalize = finalize_and_change
    return scaffold


def _save_without_copies(graph: tf.Graph) -> None:
    for op in graph.get_operations():
        if op.type == op_types.DISABLE_COPIES:
            scope = op.name.rpartition('/')[0]
            for read in op.inputs[0].consumers():
                is_of_scope = read.name.rpartition('/')[0] == scope
                is_read = is_of_scope and read.type == op_types.READ_VARIABLE
                # A scaffold is finalized for each session.
                if is_read and op not in read.control_inputs:
                    function_calls.let_wait(read, [op])
