"""Estimates how many bytes a tensor has: what it costs to send or to copy it.

Whether an op is sharded is no matter of cost: it is, if a rule says how. The only exception is
where sharding starts by rows that aren't examples: at heavy ops (`rules.HEAVY`).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import tensorflow.compat.v1 as tf

_UNKNOWN_BATCH_SIZE = 64


def bytes_of(tensor: Any) -> int:
    """The bytes of a tensor, or of a variable's value.

    Dimension 0 counts as 64 if the graph doesn't know it, as that is mostly the batch, and other
    dimensions as 1.
    """
    return entries_of(tensor) * _bytes_per_entry(tensor.dtype.as_datatype_enum)


def entries_of(tensor: Any) -> int:
    """The entries of a tensor, or of a variable's value, in the same way."""
    shape = tensor.shape
    dims = [None] if shape.rank is None else shape.as_list()
    if None in dims:
        unknown_first = _UNKNOWN_BATCH_SIZE if dims[0] is None else 1
        return unknown_first * math.prod(size for size in dims if size is not None)
    return math.prod(dims)


@functools.cache
def _bytes_per_entry(type_number: int) -> int:
    return tf.as_dtype(type_number).base_dtype.size or 1  # strings have no size of their own
