"""The different ids of all towers, made from those that each tower has.

In: for each tower, the name of its different ids, and of what belongs to them. Out: the name of the
same for the global batch. For example, on two towers:

    ids    [7, 3]  and  [3, 9]    =>    [7, 3, 9]    in the order in which they come first
    sums   [a, b]  and  [c, d]    =>    [a, b + c, d]
    rows   [A, B]  and  [B, D]    =>    [A, B, D]    what towers have of an id is the same
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.nodes.node_builder import second_output
from estimator_mgpu.partition.towers.reduce_and_gather import gather_selection
from estimator_mgpu.partition.towers.shards import Shards
from estimator_mgpu.tf_internals import op_types


class MergedIds(NamedTuple):
    """The different ids of all towers, a vector.

    Attributes:
      ids: the name of the ids.
      places: for each id of each tower, one tower after the other, its place among these.
      size: how many they are, an int32 scalar.
    """

    ids: str
    places: str
    size: str


def merge(
    shards: Shards,
    ids: Sequence[str],
    dtype: tf.DType,
    is_sorted: bool,
    firsts: Sequence[str],
    device: str,
) -> MergedIds:
    """Merges the towers' ids.

    Args:
      shards: those of the examples that the ids are of.
      ids: for each tower, its different ids.
      is_sorted: whether they are in ascending order, rather than that in which they come first.
      firsts: for each tower, the number of the entry with which each of its ids comes first, int64;
        [] if ids of a tower come before those of the next one.
    """
    nodes = shards.nodes
    joined = gather_selection(shards, ids, dtype, 0, device)
    unique = nodes.add(op_types.UNIQUE, [joined], device, T=dtype, out_idx=tf.int32)
    places = second_output(unique)
    count = nodes.add('Size', [unique], device, T=dtype, out_type=tf.int32)
    if is_sorted:
        order = nodes.argsort(unique, dtype, device)
    elif firsts:
        joined = gather_selection(shards, firsts, tf.int64, 0, device)
        first = nodes.add('UnsortedSegmentMin', [joined, places, count], device, **_types(tf.int64))
        order = nodes.argsort(first, tf.int64, device)
    else:
        return MergedIds(unique, places, count)

    ranks = nodes.add('InvertPermutation', [order], device, T=tf.int32)
    sorted_ids = nodes.take(unique, dtype, order, device, tf.int32)
    sorted_places = nodes.take(ranks, tf.int32, places, device, tf.int32)
    return MergedIds(sorted_ids, sorted_places, count)


def add_up(
    shards: Shards, merged: MergedIds, sums: Sequence[str], dtype: tf.DType, device: str
) -> str:
    """Adds up what towers have of the same ids."""
    joined = gather_selection(shards, sums, dtype, 0, device)
    inputs = [joined, merged.places, merged.size]
    return shards.nodes.add(op_types.UNSORTED_SEGMENT_SUM, inputs, device, **_types(dtype))


def take_first(
    shards: Shards, merged: MergedIds, rows: Sequence[str], dtype: tf.DType, device: str
) -> str:
    """Takes of each id what the first tower has that has it."""
    nodes = shards.nodes
    joined = gather_selection(shards, rows, dtype, 0, device)
    size = nodes.add('Size', [merged.places], device, T=tf.int32, out_type=tf.int32)
    numbers = nodes.add('Range', [0, size, 1], device, Tidx=tf.int32)
    inputs = [numbers, merged.places, merged.size]
    firsts = nodes.add('UnsortedSegmentMin', inputs, device, **_types(tf.int32))
    return nodes.take(joined, dtype, firsts, device, tf.int32)


def _types(dtype: tf.DType) -> dict[str, tf.DType]:
    """The attributes of a reduction of the rows of each id."""
    return {'T': dtype, 'Tindices': tf.int32, 'Tnumsegments': tf.int32}
