"""Which state an op reads and writes: variables, tables, queues, whatever it is given a handle of.

A piece of state is known by the op that makes it, such as a `VarHandleOp`. For what has no
handle, such as the log or what a Python function keeps, there is `effects.has_side_effect`.

An op that calls functions does what their ops do with the state that it hands to them. A reference
variable of TensorFlow 1 is read by an `Identity`, whose output lies in the variable's own memory;
so each op that uses this output reads the variable when it runs:

    w (reference) --> Identity --> MatMul           MatMul reads w

This is a *late read*. It's the same with such an `Identity` in a function: TensorFlow puts the ops
of calls, and of branches and loops of TensorFlow 2, into the graph, so whoever uses what a call
gives reads late what the function reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import function_calls, graphs, op_types
from estimator_mgpu.tf_internals.effects import (
    has_side_effect,
    maker_of_state,
    type_may_give_references,
)


def makers_of_state(tensors: Iterable[tf.Tensor]) -> Iterator[tf.Operation]:
    """The ops that make the state that tensors refer to; in a function, its arguments."""
    for tensor in tensors:
        if graphs.is_handle(tensor):
            yield maker_of_state(tensor)


def written_state(op: tf.Operation) -> set[tf.Operation]:
    """The state that an op writes: of a call, what the function's ops write."""
    if not has_side_effect(op) or op.type in op_types.STATE_QUERIES:
        return set()
    if op.type not in op_types.FUNCTION_CALLERS:
        return set(makers_of_state(op.inputs))

    bodies = function_calls.function_graphs(op)
    if not bodies:  # It may write all that it's given.
        return set(makers_of_state(op.inputs))
    written: set[tf.Operation] = set()
    for body in bodies:
        arguments = _arguments(op, body)
        for inner in body.get_operations():
            for state in written_state(inner):
                if state in arguments:
                    written.update(makers_of_state([arguments[state]]))
    return written


def _arguments(call: tf.Operation, body: tf.Graph) -> dict[tf.Operation, tf.Tensor]:
    """What a function's arguments, `Placeholder` ops, are given by an op that calls it."""
    # The first input of a branch says which one is taken.
    first = 1 if call.type in op_types.BRANCHES else 0
    return {argument.op: operand for argument, operand in zip(body.inputs, call.inputs[first:])}


def read_by_users(graph: tf.Graph, ops: Iterable[tf.Operation]) -> dict[str, set[tf.Operation]]:
    """By name, the tensors whose users read variables by them, with these variables.

    Args:
      graph: that of the ops. If no type in it can begin a late read, they aren't looked at.
      ops: each after those that it depends on.
    """
    read: dict[str, set[tf.Operation]] = {}
    if not any(map(_may_begin_late_reads, graphs.types_of(graph))):
        return read
    for op in ops:
        for output in op.outputs:
            if graphs.is_reference_variable(output):
                read[output.name] = set(makers_of_state([output]))
        calls_functions = op.type in op_types.FUNCTION_CALLERS
        if not (read or calls_functions):
            continue
        operands = op.inputs if calls_functions else sharing_memory(op)
        if operands:
            variables = set().union(*(read.get(operand.name, ()) for operand in operands))
            if calls_functions:
                variables.update(makers_of_state(op.inputs))
            if variables:
                for output in op.outputs:
                    read.setdefault(output.name, variables)
    return read


def _may_begin_late_reads(op_type: str) -> bool:
    return op_type in op_types.FUNCTION_CALLERS or type_may_give_references(op_type)


def asks_for_value(op: tf.Operation) -> bool:
    """Whether an op reads the value of state, rather than its shape or whether it's initialized."""
    return op.type not in op_types.SHAPE_QUERIES and op.type not in op_types.HANDLE_QUERIES


def forwards(op: tf.Operation, operand: tf.Tensor) -> bool:
    """Whether an op gives an operand on as it is, so that its users read what is in it."""
    if op.type in op_types.SWITCH:
        return op.inputs[1].name != operand.name  # That decides which way is taken.
    return op.type in op_types.FORWARD_VARIABLES


def read_late(op: tf.Operation, behind: dict[str, set[tf.Operation]]) -> set[tf.Operation]:
    """The variables that an op reads late.

    What an op passes on counts, too: it may be fetched, or sent to another device, and then it's
    read when the op runs.

    Args:
      op: one that may read.
      behind: what `read_by_users` gives.
    """
    if not behind or all(operand.name not in behind for operand in op.inputs):  # as of most ops
        return set()
    # A `Merge` passes on nothing of the branch that isn't taken.
    if not asks_for_value(op) or op.type in op_types.MERGE:
        return set()
    # What writes to a reference doesn't read it late, but its other operands.
    writes = has_side_effect(op)
    operands = [t for t in op.inputs if not (writes and graphs.is_handle(t))]
    return set().union(*(behind.get(operand.name, ()) for operand in operands))


def sharing_memory(op: tf.Operation) -> Sequence[tf.Tensor]:
    """The operands of an op in whose memory what it gives may lie."""
    if op.type in op_types.VIEWS or op.type in op_types.SWITCH:
        return op.inputs[:1]  # The others are a new shape, or say which way is taken.
    if op.type == op_types.CAST:
        return op.inputs if op.get_attr('SrcT') == op.get_attr('DstT') else ()
    return op.inputs if op.type in op_types.MAY_SHARE_MEMORY else ()
