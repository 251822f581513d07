"""Variables that a step reads and writes, where nothing says which comes first."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu import sharing
from estimator_mgpu.walks import Order

_READS = frozenset(['ReadVariableOp', 'ResourceGather', 'ResourceGatherNd', 'Identity', 'GatherV2'])


def unordered(graph: tf.Graph, ops: Sequence[tf.Operation]) -> list[str]:
    """Lists the variables of which a step may read the old value or the new one.

    Args:
      graph: the graph.
      ops: what the step runs.

    Returns:
      A line for each: its name, and those of what reads and what writes it.
    """
    writes: dict[str, list[tf.Operation]] = {}
    for op in ops:
        if sharing.is_write(op) and sharing.writes_variable(op):
            for handle in sharing.shared_handles(op):
                writes.setdefault(handle, []).append(op)
    # No order can be found out of what only passes a v1 variable on.
    reads = [op for op in ops if op.type in _READS and not any(map(sharing.is_handle, op.outputs))]
    pairs = [
        (handle, read, write)
        for read in reads
        for handle in sharing.shared_handles(read)
        for write in writes.get(handle, [])
    ]
    order = Order(graph, list({op.name: op for _, *two in pairs for op in two}.values()))
    found = {
        handle: f'{handle!r} (read by {read.name!r}, written by {write.name!r})'
        for handle, read, write in pairs
        if not (order.is_before(read, write) or order.is_before(write, read))
    }
    return list(found.values())
