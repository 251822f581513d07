"""Calls of a `tf.function` become part of the graph, so that what they call is sharded as usual.

    x --> PartitionedCall(f) --> user        =>        x --> ops of f --> user

Loops and branches call functions, too; these stay, and are sharded by `propagation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.rewrites.function_ops import add_ops, after, take_place_of
from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private, tracebacks
from estimator_mgpu.tf_internals.effects import has_side_effect, writes_state
from estimator_mgpu.tf_internals.liveness import Liveness


def inline_calls(division: Division) -> None:
    """Replaces the outputs of calls by those of the called function's own ops, added to the graph.

    The calls stay in the graph, for whoever fetches them.
    """
    graph = division.graph
    visited = set(division.existing_ops)
    while True:  # Functions may call others, which come next; but none calls itself.
        calls = [
            op
            for op in graph.get_operations()
            if op.type in op_types.PARTITIONED_CALLS and op.name not in visited
        ]
        if not calls:
            return
        visited.update(call.name for call in calls)
        liveness = Liveness(graph.get_operations())
        for call in calls:
            function = _function_to_inline(call, liveness)
            if function is not None:
                _inline(call, function, division)


def _function_to_inline(call: tf.Operation, liveness: Liveness) -> Any:
    """The graph of the function that an op calls; None if it has to be called."""
    if not function_calls.function_graphs(call):
        return None
    # In a v1 loop or a branch, a function's constants would run outside of it.
    if not liveness.always_runs(call):
        return None
    if function_calls.call_attributes(call) & op_types.STAYS_A_CALL:
        return None
    [graph] = function_calls.function_graphs(call)
    return graph


def _inline(call: tf.Operation, function: Any, division: Division) -> None:
    """Lets a function's ops take the place of a call."""
    scope = f'{call.name}/inlined'
    with tracebacks.made_for(call, {scope: function}):
        with tf.control_dependencies(None), tf.device(call.device), tf.name_scope(None):
            added = add_ops(function, call.inputs, scope)
            before = [*added.effects, *call.control_inputs]
            outputs = [after(before, output, f'{call.name}/output') for output in added.outputs]
            ends = [*added.effects, *(output.op for output in outputs)]
            take_place_of(call, outputs, ends, division)

        liveness = Liveness(added.ops)
        _wait_as_the_call_did(call, added.ops, liveness)
        _wait_for_arguments(call, added.ops, liveness)


def _wait_as_the_call_did(
    call: tf.Operation, inlined: Sequence[tf.Operation], liveness: Liveness
) -> None:
    """Lets the stateful ops of a function wait for what its call waited for by control edges.

    Args:
      call: the op that calls the function.
      inlined: the function's ops.
      liveness: of these.
    """
    if call.control_inputs:
        for op in _first_of_stateful(inlined, liveness):
            _let_wait(op, call.control_inputs, liveness)


def _wait_for_arguments(
    call: tf.Operation, inlined: Sequence[tf.Operation], liveness: Liveness
) -> None:
    """Lets a function's writes wait for all of its arguments, as a call begins with these.

    Its reads needn't wait, unless the arguments come from an op that writes to a variable that the
    call is given.

    Args:
      call: the op that calls the function.
      inlined: the function's ops.
      liveness: of these.
    """
    arguments = [operand.op for operand in call.inputs if not graphs.is_handle(operand)]
    if not arguments:
        return
    first_uses = _first_uses_of_variables(call, inlined, liveness)
    if not _follows_from_write(call):
        first_uses = [op for op in first_uses if has_side_effect(op)]
    for op in first_uses:
        _let_wait(op, arguments, liveness)


def _let_wait(op: tf.Operation, before: Sequence[tf.Operation], liveness: Liveness) -> None:
    """Lets an op of a function wait for others; if it stays a call, for its arguments, too.

    The ops of a call that is inlined next wait themselves for the arguments that they need.

    Args:
      op: the op, inlined.
      before: the ops to wait for.
      liveness: of the function's ops, inlined.
    """
    is_call = op.type in op_types.PARTITIONED_CALLS
    if is_call and _function_to_inline(op, liveness) is not None:
        private.add_control_inputs(op, list(dict.fromkeys(before)))
    else:
        function_calls.let_wait(op, before)


def _first_uses_of_variables(
    call: tf.Operation, ops: Sequence[tf.Operation], liveness: Liveness
) -> list[tf.Operation]:
    """The ops of a function that are given a variable as the call is, but in v1 loops.

    Args:
      call: the op that calls the function.
      ops: those of the function, inlined.
      liveness: of these.
    """
    handles = {operand.name for operand in call.inputs if graphs.is_handle(operand)}
    return [
        op
        for op in ops
        if any(operand.name in handles for operand in op.inputs) and not liveness.frame(op)
    ]


def _follows_from_write(call: tf.Operation) -> bool:
    """Whether an op that a call depends on writes to a variable that the call is given."""
    handles = [operand for operand in call.inputs if graphs.is_handle(operand)]
    writes = [op for handle in handles for op in _users_of_variable(handle) if writes_state(op)]
    return call in graphs.descendants([op for op in writes if op is not call])


def _users_of_variable(handle: tf.Tensor) -> Iterator[tf.Operation]:
    """The ops that are given a variable, or what passes it on, such as the `Enter` of a loop."""
    for op in handle.consumers():
        if op.type in op_types.FORWARD_VARIABLES:
            for output in op.outputs:
                yield from _users_of_variable(output)
        else:
            yield op


def _first_of_stateful(ops: Sequence[tf.Operation], liveness: Liveness) -> list[tf.Operation]:
    """Ops that can wait for what is outside of a function, so that all of its stateful ops do.

    A stateful op in a v1 loop can't. Its loop waits instead, where it begins.

    Args:
      ops: those of the function, inlined.
      liveness: of these.
    """
    stateful = [op for op in ops if op.op_def.is_stateful]
    outside = [op for op in stateful if not liveness.frame(op)]
    loops = {liveness.frame(op)[:1] for op in stateful if liveness.frame(op)}
    begins = [op for op in ops if op.type in op_types.ENTER and liveness.output_frame(op) in loops]
    return outside + begins
