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
    with_effects = {liveness.outermost_loop(op) for op in ops if not order.is_quiet(op)}
    for op in ops:
        if op.type in op_types.ENTER and not liveness.frame(op):
            _begin_at_once(op, order)
        elif liveness.outermost_loop(op) not in with_effects and _is_only_waited_for(op, order):
            # Its users stop waiting, and it counts as no read.
            for user in private.control_consumers(op):
                graphs.set_control_inputs(user, [b for b in user.control_inputs if b is not op])
            order.forget_read(op)
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
    if op.inputs[0].op.type not in op_types.ENTER:
        return False
    users = private.control_consumers(op)
    return bool(users) and not any(_has_to_wait(user, op, order) for user in users)


def _has_to_wait(user: tf.Operation, op: tf.Operation, order: Order) -> bool:
    """Whether an op in a loop has to wait for another one, by a control edge."""
    frame = order.liveness.frame(user)
    others = [before for before in graphs.direct_inputs(user) if before is not op]
    if all(order.liveness.output_frame(before) != frame for before in others):
        return True  # Nothing else keeps it in the loop.
    # What reads a variable may have to wait for a write to it.
    return order.is_quiet(user) and bool(order.must_come_before(user))
