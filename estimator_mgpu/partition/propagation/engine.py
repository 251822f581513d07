"""Propagation: from the placements of the batch to those of every tensor, and so to a plan.

Ops are visited in order, each after those that it depends on. A visit may find that an earlier op
has to run once after all, or that a partial result has to be reduced where it is made. That is
noted. If an op that was visited before would then be decided otherwise, all ops are visited again,
until there is no such op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.placements import (
    REPLICATE,
    CountedByTower,
    NotGatherable,
    Partial,
    Placement,
    Shard,
    rows_of,
)
from estimator_mgpu.partition.plan import LoopFrame, OpPlan, Plan
from estimator_mgpu.partition.propagation.batch_placements import place_batch
from estimator_mgpu.partition.propagation.branches import (
    decide_branches,
    decide_merge,
    decide_switch,
)
from estimator_mgpu.partition.propagation.decisions import decide
from estimator_mgpu.partition.propagation.loops import decide_loop, decide_v1_loop
from estimator_mgpu.partition.propagation.partial_results import decide_of_partial, makes_dense
from estimator_mgpu.partition.propagation.reasons import reason_of, reason_of_lists_made
from estimator_mgpu.partition.propagation.scope import CallRule, EqualNames, Scope
from estimator_mgpu.partition.rules.notation import NotSharded, Rule
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import RowSpace, SelectedRows
from estimator_mgpu.tf_internals import graphs, op_types, private
from estimator_mgpu.tf_internals.v1_loops import OpOrLoop, V1Loop, passed_on

CALL_RULES: dict[str, CallRule] = {
    **dict.fromkeys(op_types.LOOPS, decide_loop),
    **dict.fromkeys(op_types.BRANCHES, decide_branches),
    **dict.fromkeys(op_types.PARTITIONED_CALLS, decide_branches),
    **dict.fromkeys(op_types.SWITCH, decide_switch),
    **dict.fromkeys(op_types.MERGE, decide_merge),
    op_types.V1_LOOP: decide_v1_loop,
}


def propagate(
    sources: Sequence[tf.Tensor],
    unsharded: Sequence[tf.Tensor | tf.SparseTensor | tf.RaggedTensor],
    order: Sequence[OpOrLoop],
    batch: RowSpace,
    rules: dict[str, Rule],
    unused: Set[str],
    reasons: Mapping[str, str],
    may_be_dead: Callable[[tf.Tensor], bool] = lambda _: False,
) -> Plan:
    """Decides which ops run on every tower.

    Args:
      sources: dense tensors of the batch, with the examples along dimension 0.
      unsharded: what else depends on the batch: sparse and ragged tensors, and tensors of unknown
        rank.
      order: the ops that depend on any of these, each after those that it depends on; a v1 loop
        in the place of its ops.
      batch: the batch's row space.
      rules: by type of op.
      unused: names of ops in `order` that are left as they are.
      reasons: by the name of an unsharded tensor, why ops that use it run once.
      may_be_dead: tells which tensors are in branches of TensorFlow 1, which may not be taken.

    Raises:
      RuntimeError: if a rule fails.
    """
    reduced: set[str] = set()
    run_once: dict[str, dict[str, str]] = {}
    same_entries = EqualNames()
    same_sums = EqualNames()
    # Each pass but the last adds to one of these, which never lose anything: so it ends.
    while True:
        scope = Scope(
            batch,
            rules,
            CALL_RULES,
            Sizes(),
            reduced=reduced,
            run_once=run_once,
            same_entries=same_entries,
            same_sums=same_sums,
        )
        entries, at_others_entries = place_batch(scope, sources, unsharded)
        count_of_same = scope.count_of_same_rows
        graph_pass = _Pass(scope, reasons, may_be_dead)
        for op in order:
            if op.name not in unused:
                graph_pass.visit(op)

        if graph_pass.is_last and scope.count_of_same_rows == count_of_same:
            return Plan(
                rows=batch,
                sources=sources,
                entries=entries,
                at_others_entries=at_others_entries,
                order=[end for op in order for end in _boundary(op)],
                ops=scope.ops,
                placements=scope.placements,
                once=graph_pass.once,
                sizes=scope.sizes,
                unused=unused,
                frames=_frames(scope, order),
                in_loops=scope.in_loops,
            )


def _boundary(op: OpOrLoop) -> Sequence[tf.Operation]:
    """The op, or the ops of a v1 loop that are connected with ops outside of it."""
    return [*op.enters, *op.exits] if isinstance(op, V1Loop) else [op]


def _frames(
    scope: Scope, ops: Sequence[OpOrLoop], around: tuple[LoopFrame, ...] = ()
) -> dict[str, tuple[LoopFrame, ...]]:
    """The v1 loops around the inputs of ops, by the ops' names.

    Args:
      ops: ops and v1 loops, in the graph or in a loop.
      around: the loops around these.
    """
    frames: dict[str, tuple[LoopFrame, ...]] = {}
    for loop in ops:
        if not isinstance(loop, V1Loop):
            continue
        first = loop.enters[0]
        iterations = first.get_attr('parallel_iterations')
        is_joint = scope.ops.get(first.name, OpPlan()).is_joint
        inside = (*around, LoopFrame(loop.name, iterations, is_joint))
        frames.update((op.name, inside) for op in loop.all_ops if op not in loop.enters)
        if loop.body is not None:
            frames.update(_frames(scope, loop.body.ops, inside))
    return frames


class _Pass:
    """One pass over the ops of the graph.

    Args:
      scope: what is known and decided. Its `reduced` and `run_once` last from pass to pass.
      reasons: by the name of a tensor, why ops that use it run once.
      may_be_dead: tells which tensors are in branches of TensorFlow 1, which may not be taken.

    Attributes:
      once: as in `Plan`.
      is_last: False if something was found that an op visited earlier should have known, so that
        another pass is needed.
    """

    def __init__(
        self,
        scope: Scope,
        reasons: Mapping[str, str],
        may_be_dead: Callable[[tf.Tensor], bool],
    ):
        self.scope = scope
        self.once: dict[str, tuple[str, int]] = {}
        self.is_last = True
        self._reasons = reasons
        self._may_be_dead = may_be_dead
        self._visited: set[tf.Operation] = set()

    def visit(self, op: OpOrLoop) -> None:
        """Decides how an op, or a v1 loop, runs."""
        if op.type == op_types.NO_OP:
            self._visit_group(op)
            self._visited.add(op)
            return

        placements = self.scope.placements_of_inputs(op)
        if op.type in op_types.SHAPE_QUERIES:
            self._run_unsharded(op, placements, '')  # It needs no values, and so no reason.
        else:
            reason = reason_of_lists_made(self.scope, _boundary(op))
            if reason is None:
                self._decide(op, placements)
            else:
                self._run_unsharded(op, placements, reason)
        self._visited.update(_boundary(op))

    def _visit_group(self, op: tf.Operation) -> None:
        """Lets a `tf.group` have a copy on each tower, which waits for the tower's own ops."""
        waits_for_towers = any(before.name in self.scope.ops for before in op.control_inputs)
        if waits_for_towers and private.control_consumers(op):
            self.scope.ops[op.name] = OpPlan()

    def _decide(self, op: OpOrLoop, placements: list[Placement]) -> None:
        """Lets an op run on every tower if it can be sharded, and otherwise once."""
        # Rows that begin in a branch end with it: such a `Merge` isn't sharded, nor does it pass on
        # partial results.
        rows_end = op.type in op_types.MERGE and any(
            self._begins_in_branch(rows_of(placement)) for placement in placements
        )
        if any(isinstance(placement, Partial) for placement in placements):
            of_partial = None if rows_end else decide_of_partial(self.scope, op, placements)
            if of_partial is not None:
                self.scope.record(op, of_partial)
                return

            self._reduce_inputs(op, placements)
            placements = [
                REPLICATE if isinstance(placement, Partial) else placement
                for placement in placements
            ]

        try:
            if rows_end and any(placement != REPLICATE for placement in placements):
                raise NotSharded(f'{op.name} ends a branch in which the rows of its value begin')
            decision = decide(self.scope, op, placements)
        except NotSharded as error:
            if self._uses_towers(op, placements):  # Otherwise there is no reason to tell.
                reason = reason_of(self.scope, self.once, op, placements, str(error))
                self._run_unsharded(op, placements, reason)
        else:
            self.scope.record(op, decision)

    def _begins_in_branch(self, rows: RowSpace | None) -> bool:
        """Whether a row space begins with a tensor in a branch of TensorFlow 1.

        If the branch isn't taken, nobody knows how many rows there are.
        """
        if rows is None:
            return False
        if isinstance(rows, SelectedRows) and self._begins_in_branch(rows.origin):
            return True
        return rows.is_of_tensor and self._may_be_dead(
            tf.get_default_graph().get_tensor_by_name(rows.name)
        )

    def _run_unsharded(self, op: OpOrLoop, placements: Sequence[Placement], reason: str) -> None:
        """Lets an op run once, with the full values of its inputs."""
        self._run_makers_of_lists_once(op, placements, reason)

        if op.type in op_types.SHAPE_QUERIES or not self._uses_towers(op, placements):
            return  # It uses nothing of towers, or only sizes: there is no reason to tell.

        self._note_once(op, placements, reason)
        uses_shards = any(isinstance(placement, Shard) for placement in placements)
        if uses_shards or self.scope.follows_gathered(op):
            for output in op.outputs:
                self.scope.reshardable.add(output.name)
                self.scope.sizes.start_row_space(output)

    def _uses_towers(self, op: OpOrLoop, placements: Sequence[Placement]) -> bool:
        """Whether an op uses what towers make, or what was made once of such."""
        is_given = any(placement != REPLICATE for placement in placements)
        return is_given or self.scope.follows_gathered(op)

    def _run_makers_of_lists_once(
        self, op: OpOrLoop, placements: Sequence[Placement], reason: str
    ) -> None:
        """Notes that what makes the lists that an op uses runs once, from the next pass on."""
        for tensor, placement in zip(op.inputs, placements):
            # Numbers of rows are computed once more, in full, which is cheap.
            if isinstance(placement, NotGatherable) and not isinstance(placement, CountedByTower):
                maker = passed_on(tensor).op
                users = self.scope.run_once.setdefault(maker.name, {})
                if not users:
                    self.is_last = False
                users.setdefault(op.name, reason)

    def _note_once(self, op: OpOrLoop, placements: Sequence[Placement], reason: str) -> None:
        """Notes why an op runs once, and the bytes that are gathered for it."""
        for tensor in op.inputs:
            if tensor.name in self._reasons:
                reason = self._reasons[tensor.name]
                break

        gathered = {
            tensor
            for tensor, placement in zip(op.inputs, placements)
            if placement != REPLICATE and tensor.op.name in self.scope.ops
        }
        bytes_gathered = sum(bytes_of(tensor) for tensor in gathered)
        # A v1 loop is named by the ops that give its results. What is gathered for it counts once.
        members = op.exits if isinstance(op, V1Loop) else [op]
        for index, member in enumerate(members):
            self.once[member.name] = (reason, 0 if index else bytes_gathered)

    def _reduce_inputs(self, op: OpOrLoop, placements: Sequence[Placement]) -> None:
        """Notes that the partial results that an op uses are reduced where they come from.

        They are reduced once for all ops that use them. For example, the input of a reshape is
        reduced rather than its output, as others may use the input, too.
        """
        for tensor, placement in zip(op.inputs, placements):
            if isinstance(placement, Partial):
                rearrangements: list[tf.Operation] = []
                while tensor.op.type in op_types.REARRANGEMENTS:
                    source = tensor.op.inputs[0]
                    if self.scope.placement_of(source) == REPLICATE:
                        break
                    rearrangements.append(tensor.op)
                    tensor = source
                is_new = tensor.name not in self.scope.reduced
                if is_new and makes_dense(self.scope, tensor.op, self.scope.placement_of(tensor)):
                    self.is_last = False  # It may run once in the next pass.
                self.scope.reduced.add(tensor.name)
                self._visit_again(tensor, rearrangements[::-1])

    def _visit_again(self, reduced: tf.Tensor, rearrangements: Sequence[tf.Operation]) -> None:
        """Lets ops run once that have passed on a partial result that is now reduced before them.

        For example, a gradient is summed over the examples and reshaped, and an optimizer needs all
        of it. The reshape was sharded when it was visited. Now that the sum is reduced, the reshape
        is visited again, and runs once. If other ops were visited that use the sum or its reshape,
        all ops are visited again, in another pass.

        Args:
          reduced: the partial result.
          rearrangements: the ops that have passed it on, one after another.
        """
        users = {op for op in reduced.consumers() if op.type not in op_types.SHAPE_QUERIES}
        for rearrangement in rearrangements:
            users.update(graphs.consumers_of(rearrangement))
        if not (users & self._visited).issubset(rearrangements):
            self.is_last = False
            return
        for rearrangement in rearrangements:
            self.scope.forget(rearrangement)
            self.visit(rearrangement)
