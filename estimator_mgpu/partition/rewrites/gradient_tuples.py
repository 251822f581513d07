"""Gradients don't wait for each other, and writes wait for reads.

`tf.gradients` ties the gradients of an op together by a `tf.tuple`: a group that waits for all of
them, and an entry for each, which waits for the group:

    gradient a ---+-------------> entry a --> user        gradient a --> user
                  |                 ^
                  +---> group ------+                =>
                  |                 v
    gradient b ---+-------------> entry b --> user        gradient b --> user

So no variable is written before all gradients of the op have read it. But the gradients of the
loss are tied as well, and no tower could begin with its gradients before all towers have their
losses. Here the entries are replaced by what they are of, and writes wait for reads directly.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs, op_types, private
from estimator_mgpu.tf_internals.effects import has_side_effect, upstream_side_effects
from estimator_mgpu.tf_internals.graphs import dependents


def untie_gradient_tuples(graph: tf.Graph, existing_ops: Set[str]) -> dict[str, tf.Tensor]:
    """Replaces the entries of tuples by the entries' inputs, which wait for no other entry.

    A graph with reference variables or v1 control flow stays as it is.

    Args:
      graph: the graph that the model_fn has built.
      existing_ops: names of ops that were there before the model_fn, which stay as they are.

    Returns:
      By the name of an entry's output, the tensor that is used in its place.
    """
    ops = [op for op in graph.get_operations() if op.name not in existing_ops]
    has_references = any(graphs.is_reference_variable(t) for op in ops for t in op.outputs)
    if has_references or any(map(private.in_v1_control_flow, ops)):
        return {}

    replaced: dict[str, tf.Tensor] = {}
    effects = upstream_side_effects(ops)
    for op in ops:
        if op.type == op_types.NO_OP and _is_group_of_tuple(op, effects):
            replaced.update(_untie(op))
    return replaced


def _is_group_of_tuple(group: tf.Operation, effects: dict[tf.Operation, int]) -> bool:
    """Whether a group is a tuple's, and its entries wait for no side effect only by the group."""
    entries = private.control_consumers(group)
    if not all(entry.type == op_types.IDENTITY for entry in entries):
        return False
    sources = {entry.inputs[0].op for entry in entries}
    if not sources <= set(group.control_inputs):
        return False
    return len({effects[source] for source in sources}) <= 1


def _untie(group: tf.Operation) -> dict[str, tf.Tensor]:
    """Lets the entries of a group wait for each other no more.

    Returns:
      As `untie_gradient_tuples`: without the entries that wait for another op as well.
    """
    entries = private.control_consumers(group)
    sources = {entry.inputs[0].op for entry in entries}
    replaced: dict[str, tf.Tensor] = {}
    for entry in entries:
        remaining = [
            before
            for before in [*entry.control_inputs, *group.control_inputs]
            if before != group and before not in sources
        ]
        graphs.set_control_inputs(entry, remaining)
        if not remaining:
            source = entry.inputs[0]
            replaced[entry.outputs[0].name] = source
            graphs.redirect_consumers(entry, {0: source}, source.op)
    return replaced


def order_writes_after_reads(untied: Sequence[tf.Operation], existing_ops: Set[str]) -> None:
    """Lets ops that write a variable wait for the ops that read it in the same step.

    A tuple ensured that where a gradient doesn't depend on the variable, as of a linear loss. A
    read that already follows the write isn't reordered.

    Args:
      untied: the entries that `untie_gradient_tuples` has replaced.
      existing_ops: names of ops that were there before the model_fn.
    """
    step = graphs.ancestors(untied)
    gradients = [entry.inputs[0] for entry in untied]
    for write in dependents(gradients, existing_ops):
        if not has_side_effect(write):
            continue
        for handle in write.inputs:
            if handle.dtype != tf.resource:
                continue
            for read in handle.consumers():
                # A function that is called may read, but counts as a side effect: such entries
                # aren't untied.
                is_read_of_step = read in step and read.type in op_types.VARIABLE_READS
                if is_read_of_step and _is_used(read) and write not in graphs.ancestors([read]):
                    private.add_control_inputs(write, [read])


def _is_used(read: tf.Operation) -> bool:
    """Whether a step uses what is read, rather than only keeps it, as in another variable."""
    users = [user for tensor in read.outputs for user in tensor.consumers()]
    return any(user.type not in op_types.KEEP_READ_VALUES for user in users)
