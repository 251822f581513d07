"""The steps in their order: rows, plan, towers."""

from __future__ import annotations

from collections.abc import Sequence, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.batch_norm import expand
from estimator_mgpu.partition.calls import inline
from estimator_mgpu.partition.homes import settle
from estimator_mgpu.partition.inside import CALLERS
from estimator_mgpu.partition.propagation import propagate
from estimator_mgpu.partition.rules import RULES, images
from estimator_mgpu.partition.symbols import Rows
from estimator_mgpu.partition.towers import Towers
from estimator_mgpu.partition.waits import fill, read_first, untie


def divide(
    graph: tf.Graph,
    sources: Sequence[tf.Tensor],
    sparse: Sequence[tf.SparseTensor],
    static: int | None,
    total: tf.Tensor | None,
    devices: Sequence[str],
    before: Set[str] = frozenset(),
    batch_norm: str = 'batch',
) -> Towers | None:
    """Divides a finished graph over devices.

    Args:
      graph: the graph.
      sources: tensors with the batch's rows along dimension 0.
      sparse: sparse tensors that have them, too.
      static: how many rows there are, if the graph knows.
      total: how many there are, an int32 scalar, otherwise.
      devices: one device a tower.
      before: names of ops that aren't the model's, and stay as they are.
      batch_norm: whether fused batch normalization takes statistics of the 'batch' or a 'device'.

    Returns:
      The towers; None if the graph stays as it is, as there are fewer rows than devices.
    """
    if not (sources or sparse) or (static is not None and static < len(devices)):
        return None
    replaced = {**inline(graph, before), **untie(graph, before), **fill(graph, before)}
    table = RULES
    if batch_norm == 'device':
        table = {**RULES, **images.OF_DEVICE}
    else:
        expand(graph)
    unused = {name.partition(':')[0] for name in replaced}
    rows = Rows('batch', static)
    plan = propagate(sources, sparse, rows, table, CALLERS, before, unused)
    towers = Towers(graph, plan, total, devices, settle(graph, plan), replaced)
    read_first(plan.order)
    return towers
