"""Placements: where a tensor's values are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Union

from estimator_mgpu.partition.sizes import RowSpace, Size


@dataclass(frozen=True)
class Replicate:
    """The value itself; the op that makes it runs once, or alike on each tower."""


class Shard(NamedTuple):
    """Each tower has its rows: as many entries along an axis, from 0, for each row, in order."""

    axis: int
    rows: RowSpace


class Partial(NamedTuple):
    """Each tower has what its rows come to: together, by a reduction, that is the value."""

    reduce: str  # 'sum', 'mean' (weighted by rows), 'max', 'min', 'prod', 'all' or 'any'
    rows: RowSpace


class Kept(NamedTuple):
    """What can't become whole: if that is needed, what makes it runs once.

    It's a TensorList or an Optional, by what towers have of its elements; or the shape of elements,
    of which each tower has its own.
    """

    element: Placement
    sizes: tuple[Size, ...] = ()  # how many entries a row has in elements; or those that are sizes
    rank: int = 0  # of elements that have rows


Placement = Union[Replicate, Shard, Partial, Kept]
REPLICATE = Replicate()
