"""The shapes of features and labels whose rank the input_fn doesn't tell."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.batch import Batch, batch_of
from estimator_mgpu.partition.rules import RULES
from estimator_mgpu.partition.rules.notation import FAMILIES
from estimator_mgpu.tf_internals import op_types
from estimator_mgpu.tf_internals.liveness import Liveness


def shapes_told_by_model(batch: Batch) -> Batch:
    """Looks at a batch again after the model_fn, which may have told the shapes of some leaves.

    A shape also counts if it is that of an elementwise result, such as a tf.cast.
    """
    for leaf in batch.unknown.values():
        shape = _shape_told(leaf) if isinstance(leaf, tf.Tensor) else None
        if shape is not None:
            leaf.set_shape([None, *shape[1:]] if shape else [])
    return batch_of({**batch.leaves, **batch.unknown})


def _shape_told(tensor: tf.Tensor) -> list[int | None] | None:
    """Returns the shape that the graph tells of what is made of a tensor entry by entry.

    `tf.ensure_shape` tells it, or `set_shape` of what `tf.cast` returns. What reshapes a tensor
    doesn't: its dimension 0 may be another one.
    """
    liveness = Liveness(tensor.graph.get_operations())
    stack, seen = [tensor], {tensor.name}
    while stack:
        own = stack.pop()
        for user in own.consumers():
            entries = (
                user.type == op_types.ENSURE_SHAPE
                or RULES.get(user.type) == FAMILIES['elementwise']
            )
            alone = all(t is own or t.shape.rank == 0 for t in user.inputs)
            if not entries or not alone or not liveness.always_runs(user):
                continue
            [made] = user.outputs
            if made.shape.rank is not None:
                return made.shape.as_list()
            if made.name not in seen:
                seen.add(made.name)
                stack.append(made)
    return None
