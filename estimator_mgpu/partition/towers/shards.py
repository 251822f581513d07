"""Which examples each tower has, and slices of full values.

In: how many examples there are, and the towers. Out: for each tower, where its shard starts and how
large it is, along any dimension; and nodes that take the shard of a full value.

For example, 3 towers share 7 examples as 3, 2 and 2: the second has the examples from 3 on. If
there are only 2 examples, the third tower has none. It computes on the first example instead, since
many kernels fail without one; `reduce_and_gather` leaves its results out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches.batch import number_of_rows
from estimator_mgpu.partition.nodes.node_builder import NodeBuilder, Number
from estimator_mgpu.partition.plan import Constant, FullSizes, LocalShape
from estimator_mgpu.partition.sizes import ONE, Entry, RowSpace, SelectedRows, Size, per_row
from estimator_mgpu.partition.tower import Chain, Tower, chains_of, static_extents

Extent = tuple[Number, Number]
"""Where a tower's entries along a dimension start, and how many they are."""


class Bounds(NamedTuple):
    """The vectors that a `StridedSlice` along an axis is given, by name."""

    axis: int
    begin: str
    end: str
    strides: str


class Shards:
    """Shards of a row space: `EqualShards` or `SelectionShards`.

    A tower *has* `counts` rows, and *computes on* its extent. That's the same, but for a tower
    without rows, which computes on others' rows.

    Sizes are computed in the integer type of whoever needs them, as the model does: products are
    too large for int32 where a tensor, or something that a model counts, has more than 2 ** 31
    entries.

    Args:
      rows: the row space, of the batch's examples or of others, such as those a mask leaves.
      symbol_value: symbol_value(symbol, tower or None, dtype) gives the value of a size's symbol.
    """

    def __init__(
        self,
        rows: RowSpace,
        towers: Sequence[Tower],
        nodes: NodeBuilder,
        symbol_value: Callable[[Any, Any, tf.DType], Number],
    ):
        self.rows = rows
        self.towers = towers
        self.chains = chains_of(towers)
        self.nodes = nodes
        self.symbol_value = symbol_value
        # For each tower, its extent in what each machine has read.
        self._extents_in_parts: list[list[Extent]] = []
        # By how many entries a row has, the tower's number, and the axis.
        self._bounds_of_slices: dict[tuple[Size, int, int], Bounds] = {}

    # Subclasses set or override these.

    @functools.cached_property
    def total(self) -> Number:
        """How many rows there are."""
        raise NotImplementedError

    @functools.cached_property
    def counts(self) -> Sequence[Number]:
        """How many rows the shard of each tower has."""
        raise NotImplementedError

    @functools.cached_property
    def active(self) -> Sequence[str] | None:
        """Whether each tower has any rows; None if all always have."""
        return None

    @functools.cached_property
    def _starts(self) -> Sequence[Number]:
        """The first row on which each tower computes."""
        raise NotImplementedError

    @functools.cached_property
    def _sizes(self) -> Sequence[Number]:
        """The number of rows on which each tower computes."""
        raise NotImplementedError

    @functools.cached_property
    def _sizes_of_chains(self) -> Sequence[Number]:
        """With several turns: on how many rows the towers of each chain compute."""
        raise NotImplementedError

    def extent(self, factor: Size, tower: Tower, dtype: tf.DType = tf.int32) -> Extent:
        """Where a tower's entries start, and how many there are, with `factor` entries a row."""
        start = self._cast(self._starts[tower.number], dtype)
        entries_per_row = self.size_value(factor, tower, dtype)
        return self._multiply(start, entries_per_row), self.local_size(factor, tower, dtype)

    def local_size(self, factor: Size, tower: Tower, dtype: tf.DType = tf.int32) -> Number:
        """How many entries a tower computes on, with `factor` entries a row."""
        rows = self._cast(self._sizes[tower.number], dtype)
        return self._multiply(rows, self.size_value(factor, tower, dtype))

    def count_of_chain(self, factor: Size, chain: Chain, dtype: tf.DType) -> Number:
        """How many entries all towers of a chain have, with `factor` entries a row."""
        rows = self._cast(self._sizes_of_chains[self.chains.index(chain)], dtype)
        return self._multiply(rows, self.size_value(factor, None, dtype))

    def size_value(self, size: Size, tower: Tower | None, dtype: tf.DType) -> Number:
        """The value of a size, with all rows; with a tower, other dimensions are those it has."""
        if size.static is not None:
            return size.static
        value: Number = size.number
        for symbol in size.symbols:
            value = self._multiply(value, self.symbol_value(symbol, tower, dtype))
        return value

    def total_as(self, dtype: tf.DType, more: int = 0) -> Number:
        """How many rows there are, and some more, in an integer type."""
        return self._add(more, self._cast(self.total, dtype))

    def local_sizes(
        self, need: Constant | LocalShape | FullSizes, tower: Tower, scalar: bool, dtype: tf.DType
    ) -> Number | list[Number]:
        """The integers that a tower gets in place of a tensor of sizes: its own shape, say."""
        if isinstance(need, Constant):
            return need.numbers[0] if need.scalar else list(need.numbers)
        if isinstance(need, FullSizes):
            full_sizes = [self.size_value(entry, None, dtype) for entry in need.entries]
            return full_sizes[0] if scalar else full_sizes

        factor = per_row(need.entries[need.position], need.rows)
        assert factor is not None
        local_size = self.local_size(factor, tower, dtype)
        if scalar:
            return local_size

        sizes = []
        for position, entry in enumerate(need.entries):
            if position == need.position:
                sizes.append(local_size)
            else:
                sizes.append(self.size_value(entry, tower, dtype))
        return sizes

    def slice(self, full: str, axis: int, factor: Size, tower: Tower, device: str) -> str:
        """A tower's shard of a full value, with `factor` entries a row along an axis."""
        key = factor, tower.number, axis
        if key not in self._bounds_of_slices:
            index = index_type(factor * self.rows.size)
            extent = self.extent(factor, tower, index)
            self._bounds_of_slices[key] = self._bounds(axis, extent)
        return self._cut(full, self._bounds_of_slices[key], device)

    def slice_of_blocks(
        self, full: str, axis: int, dims: Sequence[Size], tower: Tower, device: str
    ) -> str:
        """The same of a full value in blocks: the tower's rows of each block.

        Args:
          axis: the dimension along which the blocks follow each other.
          dims: of the full value.
        """
        extent = self.extent(ONE, tower)
        blocks = self.reshape_blocks(full, axis, dims, self.total, device, apart=True)
        shard = self.cut(blocks, axis + 1, extent, device)
        return self.reshape_blocks(shard, axis, dims, extent[1], device, apart=False)

    def reshape_blocks(
        self,
        value: str,
        axis: int,
        dims: Sequence[Size],
        row_count: Number,
        device: str,
        apart: bool,
    ) -> str:
        """Reshapes [blocks * rows] to [blocks, rows], or back.

        Args:
          axis: the dimension along which the blocks follow each other.
          dims: of the full value.
          row_count: how many rows each block has in what is reshaped: a tower's, or all.
          apart: whether blocks and rows become two dimensions, rather than one.
        """
        block_count = per_row(dims[axis], self.rows)
        assert block_count is not None
        blocks = self.size_value(block_count, None, tf.int64)
        rows = self._cast(row_count, tf.int64)
        blocks_and_rows = [blocks, rows] if apart else [self._multiply(blocks, rows)]

        before = [self.size_value(size, None, tf.int64) for size in dims[:axis]]
        after = [self.size_value(size, None, tf.int64) for size in dims[axis + 1 :]]
        shape = self.nodes.tensor([*before, *blocks_and_rows, *after], tf.int64)
        return self.nodes.add('Reshape', [value, shape], device)

    def cut(self, value: str, axis: int, extent: Extent, device: str) -> str:
        """The entries of an extent along an axis, taken on a device.

        It's a `StridedSlice` rather than a `Slice`, as that keeps the other dimensions' static
        sizes.
        """
        return self._cut(value, self._bounds(axis, extent), device)

    def _bounds(self, axis: int, extent: Extent) -> Bounds:
        """The bounds of the entries of an extent along an axis."""
        start, size = extent
        end = self._add(start, size)
        index = index_type(Size(end)) if isinstance(end, int) else self.nodes.dtype(end)
        return Bounds(
            axis,
            self.nodes.tensor([*[0] * axis, start], index),
            self.nodes.tensor([*[0] * axis, end], index),
            self.nodes.tensor([1] * (axis + 1), index),
        )

    def _cut(self, value: str, bounds: Bounds, device: str) -> str:
        # A bit for each dimension before the axis, which is taken from its begin to its end.
        mask = (1 << bounds.axis) - 1
        inputs = [value, bounds.begin, bounds.end, bounds.strides]
        return self.nodes.add('StridedSlice', inputs, device, begin_mask=mask, end_mask=mask)

    def join_parts(self, parts: Sequence[tf.Tensor], tower: Tower) -> str:
        """A tower's shard of a batch of which each machine has read a part, in order.

        Each part is cut on the machine that has it, so that only what the tower needs is sent.
        """
        pieces = []
        for part, extent in zip(parts, self.extents_in_parts(parts, tower)):
            pieces.append(self.cut(part.name, 0, extent, part.device))
        return self.nodes.concat(pieces, 0, tower.device)

    def extents_in_parts(self, parts: Sequence[Any], tower: Tower) -> list[Extent]:
        """A tower's extent in each part of a batch, in the order of the machines that read them.

        Args:
          parts: of a dense or a ragged tensor. Those of all others have as many rows, or what gives
            the number of examples fails.
        """
        if len(parts) == 1:
            return [self.extent(ONE, tower)]
        if not self._extents_in_parts:
            self._add_extents_in_parts(parts)
        return self._extents_in_parts[tower.number]

    def _add_extents_in_parts(self, parts: Sequence[Any]) -> None:
        """Adds ops that compute each tower's extent in each part."""
        tensor_of = self.nodes.graph.get_tensor_by_name
        [a_tensor, *_] = tf.nest.flatten(list(parts), expand_composites=True)
        with self.nodes.at_once(self.nodes.host, a_tensor.op):
            rows = tf.stack([tf.cast(number_of_rows(part), tf.int32) for part in parts])
            rows_before = tf.cumsum(rows, exclusive=True)
            # Matrices from here on: a row for each tower, a column for each part.
            start = tf.stack([tensor_of(name) for name in self._starts])[:, None]
            size = tf.stack([tensor_of(name) for name in self._sizes])[:, None]
            first = tf.clip_by_value(start - rows_before, 0, rows)
            end = tf.clip_by_value(start + size - rows_before, 0, rows)

            start_vectors = tf.unstack(first)
            size_vectors = tf.unstack(end - first)
            for starts, sizes in zip(start_vectors, size_vectors):
                extents = zip(_names_of_entries(starts), _names_of_entries(sizes))
                self._extents_in_parts.append(list(extents))

    def _cast(self, rows: Number, dtype: tf.DType) -> Number:
        """A number of rows in another type; it's an int32 scalar if the graph doesn't know it."""
        if isinstance(rows, int):
            return rows
        with self.nodes.for_many():
            return self.nodes.cast(rows, dtype, self.nodes.host)

    def _multiply(self, a: Number, b: Number) -> Number:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if a == 1:
            return b
        if b == 1:
            return a
        return self._binary('Mul', a, b)

    def _add(self, a: Number, b: Number) -> Number:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if a == 0:
            return b
        return self._binary('AddV2', a, b)

    def _binary(self, op_type: str, a: Number, b: Number) -> str:
        [dtype, *_] = [self.nodes.dtype(number) for number in (a, b) if isinstance(number, str)]
        scalars = [self.nodes.scalar(a, dtype), self.nodes.scalar(b, dtype)]
        with self.nodes.for_many():
            return self.nodes.add(op_type, scalars, self.nodes.host)


