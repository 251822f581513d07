"""What has to be written for something to be there: a metric's update, say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import sharing


class Updates(NamedTuple):
    """What some tensors need to be written.

    Attributes:
      ops: all ops that they depend on, by name, up to what's shared.
      writes: those that write.
      own: the names of those that write or that read what is written.
    """

    ops: dict[str, tf.Operation]
    writes: list[tf.Operation]
    own: set[str]

    def without(self, writes: Iterable[tf.Operation]) -> Updates:
        """Leaves out some writes, and reads of what they write."""
        names = {op.name for op in writes}
        left = set().union(*(sharing.shared_handles(op) for op in writes))
        own = {name for name in self.own if not sharing.shared_handles(self.ops[name]) & left}
        return self._replace(writes=[op for op in self.writes if op.name not in names], own=own)

    def loops_after_writes(self) -> set[str]:
        """Returns the names of what starts loops that are given something read.

        Where a tower has no rows, what is read isn't there. A loop of which some but not all
        inputs are there never ends.
        """
        after = self.after_writes()
        loops = {name for name in after if sharing.calls_function(self.ops[name])}
        enters = [op for op in self.ops.values() if op.type in ('Enter', 'RefEnter')]
        frames = {op.get_attr('frame_name') for op in enters if op.name in after}
        return loops | {op.name for op in enters if op.get_attr('frame_name') in frames}

    def after_writes(self) -> set[str]:
        """Returns the names of the ops that wait for a write, or use what is read after one."""
        found = set(self.own)
        size = 0
        while size < len(found):
            size = len(found)
            found |= {
                op.name
                for op in self.ops.values()
                if any(t.op.name in found for t in op.inputs)
                or any(c.name in found for c in op.control_inputs)
            }
        return found
