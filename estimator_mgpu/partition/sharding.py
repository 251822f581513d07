"""The batch's rows over towers: who has how many, and slices of what is whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Union

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import host_of
from estimator_mgpu.partition.nodes import Nodes
from estimator_mgpu.partition.sizes import ONE, Rows, Size

Number = Union[int, str]
"""An integer that is known, or what an int32 scalar tensor is referred to by."""


class Sharding:
    """How rows are divided: as evenly as can be, the larger shards first.

    A tower that has no row, as there are fewer rows than towers, computes on the first row instead,
    so that it has something to compute on, and is left out where towers meet. Of an empty batch,
    all towers have none.

    Args:
      rows: which rows.
      total: how many there are, an int32 scalar; None if `rows` knows.
      devices: one a tower.
      nodes: where nodes go.
      scalar: scalar(size, tower) -> reference to an int32 scalar that is the size: for a tower
        (its own dimensions, but all rows), or the whole (None).

    Attributes:
      counts: how many rows each tower has, an int or an int32 scalar.
      active: whether each tower has any, a bool scalar; None if all have, always.
    """

    def __init__(
        self,
        rows: Rows,
        total: tf.Tensor | None,
        devices: Sequence[str],
        nodes: Nodes,
        scalar: Callable[[Size, Any], str],
    ):
        self._nodes = nodes
        self._scalar = scalar
        self._memo: dict[Hashable, Any] = {}
        self.host = host_of(devices[0])
        n = len(devices)
        self.active: list[str] | None = None
        self.counts: list[Number] = []
        self._starts: list[Number] = []
        self._sizes: list[Number] = []
        self.total: Number
        if total is None:
            self.total = known = rows.static or 0
            counts = [known // n + (i < known % n) for i in range(n)]
            self.counts = self._sizes = list[Number](counts)
            self._starts = [sum(counts[:i]) for i in range(n)]
            return
        scope = tf.name_scope(f'{nodes.scope}/rows/')
        with tf.control_dependencies(None), tf.device(self.host), scope:
            towers = tf.range(n)
            rows_each = total // n + tf.cast(towers < total % n, tf.int32)
            active = rows_each > 0
            starts = tf.cumsum(rows_each, exclusive=True)
            starts = tf.where(active, starts, tf.zeros_like(starts))
            sizes = tf.maximum(rows_each, tf.minimum(total, 1))
            columns = [tf.unstack(t) for t in (rows_each, starts, sizes, active)]
        self.total = nodes.outside(total)
        references = [[nodes.outside(t) for t in column] for column in columns]
        self.counts, self._starts, self._sizes = map(list[Number], references[:3])
        self.active = references[3]

    def start(self, factor: Size, tower: int) -> Number:
        """Where a tower's entries start, of a dimension with `factor` entries a row."""
        return self._times(self._starts[tower], factor, tower)

    def size(self, factor: Size, tower: int) -> Number:
        """How many entries a tower computes on, of a dimension with `factor` entries a row."""
        return self._times(self._sizes[tower], factor, tower)

    def rows_of(
        self,
        whole: str,
        dtype: tf.DType,
        dims: Sequence[Size],
        axis: int,
        factor: Size,
        tower: int,
        device: str,
    ) -> str:
        """A tower's rows of a whole tensor.

        Args:
          whole: the tensor.
          dtype: its type.
          dims: its dimensions. If it isn't known whether the one with the rows is of size 1, which
            is as long as all rows by broadcasting, that is looked at in each step.
          axis: the dimension that has the rows.
          factor: how many entries a row has there.
          tower: which.
          device: where to take them.
        """
        start = self.start(factor, tower)
        size = self.size(factor, tower)
        key: tuple[Any, ...] = ('slice', len(dims), axis, factor, tower)
        if self._may_be_one(dims[axis]):
            start, size = self._unless_one(dims[axis], start, size)
            key = (*key, dims[axis])
        if key not in self._memo:
            begin = [start if i == axis else 0 for i in range(len(dims))]
            sizes = [size if i == axis else -1 for i in range(len(dims))]
            self._memo[key] = self.vector(begin), self.vector(sizes)
        return self._nodes.add('Slice', [whole, *self._memo[key]], device, T=dtype, Index=tf.int32)

    def vector(self, numbers: Sequence[Number], dtype: tf.DType = tf.int32) -> str:
        """A vector of integers."""
        if all(isinstance(n, int) for n in numbers):
            return self._nodes.const(list(numbers), dtype, self.host)
        parts = [
            n if isinstance(n, str) else self._nodes.const(n, tf.int32, self.host) for n in numbers
        ]
        packed = self._nodes.add('Pack', parts, self.host, T=tf.int32, N=len(parts), axis=0)
        if dtype == tf.int32:
            return packed
        return self._nodes.add('Cast', [packed], self.host, SrcT=tf.int32, DstT=dtype)

    def whole_size(self, factor: Size) -> Number:
        """How many entries all rows have."""
        return self._times(self.total, factor, None)

    def reference(self, number: Number) -> str:
        """An int32 scalar tensor."""
        return number if isinstance(number, str) else self._nodes.const(number, tf.int32, self.host)

    def _times(self, number: Number, factor: Size, tower: int | None) -> Number:
        if isinstance(number, int) and factor.static is not None:
            return number * factor.static
        if factor == ONE:
            return number
        key = ('times', number, factor, tower)
        if key not in self._memo:
            inputs = [self.reference(number), self._scalar(factor, tower)]
            self._memo[key] = self._nodes.add('Mul', inputs, self.host, T=tf.int32)
        return self._memo[key]

    @staticmethod
    def _may_be_one(dim: Size) -> bool:
        return dim.static is None and dim.rows is None

    def _unless_one(self, dim: Size, start: Number, size: Number) -> tuple[str, str]:
        """Start and size of rows, or 0 and 1 where the dimension is of size 1."""
        key = ('one', dim, start, size)
        if key not in self._memo:
            one = self._nodes.const(1, tf.int32, self.host)
            zero = self._nodes.const(0, tf.int32, self.host)
            inputs = [self._scalar(dim, None), one]
            is_one = self._nodes.add('Equal', inputs, self.host, T=tf.int32)
            self._memo[key] = tuple(
                self._nodes.add('SelectV2', [is_one, a, self.reference(b)], self.host, T=tf.int32)
                for a, b in ((zero, start), (one, size))
            )
        return self._memo[key]
