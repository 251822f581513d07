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
    joined = gather_selection(shards, ids, 0, device)
    unique = nodes.add(op_types.UNIQUE, [joined], device, out_idx=tf.int32)
    places = second_output(unique)
    count = nodes.add('Size', [unique], device, out_type=tf.int32)
    if is_sorted:
        order = nodes.argsort(unique, device)
    elif firsts:
        joined = gather_selection(shards, firsts, 0, device)
        first = nodes.add('UnsortedSegmentMin', [joined, places, count], device)
        order = nodes.argsort(first, device)
    else:
        return MergedIds(unique, places, count)

    ranks = nodes.add('InvertPermutation', [order], device)
    sorted_ids = nodes.take(unique, order, device)
    sorted_places = nodes.take(ranks, places, device)
    return MergedIds(sorted_ids, sorted_places, count)


def add_up(shards: Shards, merged: MergedIds, sums: Sequence[str], device: str) -> str:
    """Adds up what towers have of the same ids."""
    joined = gather_selection(shards, sums, 0, device)
    inputs = [joined, merged.places, merged.size]
    return shards.nodes.add(op_types.UNSORTED_SEGMENT_SUM, inputs, device)


def take_one(shards: Shards, merged: MergedIds, rows: Sequence[str], device: str) -> str:
    """Takes of each id what a tower has that has it: the last one of these."""
    joined = gather_selection(shards, rows, 0, device)
    return shards.nodes.add('DynamicStitch', [merged.places, joined], device)
