"""The steps by which a finished graph is divided over devices, in their order."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import optimizer
from estimator_mgpu.batches.batch import RANK_REMEDY, Batch
from estimator_mgpu.partition import later_gradients
from estimator_mgpu.partition.order import check
from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.partition.propagation.engine import propagate
from estimator_mgpu.partition.propagation.needless_ops import bypass_needless_ops
from estimator_mgpu.partition.rewrites.batch_norm import expand_batch_norm
from estimator_mgpu.partition.rewrites.fills import replace_likes_by_fills
from estimator_mgpu.partition.rewrites.identities import bypass_identities, idle_groups
from estimator_mgpu.partition.rewrites.inline_calls import inline_calls
from estimator_mgpu.partition.rewrites.later_reads import read_after_writes
from estimator_mgpu.partition.rewrites.loop_handles import bypass_loops_of_handles
from estimator_mgpu.partition.rewrites.loop_shapes import infer_loop_shapes
from estimator_mgpu.partition.rewrites.loop_waits import remove_loop_waits
from estimator_mgpu.partition.rewrites.read_functions import read_functions
from estimator_mgpu.partition.rewrites.recomputation.recompute import recompute_activations
from estimator_mgpu.partition.rewrites.take_apart_loops import take_apart_loops
from estimator_mgpu.partition.rewrites.unused_gradients import unused_gradients
from estimator_mgpu.partition.rules import OF_DEVICE, PRODUCTS, RULES
from estimator_mgpu.partition.sizes import RowSpace
from estimator_mgpu.partition.towers.build import (
    Towers,
    Turns,
    build_towers,
    replaced_op,
    replaced_result,
)
from estimator_mgpu.partition.towers.op_devices import place_ops
from estimator_mgpu.tf_internals import graphs
from estimator_mgpu.tf_internals.graphs import dependents
from estimator_mgpu.tf_internals.v1_loops import find_loops, order_units


def divide(
    graph: tf.Graph,
    batch: Batch,
    total: tf.Tensor | None,
    devices: Sequence[str],
    existing_ops: Set[str] = frozenset(),
    batch_norm: str = 'batch',
    turns: int = 1,
    results: Sequence[tf.Operation] = (),
    step_results: Sequence[tf.Tensor | tf.Operation] = (),
    recomputed_loss: tf.Tensor | None = None,
    bypasses_needless_ops: bool = True,
) -> Towers | None:
    """Divides a finished graph over devices, and over turns of each device.

    Args:
      graph: the graph that the model_fn has built, which is changed.
      batch: the features and labels that it was built for.
      total: how many examples there are, an int32 scalar; None if the graph knows.
      devices: those of towers.
      existing_ops: names of ops that were there before the model_fn, such as the global step; they
        stay as they are.
      batch_norm: 'batch' to normalize by the statistics of the global batch, 'device' by those of
        each tower's examples.
      turns: how many towers each device has, one after the other; fewer if the graph knows that
        there are fewer examples.
      results: ops of what an EstimatorSpec gives, or whatever is wanted of the graph.
      step_results: those for which a step is run in this mode: turns may need all of these.
      recomputed_loss: the loss, if forward ops are computed again for its gradients.
      bypasses_needless_ops: whether towers have no copies of ops that give what they are given;
        otherwise each op runs as its rule says.

    Returns:
      The towers; None if the graph stays as it is, as there is nothing to shard.
    """
    if not _is_shardable(batch, len(devices)):
        return None
    if batch.static is not None:
        turns = min(turns, batch.static // len(devices))
    unsharded = _unsharded_leaves(batch)

    inputs = tf.nest.flatten([batch.sources, unsharded], expand_composites=True)
    read_functions(graph, existing_ops)
    model = later_gradients.note_model(graph)
    replaced = inline_calls(graph, existing_ops)
    model.note_inlined(replaced)
    replaced.update(take_apart_loops(dependents(inputs, existing_ops)))
    facts = None
    if check.is_on():
        facts = check.Facts(graph, [replaced_op(result, replaced) for result in results])
    infer_loop_shapes(graph)
    bypass_loops_of_handles(graph, existing_ops)
    if batch_norm != 'device':
        replaced.update(expand_batch_norm(graph, existing_ops))
    recomputation = None
    if recomputed_loss is not None:
        loss = replaced_result(recomputed_loss, replaced)
        current_results = [replaced_result(result, replaced) for result in step_results]
        recomputation = recompute_activations(graph, inputs, loss, current_results, existing_ops)
    order = Order(graph.get_operations())
    if read_after_writes(graph, order):
        order = Order(graph.get_operations())

    # The number of examples waits for the check that all leaves have as many.
    ops_of_total = graphs.ancestors([total.op]) if total is not None else set()
    kept = existing_ops | {op.name for op in ops_of_total}
    unused_entries = remove_loop_waits(graph, existing_ops, order)
    replaced.update(bypass_identities(graph, kept, order))
    replaced.update(replace_likes_by_fills(graph, existing_ops, order.liveness))
    unused = unused_entries | {name.partition(':')[0] for name in replaced}
    unused |= idle_groups(graph, existing_ops, unused)
    unused |= unused_gradients(graph.get_operations(), results, PRODUCTS, unused, order)

    used = [op for op in graph.get_operations() if op.name not in unused]
    loops = find_loops(used, order.liveness)
    plan = propagate(
        batch.sources,
        unsharded,
        order_units(dependents(inputs, existing_ops), loops),
        RowSpace('batch', batch.static),
        RULES | OF_DEVICE if batch_norm == 'device' else RULES,
        PRODUCTS,
        unused=unused,
        reasons=_reasons_of_unknown_ranks(batch),
        shard_count=len(devices) * turns,
        may_be_dead=order.liveness.output_may_be_dead,
    )
    if bypasses_needless_ops:
        plan, bypassed = bypass_needless_ops(graph, plan, order)
        replaced.update(bypassed)
    full_value_devices = place_ops(graph, plan, devices)
    calls = optimizer.gradients_by_call(graph)
    towers = build_towers(
        graph,
        plan,
        total,
        devices,
        full_value_devices,
        replaced,
        order,
        model,
        calls,
        Turns(turns, step_results, results, loops),
    )
    towers.recomputation = recomputation
    towers.facts = facts
    if batch_norm == 'device':
        later_gradients.refuse_batch_norm(graph, existing_ops)
    model.end_changes(towers.tensors_in_use())
    return towers


def _is_shardable(batch: Batch, devices: int) -> bool:
    """Whether there are dense or sparse tensors to shard, and an example for each device."""
    if batch.static is not None and batch.static < devices:
        return False
    return bool(batch.sources or _sparse_leaves(batch))


def _sparse_leaves(batch: Batch) -> list[tf.SparseTensor]:
    return [leaf for leaf in batch.leaves.values() if isinstance(leaf, tf.SparseTensor)]


def _unsharded_leaves(batch: Batch) -> list[Any]:
    """The leaves of the batch that aren't sharded themselves, but whose results may be.

    These are sparse and ragged tensors, whose dense counterparts have an example a row, and tensors
    of unknown rank.
    """
    composite = (tf.SparseTensor, tf.RaggedTensor)
    leaves = [leaf for leaf in batch.leaves.values() if isinstance(leaf, composite)]
    return [*leaves, *batch.unknown.values()]


def _reasons_of_unknown_ranks(batch: Batch) -> dict[str, str]:
    """For the names of tensors of unknown rank, why the ops that use them run once."""
    return {
        leaf.name: f'{title} has an unknown rank: {RANK_REMEDY}'
        for title, leaf in zip(batch.unknown_titles, batch.unknown.values())
        if isinstance(leaf, tf.Tensor)
    }