class EqualShards(Shards):
    """Shards that are as equal as possible.

    The rows are divided over the devices, the larger shares first, and then those of each device
    over its turns in the same way: 9 rows, on 2 devices with 3 turns, as 2, 2, 1 and 2, 1, 1.

    Args:
      total: how many rows there are, an int32 scalar; None if `rows` knows.
      symbol_value: as in `Shards`.
    """

    def __init__(
        self,
        rows: RowSpace,
        total: tf.Tensor | None,
        towers: Sequence[Tower],
        nodes: NodeBuilder,
        symbol_value: Callable[[Any, Any, tf.DType], Number],
    ):
        super().__init__(rows, towers, nodes, symbol_value)
        if total is None:  # There is a row for each tower, or nothing is sharded.
            self.total = rows.static or 0
            extents = static_extents(self.total, len(self.chains), len(self.chains[0]))
            self._starts = [start for start, _ in extents]
            self._sizes = [size for _, size in extents]
            self.counts = self._sizes
        else:
            self._add_extents(total)

    def _add_extents(self, total: tf.Tensor) -> None:
        """Adds ops that compute the extents from the number of rows."""
        with self.nodes.at_once(self.nodes.host, total.op):
            extents = _Extents(tf.constant(0), total, total).divided(len(self.chains))
            turns = len(self.chains[0])
            if turns > 1:
                self._sizes_of_chains = _names_of_entries(extents.sizes)
                rows = _Extents(*(vector[:, None] for vector in extents)).divided(turns)
                extents = _Extents(*(tf.reshape(matrix, [-1]) for matrix in rows))

            self.total = total.name
            self.counts = _names_of_entries(extents.counts)
            self.active = _names_of_entries(extents.counts > 0)
            self._starts = _names_of_entries(extents.starts)
            self._sizes = _names_of_entries(extents.sizes)


