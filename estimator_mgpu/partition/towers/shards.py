"""Rows over towers: who has how many, slices of what is whole, and what towers have, made whole."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.batch import rows_of
from estimator_mgpu.devices import relay
from estimator_mgpu.partition.plan import Constant, LocalShape
from estimator_mgpu.partition.sizes import Entry, RowSpace, Size, per_row
from estimator_mgpu.partition.towers.node_builder import NodeBuilder, Number

Extent = tuple[Number, Number]
"""Where entries along a dimension start, and how many they are."""
_PAIRWISE = dict(max='Maximum', min='Minimum', prod='Mul', all='LogicalAnd', any='LogicalOr')
"""The op that combines two towers' results."""


@dataclass
class Sharding:
    """How rows are divided: as evenly as can be, the larger shards first.

    A tower that has no row computes on the first one instead, and is left out where towers meet. If
    there are no rows at all, no tower has any. `given` is how many there are, an int32 scalar, if
    `rows` doesn't know; symbol(symbol, tower or None, dtype) gives the value of a size's symbol.

    Sizes are worked out in the type of who wants them, as the model does: products are too large
    for int32 where a tensor, or what a model counts, has more than 2 ** 31 entries.
    """

    rows: RowSpace
    given: tf.Tensor | None
    devices: Sequence[str]
    nodes: NodeBuilder
    symbol: Callable[[Any, Any, tf.DType], Number]

    def __post_init__(self) -> None:
        self.counts: Sequence[Number]  # how many rows each tower has
        self._extents: Sequence[Extent]  # which rows each computes on
        self.active: Sequence[str] | None = None  # whether it has any; None: all have, always
        self._pieces: list[list[tuple[str, str]]] = []  # by tower, its rows of each machine's part
        total, n = self.given, len(self.devices)
        if total is None:
            self.total: Number = self.rows.static or 0
            each, more = divmod(self.total, n)
            self.counts = [each + (i < more) for i in range(n)]
            self._extents = [*zip(itertools.accumulate([0, *self.counts]), self.counts)]
            return
        with self.nodes.at_once(self.nodes.host):
            counts = total // n + tf.cast(tf.range(n) < total % n, tf.int32)
            active = counts > 0
            starts = tf.where(active, tf.cumsum(counts, exclusive=True), tf.zeros_like(counts))
            sizes = tf.maximum(counts, tf.minimum(total, 1))
            self.total, self.counts, self.active = total.name, _names(counts), _names(active)
            self._extents = [*zip(_names(starts), _names(sizes))]

    def extent(self, factor: Size, tower: int, dtype: tf.DType = tf.int32) -> Extent:
        """Where a tower's entries start, and how many it computes on, with `factor` a row."""
        each = self.number(factor, tower, dtype)
        start, size = (self._as(n, dtype) for n in self._extents[tower])
        return self._times(start, each, dtype), self._times(size, each, dtype)

    def number(self, size: Size, tower: int | None = None, dtype: tf.DType = tf.int32) -> Number:
        """A size: of the whole, or with a tower's own dimensions, but all rows."""
        if size.static is not None:
            return size.static
        product: Number = size.number
        for symbol in size.symbols:
            product = self._times(product, self.symbol(symbol, tower, dtype), dtype)
        return product

    def all_rows(self, dtype: tf.DType) -> Number:
        """How many rows there are."""
        return self._as(self.total, dtype)

    def _as(self, rows: Number, dtype: tf.DType) -> Number:
        """A number of rows, an int32 scalar if it isn't known, in another type."""
        if isinstance(rows, int):
            return rows
        return self.nodes.cast(rows, tf.int32, dtype, self.nodes.host)

    def _times(self, a: Number, b: Number, dtype: tf.DType) -> Number:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if 1 in (a, b):
            return b if a == 1 else a
        scalars = [self.nodes.scalar(n, dtype) for n in (a, b)]
        return self.nodes.add('Mul', scalars, self.nodes.host, T=dtype)

    def integers(
        self, need: Constant | LocalShape, tower: int, scalar: bool, dtype: tf.DType
    ) -> Number | list[Number]:
        """What a tower is given in place of a tensor of sizes."""
        if isinstance(need, Constant):
            return need.numbers[0] if need.scalar else list(need.numbers)
        at = need.position
        factor = per_row(need.entries[at], need.rows)
        assert factor is not None
        _, own = self.extent(factor, tower, dtype)
        if scalar:
            return own
        return [
            own if i == at else self.number(entry, tower, dtype)
            for i, entry in enumerate(need.entries)
        ]

    def slice(
        self, whole: str, dtype: tf.DType, axis: int, factor: Size, tower: int, to: str
    ) -> str:
        """A tower's rows of a tensor, with `factor` entries a row along an axis."""
        index = _index_type(factor * Size(1, (self.rows,)))
        return self.cut(whole, dtype, axis, self.extent(factor, tower, index), to, index)

    def cut(
        self,
        whole: str,
        dtype: tf.DType,
        axis: int,
        part: Extent,
        to: str,
        index: tf.DType = tf.int32,
    ) -> str:
        """A part of a tensor along an axis, taken on a device, which keeps what is static."""
        start, size = part
        numbers = (start, self._plus(start, size, index))
        ends = [self.nodes.tensor([*[0] * axis, n], index, index) for n in numbers]
        strides = self.nodes.tensor([1] * (axis + 1), index)
        before = (1 << axis) - 1  # a bit for each dimension that is taken whole, as later ones are
        attrs = dict(T=dtype, Index=index, begin_mask=before, end_mask=before)
        return self.nodes.add('StridedSlice', [whole, *ends, strides], to, **attrs)

    def _plus(self, a: Number, b: Number, dtype: tf.DType) -> Number:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if a == 0:
            return b
        scalars = [self.nodes.scalar(n, dtype) for n in (a, b)]
        return self.nodes.add('AddV2', scalars, self.nodes.host, T=dtype)

    def join(self, parts: Sequence[tf.Tensor], tower: int) -> str:
        """A tower's rows of what machines have parts of, in order, each cut where it is."""
        dtype = parts[0].dtype
        if not self._pieces:
            named = self.nodes.graph.get_tensor_by_name
            with self.nodes.at_once(self.nodes.host):
                rows = tf.stack([tf.cast(rows_of(part), tf.int32) for part in parts])
                before = tf.cumsum(rows, exclusive=True)
                start, size = (tf.stack([*map(named, n)])[:, None] for n in zip(*self._extents))
                first, end = (tf.clip_by_value(n - before, 0, rows) for n in (start, start + size))
                columns = (map(_names, tf.unstack(n)) for n in (first, end - first))
                self._pieces = [[*zip(*of_tower)] for of_tower in zip(*columns)]
        pieces = [
            self.cut(part.name, dtype, 0, piece, part.device)
            for part, piece in zip(parts, self._pieces[tower])
        ]
        return self.nodes.concat(pieces, 0, dtype, self.devices[tower])

    def gather(self, parts: Sequence[str], dtype: tf.DType, axis: int, size: Size, to: str) -> str:
        """All rows, in the batch's order, on a device: of towers' parts, that have a `size`."""
        joined = self.nodes.concat(parts, axis, dtype, to)
        if self.active is None:
            return joined
        # Towers without rows are the last.
        index = _index_type(size)
        return self.cut(joined, dtype, axis, (0, self.number(size, None, index)), to, index)

    def reduce(self, parts: Sequence[str], dtype: tf.DType, how: str, to: str) -> str:
        """What towers' partial results come to, on a device; `how` is a `Partial.reduce`."""
        if how == 'mean':
            return self._mean(parts, dtype, to)
        if self.active is not None:
            nothing: Any = {'sum': 0, 'prod': 1, 'all': True, 'any': False}.get(how)
            if nothing is None:
                least, most = (-np.inf, np.inf) if dtype.is_floating else (dtype.min, dtype.max)
                nothing = least if how == 'max' else most
            # The first has all rows there are, if there are fewer than two.
            parts, others = list(parts[:1]), parts[1:]
            for part, some, tower in zip(others, self.active[1:], self.devices[1:]):
                given = [some, part, self.nodes.const(nothing, dtype, tower)]
                parts.append(self.nodes.add('SelectV2', given, tower, T=dtype))
        # What another machine's towers have is combined there first, and sent once.
        groups: dict[str | int, list[str]] = {}
        for i, (part, tower) in enumerate(zip(parts, self.devices)):
            groups.setdefault(relay(self.devices, tower, to) or i, []).append(part)
        sent = [self._combined(group, dtype, how, str(at)) for at, group in groups.items()]
        return self._combined(sent, dtype, how, to)

    def _combined(self, parts: Sequence[str], dtype: tf.DType, how: str, to: str) -> str:
        """What some parts come to, on a device; one alone stays where it is."""
        if how == 'sum' and len(parts) > 1:
            return self.nodes.add('AddN', parts, to, T=dtype, N=len(parts))
        attrs = {} if dtype == tf.bool else {'T': dtype}
        return functools.reduce(
            lambda one, two: self.nodes.add(_PAIRWISE[how], [one, two], to, **attrs), parts
        )

    def _mean(self, parts: Sequence[str], dtype: tf.DType, to: str) -> str:
        """The towers' means, weighted by their rows; in float32 at least."""
        nodes, wide = self.nodes, dtype if dtype.size > 2 else tf.float32
        weighted = []
        for part, rows, tower in zip(parts, self.counts, self.devices):
            given = [nodes.cast(part, dtype, wide, tower), nodes.tensor(rows, wide)]
            weighted.append(nodes.add('Mul', given, tower, T=wide))
        total = self.reduce(weighted, wide, 'sum', to)
        mean = nodes.add('RealDiv', [total, nodes.tensor(self.total, wide)], to, T=wide)
        return nodes.cast(mean, wide, dtype, to)


def _index_type(size: Size) -> tf.DType:
    """What entries of a dimension are counted in; a number of rows, or a dimension, is int32."""
    if size.static is not None:
        return tf.int32 if size.static <= tf.int32.max else tf.int64
    alone = size.number == 1 and len(size.symbols) == 1 and not isinstance(size.symbols[0], Entry)
    return tf.int32 if alone else tf.int64


def _names(vector: tf.Tensor) -> list[str]:
    """What a vector's entries are referred to by."""
    return [entry.name for entry in tf.unstack(vector)]
