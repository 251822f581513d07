"""Why an op runs once: of all reasons that it has, the one that `explain` and errors tell.

It's the first that there is of these:

- An op needs all of a list that this op makes or uses: a list can't be gathered.
- What the op's rule says: that its loop's steps depend on the examples, say.
- The reason of an op that runs once and gives this one an input. So a whole stretch of the graph
  has the reason of its first op.
- That its type has no rule, or that it needs all examples, or may need them.

If an op is given a tensor of the batch that can't be sharded, as its rank is unknown, the engine
tells that instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import REPLICATE, NotGatherable, Placement, rows_of
from estimator_mgpu.partition.propagation.scope import Scope
from estimator_mgpu.partition.rules import has_rule
from estimator_mgpu.tf_internals import op_types
from estimator_mgpu.tf_internals.v1_loops import OpOrLoop, passed_on


def reason_of(
    scope: Scope,
    once: Mapping[str, tuple[str, int]],
    op: OpOrLoop,
    placements: Sequence[Placement],
    of_rule: str,
) -> str:
    """Why an op runs once that couldn't be sharded.

    Args:
      once: as in `Plan`, of the ops that were visited before.
      op: an op or a v1 loop.
      of_rule: what its rule says; '' if that is nothing.
    """
    reason = _reason_of_pass_before(scope, op, placements) or of_rule
    if reason:
        return reason

    reasons_before = [once[tensor.op.name][0] for tensor in op.inputs if tensor.op.name in once]
    uses_towers = any(placement != REPLICATE for placement in placements)
    if reasons_before and (has_rule(op.type) or not uses_towers):
        return reasons_before[0]
    return default_reason(scope, op, placements)


def default_reason(scope: Scope, op: tf.Operation, placements: Sequence[Placement]) -> str:
    """Why an op runs once for which nothing else was said."""
    if not has_rule(op.type):
        return f'no rule for {op.type}'
    of_batch = all(rows_of(placement) in (None, scope.batch) for placement in placements)
    if of_batch and op.type == op_types.RESHAPE and not op.inputs[0].shape[1:].is_fully_defined():
        return (
            f'this Reshape may mix examples, as the shape {op.inputs[0].shape} does not say how '
            'large they are: tell it by set_shape'
        )
    if of_batch:
        return f'this {op.type} needs all examples'
    return f"the examples of this {op.type}'s inputs may not be the batch's"


def reason_of_lists_made(scope: Scope, ops: Sequence[tf.Operation]) -> str | None:
    """Why an op runs once for the sake of a list that it makes; None if it needn't.

    It has to if another op needs all of the list, as a list can't be gathered. The reason is that
    of the first such op.

    Args:
      ops: the op; of a v1 loop, those that are connected with ops outside of it.
    """
    if not scope.run_once:  # as of almost all models
        return None
    for op in ops:
        if op.name in scope.run_once:
            return next(iter(scope.run_once[op.name].values()))
    return None


def _reason_of_pass_before(
    scope: Scope, op: OpOrLoop, placements: Sequence[Placement]
) -> str | None:
    """Why an op needed all of a list in an earlier pass; None if it needed none.

    After that pass, the maker of the list runs once, and so do all ops that use the list, in this
    pass. Of these, the op that needed all of it keeps its own reason. Others could be sharded
    before: they run once because of it, so its reason is theirs; if there are several, the first's.
    """
    if not scope.run_once:  # Almost no model has such lists, and models have many ops.
        return None
    for tensor, placement in zip(op.inputs, placements):
        users = scope.run_once.get(passed_on(tensor).op.name)
        if users and not isinstance(placement, NotGatherable):
            return users.get(op.name, next(iter(users.values())))
    return None