class SelectionShards(Shards):
    """Shards of a selection: each tower has picked rows of its own.

    Nodes are added for what is asked for only. Of the ids of an embedding, for example, nobody asks
    where each tower's start.

    Args:
      rows: the selection's row space.
      sizes: for each tower, how many rows it has picked of those on which it computes.
      origin: the shards that these were picked from.
      count: gives how many rows there are if several towers may have the same one, as of ids; None
        if each tower's are its own.
    """

    def __init__(
        self,
        rows: SelectedRows,
        sizes: Sequence[Number],
        origin: Shards,
        count: Callable[[], Number] | None = None,
    ):
        super().__init__(rows, origin.towers, origin.nodes, origin.symbol_value)
        self._sizes = sizes
        self._origin = origin
        self._count = count

    @functools.cached_property
    def total(self) -> Number:
        return self._rows_until[-1] if self._count is None else self._count()

    @functools.cached_property
    def counts(self) -> Sequence[Number]:
        return list(map(self._multiply, self._sizes, self._flags))

    @functools.cached_property
    def active(self) -> Sequence[str]:
        active = [self._binary('Greater', count, 0) for count in self.counts]
        # If no tower has a row, the first one computes on none, as one device would.
        is_empty = self._binary('Equal', self._rows_until[-1], 0)
        active[0] = self.nodes.add('LogicalOr', [active[0], is_empty], self.nodes.host)
        return active

    @functools.cached_property
    def _starts(self) -> Sequence[Number]:
        # A tower without examples computes on others' rows: on the first ones.
        return list(map(self._multiply, [0, *self._rows_until[:-1]], self._flags))

    @functools.cached_property
    def _sizes_of_chains(self) -> Sequence[Number]:
        counts = [[self.counts[tower.number] for tower in chain] for chain in self.chains]
        return [functools.reduce(self._add, of_chain) for of_chain in counts]

    @functools.cached_property
    def _rows_until(self) -> Sequence[Number]:
        """For each tower, how many rows it and those before it have."""
        return list(itertools.accumulate(self.counts, self._add))

    @functools.cached_property
    def _flags(self) -> Sequence[Number]:
        """For each tower, 1 if it has examples, otherwise 0."""
        if self._origin.active is None:
            return [1] * len(self.towers)
        host = self.nodes.host
        return [self.nodes.cast(name, tf.int32, host) for name in self._origin.active]


