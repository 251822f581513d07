"""The ops of a step, told apart: the forward pass, and the gradients that use it.

In: the batch, the loss, and what a step is run for. Out: `StepOps`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs, op_types, private


class StepOps:
    """The ops of a step.

    Args:
      inputs: the tensors of the batch.
      loss: what is minimized, or one of several losses.
      results: what a step is run for.
      existing_ops: names of ops that were there before the model_fn, which stay as they are.

    Attributes:
      graph: the graph that the model_fn has built.
      inputs: the names of the tensors of the batch.
      ops: all of them.
      forward: those that depend on the values of the batch, rather than only on its shapes, but not
        on gradients. Gradients that are a part of the loss don't count as such.
      backward: the others that depend on the values of the batch.
      needed: the ops that results depend on. What an Identity only waits for doesn't count.
    """

    def __init__(
        self,
        inputs: Sequence[tf.Tensor],
        loss: tf.Tensor,
        results: Sequence[tf.Tensor | tf.Operation],
        existing_ops: Set[str],
    ):
        self.graph = loss.graph
        self.inputs = {tensor.name for tensor in inputs}
        of_loss = graphs.ancestors([loss.op])
        ends = [getattr(result, 'op', result) for result in results]
        self.ops = graphs.ancestors([loss.op, *ends])
        others = self.ops - of_loss
        gradients = list(filter(private.is_made_by_gradients, others))
        # In an imported graph, nothing tells which ops are made by tf.gradients.
        late = others & graphs.descendants(gradients) if gradients else others

        of_values = self.ops & _dependents_of_values(inputs, existing_ops)
        self.forward = _in_order_of_creation(of_values - late)
        self.backward = of_values & late
        self.needed = _ops_needed_by([loss.op, *ends])


def _ops_needed_by(results: Sequence[tf.Operation]) -> set[tf.Operation]:
    """What ops depend on, but for what identities only wait for, as those of `tf.tuple` do.

    `tf.gradients` lets the gradients of an op wait for each other, also for those of constants,
    from which nothing is computed.
    """
    needed = set(results)
    stack = list(results)
    while stack:
        op = stack.pop()
        before = {operand.op for operand in op.inputs}
        if op.type != op_types.IDENTITY:
            before.update(op.control_inputs)
        stack += before - needed
        needed |= before
    return needed


def _dependents_of_values(inputs: Sequence[tf.Tensor], existing_ops: Set[str]) -> set[tf.Operation]:
    """The ops that are computed from the values of tensors, rather than from their shapes."""
    reached: set[tf.Operation] = set()
    stack = list(inputs)
    while stack:
        for op in stack.pop().consumers():
            if op not in reached and _uses_values(op) and op.name not in existing_ops:
                reached.add(op)
                stack += op.outputs
    return reached


def _uses_values(op: tf.Operation) -> bool:
    """Whether an op needs more of its inputs than their shapes."""
    return op.type not in op_types.SHAPE_QUERIES and op.type not in op_types.ZEROS_ONES_LIKE


def _in_order_of_creation(ops: set[tf.Operation]) -> list[tf.Operation]:
    """The ops, each after those that it depends on, and else as they were made."""
    missing = {}
    for op in ops:
        # A v1 loop's way back depends on the loop.
        begins = op.type in op_types.NEXT_ITERATION
        missing[op] = 0 if begins else len(ops.intersection(graphs.direct_inputs(op)))

    ready = [(private.creation_index(op), op) for op in ops if not missing[op]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, op = heapq.heappop(ready)
        ordered.append(op)
        for user in ops.intersection(graphs.consumers_of(op)):
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, (private.creation_index(user), user))
    return ordered
