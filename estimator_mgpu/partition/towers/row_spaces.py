"""Which rows towers have of each row space, and how large tensors are, as numbers or as nodes.

In: the row spaces and sizes of a plan. Out: `Shards`, and the names of integers. For example, of
what a mask selects each tower has the rows that it has selected itself; how many these are is known
only when a step runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches.batch import parts_of
from estimator_mgpu.devices import host_of
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.nodes.node_builder import NodeBuilder, Number
from estimator_mgpu.partition.placements import Positions
from estimator_mgpu.partition.sizes import (
    Dim,
    EntriesOfIds,
    Largest,
    LongestRow,
    RowsBehind,
    RowSpace,
    RowsToLast,
    SelectedRows,
    Splits,
    UniqueRows,
)
from estimator_mgpu.partition.tower import Tower
from estimator_mgpu.partition.towers import ragged_features
from estimator_mgpu.partition.towers.origins import Origins
from estimator_mgpu.partition.towers.shards import EqualShards, SelectionShards, Shards
from estimator_mgpu.partition.towers.sums_of_entries import SumsOfEntries
from estimator_mgpu.partition.towers.unique_ids import MergedIds


class LocalAndFull(Protocol):
    """Local and full values: what `values.Values` is to the modules that it consists of itself.

    Attributes:
      division: the graph and its plan.
      origins: tells which full values are made from local ones.
      towers: those that have local values.
      nodes: where nodes are added.
      shards: which rows towers have.
    """

    division: Division
    origins: Origins
    towers: Sequence[Tower]
    nodes: NodeBuilder
    shards: ShardsOfRows

    def local(self, tensor: tf.Tensor, tower: Tower) -> str:
        """What a tower has of a tensor."""

    def full(self, tensor: tf.Tensor) -> str:
        """The value for the global batch."""

    def merged_ids(self, rows: UniqueRows) -> MergedIds:
        """The different ids of all towers."""


class ShardsOfRows:
    """The shards of each row space, and the values of sizes.

    Args:
      values: those of which rows and sizes are counted.

    Attributes:
      of_batch: the shards of the batch.
      sums_of_entries: how many sums of a sparse tensor's entries towers have.
    """

    def __init__(self, values: LocalAndFull):
        self._graph = values.division.graph
        self._plan = values.division.plan
        self._origins = values.origins
        self._towers = values.towers
        self._nodes = values.nodes
        self._values = values
        self._shards: dict[RowSpace, Shards] = {}
        self.of_batch = self._equal_shards(self._plan.rows, values.division.total)
        titles = values.division.batch.titles_of_entries()
        paddings = [op_plan.padding for op_plan in self._plan.ops.values() if op_plan.padding]
        indices = {padding.entries: padding.indices for padding in paddings}
        self.sums_of_entries = SumsOfEntries(
            self.of_batch, titles, indices, self._origins.device_of_full
        )

    def of(self, rows: RowSpace) -> Shards:
        """The shards of a row space: the batch's, or one of a tensor."""
        if isinstance(rows, SelectedRows) and rows not in self._shards:
            self._shards[rows] = self._shards_of_selection(rows)
        if rows not in self._shards:
            self._equal_shards(rows, self._count_rows(rows) if rows.static is None else None)
        return self._shards[rows]

    def _equal_shards(self, rows: RowSpace, total: tf.Tensor | None) -> Shards:
        """Adds the shards of rows of which there are so many; None if the graph knows."""
        shards = EqualShards(rows, total, self._towers, self._nodes, self._symbol_value)
        self._shards[rows] = shards
        return shards

    def _count_rows(self, rows: RowSpace) -> tf.Tensor:
        """How many rows the tensor has with which a row space starts."""
        tensor = self._graph.get_tensor_by_name(rows.name)
        with self._nodes.at_once(self._origins.device_of_full(tensor), tensor.op):
            return tf.shape(tensor)[0]

    def _shards_of_selection(self, rows: SelectedRows) -> Shards:
        """The shards of a selection, of which each tower has the rows that it has picked."""
        selection = self._graph.get_tensor_by_name(rows.name)
        sizes: list[Number]
        if isinstance(rows, RowsToLast):
            sizes = [self.sums_of_entries.size(rows.name, tower) for tower in self._towers]
        elif isinstance(rows, RowsBehind):
            sizes = [self.sums_of_entries.size_behind(rows.name, tower) for tower in self._towers]
        else:
            first_dim = Dim(selection.name, 0)
            sizes = [self._symbol_value(first_dim, tower, tf.int32) for tower in self._towers]
        origin = self.of(rows.origin)
        if not isinstance(rows, UniqueRows):
            return SelectionShards(rows, sizes, origin)
        return SelectionShards(rows, sizes, origin, functools.partial(self._count_ids, rows))

    def _count_ids(self, rows: UniqueRows) -> str:
        """How many different ids all towers have together, or entries of these."""
        if not isinstance(rows, EntriesOfIds):
            return self._values.merged_ids(rows).size
        entries = self._graph.get_tensor_by_name(rows.name)
        full = self._values.full(entries)
        device = self._origins.device_of_full(entries)
        return self._nodes.add('Size', [full], device, out_type=tf.int32)

    def size(self, tensor: tf.Tensor) -> str:
        """The value of a tensor that says how large the global batch is, as of `tf.shape(x)`."""
        dtype = tensor.dtype.base_dtype
        entries = self._plan.sizes.entries(tensor) or []
        values = [self.of_batch.size_value(size, None, dtype) for size in entries]
        return self._nodes.tensor(values if tensor.shape.rank else values[0], dtype)

    def _symbol_value(self, symbol: Any, tower: Tower | None, dtype: tf.DType) -> Number:
        """The value of a symbol: a number of rows or splits, a dimension, or a tensor's entry."""
        if isinstance(symbol, RowSpace):
            return self.of(symbol).total_as(dtype)
        if isinstance(symbol, Splits):
            return self.of(symbol.rows).total_as(dtype, more=1)

        tensor = self._graph.get_tensor_by_name(symbol.tensor)
        if isinstance(symbol, LongestRow):
            return self._longest_row(tensor, dtype)
        if isinstance(symbol, Largest):
            return self._largest_entry(tensor, symbol.position, dtype)
        with self._nodes.for_many():
            host = self._nodes.host
            if isinstance(symbol, Dim):
                value, device = self._measured(tensor, tower)
                if tensor.shape.rank == 1:
                    return self._nodes.add('Size', [value], device, out_type=dtype)
                vector = self._nodes.add('Shape', [value], device, out_type=dtype)
                index = symbol.axis
                if tower is not None:  # It's asked for on the tower's machine.
                    host = host_of(tower.device)
            else:
                entries = self._nodes.add('Reshape', [self._values.full(tensor), [-1]], host)
                vector = self._nodes.cast(entries, dtype, host)
                index = symbol.position
            return self._nodes.add('Gather', [vector, index], host)

    def _largest_entry(self, tensor: tf.Tensor, position: int, dtype: tf.DType) -> str:
        """The largest of the entries that towers have at a position of a vector."""
        entries = []
        with self._nodes.for_many():
            for tower in self._towers:
                local = self._values.local(tensor, tower)
                entries.append(self._nodes.add('Gather', [local, position], tower.device))
            return self._largest(entries, dtype)

    def _longest_row(self, tensor: tf.Tensor, dtype: tf.DType) -> str:
        """How many values the longest row has, of row splits, or of what towers have of rows."""
        nodes = self._nodes
        placement = self._plan.placements.get(tensor.name)
        with nodes.for_many():
            if not isinstance(placement, Positions):
                of_parts = []
                for part in parts_of(tensor):
                    splits = self._values.full(part)
                    device = self._origins.device_of_full(part)
                    of_parts.append(ragged_features.longest(nodes, splits, device))
                return self._largest(of_parts, dtype)
            shards = self.of(placement.rows)
            of_towers = [nodes.scalar(0, tf.int64)]  # Selected rows may be none.
            for tower in self._towers:
                count = shards.local_size(placement.factor, tower, tensor.dtype)
                rows = self._values.local(tensor, tower)
                count = nodes.scalar(count, tensor.dtype)
                on_host = host_of(tower.device)
                of_towers.append(ragged_features.most_in_a_row(nodes, rows, count, on_host))
            return self._largest(of_towers, dtype)

    def _largest(self, scalars: Sequence[str], dtype: tf.DType) -> str:
        """The largest of some scalars, in another type than theirs."""
        host = self._nodes.host
        if len(scalars) == 1:
            return self._nodes.cast(scalars[0], dtype, host)
        vector = self._nodes.add('Pack', scalars, host)
        largest = self._nodes.add('Max', [vector, 0], host)
        return self._nodes.cast(largest, dtype, host)

    def _measured(self, tensor: tf.Tensor, tower: Tower | None) -> tuple[str, str]:
        """What a tower has of a tensor, or the full value if towers have none; and its device."""
        is_source = tensor.name in self._origins.sources and tensor.name not in self._plan.entries
        if tensor.name in self._plan.placements and not is_source:
            tower = tower or self._towers[0]
            return self._values.local(tensor, tower), tower.device
        return self._values.full(tensor), self._origins.device_of_full(tensor)
