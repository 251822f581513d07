"""How `tf.cond` and `tf.case` of TensorFlow 1 are sharded, which are made of ops, not functions.

`branches` is about those that call functions.

A `Switch` passes its input on to one of two branches, and a `Merge` passes on what comes out of the
branch that was taken. The ops of the other branch don't run:

    x, choice --> Switch --+--> ops of one branch ----+
                           +--> ops of the other one --+--> Merge --> y

So towers can have copies of a `Switch`, of a `Merge`, and of the ops between, each by its own rule.
A branch may even sum over all towers: since all take the same branch, all parts are there, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import REPLICATE, Placement, Shard
from estimator_mgpu.partition.plan import FULL, LOCAL, Decision, Need, OpPlan, Slice
from estimator_mgpu.partition.propagation.scope import Scope
from estimator_mgpu.partition.rules.notation import NotSharded
from estimator_mgpu.partition.sizes import Size


def decide_switch(
    scope: Scope, op: tf.Operation, placements: Sequence[Placement]
) -> Decision | None:
    """Decides how a `Switch` runs: both outputs have the placement of the input.

    Args:
      scope: the graph, or the function, that the op is in.
      op: a `Switch`.
      placements: of the value, and of the bool that says whether output 1 has it.
    """
    value, choice = placements
    if value == REPLICATE or (scope.in_function and choice != REPLICATE):
        return None
    dims = scope.sizes.dims(op.inputs[0]) if isinstance(value, Shard) else None
    return Decision(OpPlan((LOCAL, FULL)), [value, value], [dims, dims])


def decide_merge(
    scope: Scope, op: tf.Operation, placements: Sequence[Placement]
) -> Decision | None:
    """Decides how a `Merge` runs: all branches have to give the value in one placement.

    Args:
      scope: the graph, or the function, that the op is in.
      op: a `Merge`, which gives a value, and which of its inputs it was.
      placements: of its inputs. No placement is partial.

    Raises:
      NotSharded: if it has to run once, with the reason.
    """
    sharded = [placement for placement in placements if placement != REPLICATE]
    if not sharded:
        return None
    placement = sharded[0]
    if any(other != placement for other in sharded):
        raise NotSharded(f'the branches before {op.name} give it in several placements')

    needs: list[Need]
    dims: list[Size] | None = None
    if isinstance(placement, Shard):
        factor = _factor(scope, op, placement)
        shard = Slice(placement.axis, placement.rows, factor, placement.in_blocks)
        needs = [LOCAL if other == placement else shard for other in placements]
        rank = len(scope.sizes.dims(op.inputs[0]) or [])
        dims = scope.sizes.dims_of_shard(op.outputs[0], placement, factor, rank)
    else:  # a list
        needs = [LOCAL] * len(placements)
    decision = Decision(OpPlan(tuple(needs)), [placement, REPLICATE], [dims, None])
    return decision if scope.make_lists(op, decision) else None


def _factor(scope: Scope, op: tf.Operation, placement: Shard) -> Size:
    """How many entries an example has along the axis, if that's the same in all branches."""
    factors = {scope.sizes.per_row(tensor, placement.axis, placement.rows) for tensor in op.inputs}
    factor = factors.pop()
    if factors or factor is None or factor.static is None:
        raise NotSharded(f'the size of {op.name} is unknown, or not the same in all branches')
    return factor
