"""Where a tensor's numbers are: what each tower has of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Union

if TYPE_CHECKING:
    from .symbols import Rows, Size


@dataclass(frozen=True)
class Replicate:
    """The value itself; the op that makes it runs once, or alike on each tower."""


class Shard(NamedTuple):
    """Each tower has its rows: as many entries along an axis, from 0, for each row, in order."""

    axis: int
    rows: Rows


class Partial(NamedTuple):
    """Each tower has what its rows come to: together, by a reduction, that is the value.

    It's 'sum', 'mean' (weighted by rows), 'max', 'min', 'prod', 'all' or 'any'.
    """

    reduce: str
    rows: Rows


class ShardList(NamedTuple):
    """A TensorList, or an Optional, whose elements, of a rank, have `factor` entries a row."""

    axis: int
    rows: Rows
    factor: Size
    rank: int


class SizeList(NamedTuple):
    """One whose elements are sizes that go by rows, as the shapes that gradients keep."""

    entries: tuple[Size, ...]


@dataclass(frozen=True)
class OwnSizes:
    """The shape of a list's elements, of which each tower has its own."""


class ListOf(NamedTuple):
    """One whose elements are what each tower keeps."""

    element: Placement


Placement = Union[Replicate, Shard, Partial, ShardList, SizeList, OwnSizes, ListOf]
KEPT = (ShardList, SizeList, OwnSizes, ListOf)
"""What each tower keeps, and can't be made whole: who needs it so has its maker run once."""
REPLICATE = Replicate()
