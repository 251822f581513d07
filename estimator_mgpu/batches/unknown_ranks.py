"""The shapes of features and labels whose rank the input_fn doesn't tell, but the model_fn does.

In: the batch as the model_fn got it, when its graph is finished. Out: the batch with the ranks that
the graph tells. What has no rank then isn't sharded: see `batch.Batch.unknown`.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches.batch import Batch, batch_of
from estimator_mgpu.partition.rules import RULES
from estimator_mgpu.partition.rules.notation import FAMILIES
from estimator_mgpu.tf_internals import op_types
from estimator_mgpu.tf_internals.liveness import Liveness


def shapes_told_by_model(batch: Batch) -> Batch:
    """Looks at a batch again after the model_fn, which may have told the shapes of some leaves.

    It tells the shape of a leaf, or of an elementwise result, such as what `tf.cast` returns.

    Args:
      batch: the batch. The shapes of its tensors of unknown rank are set, if they are told.

    Returns:
      The batch, by what is known of its leaves now.
    """
    for leaf in batch.unknown.values():
        if not isinstance(leaf, tf.Tensor):
            continue
        shape = _shape_told(leaf)
        if shape is not None:
            leaf.set_shape([None, *shape[1:]] if shape else [])
    return batch_of({**batch.leaves, **batch.unknown})._replace(has_arrays=batch.has_arrays)


def _shape_told(tensor: tf.Tensor) -> list[int | None] | None:
    """Returns the shape that the graph tells of what is made of a tensor entry by entry.

    `tf.ensure_shape` tells it, or `set_shape` of what `tf.cast` returns. What reshapes a tensor
    doesn't: its dimension 0 may be another one.
    """
    liveness = Liveness(tensor.graph.get_operations())
    reached = {tensor.name}
    stack = [tensor]
    while stack:
        operand = stack.pop()
        for op in operand.consumers():
            if not (_has_shape_of(op, operand) and liveness.always_runs(op)):
                continue
            [output] = op.outputs
            if output.shape.rank is not None:
                return output.shape.as_list()
            if output.name not in reached:
                reached.add(output.name)
                stack.append(output)
    return None


def _has_shape_of(op: tf.Operation, operand: tf.Tensor) -> bool:
    """Whether an op's output has the shape of its operand: all others are scalars."""
    is_elementwise = RULES.get(op.type) == FAMILIES['elementwise']
    if op.type != op_types.ENSURE_SHAPE and not is_elementwise:
        return False
    return all(other is operand or other.shape.rank == 0 for other in op.inputs)
