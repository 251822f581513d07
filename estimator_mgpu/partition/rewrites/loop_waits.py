"""Loops of TensorFlow 1 wait for nothing outside of them, unless they have to.

If gradients are taken within `tf.control_dependencies(updates)`, the loops of the backward pass
wait for the updates. So does the loop of the forward pass, which counts its steps for them:

    update - - -> 0 ---> Enter ---> counter of the steps

If an update gives a value, as that of a reference variable does, TensorFlow passes the value into
loops as well, and ops there wait for that:

    update ---> Enter ---> Identity - - -> op in the loop

The update may follow from what this very loop gives, such as the average of an RNN's output. One
device runs such a loop op by op. But a sharded loop begins with all that it's given, and no tower
should wait for the others' updates. So only what reads or writes variables waits. A loop with side
effects, and what follows from a loop, keeps its order by `towers.waits`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.tf_internals import graphs, op_types, private
from estimator_mgpu.tf_internals.v1_loops import entered


def remove_loop_waits(division: Division) -> None:
    """Removes the control edges by which loops wait for what is outside of them.

    The ops that pass a value into a loop only for such an edge are unused then.
    """
    order = division.order
    liveness = order.liveness
    ops = [op for op in liveness.in_loops if op.name not in division.existing_ops]
    for op in ops:
        if op.type in op_types.ENTER and not liveness.frame(op):
            _begin_at_once(op, order)
        elif _is_only_waited_for(op, order):
            for user in private.control_consumers(op):
                graphs.set_control_inputs(user, [b for b in user.control_inputs if b is not op])
            enter = op.inputs[0]
            division.unused.add(op.name)
            if all(user.name in division.unused for user in enter.consumers()):
                division.unused.add(enter.op.name)


def _begin_at_once(enter: tf.Operation, order: Order) -> None:
    """Removes the control inputs of a loop's `Enter`, and of a constant that enters there.

    What is in a branch still waits for the branch: else it would run if the branch isn't taken.
    """
    [operand] = enter.inputs
    if _refers_to_variable(operand, order):
        return
    waiting = [enter, operand.op] if operand.op.type == op_types.CONST else [enter]
    for op in waiting:
        kept = [before for before in op.control_inputs if order.liveness.may_be_dead(before)]
        if len(kept) < len(op.control_inputs):
            graphs.set_control_inputs(op, kept)


def _refers_to_variable(tensor: tf.Tensor, order: Order) -> bool:
    """Whether ops in a loop may read or write a variable by what enters it."""
    if tensor.dtype == tf.resource:
        return entered(tensor).op.type not in op_types.HANDLES
    return bool(order.variables_behind(tensor))


def _is_only_waited_for(op: tf.Operation, order: Order) -> bool:
    """Whether an identity passes a value into a loop only for ops that needn't wait for it."""
    if op.type != op_types.IDENTITY or op.outputs[0].consumers():
        return False
    if op.inputs[0].op.type not in op_types.ENTER or _waits_for_access(op, order):
        return False
    users = private.control_consumers(op)
    return bool(users) and not any(_has_to_wait(user, op, order) for user in users)


def _waits_for_access(op: tf.Operation, order: Order) -> bool:
    """Whether an op in a loop waits by control edges for what touches state in the same step."""

    def inputs_of(before: tf.Operation) -> Sequence[tf.Operation]:
        begins = before.type == op_types.LOOP_CONDITION or graphs.begins_steps(before)
        return [] if begins else graphs.direct_inputs(before)

    return any(map(order.bits, graphs.ancestors(op.control_inputs, inputs_of)))


def _has_to_wait(user: tf.Operation, op: tf.Operation, order: Order) -> bool:
    """Whether an op in a loop has to wait for another one, by a control edge."""
    frame = order.liveness.frame(user)
    others = [before for before in graphs.direct_inputs(user) if before is not op]
    if all(order.liveness.output_frame(before) != frame for before in others):
        return True  # Nothing else keeps it in the loop.
    # What reads a variable may have to wait for a write to it.
    return bool(order.must_come_before(user))
