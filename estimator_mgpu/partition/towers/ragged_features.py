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


def bounds(
    nodes: NodeBuilder,
    splits: str,
    dtype: tf.DType,
    values: str,
    value_dtype: tf.DType,
    value_device: str,
    device: str,
) -> str:
    """Where rows begin, and where the last one ends: row splits from 0 to the number of values.

    Args:
      splits: the row splits of all rows.
      values: those of all rows.
      value_device: where they are.
      device: where the row splits are, and the result is made.
    """
    between = nodes.add('StridedSlice', [splits, [1], [-1], [1]], device, T=dtype, Index=tf.int32)
    between = nodes.cast(between, dtype, tf.int64, device)
    shape = nodes.add('Shape', [values], value_device, T=value_dtype, out_type=tf.int64)
    count = nodes.add('StridedSlice', [shape, [0], [1], [1]], device, T=tf.int64, Index=tf.int32)
    first = nodes.tensor([0], tf.int64)
    return nodes.concat([first, between, count], 0, tf.int64, device)


def positions(shards: Shards, bounds: str, tower: Tower, device: str) -> str:
    """Which values are in a tower's rows: their positions among all, a vector.

    It's an error if a tower's rows end before they begin.
    """
    nodes = shards.nodes
    start, size = shards.extent(ONE, tower)
    first_row = nodes.scalar(start, tf.int32)
    end_row = nodes.add('AddV2', [first_row, size], nodes.host, T=tf.int32)

    types = {'Tparams': tf.int64, 'Tindices': tf.int32}
    first = nodes.add('Gather', [bounds, first_row], device, **types)
    end = nodes.add('Gather', [bounds, end_row], device, **types)
    return nodes.add('Range', [first, end, nodes.scalar(1, tf.int64)], device, Tidx=tf.int64)


def row_splits(shards: Shards, bounds: str, tower: Tower, device: str) -> str:
    """The row splits of a tower's rows, counted from its first value."""
    nodes = shards.nodes
    start, size = shards.extent(ONE, tower)
    more = nodes.add('AddV2', [size, 1], nodes.host, T=tf.int32)
    own = shards.cut(bounds, tf.int64, 0, (start, more), device)
    first = nodes.add('Gather', [bounds, start], device, Tparams=tf.int64, Tindices=tf.int32)
    return nodes.add('Sub', [own, first], device, T=tf.int64)


def longest(nodes: NodeBuilder, splits: str, dtype: tf.DType, device: str) -> str:
    """How many values the longest row has, 0 if there is none: a scalar of the splits' type."""
    types = {'T': dtype, 'Index': tf.int32}
    ends = nodes.add('StridedSlice', [splits, [1], [0], [1]], device, end_mask=1, **types)
    starts = nodes.add('StridedSlice', [splits, [0], [-1], [1]], device, begin_mask=1, **types)
    lengths = nodes.add('Sub', [ends, starts], device, T=dtype)
    largest = nodes.add('Max', [lengths, [0]], device, T=dtype, Tidx=tf.int32)
    return nodes.add('Maximum', [largest, nodes.scalar(0, dtype)], device, T=dtype)


def most_in_a_row(nodes: NodeBuilder, rows: str, dtype: tf.DType, count: str, device: str) -> str:
    """How many values the longest row has: an int64 scalar.

    Args:
      rows: in which row each value is, a vector.
      count: how many rows there are, a scalar of the same type.
    """
    none = nodes.const([], tf.int64, nodes.host)
    types = {'Tidx': dtype, 'T': tf.int64}
    lengths = nodes.add('DenseBincount', [rows, count, none], device, **types)
    return nodes.add('Max', [lengths, [0]], device, T=tf.int64, Tidx=tf.int32)
