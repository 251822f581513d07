"""For which gradients the copies of each segment wait.

Copies that ran earlier would take the memory that they are there to save. With three segments of
one layer each, the last one has no copies. Those of segment 1 wait for the gradients of the last
one, and those of segment 0 for these and the gradients of segment 1:

    gradients of segment 2 ---> copies of segment 1 ---> gradients of segment 1
                                                                  |
                                copies of segment 0 <-------------+

In: the ops of a step, and where gradients use copies. Out: by segment, ops of gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.partition.rewrites.recomputation.kept_activations import Forward, Use
from estimator_mgpu.partition.rewrites.recomputation.step_ops import StepOps
from estimator_mgpu.tf_internals import graphs, op_types, private
from estimator_mgpu.tf_internals.upstream import upstream_bits


def gradients_before_segments(
    step: StepOps, uses: Sequence[Use], forward: Forward, order: Order
) -> dict[int, list[tf.Operation]]:
    """The ops of gradients for which the copies of each segment wait, by its number.

    These are the gradients that arrive, and all else that frees memory of later segments. For
    example, the gradient of a layer's weights isn't needed for that of the layer before it. If it
    ran when all layers have theirs, the activations of all would be there at once.

    With three segments of one layer each, the last one has no copies, and there are

        {1: [gradient of layer 1's output, gradient of layer 2's weights],
         0: [gradient of layer 0's output, gradient of layer 1's weights]}
    """
    upstream = _segments_upstream(step, uses, forward)

    # Copies of a segment may wait only for ops that depend on no copy of this segment or an earlier
    # one. Otherwise two segments could wait for each other.
    def is_before(op: tf.Operation, segment: int) -> bool:
        segments_up_to_this = (2 << segment) - 1  # as bits: of segment 1, 0b11
        is_independent = not upstream[op] & segments_up_to_this
        return is_independent and order.liveness.always_runs(op)

    arriving = defaultdict[int, set[tf.Operation]](set)
    for use in uses:
        segment = forward.segment(use.operand.op)
        sources = [source.op for source in _sources(use.op, step)]
        if all(is_before(source, segment) for source in sources):
            arriving[segment].update(sources)

    heavy = {op for op in step.backward & step.needed if _frees_memory(op, forward, order)}
    heavy_before = _last_before_segments(heavy, list(arriving), is_before)
    return {
        segment: sorted(ops.union(heavy_before[segment]), key=private.creation_index)
        for segment, ops in arriving.items()
        if ops
    }


def _segments_upstream(
    step: StepOps, uses: Sequence[Use], forward: Forward
) -> dict[tf.Operation, int]:
    """For each op of a step, the segments on whose copies it depends, a bit for each.

    With three segments, the gradients of the last one have 0b00, as they use no copies. Those of
    segment 1 have 0b10, and those of segment 0, which come after them, 0b11.
    """
    segments_of_user = defaultdict[tf.Operation, int](int)
    for use in uses:
        for op in _with_siblings(use.op, step):
            segments_of_user[op] |= 1 << forward.segment(use.operand.op)
    return upstream_bits(graphs.topological_order(list(step.ops)), segments_of_user)


def _last_before_segments(
    ops: Set[tf.Operation],
    segments: Sequence[int],
    is_before: Callable[[tf.Operation, int], bool],
) -> dict[int, list[tf.Operation]]:
    """The ops that come before each segment, but not before a later one, by its number.

    Without those that others of them use: who waits for these waits for them, too.
    """
    last: dict[int, list[tf.Operation]] = {}
    remaining = set(ops)
    for segment in sorted(segments, reverse=True):
        early = {op for op in remaining if is_before(op, segment)}
        remaining -= early
        last[segment] = [op for op in early if early.isdisjoint(graphs.consumers_of(op))]
    return last


def _sources(op: tf.Operation, step: StepOps) -> list[tf.Tensor]:
    """The gradients that an op uses, without the identities of them that only wait."""
    sources = []
    for operand in op.inputs:
        if operand.op in step.backward:
            while operand.op.type == op_types.IDENTITY:
                operand = operand.op.inputs[0]
            sources.append(operand)
    return sources


def _with_siblings(op: tf.Operation, step: StepOps) -> set[tf.Operation]:
    """An op, and the others that use the same gradients, directly or by identities.

    TensorFlow may fuse them: oneDNN computes the gradient of a bias with that of the weights. The
    copies that one of them uses can't wait for another one, then.
    """
    siblings = {op}
    stack = _sources(op, step)
    while stack:
        for user in stack.pop().consumers():
            if user not in siblings and user in step.backward:
                siblings.add(user)
                stack += user.outputs if user.type == op_types.IDENTITY else []
    return siblings


def _frees_memory(op: tf.Operation, forward: Forward, order: Order) -> bool:
    """Whether an op uses something large, and touches no state."""
    if order.bits(op):
        return False
    return any(operand.dtype.is_floating and forward.is_large(operand) for operand in op.inputs)
