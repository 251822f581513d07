"""Which ops have side effects: they change something, or give another result when run again."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs, op_types
from estimator_mgpu.tf_internals.graphs import topological_order


def has_side_effect(op: tf.Operation) -> bool:
    """Whether an op changes state, or may give another result when it's run again."""
    if op.type in op_types.VARIABLE_READS or op.type in op_types.REFERENCE_READS:
        return False
    # An op that writes to a reference variable isn't called stateful.
    if any(argument.is_ref for argument in op.op_def.input_arg):
        return True
    # An op that only makes the handle of a variable, a table or a queue has no side effect.
    makes = all(t.dtype == tf.resource or graphs.is_reference_variable(t) for t in op.outputs)
    return op.op_def.is_stateful and not (makes and op.outputs)


def upstream_side_effects(
    ops: Sequence[tf.Operation], also: Sequence[str] = ()
) -> dict[tf.Operation, int]:
    """For each op, the ops with side effects that it depends on, and itself, as bits of an int.

    Args:
      ops: those that are looked at.
      also: types of further ops that count as if they had side effects.
    """
    found: dict[tf.Operation, int] = {}
    count = 0
    for op in topological_order(ops):
        found[op] = 0
        if has_side_effect(op) or op.type in also:
            found[op] = 1 << count
            count += 1
        for before in graphs.direct_inputs(op):
            found[op] |= found.get(before, 0)
    return found
