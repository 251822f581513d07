"""Ops of which towers' partial results can be taken before these are reduced."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import REPLICATE, Partial, Placement

_VIEWS = """
    ExpandDims Identity PreventGradient Reshape Snapshot Squeeze StopGradient Transpose
"""
VIEWS = frozenset(_VIEWS.split())
"""For any reduction: the entries stay what they are."""
_SUMS = frozenset(['AddN', 'Add', 'AddV2', 'Pack', 'Sub'])
_NEGATION = 'Neg'
_PADDING = ('StridedSliceGrad',)  # Their last input comes out between zeros.


def is_forwarding(op: tf.Operation) -> bool:
    """Whether an op only passes on what it's given first: reducing before it is as good."""
    return op.type in VIEWS or op.type == _NEGATION


def linear(op: tf.Operation, placements: list[Placement]) -> Partial | None:
    """What an op makes of partial results; None if it needs the reduced one.

    A product with what is whole isn't one of these: an infinite factor gives inf for the sum, but
    nan where a tower's part is 0. Nor is a quotient.
    """
    if op.type in _PADDING:
        *others, last = placements
        return last if last == Partial('sum') and all(p == REPLICATE for p in others) else None
    first = placements[0]
    if not isinstance(first, Partial):
        return None
    others = placements[1:]
    if op.type == 'ConcatV2':
        *parts, along = placements
        return first if all(p == first for p in parts) and along == REPLICATE else None
    if op.type in VIEWS:
        return first if all(p == REPLICATE for p in others) else None
    if first.reduce != 'sum':
        return None
    if op.type == _NEGATION or (op.type in _SUMS and all(p == first for p in others)):
        return first
    return None
