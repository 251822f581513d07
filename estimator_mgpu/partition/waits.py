"""What waits for what: gradients not for each other, but what writes for what reads."""

from __future__ import annotations

from collections.abc import Sequence, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu import private


def untie(graph: tf.Graph, before: Set[str]) -> dict[str, tf.Tensor]:
    """Lets whoever uses an entry of a `tf.tuple` use what it's of, which waits for no other entry.

    `tf.gradients` makes a tuple of each op's gradients, for the sake of reference variables: none
    is written before all have read it. Other variables need none of that, and no tower would begin
    with its gradients before all have their losses. A graph with reference variables stays as it
    is. So do the tuples, for whoever fetches their entries.

    Returns, by the names of the entries, what is used in their place. Ops that are named in
    `before` aren't the model's.
    """
    ops = [op for op in graph.get_operations() if op.name not in before]
    if any(private.is_reference(t) for op in ops for t in op.outputs):
        return {}
    replaced = {}
    for op in ops:
        entries = private.waiting(op) if op.type == 'NoOp' else []
        if not all(entry.type == 'Identity' for entry in entries) or private.in_control_flow(op):
            continue
        given = {entry.inputs[0].op for entry in entries}
        if not given <= set(op.control_inputs):
            continue
        for entry in entries:
            waits = [
                c for c in (*entry.control_inputs, *op.control_inputs) if c not in {op, *given}
            ]
            if waits:
                private.set_control_inputs(entry, waits)
            else:
                replaced[entry.outputs[0].name] = entry.inputs[0]
                private.replace(entry, {0: entry.inputs[0]}, entry.inputs[0].op)
    return replaced


def fill(graph: tf.Graph, before: Set[str]) -> dict[str, tf.Tensor]:
    """Lets whoever uses zeros or ones of a tensor's shape use a fill, that waits for its size.

    Else each tower's loss waits for all losses where it's divided by how many there are.
    """
    replaced = {}
    for op in graph.get_operations():
        value = _ALIKE.get(op.type)
        if op.name in before or value is None or private.in_control_flow(op):
            continue
        [x], [like] = op.inputs, op.outputs
        if like.dtype in (tf.string, tf.resource, tf.variant):
            continue
        with tf.control_dependencies(op.control_inputs), tf.device(op.device), tf.name_scope(None):
            # tf.shape() would make a number of a batch's static size.
            shape = tf.raw_ops.Shape(input=x, name=f'{op.name}/shape')
            filled = tf.fill(shape, tf.cast(value, like.dtype), f'{op.name}/fill')
        private.replace(op, {0: filled}, op)
        replaced[like.name] = filled
    return replaced


_ALIKE = {'ZerosLike': 0, 'OnesLike': 1}


def read_first(order: Sequence[tf.Operation]) -> None:
    """Lets the model's ops that write a variable wait for those that read it for a step.

    A tuple saw to that where a gradient doesn't follow from the variable, as in a linear loss. What
    reads after it has been written, as it waits for that, still does.
    """
    for op in order:
        for handle in (t for t in op.inputs if t.op.type == 'VarHandleOp'):
            if op.op_def.is_stateful and op.type not in READS:
                reads = [c for c in handle.consumers() if c.type == 'ReadVariableOp']
                used = [r for r in reads if {c.type for c in r.outputs[0].consumers()} - _KEEPS]
                private.add_control_inputs(op, [r for r in used if not _waits(r, op)])


_KEEPS = {'AssignVariableOp', 'SaveV2'}
READS = ('ReadVariableOp', 'ResourceGather', 'ResourceGatherNd', 'VariableShape')
"""What looks at a variable and leaves it as it is, though it counts as having state."""


def _waits(op: tf.Operation, other: tf.Operation) -> bool:
    """Whether an op waits for another, by data or control."""
    seen, stack = {op}, [op]
    while stack:
        last = stack.pop()
        before = {t.op for t in last.inputs} | set(last.control_inputs)
        stack += before - seen
        seen |= before
    return other in seen
