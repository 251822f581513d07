"""What branches and calls of functions give: a mean over rows, or a sum, if all of them do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.bodies import called
from estimator_mgpu.divisors import QUOTIENTS
from estimator_mgpu.rows import LINEAR, SUMS, Rows


def kind(value: tf.Tensor, rows: Rows, take_apart: Callable[[tf.Tensor, Rows], Any]) -> str:
    """Returns what a value is for several shards, as each of its functions has it.

    Args:
      value: what a branch or call gives.
      rows: which tensors have rows.
      take_apart: as `losses.take_apart`.

    Returns:
      The kind of leaf, or '' if that can't be told.
    """
    op = value.op
    if not (value.dtype.is_floating or value.dtype.is_integer):
        return ''
    if op.type == 'Merge':
        ends = [(t, rows) for t in op.inputs]
        chosen_by = [pred for t in op.inputs for pred in private.branched_on(t.op)]
    else:
        ends = [(g.outputs[value.value_index], inner) for g, inner in called(op, rows)]
        chosen_by = [op.inputs[0]] if op.type.endswith(('If', 'Case')) else []
    if any(rows.depends(chooser.op) for chooser in chosen_by):
        return ''
    kinds = set()
    for end, known in ends:
        if known.depends(end.op):
            kinds.add(_kind_inside(end, known, take_apart))
        elif _is_not_0(end):
            kinds.add('mean')  # A mean of it is itself, a sum isn't.
    [only] = kinds if len(kinds) == 1 else ['']
    return only


def _kind_inside(end: tf.Tensor, rows: Rows, take_apart: Callable[[tf.Tensor, Rows], Any]) -> str:
    parts = take_apart(end, rows)
    kinds = {leaf.kind for leaf in parts.leaves}
    # A constant leaf is a divisor: the size of the shard.
    counted = any(leaf.counted or leaf.per is not None for leaf in parts.leaves)
    outside = counted or any(not rows.depends(leaf.tensor.op) for leaf in parts.leaves)
    if kinds not in ({'mean'}, {'sum'}) or parts.doubts or parts.notes or outside:
        return ''
    [only] = kinds
    tail = [end.graph.get_operation_by_name(name) for name in parts.tail]
    return only if all(keeps(only, op, rows) for op in tail) else ''


def keeps(kind: str, op: tf.Operation, rows: Rows) -> bool:
    """Whether what's a mean or sum over rows stays one through an op."""
    given = rows.dependent_inputs(op)
    if op.type in LINEAR:
        # What is added once is added by each shard.
        return kind == 'mean' or op.type not in SUMS or len(given) == len(op.inputs)
    return len(given) == 1 and (
        op.type == 'Mul' or op.type in QUOTIENTS and given[0] is op.inputs[0]
    )


def _is_not_0(end: tf.Tensor) -> bool:
    constant = private.constant_value(end)
    return constant is None or bool(constant.any())
