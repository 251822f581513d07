"""What the ops of a function wait for that take the place of the op that called it.

In: these ops, in the graph, and the op that called the function. Out: the same ops, of which those
that read or write wait for what the call waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
    waits = _Waits(call, operands, ops, liveness, is_next)
    waits.wait_as_the_call_did()
    waits.wait_for_arguments()


@dataclass(eq=False)
class _Waits:
    """The ops of a function, and what `add_waits` knows of them."""

    _call: tf.Operation
    _operands: Sequence[tf.Tensor]
    _ops: Sequence[tf.Operation]
    _liveness: Liveness
    _is_next: Callable[[tf.Operation], bool]

    def wait_as_the_call_did(self) -> None:
        """Lets stateful ops wait for what the call waited for by control edges."""
        if self._call.control_inputs:
            for op in self._first_of_stateful():
                self._let_wait(op, self._call.control_inputs)

    def wait_for_arguments(self) -> None:
        """Lets writes wait for all of the call's arguments, as a call begins with these.

        Reads needn't wait, unless the arguments come from an op that writes to a variable that the
        call is given.
        """
        arguments = [operand.op for operand in self._operands if not graphs.is_handle(operand)]
        if not arguments:
            return
        first_uses = self._first_uses_of_variables()
        if not self._follows_from_write():
            first_uses = [op for op in first_uses if has_side_effect(op)]
        for op in first_uses:
            self._let_wait(op, arguments)

    def _let_wait(self, op: tf.Operation, before: Sequence[tf.Operation]) -> None:
        """Lets an op wait for others; if it stays a call, for its arguments, too.

        The ops of a function that is called next wait themselves for the arguments that they need.
        """
        if self._is_next(op):
            private.add_control_inputs(op, list(dict.fromkeys(before)))
        else:
            function_calls.let_wait(op, before)

    def _first_uses_of_variables(self) -> list[tf.Operation]:
        """The ops that are given a variable as the call is, but in v1 loops."""
        handles = {operand.name for operand in self._operands if graphs.is_handle(operand)}
        return [
            op
            for op in self._ops
            if any(operand.name in handles for operand in op.inputs)
            and not self._liveness.frame(op)
        ]

    def _follows_from_write(self) -> bool:
        """Whether an op that the call depends on writes to a variable that the call is given."""
        handles = [operand for operand in self._call.inputs if graphs.is_handle(operand)]
        writes = [op for handle in handles for op in _users_of_variable(handle) if writes_state(op)]
        return self._call in graphs.descendants([op for op in writes if op is not self._call])

    def _first_of_stateful(self) -> list[tf.Operation]:
        """Ops that can wait for what is outside of the function, so that all stateful ops do.

        A stateful op in a v1 loop can't. Its loop waits instead, where it begins.
        """
        frame = self._liveness.frame
        stateful = [op for op in self._ops if op.op_def.is_stateful]
        outside = [op for op in stateful if not frame(op)]
        loops = {frame(op)[:1] for op in stateful if frame(op)}
        begins = [
            op
            for op in self._ops
            if op.type in op_types.ENTER and self._liveness.output_frame(op) in loops
        ]
        return outside + begins


def _users_of_variable(handle: tf.Tensor) -> Iterator[tf.Operation]:
    """The ops that are given a variable, or what passes it on, such as the `Enter` of a loop."""
    for op in handle.consumers():
        if op.type in op_types.FORWARD_VARIABLES:
            for output in op.outputs:
                yield from _users_of_variable(output)
        else:
            yield op
