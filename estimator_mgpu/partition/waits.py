"""What waits for what: gradients not for each other, but what writes for what reads."""

from __future__ import annotations

from collections.abc import Sequence, Set
from graphlib import TopologicalSorter

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from .rules import kinds


def untie(graph: tf.Graph, before: Set[str]) -> dict[str, tf.Tensor]:
    """Lets whoever uses an entry of a `tf.tuple` use what it's of, which waits for no other entry.

    `tf.gradients` makes a tuple of each op's gradients, for the sake of variables: none is written
    before all have read it, which `read_first` sees to instead. Else no tower would begin with its
    gradients before all have their losses. Where an entry may wait for an effect by its tuple only,
    or a graph has reference variables or v1 control flow, tuples stay as they are. Returns, by the
    names of the entries, what is used in their place.
    """
    ops = [op for op in graph.get_operations() if op.name not in before]
    references = any(private.is_reference(t) for op in ops for t in op.outputs)
    if references or any(map(private.in_control_flow, ops)):
        return {}
    replaced = {}
    effects = effects_of(ops)
    for op in ops:
        entries = private.waiting(op) if op.type == kinds.GROUP else []
        if not all(entry.type == kinds.IDENTITY for entry in entries):
            continue
        given = {entry.inputs[0].op for entry in entries}
        if not given <= set(op.control_inputs) or len({effects[g] for g in given}) > 1:
            continue
        for entry in entries:
            waits = [*entry.control_inputs, *op.control_inputs]
            waits = [other for other in waits if other not in {op, *given}]
            private.set_control_inputs(entry, waits)
            if not waits:
                replaced[entry.outputs[0].name] = entry.inputs[0]
                private.replace(entry, {0: entry.inputs[0]}, entry.inputs[0].op)
    return replaced


def has_effect(op: tf.Operation) -> bool:
    """Whether running an op changes anything, or is another time another thing."""
    if op.type in kinds.READS or op.type in kinds.REFERENCES:
        return False
    # What writes to a variable of TensorFlow 1's kind isn't called stateful.
    if any(argument.is_ref for argument in op.op_def.input_arg):
        return True
    # A variable, a table or a queue is only made, by what it's referred to.
    makes = all(t.dtype == tf.resource or private.is_reference(t) for t in op.outputs)
    return op.op_def.is_stateful and not (makes and op.outputs)


def effects_of(ops: Sequence[tf.Operation], also: Sequence[str] = ()) -> dict[tf.Operation, int]:
    """The ops with effects, or of other types, that each waits for, and itself: one bit each."""
    found: dict[tf.Operation, int] = {}
    count = 0
    for op in ordered(ops):
        found[op] = 0
        if has_effect(op) or op.type in also:
            found[op] = 1 << count
            count += 1
        for before in private.waited(op):
            found[op] |= found.get(before, 0)
    return found


def fill(graph: tf.Graph, before: Set[str]) -> dict[str, tf.Tensor]:
    """Lets whoever uses zeros or ones of a tensor's shape use a fill, that waits for its size.

    Else each tower's loss waits for all losses where it's divided by how many there are.
    """
    replaced = {}
    for op in graph.get_operations():
        value = kinds.ALIKE.get(op.type)
        if op.name in before or value is None or private.in_control_flow(op):
            continue
        [x], [like] = op.inputs, op.outputs
        if like.dtype in (tf.string, tf.resource, tf.variant) or not like.consumers():
            continue
        with tf.control_dependencies(op.control_inputs), tf.device(op.device), tf.name_scope(None):
            # tf.shape() would make a number of a batch's static size.
            shape = tf.raw_ops.Shape(input=x, name=f'{op.name}/shape')
            filled = tf.fill(shape, tf.cast(value, like.dtype), f'{op.name}/fill')
        private.replace(op, {0: filled}, op)
        replaced[like.name] = filled
    return replaced


def read_first(untied: Sequence[tf.Operation], before: Set[str]) -> None:
    """Lets ops that write a variable wait for those that read it for a step.

    A tuple saw to that where a gradient doesn't follow from the variable, as in a linear loss: what
    was `untied` waited for them. What reads after it has been written still does.
    """
    step = private.backward(untied)
    for op in filter(has_effect, dependents([entry.inputs[0] for entry in untied], before)):
        for handle in (t for t in op.inputs if t.dtype == tf.resource):
            # What calls functions counts as an effect, for which all entries of a tuple wait.
            for user in (u for u in handle.consumers() if u in step and u.type in kinds.READS):
                uses = {c.type for t in user.outputs for c in t.consumers()} - set(kinds.KEEPS)
                if uses and op not in private.backward([user]):
                    private.add_control_inputs(op, [user])


def dependents(sources: Sequence[tf.Tensor], before: Set[str]) -> list[tf.Operation]:
    """All of the model's ops that depend on the sources, in the order in which they were made."""
    reached: set[tf.Operation] = set()
    stack = [op for t in sources for op in t.consumers()]
    while stack:
        op = stack.pop()
        if op not in reached and op.name not in before:
            reached.add(op)
            stack += private.followers(op)
    return sorted(reached, key=private.number)


def ordered(ops: Sequence[tf.Operation]) -> list[tf.Operation]:
    """The ops, each after those that it depends on."""
    given = {op: [] if op.type in kinds.NEXT else private.waited(op) for op in ops}
    return [op for op in TopologicalSorter(given).static_order() if op in given]
