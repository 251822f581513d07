"""How many bytes a tensor has."""

from __future__ import annotations

import math
from typing import Any

_ROWS = 64  # stands for a dimension that isn't known


def bytes_of(tensor: Any) -> int:
    """The bytes of a tensor, or of a variable's value; as if there were 64 rows, where unknown."""
    first, *others = [None] if tensor.shape.rank is None else [*tensor.shape.as_list(), 1]
    known = [_ROWS if first is None else first, *(1 if d is None else d for d in others)]
    return math.prod(known) * (tensor.dtype.base_dtype.size or 1)
