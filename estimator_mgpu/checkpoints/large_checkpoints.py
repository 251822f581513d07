"""Checkpoints of tables that leave no room for a copy on their device.

In: a graph with a saver. Out: the same graph, in which a variable is saved without a copy of it.
TensorFlow makes one on the variable's device if a step has updated some rows: the op that turns
this off is in the graph, but nothing waits for it.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import function_calls, graphs, op_types


def save_without_copies(graph: tf.Graph) -> None:
    """Lets a graph that has a saver read what it saves without a copy."""
    for op in graphs.ops_of_types(graph, [op_types.DISABLE_COPIES]):
        scope = op.name.rpartition('/')[0]
        for read in op.inputs[0].consumers():
            is_of_scope = read.name.rpartition('/')[0] == scope
            is_read = is_of_scope and read.type == op_types.READ_VARIABLE
            # A scaffold is finalized for each session.
            if is_read and op not in read.control_inputs:
                function_calls.let_wait(read, [op])
