"""What waits for what: gradients not for each other, but what writes for what reads."""

from __future__ import annotations

from collections.abc import Sequence, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs, op_types, private
from estimator_mgpu.tf_internals.effects import has_side_effect, upstream_side_effects
from estimator_mgpu.tf_internals.graphs import dependents


def untie_gradient_tuples(graph: tf.Graph, before: Set[str]) -> dict[str, tf.Tensor]:
    """Lets whoever uses an entry of a `tf.tuple` use what it's of, which waits for no other entry.

    `tf.gradients` makes a tuple of each op's gradients, for the sake of variables: none is written
    before all have read it, which `read_first` sees to instead. Else no tower would begin with its
    gradients before all have their losses. Where an entry may wait for an effect by its tuple only,
    or a graph has reference variables or v1 control flow, tuples stay as they are. Returns, by the
    names of the entries, what is used in their place.
    """
    ops = [op for op in graph.get_operations() if op.name not in before]
    references = any(graphs.is_reference_variable(t) for op in ops for t in op.outputs)
    if references or any(map(private.in_v1_control_flow, ops)):
        return {}
    replaced = {}
    effects = upstream_side_effects(ops)
    for op in ops:
        entries = private.control_consumers(op) if op.type == op_types.NO_OP else []
        if not all(entry.type == op_types.IDENTITY for entry in entries):
            continue
        given = {entry.inputs[0].op for entry in entries}
        if not given <= set(op.control_inputs) or len({effects[g] for g in given}) > 1:
            continue
        for entry in entries:
            waits = [*entry.control_inputs, *op.control_inputs]
            waits = [other for other in waits if other not in {op, *given}]
            graphs.set_control_inputs(entry, waits)
            if not waits:
                replaced[entry.outputs[0].name] = entry.inputs[0]
                graphs.redirect_consumers(entry, {0: entry.inputs[0]}, entry.inputs[0].op)
    return replaced


def order_writes_after_reads(untied: Sequence[tf.Operation], before: Set[str]) -> None:
    """Lets ops that write a variable wait for those that read it for a step.

    A tuple saw to that where a gradient doesn't follow from the variable, as in a linear loss: what
    was `untied` waited for them. What reads after it has been written still does.
    """
    step = graphs.ancestors(untied)
    for op in filter(has_side_effect, dependents([entry.inputs[0] for entry in untied], before)):
        for handle in (t for t in op.inputs if t.dtype == tf.resource):
            # What calls functions counts as an effect, for which all entries of a tuple wait.
            for user in (
                u for u in handle.consumers() if u in step and u.type in op_types.VARIABLE_READS
            ):
                uses = {c.type for t in user.outputs for c in t.consumers()} - set(
                    op_types.KEEP_READ_VALUES
                )
                if uses and op not in graphs.ancestors([user]):
                    private.add_control_inputs(op, [user])
