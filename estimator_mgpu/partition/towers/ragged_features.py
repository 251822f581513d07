"""Each tower's rows of a `RaggedTensor`, whose row splits and values are full values.

In: the names of the row splits and of the values. Out: what a tower has of them. For example, the
second tower has the examples from 2 on:

    row splits [0, 2, 2, 3, 5]    =>    [0, 1, 3]
    values [a, b, c, d, e]        =>    [c, d, e], at the positions [2, 3, 4]

The first tower has the values before the first row as well, and the last one those behind the last
row, if splits are such: what uses all values on one device is given all of them.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.nodes.node_builder import NodeBuilder
from estimator_mgpu.partition.sizes import ONE
from estimator_mgpu.partition.tower import Tower
from estimator_mgpu.partition.towers.shards import Shards


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


def positions(shards: Shards, bounds: str, tower: Tower, device: str) -> str:
    """Which values are in a tower's rows: their positions among all, a vector.

    It's an error if a tower's rows end before they begin.
    """
    nodes = shards.nodes
    start, size = shards.extent(ONE, tower)
    first_row = nodes.scalar(start, tf.int32)
    end_row = nodes.add('AddV2', [first_row, size], nodes.host)

    first = nodes.add('Gather', [bounds, first_row], device)
    end = nodes.add('Gather', [bounds, end_row], device)
    return nodes.add('Range', [first, end, nodes.scalar(1, tf.int64)], device)


def row_splits(shards: Shards, bounds: str, tower: Tower, device: str) -> str:
    """The row splits of a tower's rows, counted from its first value."""
    nodes = shards.nodes
    start, size = shards.extent(ONE, tower)
    more = nodes.add('AddV2', [size, 1], nodes.host)
    own = shards.cut(bounds, 0, (start, more), device)
    first = nodes.add('Gather', [bounds, start], device)
    return nodes.add('Sub', [own, first], device)


def longest(nodes: NodeBuilder, splits: str, device: str) -> str:
    """How many values the longest row has, 0 if there is none: a scalar of the splits' type."""
    ends = nodes.add('StridedSlice', [splits, [1], [0], [1]], device, end_mask=1)
    starts = nodes.add('StridedSlice', [splits, [0], [-1], [1]], device, begin_mask=1)
    lengths = nodes.add('Sub', [ends, starts], device)
    largest = nodes.add('Max', [lengths, [0]], device)
    return nodes.add('Maximum', [largest, nodes.scalar(0, nodes.dtype(splits))], device)


def most_in_a_row(nodes: NodeBuilder, rows: str, count: str, device: str) -> str:
    """How many values the longest row has: an int64 scalar.

    Args:
      rows: in which row each value is, a vector.
      count: how many rows there are, a scalar of the same type.
    """
    none = nodes.const([], tf.int64, nodes.host)
    lengths = nodes.add('DenseBincount', [rows, count, none], device)
    return nodes.add('Max', [lengths, [0]], device)
