"""Where a tensor's numbers are: what each tower has of it."""

from __future__ import annotations

from typing import NamedTuple, Union


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


Placement = Union[Replicate, Shard, Partial]
REPLICATE = Replicate()
