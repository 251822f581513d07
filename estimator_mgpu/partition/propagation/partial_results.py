"""How an op runs that is given partial results, such as each tower's part of a sum.

Either it makes a partial result of them, so that only that is reduced; or they are reduced first,
and the op is decided on as any other one, in `decisions`. `towers.reduce_and_gather` reduces them.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
    REPLICATE,
    Partial,
    Placement,
    common_placement,
    rows_of,
)
from estimator_mgpu.partition.plan import FULL, FULL_ON_FIRST, LOCAL, Decision, OpPlan
from estimator_mgpu.partition.propagation.scope import Scope
from estimator_mgpu.partition.rules import unique_ids
from estimator_mgpu.partition.sizes import UniqueRows
from estimator_mgpu.tf_internals import op_types


def decide_kept_partial(op: tf.Operation, placements: Sequence[Placement]) -> Decision | None:
    """How an op makes a partial result of partial results; None if it needs the reduced ones.

    For example, the sum of two partial sums is a partial sum, which is reduced once instead of
    twice. A product of a partial sum and a replicated factor could be one as well, but isn't made
    one: an infinite factor gives inf for the sum, but nan on a tower whose part is 0. Nor is a
    quotient.
    """
    is_merge = op.type in op_types.MERGE
    if not is_merge and op.type not in op_types.PARTIAL_INPUTS:
        return None
    partial = common_placement(placements)
    if not isinstance(partial, Partial) or isinstance(partial.rows, UniqueRows):
        return None  # Towers have other ids: sums of them are made where they are needed.
    if partial.reduce != 'sum' and (is_merge or op.type in op_types.PARTIAL_SUM_INPUTS):
        return None

    if is_merge:
        if any(other not in (partial, REPLICATE) for other in placements):
            return None
        # What another branch gives counts on the first tower, and as zeros on others.
        needs = [LOCAL if placement == partial else FULL_ON_FIRST for placement in placements]
        # Output 1 says which input it was.
        return Decision(OpPlan(tuple(needs)), [partial, REPLICATE])

    # Which inputs may be partial; the others are replicated.
    summands = op_types.PARTIAL_INPUTS[op.type]
    expected: list[Placement] = [REPLICATE] * len(placements)
    expected[summands] = [partial] * len(placements[summands])
    if list(placements) != expected:
        return None
    needs = [LOCAL if placement == partial else FULL for placement in placements]
    return Decision(OpPlan(tuple(needs)), [partial] * len(op.outputs))


def decide_of_partial(
    scope: Scope, op: tf.Operation, placements: Sequence[Placement]
) -> Decision | None:
    """How an op of the graph makes a partial result of partial results.

    Args:
      scope: the graph that the op is in.
      op: one that is given partial results.
      placements: of its inputs.

    Returns:
      None if it needs the reduced ones.
    """
    kept = decide_kept_partial(op, placements)
    if kept is not None:
        return kept
    decision = unique_ids.decide_of_sums_by_id(op, placements, scope.sizes)
    if decision is None:
        return None
    is_dense = makes_dense(scope, op, decision.placements[0])
    return None if is_dense and _is_reduced_by_itself(scope, op.outputs[0]) else decision


def makes_dense(scope: Scope, op: tf.Operation, placement: Placement | None) -> bool:
    """Whether towers add up the sums that they have by id, and the result isn't by id.

    For example, a sparse gradient is made dense: whole tables would be sent, not some rows. So if
    the result is reduced, the op may run once instead.

    Args:
      placement: of the result.
    """
    if op.type != op_types.UNSORTED_SEGMENT_SUM:
        return False
    is_of_sums = isinstance(scope.placement_of(op.inputs[0]), Partial)
    return is_of_sums and not isinstance(rows_of(placement), UniqueRows)


def _is_reduced_by_itself(scope: Scope, tensor: tf.Tensor) -> bool:
    """Whether a partial result is reduced, and not together with other ones that ops add to it.

    Then sums by id are added up once: towers send a row of each id, and not a whole table. This is
    known from the second pass on.
    """
    if tensor.name not in scope.reduced:
        return False
    operands = [operand for user in tensor.consumers() for operand in user.inputs]
    others = [operand for operand in operands if operand.name != tensor.name]
    return not others or any(other.name not in scope.reduced for other in others)
