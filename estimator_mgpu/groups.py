"""Ops that put rows that are alike into groups: sums of segments, and what differs among ids."""

from __future__ import annotations

import re

import tensorflow.compat.v1 as tf

_SEGMENTS = re.compile('(Unsorted|Sparse)?Segment(Sum|Mean|SqrtN|Max|Min|Prod)(WithNum|V2|$)')
# Ops that give numbers of rows, and what these stay that through.
_NUMBERS = re.compile('Where$|Range$|StringSplit|CTC|.*(Ragged|Sparse)')
_PASSING = re.compile(
    'Identity|Cast|Reshape|Squeeze|ExpandDims|StridedSlice|Gather|Tile|BroadcastTo|Pack|ConcatV2'
    '|Add|Sub|Mul|Floor|Minimum|Maximum|Select'
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


def numbers_rows(op: tf.Operation) -> bool:
    """Whether an op gives numbers of rows, such as those of a sparse tensor's entries."""
    return _NUMBERS.match(op.type) is not None


def passes_ids_on(op: tf.Operation) -> bool:
    """Whether what ids say stays the same through an op."""
    return _PASSING.match(op.type) is not None
