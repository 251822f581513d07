"""Estimates how many bytes a tensor has: what it costs to send or to copy it.

Whether an op is sharded is no matter of cost: it is, if a rule says how. The only exception is
where sharding starts by rows that aren't examples: at heavy ops (`rules.HEAVY`).
"""

from __future__ import annotations

import math
from typing import Any

_UNKNOWN_BATCH_SIZE = 64


def bytes_of(tensor: Any) -> int:
    """The bytes of a tensor, or of a variable's value.

    Dimension 0 counts as 64 if the graph doesn't know it, as that is mostly the batch, and other
    dimensions as 1.
    """
    shape = tensor.shape
    dims = [None] if shape.rank is None else shape.as_list()
    sizes = [1 if size is None else size for size in dims]
    if dims and dims[0] is None:
        sizes[0] = _UNKNOWN_BATCH_SIZE

    bytes_per_entry = tensor.dtype.base_dtype.size or 1  # strings have no size of their own
    return math.prod(sizes) * bytes_per_entry
