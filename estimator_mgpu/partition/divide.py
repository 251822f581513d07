"""The steps by which a finished graph is divided over devices, in their order."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches.batch import RANK_REMEDY, Batch
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.once_devices import place_ops
from estimator_mgpu.partition.order import facts
from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.partition.propagation.engine import propagate
from estimator_mgpu.partition.propagation.needless_ops import bypass_needless_ops
from estimator_mgpu.partition.propagation.unused_gradients import find_unused_gradients
from estimator_mgpu.partition.rewrites.batch_norm import expand_batch_norm
from estimator_mgpu.partition.rewrites.identities import bypass_identities, find_unused_ops
from estimator_mgpu.partition.rewrites.inline_calls import inline_calls
from estimator_mgpu.partition.rewrites.later_reads import read_after_writes
from estimator_mgpu.partition.rewrites.loop_handles import bypass_loops_of_handles
from estimator_mgpu.partition.rewrites.loop_waits import remove_loop_waits
from estimator_mgpu.partition.rewrites.read_functions import read_functions
from estimator_mgpu.partition.rewrites.recomputation.recompute import recompute_activations
from estimator_mgpu.partition.rewrites.recomputation.step_ops import StepOps
from estimator_mgpu.partition.rewrites.take_apart_branches import take_apart_branches
from estimator_mgpu.partition.rewrites.take_apart_loops import take_apart_loops
from estimator_mgpu.partition.rules import OF_DEVICE, RULES
from estimator_mgpu.partition.sizes import RowSpace
from estimator_mgpu.partition.towers.build_towers import Towers, build_towers
from estimator_mgpu.partition.towers.everywhere import copy_small_references
from estimator_mgpu.tf_internals.graphs import dependents
from estimator_mgpu.tf_internals.v1_loops import find_loops, with_loops


def divide(division: Division) -> Towers | None:
    """Divides a finished graph over devices, and over turns of each device.

    Args:
      division: the graph, its batch, the devices, and what else is asked for.

    Returns:
      The towers; None if the graph stays as it is, as there is nothing to shard.
    """
    if not _is_shardable(division):
        return None
    if division.batch.static is not None:
        division.turns = min(division.turns, division.batch.static // len(division.devices))
    for step in STEPS:
        step(division)
    return build_towers(division)


def _is_shardable(division: Division) -> bool:
    """Whether there are dense or sparse tensors to shard, and an example for each device."""
    batch = division.batch
    if batch.static is not None and batch.static < len(division.devices):
        return False
    sparse = [leaf for leaf in batch.leaves.values() if isinstance(leaf, tf.SparseTensor)]
    return bool(batch.sources or sparse)


def _inline_functions(division: Division) -> None:
    inline_calls(division)
    take_apart_branches(division)
    division.user_ops = set(division.graph.get_operations())


def _note_facts(division: Division) -> None:
    results = [division.op_in_place_of(result) for result in division.results]
    division.facts = facts.noted(division.graph, results)


def _recompute(division: Division) -> None:
    if division.recomputed_loss is None:
        return
    loss = division.in_place_of(division.recomputed_loss)
    results = [division.in_place_of(result) for result in division.step_results]
    step = StepOps(division.inputs, loss, results, division.existing_ops)
    division.recomputation = recompute_activations(step)


def _find_order(division: Division) -> None:
    division.order = Order(division.graph)


def _plan(division: Division) -> None:
    """Decides which ops are sharded, and how."""
    division.loops = find_loops(division.unused, division.order.liveness)
    batch = division.batch
    division.plan = propagate(
        batch.sources,
        batch.unsharded,
        with_loops(dependents(division.inputs, division.existing_ops), division.loops),
        RowSpace('batch', batch.static),
        RULES | OF_DEVICE if division.batch_norm == 'device' else RULES,
        unused=division.unused,
        reasons=_reasons_of_unknown_ranks(batch),
        may_be_dead=division.order.liveness.output_may_be_dead,
    )


def _reasons_of_unknown_ranks(batch: Batch) -> dict[str, str]:
    """For the names of tensors of unknown rank, why the ops that use them run once."""
    return {
        leaf.name: f'{title} has an unknown rank: {RANK_REMEDY}'
        for title, leaf in zip(batch.unknown_titles, batch.unknown.values())
        if isinstance(leaf, tf.Tensor)
    }


STEPS: tuple[Callable[[Division], None], ...] = (
    # Ops take the place of what only names them, so that all other steps see ops.
    read_functions,  # The next two look into the graphs of functions.
    _inline_functions,  # What is inlined belongs to the model, and a loop in it becomes visible.
    take_apart_loops,
    # From here on, no step may change the order in which state is touched. Until `_find_order`,
    # control edges hold it. After that, `order` holds it, and `towers.waits` adds the edges.
    _note_facts,
    # Ops that can't be sharded, or not as well, are replaced by such as can.
    bypass_loops_of_handles,
    expand_batch_norm,
    _recompute,  # After these, so that what is copied can be sharded.
    # Whoever reads state has its own read where it needs one: then the order is final.
    _find_order,
    read_after_writes,
    # What only waits is bypassed: from here on, who waits for what is asked of the order.
    remove_loop_waits,
    bypass_identities,
    find_unused_ops,  # After all that replaces something, but for `bypass_needless_ops`.
    find_unused_gradients,  # Their users may be unused ops.
    # The plan, and where what it doesn't shard runs.
    _plan,
    bypass_needless_ops,  # The plan knows their sizes.
    place_ops,
    copy_small_references,  # For what the plan doesn't shard; beside the variable.
)
