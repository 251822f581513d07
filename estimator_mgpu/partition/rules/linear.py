"""Ops of which towers' partial results can be taken before these are reduced."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import REPLICATE, Partial, Placement

_VIEWS = 'ExpandDims Identity PreventGradient Reshape Snapshot Squeeze StopGradient Transpose'
_SUMS = 'Add AddN AddV2 Neg Pack Sub'


def is_forwarding(op: tf.Operation) -> bool:
    """Whether an op only passes on what it's given first: reducing before it is as good."""
    return op.type in _VIEWS.split() or op.type == 'Neg'


def linear(op: tf.Operation, placements: list[Placement]) -> Partial | None:
    """What an op makes of partial results; None if it needs the reduced one.

    A product with what is whole isn't one of these: an infinite factor gives inf for the sum, but
    nan where a tower's part is 0. Nor is a quotient.
    """
    padding = op.type == 'StridedSliceGrad'  # Its last input comes out between zeros.
    first, *others = reversed(placements) if padding else placements
    if not isinstance(first, Partial):
        return None
    if op.type == 'ConcatV2':
        *others, along = others
        return first if along == REPLICATE and all(p == first for p in others) else None
    sums = op.type in _SUMS.split() and first.reduce == 'sum' and all(p == first for p in others)
    views = op.type in _VIEWS.split() or (padding and first.reduce == 'sum')
    return first if sums or (views and all(p == REPLICATE for p in others)) else None
