"""How much memory a step needs, as TensorFlow's trace (`RunMetadata`) tells."""

from __future__ import annotations

import itertools


def peak(stats):
    """The most bytes that the outputs and the scratch space of a device's ops take at a time.

    Args:
      stats: of the device: one of `RunMetadata.step_stats.dev_stats`.
    """
    used = [memory for node in stats.node_stats for memory in node.memory]
    records = [(r.alloc_micros, r.alloc_bytes) for m in used for r in m.allocation_records]
    # What is freed has a negative size.
    totals = itertools.accumulate(size for _, size in sorted(records))
    return max([0, *totals])
