"""Which ops have effects."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs, op_types
from estimator_mgpu.tf_internals.graphs import topological_order


def has_side_effect(op: tf.Operation) -> bool:
    """Whether running an op changes anything, or is another time another thing."""
    if op.type in op_types.VARIABLE_READS or op.type in op_types.REFERENCE_READS:
        return False
    # What writes to a variable of TensorFlow 1's kind isn't called stateful.
    if any(argument.is_ref for argument in op.op_def.input_arg):
        return True
    # A variable, a table or a queue is only made, by what it's referred to.
    makes = all(t.dtype == tf.resource or graphs.is_reference_variable(t) for t in op.outputs)
    return op.op_def.is_stateful and not (makes and op.outputs)


def upstream_side_effects(
    ops: Sequence[tf.Operation], also: Sequence[str] = ()
) -> dict[tf.Operation, int]:
    """The ops with effects, or of other types, that each waits for, and itself: one bit each."""
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
