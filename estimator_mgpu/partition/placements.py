"""Placements: what each tower has of a tensor.

`Replicate`, `Shard` and `Partial` are those of PyTorch's DTensor. The others cannot be gathered:
most are of TensorLists and Optionals, in which loops and branches keep what their gradients need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Union

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.sizes import ONE, RowSpace, SelectedRows, Size, UniqueRows


@dataclass(frozen=True)
class Replicate:
    """The full value: the op that makes it runs once, or does the same on each tower."""


REPLICATE = Replicate()


class Shard(NamedTuple):
    """Each tower has the entries of its examples, in the batch's order.

    An example may have several entries along the axis: if [batch, time] was reshaped to
    [batch * time], it has `time` of them, one after the other. If [time, batch] was reshaped to
    [time * batch], it has as many, but in blocks: `time` blocks, each with all examples. A tower's
    shard then has its examples of each block. For 2 blocks of 3 examples, on two towers:

        full value  a b c A B C
        shards      a b A B   and   c C
    """

    axis: int  # the dimension that is sharded, from 0
    rows: RowSpace  # whose shards these are: almost always the batch's
    in_blocks: bool = False  # never if there's only one block: then it's both


MOMENTS = 'moments'
"""The reduction of means and unbiased variances, two outputs of one op.

In the variance of all, each tower's variance counts, and how far its mean is from that of all. Both
are reduced where they are made, as the op that applies them needs them in full.
"""


class Partial(NamedTuple):
    """Each tower has the result for its examples. Reduced over the towers, it's the full value."""

    # 'sum', 'mean' (weighted by examples), 'max', 'min', 'prod', 'all', 'any' or MOMENTS
    reduce: str
    rows: RowSpace


class NotGatherable:
    """A value that cannot be gathered, such as a TensorList.

    If another op needs all of it, the op that makes it runs once, unsharded.
    """


@dataclass(frozen=True)
class ShardList(NotGatherable):
    """A TensorList or an Optional. Each tower has one of its own, with its shards of the elements.

    In a recurrent network, say, whose states of each step are [batch, units]: `axis` is 0.
    """

    axis: int  # of the elements
    rows: RowSpace
    factor: Size  # how many entries an example has along the axis
    rank: int  # of the elements
    in_blocks: bool = False  # whether these are in blocks, as in `Shard`


@dataclass(frozen=True)
class RowList(NotGatherable):
    """A TensorList or a TensorArray that has an element for each row, as `tf.map_fn` makes it.

    Each tower has the elements of its rows.
    """

    rows: RowSpace
    factor: Size  # how many elements a row has

    @property
    def count(self) -> Size:
        """How many elements all towers have together."""
        return self.factor * self.rows.size


@dataclass(frozen=True)
class SizeList(NotGatherable):
    """A TensorList or an Optional whose elements are sizes, of which each tower has its own.

    Of [2 * batch, 5], say, where an element is a shape.
    """

    sizes: tuple[Size, ...]  # the entries of an element


@dataclass(frozen=True)
class NestedList(NotGatherable):
    """A TensorList or an Optional of what cannot be gathered, such as an inner loop's lists."""

    element: ListPlacement | ByBranch | ElementShape | Flow


@dataclass(frozen=True)
class ByBranch(NotGatherable):
    """An Optional that branches give their gradients: each branch puts something else into it.

    What the branch that was taken has put into it, only the same branch of the gradient takes out.
    """

    # What chooses the branch: an op, and which of its outputs. A tensor won't do: placements have
    # to be hashable, and tensors of functions aren't with TensorFlow 2's behavior.
    choice: tuple[tf.Operation, int]
    branches: tuple[Placement, ...]


@dataclass(frozen=True)
class ElementShape(NotGatherable):
    """The shape that a TensorList's elements have, of which each tower has its own."""


@dataclass(frozen=True)
class ReplicateList(NotGatherable):
    """A TensorArray or a stack. Each tower has one of its own, with the same elements."""


REPLICATE_LIST = ReplicateList()


@dataclass(frozen=True)
class Flow(NotGatherable):
    """What orders the ops on a TensorArray, of which each tower has its own."""


FLOW = Flow()


class CountedByTower(NotGatherable):
    """Numbers of rows, which each tower counts for itself.

    So these are of use only to ops on the same tower. Other ops get full ones, from the user's own
    op.
    """


@dataclass(frozen=True)
class Positions(CountedByTower):
    """Where the rows of a selection stood before `tf.dynamic_partition` or a mask picked them.

    Each tower counts from its own first row. If the towers have 2 rows each, and the mask is
    [True, False] and [True, True], the positions are [0] and [0, 1]. The indices of a sparse tensor
    are positions, too: each begins with the row in which its entry is.
    """

    selection: RowSpace  # mostly `SelectedRows`
    rows: RowSpace  # those that were picked from
    factor: Size  # how many entries each of these rows had
    # Of `tf.dynamic_partition`, all parts, which together have each row once; () for a mask.
    selections: tuple[SelectedRows, ...] = ()
    repeats: Size = ONE  # how many positions there are for each row of the selection
    fill_rows: bool = False  # whether they are in ascending order, and each entry has some

    @property
    def shard(self) -> Shard:
        """The placement of what has an entry for each position."""
        return Shard(0, self.selection)

    @property
    def count(self) -> Size:
        """How many positions all towers have together."""
        return self.repeats * self.selection.size

    @property
    def total(self) -> Size:
        """How many entries all towers have together of what was picked from."""
        return self.factor * self.rows.size


@dataclass(frozen=True)
class PlacesOfIds(CountedByTower):
    """For each row the place of its id among the different ones, as `tf.unique` gives it.

    A row may have several ids. Each tower has different ids of its own.
    """

    ids: UniqueRows
    rows: RowSpace  # those that have places
    factor: Size = ONE  # how many entries of dimension 0 each of them has

    @property
    def shard(self) -> Shard:
        """The placement of what has an entry for each of the first dimension."""
        return Shard(0, self.rows)

    @property
    def count(self) -> Size:
        """How many entries of dimension 0 all towers have together."""
        return self.factor * self.rows.size


@dataclass(frozen=True)
class PaddedPositions(CountedByTower):
    """Where the values of each row of a ragged tensor are among all; -1 fills rows up.

    Each tower counts from its own first value: [[0, 1], [2, -1]], say.
    """

    values: SelectedRows
    rows: RowSpace


ListPlacement = Union[ShardList, RowList, SizeList, NestedList, ReplicateList]
Placement = Union[
    Replicate,
    Shard,
    Partial,
    ListPlacement,
    ByBranch,
    ElementShape,
    Flow,
    Positions,
    PlacesOfIds,
    PaddedPositions,
]


def common_placement(placements: Sequence[Placement]) -> Placement:
    """The placement of a value of which branches give one each: the first that isn't replicated.

    Other branches have to give it in the same placement, or in full.
    """
    on_towers = [placement for placement in placements if placement != REPLICATE]
    return on_towers[0] if on_towers else REPLICATE


def rows_of(placement: Placement | None) -> RowSpace | None:
    """The row space of which a tensor is a shard or a partial result; None if it's neither."""
    return placement.rows if isinstance(placement, (Shard, Partial)) else None
