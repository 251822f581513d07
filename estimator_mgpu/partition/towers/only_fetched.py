"""Tells for which tensors that are only fetched a full value is made: the user's op gives others.

The user's ops stay in the graph. Those that are sharded don't run in a step, but somebody may fetch
what they give, in a hook, say:

    towers' copies:   x' ---> MatMul' ---> Relu' ---> Square' ---> Mean' ---> loss
                                 |                                   |
                              gathered                            reduced
                                 v                                   v
    user's ops:               Relu ------> Square                  fetched

Whoever fetches the squares runs `Relu` and `Square` on one device, but no product. If all were
gathered, half of what is added to a graph would be gathers that nobody ever runs, and training
would take longer to start.

In: a plan, and where full values come from. Out: the tensors whose full values are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.byte_counts import entries_of
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.placements import Partial
from estimator_mgpu.partition.plan import LOCAL, OF_SIZES, Plan, Sharded
from estimator_mgpu.partition.towers.origins import Origins
from estimator_mgpu.tf_internals import op_types
from estimator_mgpu.tf_internals.private import control_consumers


def worth_making(
    division: Division, origins: Origins, sharded: Sharded, result_ops: Set[tf.Operation]
) -> Iterator[tf.Tensor]:
    """The tensors whose full values are made.

    Args:
      origins: tells which full values are made from what towers have.
      sharded: the ops that run on every tower.
      result_ops: those that give what steps are run for.
    """
    used = _used_in_steps(division, origins, sharded, result_ops)
    for op in division.plan.order:
        if not any(map(origins.is_made_from_local, op.outputs)):
            continue
        is_light = division.is_light(op) and not _gives_much_less(op, division.plan)
        for tensor in op.outputs:
            is_reduced = isinstance(division.plan.placements.get(tensor.name), Partial)
            if tensor in used or is_reduced or not is_light:
                yield tensor


def _gives_much_less(op: tf.Operation, plan: Plan) -> bool:
    """Whether far more would be gathered for an op than of what it gives: of an `ArgMax`, say.

    A slice doesn't count. There may be thousands of them, which take the gradient of a
    concatenation of columns apart: together they give all of it.
    """
    if op.name not in plan.ops or op.type == op_types.SLICE:
        return False
    taken = [entries_of(operand) for operand in op.inputs if operand.name in plan.placements]
    return max(taken, default=0) > 4 * sum(map(entries_of, op.outputs))


def _used_in_steps(
    division: Division, origins: Origins, sharded: Sharded, result_ops: Set[tf.Operation]
) -> set[tf.Tensor]:
    """The tensors that depend on the batch, and that the user's ops use which run in a step."""
    plan = division.plan
    order = division.order

    def may_be_skipped(op: tf.Operation) -> bool:
        """Whether no step runs one of the user's ops if nobody uses what it gives."""
        if op in sharded:
            return True
        if op in result_ops or control_consumers(op):
            return False
        if op.outputs and all(map(origins.is_made_from_local, op.outputs)):  # as sizes are
            return True
        # What nobody uses is there to be fetched, such as a summary.
        is_used = any(tensor.consumers() for tensor in op.outputs)
        return is_used and order.is_quiet(op) and not order.liveness.is_in_loop(op)

    used: set[tf.Tensor] = set()
    skipped = {division.graph.get_operation_by_name(name) for name in plan.unused}
    for op in reversed(plan.order):
        if op in skipped:
            continue
        runs = False
        for tensor in op.outputs:
            if op in result_ops or not skipped.issuperset(tensor.consumers()):
                used.add(tensor)
            if not origins.is_made_from_local(tensor):
                runs |= tensor in used or _is_taken_by_copies(tensor, sharded)
        if not runs and may_be_skipped(op):
            skipped.add(op)
    return used


def _is_taken_by_copies(tensor: tf.Tensor, sharded: Sharded) -> bool:
    """Whether towers' copies use what one of the user's ops gives."""
    return any(
        tensor is operand and need != LOCAL and not isinstance(need, OF_SIZES)
        for user in tensor.consumers()
        if user in sharded
        for operand, need in zip(user.inputs, sharded[user].needs)
    )
