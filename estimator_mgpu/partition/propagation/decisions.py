"""How one op runs, given the placements of its inputs.

An op is sharded by its rule, a list by the rule for lists, and what calls functions by the rule for
loops or branches. Whatever no rule can shard runs once: `NotSharded` is raised, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
    REPLICATE,
    CountedByTower,
    NotGatherable,
    Partial,
    Placement,
    Shard,
    rows_of,
)
from estimator_mgpu.partition.plan import (
    CountedFromFirst,
    Decision,
    Slice,
    SparseRows,
)
from estimator_mgpu.partition.propagation.matching import Match
from estimator_mgpu.partition.propagation.scope import Scope
from estimator_mgpu.partition.rules import (
    OF_PLACEMENTS,
    entries,
    lists,
    selections,
    tensor_arrays,
)
from estimator_mgpu.partition.rules.notation import NotSharded, failure, signature_of
from estimator_mgpu.partition.sizes import ONE, RowSpace, UniqueRows
from estimator_mgpu.tf_internals import op_types

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
        for decision in _decisions(scope, op, placements):
            if _keeps_ids(decision, placements) and _keeps_order(decision):
                return decision
    except NotSharded:
        raise
    except Exception as error:
        raise failure(op, error) from error
    raise NotSharded


def _keeps_ids(decision: Decision, placements: Sequence[Placement]) -> bool:
    """Whether towers have one row for each of their different ids, which several may have.

    So they can't slice what belongs to ids. They can sum up by id what belongs to other rows, but
    not what belongs to the ids: in the sum, an id that two towers have would count twice.
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
            if rows in map(rows_of, placements):
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
        if isinstance(need, (SparseRows, CountedFromFirst)) and not need.rows.is_ordered:
            return False
        if isinstance(need, Slice) and not need.rows.is_ordered and need.factor != ONE:
            return False
    for placement, dims in zip(decision.placements, decision.dims):
        if not isinstance(placement, Shard) or placement.rows.is_ordered:
            continue
        if dims is None or dims[placement.axis] != placement.rows.size:
            return False
    return True


def _decisions(
    scope: Scope, op: tf.Operation, placements: Sequence[Placement]
) -> Iterator[Decision]:
    """Yields the ways in which the rules shard an op, the best first, as `matching` finds them."""
    has_counted = any(isinstance(placement, CountedByTower) for placement in placements)
    # Functions have sizes of their own, the same for each call.
    if (has_counted or op.type in OF_PLACEMENTS) and not scope.in_function:
        decision = selections.decide(op, placements, scope.sizes) or entries.decide(
            op, placements, scope.sizes
        )
        if decision is not None:
            yield decision

    # Other rules know no positions, but as operands of `EntriesOf`: they are given these in full.
    gatherable = [
        REPLICATE if isinstance(placement, CountedByTower) else placement
        for placement in placements
    ]
    has_lists = any(isinstance(placement, NotGatherable) for placement in gatherable)
    if op.type in scope.call_rules:
        decision = scope.call_rules[op.type](scope, op, _of_batch(gatherable, scope.batch))
    elif op.type.startswith(op_types.HANDLE_PREFIXES):
        of_list = scope.placement_of_list(op.inputs[0])
        decision = tensor_arrays.HandleOp(
            op,
            [of_list, *gatherable[1:]],
            scope.batch,
            scope.sizes,
            scope.in_function,
            scope.assumes,
        ).decide()
    elif op.type.startswith(op_types.LIST_PREFIXES) or has_lists:
        decision = lists.decide(
            op, _of_batch(gatherable, scope.batch), scope.batch, scope.sizes, scope.in_function
        )
    else:
        yield from _by_rule(scope, op, placements)
        return
    if decision is not None and scope.make_lists(op, decision):
        yield decision


def _of_batch(placements: Sequence[Placement], batch: RowSpace) -> list[Placement]:
    """The placements, but for shards of other row spaces: their full values are used."""
    return [
        placement if rows_of(placement) in (None, batch) else REPLICATE for placement in placements
    ]


def _by_rule(scope: Scope, op: tf.Operation, placements: Sequence[Placement]) -> Iterator[Decision]:
    """The same by the rule for the op's type.

    Args:
      placements: of the op's inputs. Only operands that have the entries of a sparse tensor may be
        counted by towers; others are replicated.
    """
    is_replicated = all(placement == REPLICATE for placement in placements)
    if is_replicated and not scope.follows_gathered(op) and _rule_adds_nothing(op):
        return

    signature = signature_of(scope.rules.get(op.type), op, scope.sizes)
    match = Match(op, signature, placements, scope)

    # The sizes of outputs are worth knowing also if the op runs once.
    for output, dims in zip(op.outputs, match.dims):
        scope.sizes.set_dims(output, dims)

    yield from match.decisions()
    if signature.otherwise is not None:
        yield from Match(op, signature.otherwise, placements, scope).decisions()


def _rule_adds_nothing(op: tf.Operation) -> bool:
    """Whether a rule can't say more than the graph of an op none of whose inputs is sharded.

    It could say which sizes the outputs have, or that the op makes its shard by itself. The graph
    knows the sizes of most ops of an optimizer. A shard is made of a shape, as by
    `tf.zeros([batch, 3])`; but no scalar is a shard, nor is the shape, which is made of scalars.
    """
    if all(output.shape.rank == 0 for output in op.outputs):
        return True
    if any(map(_may_be_shape, op.inputs)):
        return False
    return all(output.shape.is_fully_defined() for output in op.outputs)


def _may_be_shape(tensor: tf.Tensor) -> bool:
    """Whether a tensor may hold sizes of dimensions."""
    return tensor.dtype.base_dtype in _SIZE_TYPES and tensor.shape.rank != 0