class _Extents(NamedTuple):
    """Extents: where each starts, on how many rows it computes, and how many it has.

    One without a row computes on the first one of those that were divided, if there is one.
    """

    starts: tf.Tensor
    sizes: tf.Tensor
    counts: tf.Tensor

    def divided(self, count: int) -> _Extents:
        """Divides an extent into a vector of so many, or a column of extents into their rows."""
        is_larger = self.sizes % count > list(range(count))
        shares = self.sizes // count + tf.cast(is_larger, tf.int32)
        rows_before = tf.cumsum(shares, -1, exclusive=True)
        starts = self.starts + rows_before * tf.minimum(shares, 1)
        sizes = tf.maximum(shares, tf.minimum(self.sizes, 1))
        # In an extent without a row, the first one computes on a row that isn't its own.
        counts = shares * tf.minimum(self.counts, 1)
        return _Extents(starts, sizes, counts)


def index_type(size: Size) -> tf.DType:
    """The type for indices along a dimension of this size.

    A number of rows, or a dimension as such, is int32, which is cheaper; a product of them, and
    what an entry of a tensor says, may be larger.
    """
    if size.static is not None:
        return tf.int32 if size.static <= tf.int32.max else tf.int64
    is_one_symbol = size.number == 1 and len(size.symbols) == 1
    if is_one_symbol and not isinstance(size.symbols[0], Entry):
        return tf.int32
    return tf.int64


def _names_of_entries(vector: tf.Tensor) -> list[str]:
    return [entry.name for entry in tf.unstack(vector)]
