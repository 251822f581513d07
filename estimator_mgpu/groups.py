"""Ops that put rows that are alike into groups: sums of segments, and what differs among ids."""

from __future__ import annotations

import re

import tensorflow.compat.v1 as tf

from estimator_mgpu import ragged

_SEGMENTS = re.compile('(Unsorted|Sparse)?Segment(Sum|Mean|SqrtN|Max|Min|Prod)(WithNum|V2|$)')
# Ops that give numbers of rows, all or by the name of an output, and what these stay that through.
_NUMBERS = re.compile('(Where|Range)$')
_MAKES_NUMBERS = re.compile('StringSplit|CTC|.*(Ragged|Sparse)')
_PASSING = re.compile('ConcatV2|Pack|Add|Sub|Mul|FloorDiv|Minimum|Maximum|Select|Split')
_PASSING_FIRST = re.compile(
    'Identity|Cast|Reshape|Squeeze|ExpandDims|StridedSlice|Slice|Gather|Tile|BroadcastTo|Transpose'
    '|Unpack|Enter'
)


def ids(op: tf.Operation) -> tf.Tensor | None:
    """Returns what says to which segment each entry goes, if an op reduces segments."""
    if not _SEGMENTS.match(op.type):
        return None
    return op.inputs[2 if op.type.startswith('Sparse') else 1]


def of_what_differs(op: tf.Operation, axis: int) -> bool:
    """Whether an op gives an entry for each different one of what it's given.

    Args:
      op: the op.
      axis: along which dimension it's given rows.
    """
    of_all = op.type.endswith('SetOperation') and axis != 0  # They go row by row.
    return of_all or op.type.startswith(('Unique', 'ListDiff'))


def is_which(output: tf.Tensor) -> bool:
    """Whether an output of `tf.unique` says which of what differs each entry is."""
    return output.op.type.startswith('Unique') and output.value_index == 1


def numbers_rows(tensor: tf.Tensor) -> bool:
    """Whether an op gives numbers of rows, such as those of a sparse tensor's entries."""
    made = (
        ragged.named(tensor.op, ('indices', 'splits', 'map'))
        if _MAKES_NUMBERS.match(tensor.op.type)
        else ()
    )
    return _NUMBERS.match(tensor.op.type) is not None or any(tensor is other for other in made)


def passed_on(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Lists the inputs that say the same as what an op gives, if they're numbers of rows."""
    op = tensor.op
    if _PASSING_FIRST.match(op.type):
        return list(op.inputs[:1])
    return list(op.inputs) if _PASSING.match(op.type) else []
