"""What the ops of a function wait for that take the place of the op that called it.

In: these ops, in the graph, and the op that called the function. Out: the same ops, of which those
that read or write wait for what the call waited for. Who waited for the call is told by
`function_ops.take_place_of` what to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private
from estimator_mgpu.tf_internals.effects import has_side_effect, writes_state
from estimator_mgpu.tf_internals.liveness import Liveness


def add_waits(
    call: tf.Operation,
    operands: Sequence[tf.Tensor],
    ops: Sequence[tf.Operation],
    liveness: Liveness,
    is_next: Callable[[tf.Operation], bool],
) -> None:
    """Adds control inputs to the ops of a function: what they have to wait for.

    Args:
      call: the op that called the function: a call, or one that chooses a branch.
      operands: what has taken the place of the function's arguments.
      ops: those of the function, in the graph.
      liveness: of these.
      is_next: whether an op of them calls a function whose ops will take its place, too.
    """

    def let_wait(op: tf.Operation, before: Sequence[tf.Operation]) -> None:
        """Lets an op wait for others; if it stays a call, for its arguments, too.

        The ops of a function that is called next wait themselves for the arguments that they need.
        """
        if is_next(op):
            private.add_control_inputs(op, list(dict.fromkeys(before)))
        else:
            function_calls.let_wait(op, before)

    if call.control_inputs:
        for op in _first_of_stateful(ops, liveness):
            let_wait(op, call.control_inputs)

    arguments = [operand.op for operand in operands if not graphs.is_handle(operand)]
    if arguments:
        for op in _waiting_for_arguments(call, operands, ops, liveness):
            let_wait(op, arguments)


def _first_of_stateful(ops: Sequence[tf.Operation], liveness: Liveness) -> list[tf.Operation]:
    """Ops that can wait for what is outside of the function, so that all stateful ops do.

    A stateful op in a v1 loop can't. Its loop waits instead, where it begins.
    """
    stateful = [op for op in ops if op.op_def.is_stateful]
    outside = [op for op in stateful if not liveness.frame(op)]
    loops = {liveness.frame(op)[:1] for op in stateful if liveness.frame(op)}
    begins = [op for op in ops if op.type in op_types.ENTER and liveness.output_frame(op) in loops]
    return outside + begins


def _waiting_for_arguments(
    call: tf.Operation,
    operands: Sequence[tf.Tensor],
    ops: Sequence[tf.Operation],
    liveness: Liveness,
) -> list[tf.Operation]:
    """The ops that wait for all of the call's arguments: writes do, as a call begins with these.

    Reads needn't wait, unless the arguments come from an op that writes to a variable that the
    call is given.
    """
    handles = {operand.name for operand in operands if graphs.is_handle(operand)}
    first_uses = [
        op
        for op in ops
        if any(operand.name in handles for operand in op.inputs) and not liveness.frame(op)
    ]
    if _follows_from_write(call):
        return first_uses
    return [op for op in first_uses if has_side_effect(op)]


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
