"""Where a tensor's numbers are: what each tower has of it."""

from __future__ import annotations

from typing import Any, NamedTuple, Union


class Rows:
    """A row space: says which rows a shard is of, and how many there are.

    Tensors of different row spaces are never combined row by row.

    Args:
      name: of the batch's rows, `batch`.
      static: how many rows there are, if the graph knows; else None.
    """

    def __init__(self, name: str, static: int | None):
        self.name = name
        self.static = static

    def __repr__(self) -> str:
        return self.name


class Replicate(NamedTuple):
    """The value itself; the op that makes it runs once, or alike on each tower."""

    def __repr__(self) -> str:
        return 'Replicate'


class Shard(NamedTuple):
    """Each tower has its rows: as many entries along an axis for each row, in order.

    Attributes:
      axis: the dimension that has the rows, from 0.
      rows: which rows.
    """

    axis: int
    rows: Rows


class Partial(NamedTuple):
    """Each tower has what its rows come to: together, by a reduction, that is the value.

    Attributes:
      reduce: 'sum', 'mean' (weighted by rows), 'max', 'min', 'prod', 'all' or 'any'.
    """

    reduce: str


class ShardList(NamedTuple):
    """A TensorList whose elements have rows along an axis.

    Attributes:
      axis: the elements' dimension that has the rows.
      rows: which rows.
      factor: how many entries a row has there, a `Size`.
      rank: of the elements.
    """

    axis: int
    rows: Rows
    factor: Any
    rank: int


class SizeList(NamedTuple):
    """A TensorList whose elements are sizes that go by rows, as the shapes that gradients keep.

    Attributes:
      entries: a `Size` for each entry of an element.
    """

    entries: tuple[Any, ...]


class OwnSizes(NamedTuple):
    """The shape of a list's elements, of which each tower has its own."""

    def __repr__(self) -> str:
        return 'OwnSizes'


class ListOf(NamedTuple):
    """A TensorList of what each tower keeps.

    Attributes:
      element: what that is.
    """

    element: Any


Placement = Union[Replicate, Shard, Partial, ShardList, SizeList, OwnSizes, ListOf]
KEPT = (ShardList, SizeList, OwnSizes, ListOf)
"""What each tower keeps, and can't be made whole: who needs it so has its maker run once."""
REPLICATE = Replicate()
