"""How one op runs, given the placements of its inputs.

An op is sharded by its rule, a list by the rule for lists, and what calls functions by the rule for
loops or branches. Whatever no rule can shard runs once: `NotSharded` is raised, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
    REPLICATE,
    CountedByTower,
    NotGatherable,
    Partial,
    Placement,
    Positions,
    Shard,
    common_placement,
    rows_of,
)
from estimator_mgpu.partition.plan import (
    FULL,
    FULL_ON_FIRST,
    LOCAL,
    CountedFromFirst,
    Decision,
    LocalShape,
    OpPlan,
    Slice,
    SparseRows,
)
from estimator_mgpu.partition.propagation.matching import Match
from estimator_mgpu.partition.propagation.scope import Scope
from estimator_mgpu.partition.rules import (
    OF_PLACEMENTS,
    entries,
    handles,
    lists,
    selections,
    sparse,
)
from estimator_mgpu.partition.rules.notation import NotSharded, failure, signature_of
from estimator_mgpu.partition.sizes import ONE, RowSpace, UniqueRows
from estimator_mgpu.tf_internals import op_types

_BY_PLACEMENTS = OF_PLACEMENTS | set(entries.PADS_AND_SLICES)
_SIZE_TYPES = frozenset((tf.int32, tf.int64))


def decide(scope: Scope, op: tf.Operation, placements: Sequence[Placement]) -> Decision:
    """Decides how an op runs on every tower.

    Args:
      scope: the graph or function that the op is in. Sizes that the op's rule tells are recorded.
      op: one whose inputs are sharded, or one that may make its shard by itself, of sizes.
      placements: of the op's inputs. No placement is partial.

    Raises:
      NotSharded: if the op has to run once. Its text is the reason; an empty one says that the op
        needs all examples, or has no rule.
      RuntimeError: if the op's rule fails.
    """
    try:
        decision = _decision(scope, op, placements)
    except NotSharded:
        raise
    except Exception as error:
        raise failure(op, error) from error
    if decision is None or not _keeps_ids(op, decision) or not _keeps_order(decision):
        raise NotSharded
    if op.type in sparse.RULES and not _keeps_height(decision, placements):
        raise NotSharded
    return decision


def _keeps_height(decision: Decision, placements: Sequence[Placement]) -> bool:
    """Whether a sparse tensor's shape has as many rows as its entries' positions are counted in.

    It may have more, the last of them without entries. If these were shared over the towers, a
    tower's rows wouldn't be those in which its entries are counted.
    """
    needs = decision.plan.needs
    shapes = [need for need in needs if isinstance(need, LocalShape)]
    counted = [placement for placement, need in zip(placements, needs) if need == LOCAL]
    totals = [placement.total for placement in counted if isinstance(placement, Positions)]
    return all(shape.entries[shape.position].same_as(total) for shape in shapes for total in totals)


def _keeps_ids(op: tf.Operation, decision: Decision) -> bool:
    """Whether towers have one row for each of their different ids, which several may have.

    So they can't slice what belongs to ids, and what they reduce has to be a sum by id.
    """
    slices = (Slice, CountedFromFirst, SparseRows)
    needs = [need for need in decision.plan.needs if isinstance(need, slices)]
    if any(isinstance(need.rows, UniqueRows) for need in needs):
        return False
    for index, placement in enumerate(decision.placements):
        rows = rows_of(placement)
        if not isinstance(rows, UniqueRows):
            continue
        if isinstance(placement, Partial):
            if op.type not in entries.SUMS_BY_ID:
                return False
            continue
        dims = decision.dims[index] if decision.dims else None
        if placement != Shard(0, rows) or not dims or dims[0] != rows.size:
            return False
    return True


def _keeps_order(decision: Decision) -> bool:
    """Whether towers have one entry for each of the rows that are in any order.

    They are put in the order of the batch by a number for each row.
    """
    for need in decision.plan.needs:
        if isinstance(need, SparseRows) and not need.rows.is_ordered:
            return False
        if isinstance(need, Slice) and not need.rows.is_ordered and need.factor != ONE:
            return False
    for placement, dims in zip(decision.placements, decision.dims):
        if not isinstance(placement, Shard) or placement.rows.is_ordered:
            continue
        if dims is None or dims[placement.axis] != placement.rows.size:
            return False
    return True


def _decision(scope: Scope, op: tf.Operation, placements: Sequence[Placement]) -> Decision | None:
    op_type = op.type
    has_counted = any(isinstance(placement, CountedByTower) for placement in placements)
    if has_counted or op_type in _BY_PLACEMENTS:
        decision = None
        if not scope.in_function:  # Functions have sizes of their own, the same for each call.
            decision = selections.decide(op, placements, scope.sizes) or entries.decide(
                op, placements, scope.sizes
            )
        if decision is not None or op_type in OF_PLACEMENTS:
            return decision
    # From here on, rules know no positions: they are given these in full. `counted` is for
    # `_by_rule`, which knows operands of entries.
    counted = placements
    placements = [
        REPLICATE if isinstance(placement, CountedByTower) else placement
        for placement in placements
    ]

    has_lists = any(isinstance(placement, NotGatherable) for placement in placements)
    if op_type in scope.rules.of_calls:
        rule = scope.rules.of_calls[op_type]
        decision = rule(scope, op, _of_batch(placements, scope.batch))
    elif op_type.startswith(op_types.HANDLE_PREFIXES):
        of_list = scope.placement_of_list(op.inputs[0])
        decision = handles.decide(
            op,
            [of_list, *placements[1:]],
            scope.batch,
            scope.sizes,
            scope.in_function,
            scope.assumes,
        )
    elif op_type.startswith(op_types.LIST_PREFIXES) or has_lists:
        decision = lists.decide(
            op, _of_batch(placements, scope.batch), scope.batch, scope.sizes, scope.in_function
        )
    else:
        return _by_rule(scope, op, counted)
    return decision if decision and scope.make_lists(op, decision) else None


def _of_batch(placements: Sequence[Placement], batch: RowSpace) -> list[Placement]:
    """The placements, but for shards of other row spaces: their full values are used."""
    return [
        placement if rows_of(placement) in (None, batch) else REPLICATE for placement in placements
    ]


def _by_rule(scope: Scope, op: tf.Operation, placements: Sequence[Placement]) -> Decision | None:
    """By the rule for the op's type; None if no input is sharded in a way that the rule allows.

    Args:
      placements: of the op's inputs. Only operands that have the entries of a sparse tensor may be
        counted by towers; others are replicated.
    """
    are_replicated = all(
        placement == REPLICATE or isinstance(placement, CountedByTower) for placement in placements
    )
    inputs_are_replicated = are_replicated and not scope.follows_gathered(op)
    if inputs_are_replicated and _rule_adds_nothing(op):
        return None

    signature = signature_of(scope.rules.of_ops.get(op.type), op, scope.sizes)
    match = Match(op, signature, placements, scope)

    # The sizes of outputs are worth knowing also if the op runs once.
    for output, dims in zip(op.outputs, match.dims()):
        scope.sizes.set_dims(output, dims)

    decision = match.decision()
    if decision is None and signature.otherwise is not None:
        return Match(op, signature.otherwise, placements, scope).decision()
    return decision


def _rule_adds_nothing(op: tf.Operation) -> bool:
    """Whether a rule can't say more than the graph of an op none of whose inputs is sharded.

    It could say which sizes the outputs have, or that the op makes its shard by itself. The graph
    knows the sizes of most ops of an optimizer, and a shard is made of integers: of a size, as by
    `tf.zeros([batch, 3])`.
    """
    if any(operand.dtype.base_dtype in _SIZE_TYPES for operand in op.inputs):
        return False
    return all(output.shape.is_fully_defined() for output in op.outputs)


def kept_partial(op: tf.Operation, placements: Sequence[Placement]) -> Partial | None:
    """The partial result that an op makes of partial results; None if it needs the reduced ones.

    For example, the sum of two partial sums is a partial sum, which is reduced once instead of
    twice. A product of a partial sum and a replicated factor could be one as well, but isn't made
    one: an infinite factor gives inf for the sum, but nan on a tower whose part is 0. Nor is a
    quotient.
    """
    if op.type in op_types.MERGE:
        # What another branch gives counts on the first tower, and as zeros on others.
        partial = common_placement(placements)
        if not isinstance(partial, Partial) or partial.reduce != 'sum':
            return None
        if isinstance(partial.rows, UniqueRows):
            return None
        return partial if all(other in (partial, REPLICATE) for other in placements) else None
    if op.type not in op_types.PARTIAL_INPUTS:
        return None
    # Which inputs may be partial; the others are replicated.
    summands = op_types.PARTIAL_INPUTS[op.type]
    partials = placements[summands]
    if not partials or not isinstance(partials[0], Partial):
        return None
    first = partials[0]
    if isinstance(first.rows, UniqueRows):
        return None  # Towers have other ids: sums of them are made where they are needed.
    if first.reduce != 'sum' and op.type in op_types.PARTIAL_SUM_INPUTS:
        return None

    expected: list[Placement] = [REPLICATE] * len(placements)
    expected[summands] = [first] * len(partials)
    return first if list(placements) == expected else None


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
    partial = kept_partial(op, placements)
    if partial is not None:
        return kept_partial_decision(op, placements, partial)
    decision = entries.decide_of_sums_by_id(op, placements, scope.sizes)
    if decision is None or isinstance(rows_of(decision.placements[0]), UniqueRows):
        return decision
    return None if _is_reduced_by_itself(scope, op.outputs[0]) else decision


def _is_reduced_by_itself(scope: Scope, tensor: tf.Tensor) -> bool:
    """Whether a tensor, of which towers have parts, is reduced for ops without other partial sums.

    Then sums by id are added up once: towers send a row of each id, and not a whole table. This is
    known from the second pass on.
    """
    if tensor.name not in scope.reduced:
        return False
    operands = [operand for user in tensor.consumers() for operand in user.inputs]
    others = [operand for operand in operands if operand.name != tensor.name]
    return not others or any(other.name not in scope.reduced for other in others)


def kept_partial_decision(
    op: tf.Operation, placements: Sequence[Placement], partial: Partial
) -> Decision:
    """The decision for an op that makes a partial result of partial results."""
    if op.type in op_types.MERGE:
        needs = tuple(LOCAL if placement == partial else FULL_ON_FIRST for placement in placements)
        return Decision(OpPlan(needs), [partial, REPLICATE])  # Output 1 says which input it was.
    needs = tuple(LOCAL if placement == partial else FULL for placement in placements)
    return Decision(OpPlan(needs), [partial] * len(op.outputs))
