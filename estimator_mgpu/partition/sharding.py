"""The batch's rows over towers: who has how many, slices of what is whole, and sizes as tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Union

import tensorflow.compat.v1 as tf

from estimator_mgpu.batch import rows_of
from estimator_mgpu.devices import host_of
from .nodes import Nodes
from .plan import Local, Numbers
from .symbols import Rows, Size, per_row

Number = Union[int, str]
"""An integer that is known, or what an int32 scalar tensor is referred to by."""
Extent = tuple[Number, Number]
"""Where entries along a dimension start, and how many they are."""


@dataclass
class Sharding:
    """How rows are divided: as evenly as can be, the larger shards first.

    A tower that has no row computes on the first one instead, and is left out where towers meet. If
    there are no rows at all, no tower has any. `given` is how many there are, an int32 scalar, if
    `rows` doesn't know; symbol(what a size depends on, tower, or None) says what that is.
    """

    rows: Rows
    given: tf.Tensor | None
    devices: Sequence[str]
    nodes: Nodes
    symbol: Callable[[Any, Any], Number]

    def __post_init__(self) -> None:
        self.host = host_of(self.devices[0])  # where sizes are
        total, n = self.given, len(self.devices)
        self.counts: Sequence[Number]  # how many rows each tower has
        self._spans: list[list[Extent]] = []
        self.active: Sequence[str] | None = None  # whether it has any; None: all have, always
        if total is None:
            self.total: Number = self.rows.static or 0
            each, more = divmod(self.total, n)
            self.counts = self._sizes = [each + (i < more) for i in range(n)]
            self._starts: Sequence[Number] = [each * i + min(i, more) for i in range(n)]
            return
        scope = tf.name_scope(f'{self.nodes.scope}/rows/')
        with tf.control_dependencies(None), tf.device(self.host), scope:
            counts = total // n + tf.cast(tf.range(n) < total % n, tf.int32)
            active = counts > 0
            starts = tf.cumsum(counts, exclusive=True)
            starts = tf.where(active, starts, tf.zeros_like(starts))
            sizes = tf.maximum(counts, tf.minimum(total, 1))
            columns = [[t.name for t in tf.unstack(c)] for c in (counts, starts, sizes, active)]
        self.total = total.name
        self.counts, self._starts, self._sizes, self.active = columns

    def extent(self, factor: Size, tower: int) -> Extent:
        """Where a tower's entries start, and how many it computes on, with `factor` a row."""
        each = self.number(factor, tower)
        return self._times(self._starts[tower], each), self._times(self._sizes[tower], each)

    def number(self, size: Size, tower: int | None = None) -> Number:
        """A size: of the whole, or with a tower's own dimensions, but all rows."""
        if size.static is not None:
            return size.static
        factors = [self.symbol(symbol, tower) for symbol in size.symbols]
        return functools.reduce(self._times, [size.number, *factors])

    def integers(self, need: Numbers | Local, tower: int, scalar: bool) -> Number | list[Number]:
        """What a tower is given in place of a tensor of sizes."""
        if isinstance(need, Numbers):
            return need.numbers[0] if need.scalar else list(need.numbers)
        at = need.position
        factor = per_row(need.entries[at], need.rows)
        assert factor is not None
        _, own = self.extent(factor, tower)
        if scalar:
            return own
        return [own if i == at else self.number(e, tower) for i, e in enumerate(need.entries)]

    def tensor(self, value: Number | Sequence[Number], dtype: tf.DType = tf.int32) -> str:
        """An integer, or a list of some, as a tensor."""
        if not isinstance(value, str):
            if isinstance(value, int) or all(isinstance(n, int) for n in value):
                return self.nodes.const(value, dtype, self.host)
            value = self._add('Pack', value, T=tf.int32, N=len(value), axis=0)
        return self.nodes.cast(value, tf.int32, dtype, self.host)

    def cut(self, whole: str, dtype: tf.DType, rank: int, axis: int, part: Extent, to: str) -> str:
        """A part of a tensor along an axis, taken on a device."""
        start, size = part
        begin = self.tensor([start if i == axis else 0 for i in range(rank)])
        sizes = self.tensor([size if i == axis else -1 for i in range(rank)])
        return self.nodes.add('Slice', [whole, begin, sizes], to, T=dtype, Index=tf.int32)

    def join(self, parts: Sequence[tf.Tensor], tower: int) -> str:
        """A tower's rows of what machines have parts of, in order, each cut where it is."""
        self._spans = self._spans or self._spans_of(parts)
        pieces, dtype, rank = [], parts[0].dtype, parts[0].shape.rank
        for part, span in zip(parts, self._spans[tower]):
            pieces.append(self.cut(part.name, dtype, rank, 0, span, part.device))
        attrs = {'T': dtype, 'N': len(pieces), 'Tidx': tf.int32}
        return self.nodes.add('ConcatV2', [*pieces, self.tensor(0)], self.devices[tower], **attrs)

    def _spans_of(self, parts: Sequence[tf.Tensor]) -> list[list[Extent]]:
        """By tower and part, where the tower's rows start in that part, and how many they are."""
        named = self.nodes.graph.get_tensor_by_name
        scope = tf.name_scope(f'{self.nodes.scope}/rows/')
        with tf.control_dependencies(None), tf.device(self.host), scope:
            rows = [tf.cast(rows_of(part), tf.int32) for part in parts]
            counts, before = tf.stack(rows), tf.cumsum(rows, exclusive=True)
            starts, sizes = (
                tf.stack([named(n) for n in own])[:, None] for own in (self._starts, self._sizes)
            )
            ends = (starts, starts + sizes)
            first, end = (tf.clip_by_value(at - before, 0, counts) for at in ends)
            table = map(tf.unstack, tf.unstack(tf.stack([first, end - first], 2)))
            return [[(a.name, n.name) for a, n in map(tf.unstack, row)] for row in table]

    def _times(self, a: Number, b: Number) -> Number:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        return b if a == 1 else a if b == 1 else self._add('Mul', [a, b], T=tf.int32)

    def _add(self, op: str, numbers: Sequence[Number], **attrs: Any) -> str:
        return self.nodes.add(op, [self.tensor(n) for n in numbers], self.host, **attrs)
