"""The steps in their order: what is written otherwise, a plan, homes, towers."""

from __future__ import annotations

from collections.abc import Sequence, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu import optimizer
from estimator_mgpu.batch import RANK_REMEDY, Batch
from estimator_mgpu.partition.propagation.engine import propagate
from estimator_mgpu.partition.rewrites.batch_norm import expand
from estimator_mgpu.partition.rewrites.fills import fill
from estimator_mgpu.partition.rewrites.gradient_tuples import read_first, untie
from estimator_mgpu.partition.rewrites.inline_calls import inline
from estimator_mgpu.partition.rules import OF_DEVICE, PRODUCTS, RULES
from estimator_mgpu.partition.sizes import RowSpace
from estimator_mgpu.partition.towers.build import Towers
from estimator_mgpu.partition.towers.placement import settle
from estimator_mgpu.tf_internals.graphs import dependents, ordered


def divide(
    graph: tf.Graph,
    batch: Batch,
    total: tf.Tensor | None,
    devices: Sequence[str],
    before: Set[str] = frozenset(),
    batch_norm: str = 'batch',
) -> Towers | None:
    """Divides a finished graph over devices, one a tower.

    `total` is how many rows there are, an int32 scalar, if the graph doesn't know; `before` names
    ops that aren't the model's (the global step, say), which stay as they are. Returns None if the
    whole graph does, as there are fewer rows than devices, or only ragged tensors
    and tensors of unknown rank.
    """
    sources, static, leaves, unknown = batch
    sparse = [leaf for leaf in leaves.values() if isinstance(leaf, tf.SparseTensor)]
    if not (sources or sparse) or (static is not None and static < len(devices)):
        return None
    inlined, untied = inline(graph, before), untie(graph, before)
    replaced = {**inlined, **untied, **fill(graph, before)}
    own = OF_DEVICE if batch_norm == 'device' else {}
    if not own:
        replaced.update(expand(graph, before))
    unused = {name.partition(':')[0] for name in replaced}
    wholes = [*sparse, *unknown.values()]
    given = tf.nest.flatten([sources, wholes], expand_composites=True)
    ops, rows = dependents(given, before), RowSpace('batch', static)
    read_first([graph.get_tensor_by_name(name).op for name in untied], before)
    reasons = {
        leaf.name: f'{title} has an unknown rank: {RANK_REMEDY}'
        for title, leaf in zip(batch.unknown_titles, unknown.values())
        if isinstance(leaf, tf.Tensor)
    }
    plan = propagate(sources, wholes, ordered(ops), rows, RULES | own, PRODUCTS, unused, reasons)
    homes = settle(graph, plan)
    return Towers(graph, plan, total, devices, homes, replaced, optimizer.gradients_by_call(graph))
