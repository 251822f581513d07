"""Each tower's rows of a `RaggedTensor`, whose row splits and values are full values.

In: the names of the row splits and of the values. Out: what a tower has of them. For example, the
second tower has the examples from 2 on:

    row splits [0, 2, 2, 3, 5]    =>    [0, 1, 3]
    values [a, b, c, d, e]        =>    [c, d, e], at the positions [2, 3, 4]

The first tower has the values before the first row as well, and the last one those behind the last
row, if splits are such: what uses all values on one device is given all of them.

If machines have read parts of the batch, a tower has the same of each part, and joins it.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.nodes.node_builder import NodeBuilder
from estimator_mgpu.partition.towers.shards import Extent, Shards


def bounds(nodes: NodeBuilder, splits: str, values: str, value_device: str, device: str) -> str:
    """Where rows begin, and where the last one ends: row splits from 0 to the number of values.

    Args:
      splits: the row splits of all rows.
      values: those of all rows.
      value_device: where they are.
      device: where the row splits are, and the result is made.
    """
    between = nodes.add('StridedSlice', [splits, [1], [-1], [1]], device)
    between = nodes.cast(between, tf.int64, device)
    shape = nodes.add('Shape', [values], value_device, out_type=tf.int64)
    count = nodes.add('StridedSlice', [shape, [0], [1], [1]], device)
    first = nodes.tensor([0], tf.int64)
    return nodes.concat([first, between, count], 0, device)


def positions(nodes: NodeBuilder, bounds: str, extent: Extent, device: str) -> str:
    """Which values are in the rows of an extent: their positions among all, a vector.

    It's an error if a tower's rows end before they begin.
    """
    start, size = extent
    first_row = nodes.scalar(start, tf.int32)
    end_row = nodes.add('AddV2', [first_row, size], nodes.host)

    first = nodes.add('Gather', [bounds, first_row], device)
    end = nodes.add('Gather', [bounds, end_row], device)
    return nodes.add('Range', [first, end, nodes.scalar(1, tf.int64)], device)


def row_splits(shards: Shards, bounds: str, extent: Extent, device: str) -> str:
    """The row splits of the rows of an extent, counted from the first value there."""
    nodes = shards.nodes
    start, size = extent
    more = nodes.add('AddV2', [size, 1], nodes.host)
    own = shards.cut(bounds, 0, (start, more), device)
    first = nodes.add('Gather', [bounds, start], device)
    return nodes.add('Sub', [own, first], device)


def join(nodes: NodeBuilder, pieces: Sequence[tuple[str, str]], device: str) -> str:
    """The row splits of all rows of some pieces, one after another.

    Args:
      pieces: the row splits of each piece, and their device.
      device: that of the result.
    """
    if len(pieces) == 1:
        [(splits, _)] = pieces
        return splits
    lengths = [_lengths(nodes, splits, splits_device) for splits, splits_device in pieces]
    ends = nodes.add('Cumsum', [nodes.concat(lengths, 0, device), 0], device)
    return nodes.concat([nodes.tensor([0], nodes.dtype(ends)), ends], 0, device)


def longest(nodes: NodeBuilder, splits: str, device: str) -> str:
    """How many values the longest row has, 0 if there is none: a scalar of the splits' type."""
    largest = nodes.add('Max', [_lengths(nodes, splits, device), [0]], device)
    return nodes.add('Maximum', [largest, nodes.scalar(0, nodes.dtype(splits))], device)


def _lengths(nodes: NodeBuilder, splits: str, device: str) -> str:
    """How many values each row has: a vector of the splits' type."""
    ends = of_each_row(nodes, splits, 1, device)
    starts = of_each_row(nodes, splits, 0, device)
    return nodes.add('Sub', [ends, starts], device)


def of_each_row(nodes: NodeBuilder, splits: str, offset: int, device: str) -> str:
    """Where each row begins, with an offset of 0, or ends, with 1."""
    if offset == 0:
        return nodes.add('StridedSlice', [splits, [0], [-1], [1]], device, begin_mask=1)
    return nodes.add('StridedSlice', [splits, [1], [0], [1]], device, end_mask=1)


def most_in_a_row(nodes: NodeBuilder, rows: str, count: str, device: str) -> str:
    """How many values the longest row has: an int64 scalar.

    Args:
      rows: in which row each value is, a vector.
      count: how many rows there are, a scalar of the same type.
    """
    none = nodes.const([], tf.int64, nodes.host)
    lengths = nodes.add('DenseBincount', [rows, count, none], device)
    return nodes.add('Max', [lengths, [0]], device)
