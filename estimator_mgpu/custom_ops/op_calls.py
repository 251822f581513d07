"""The ops that a function makes, and what each of them is given on one device.

In: a function's tensors in a graph, and what is fed. Out: a `Call` for each op that can be tried by
itself. Ops that do the same with inputs of the same shapes are one call.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.custom_ops.runs import as_array, session_of
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.rewrites.inline_calls import inline_calls
from estimator_mgpu.tf_internals import graphs, private
from estimator_mgpu.tf_internals.liveness import Liveness
from estimator_mgpu.tf_internals.shape_functions import copy_of

_MOST_SIZES = 64  # A vector of integers that has more entries is no shape.


class Call(NamedTuple):
    """An op, and what it's given on one device."""

    op: tf.Operation
    values: Sequence[Any]  # arrays, one for each input; None for a variable or a table
    used: Sequence[int]  # those of its outputs that anything uses

    def fed(self) -> tf.Operation:
        """Adds an op that does the same with whatever its inputs are fed."""
        try:
            return copy_of(self.op, self._placeholders(are_counts_known=False))
        except ValueError:
            # Its shape function needs to know how many sizes it's given, or which axes.
            return copy_of(self.op, self._placeholders(are_counts_known=True))

    def _placeholders(self, are_counts_known: bool) -> list[tf.Tensor]:
        """What is fed for the inputs; the input itself if it has no value."""
        placeholders = list(self.op.inputs)
        for index, value in enumerate(self.values):
            if value is not None:
                shape = value.shape if are_counts_known and may_be_sizes(value) else None
                placeholders[index] = tf.placeholder(placeholders[index].dtype.base_dtype, shape)
        return placeholders

    def key(self) -> Hashable:
        """A key that two ops share if they do the same with inputs of the same shapes."""
        attrs = []
        for name, attr in sorted(self.op.node_def.attr.items()):
            if not name.startswith('_'):
                attrs.append((name, attr.SerializeToString()))

        inputs: list[Any] = []
        for value in self.values:
            if value is None:
                inputs.append(None)
            else:
                inputs.append((value.shape, value.tobytes() if may_be_sizes(value) else b''))
        return (self.op.type, *attrs, *inputs, *self.used)


def may_be_sizes(value: Any) -> bool:
    """Whether an input may have sizes for entries, or name dimensions: a short integer vector."""
    if value is None or value.dtype.kind != 'i':
        return False
    return value.ndim < 2 and value.size <= _MOST_SIZES


def calls_of(
    outputs: Sequence[tf.Tensor],
    feed: dict[tf.Tensor, np.ndarray],
    towers: int,
    types: Container[str],
) -> list[Call]:
    """Finds the ops that are to be tried, each once, and runs what they are given.

    Args:
      outputs: what a function makes in the default graph.
      feed: the values of the graph's placeholders.
      towers: how many devices the session has.
      types: the types of the ops to be tried.
    """
    outputs = inlined(outputs)
    liveness = Liveness(tf.get_default_graph().get_operations())
    ops = [
        op
        for op in ops_of(outputs)
        if op.type in types and _can_be_tried(op) and liveness.always_runs(op)
    ]

    tensors = {}
    for op in ops:
        for tensor in op.inputs:
            if tensor.dtype != tf.resource:
                tensors[tensor.name] = tensor
    with session_of(towers) as session:
        arrays = session.run(tensors, feed)

    fetched = {tensor.name for tensor in outputs}
    calls: dict[Hashable, Call] = {}
    for op in ops:
        values = [as_array(arrays.get(tensor.name)) for tensor in op.inputs]
        used = [i for i, t in enumerate(op.outputs) if t.name in fetched or t.consumers()]
        call = Call(op, values, used)
        calls.setdefault(call.key(), call)
    return list(calls.values())


def inlined(outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Inlines calls of functions in the default graph; returns what is used in place of tensors."""
    division = Division(tf.get_default_graph())
    inline_calls(division)
    return [division.replaced.get(tensor.name, tensor) for tensor in outputs]


def ops_of(outputs: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """The ops that tensors need, in the order in which they were made."""
    needed = graphs.ancestors([tensor.op for tensor in outputs])
    return sorted(needed, key=private.creation_index)


def _can_be_tried(op: tf.Operation) -> bool:
    """Whether an op can run by itself, on values of its inputs, and its outputs can be compared."""
    has_lists = any(tensor.dtype == tf.variant for tensor in [*op.inputs, *op.outputs])
    return not has_lists and all(op.graph.is_fetchable(tensor) for tensor in op.inputs)
