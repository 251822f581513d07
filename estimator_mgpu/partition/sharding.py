"""The batch's rows over towers: who has how many, slices of what is whole, and sizes as tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Union

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import host_of
from estimator_mgpu.partition.nodes import Nodes
from estimator_mgpu.partition.plan import Local, Slice
from estimator_mgpu.partition.sizes import Rows, Size

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
      symbol: symbol(dimension or entry that isn't known, tower) -> reference to an int32 scalar
        that is it, for a tower or for the whole (None).

    Attributes:
      host: the CPU where sizes are.
      total: how many rows there are.
      counts: how many each tower has.
      active: whether each tower has any, a bool scalar; None if all have, always.
    """

    def __init__(
        self,
        rows: Rows,
        total: tf.Tensor | None,
        devices: Sequence[str],
        nodes: Nodes,
        symbol: Callable[[Any, Any], str],
    ):
        self._nodes = nodes
        self._symbol = symbol
        self._memo: dict[Hashable, Any] = {}
        self.host = host_of(devices[0])
        self.active: list[str] | None = None
        self.total: Number
        n = len(devices)
        if total is None:
            self.total = known = rows.static or 0
            counts = [known // n + (i < known % n) for i in range(n)]
            self.counts = self._sizes = list[Number](counts)
            self._starts = list[Number](sum(counts[:i]) for i in range(n))
            return
        scope = tf.name_scope(f'{nodes.scope}/rows/')
        with tf.control_dependencies(None), tf.device(self.host), scope:
            towers = tf.range(n)
            counts = total // n + tf.cast(towers < total % n, tf.int32)
            active = counts > 0
            starts = tf.cumsum(counts, exclusive=True)
            starts = tf.where(active, starts, tf.zeros_like(starts))
            sizes = tf.maximum(counts, tf.minimum(total, 1))
            columns = [tf.unstack(t) for t in (counts, starts, sizes, active)]
        self.total = nodes.outside(total)
        references = [[nodes.outside(t) for t in column] for column in columns]
        self.counts, self._starts, self._sizes = map(list[Number], references[:3])
        self.active = references[3]

    def start(self, factor: Size, tower: int) -> Number:
        """Where a tower's entries start, of a dimension with `factor` entries a row."""
        return self._times(self._starts[tower], self.number(factor, tower))

    def size(self, factor: Size, tower: int) -> Number:
        """How many entries a tower computes on, of a dimension with `factor` entries a row."""
        return self._times(self._sizes[tower], self.number(factor, tower))

    def number(self, size: Size, tower: int | None = None) -> Number:
        """A size: of the whole, or with a tower's own dimensions, but all rows."""
        if size.static is not None:
            return size.static
        factors: list[Number] = [
            self.total if isinstance(symbol, Rows) else self._symbol(symbol, tower)
            for symbol in size.symbols
        ]
        return functools.reduce(self._times, [size.number, *factors])

    def rows_of(
        self,
        whole: str,
        dtype: tf.DType,
        dims: Sequence[Size],
        slice_: Slice,
        tower: int,
        device: str,
    ) -> str:
        """A tower's rows of a whole tensor, taken on a device.

        If it isn't known whether the dimension with the rows is of size 1, which is as long as all
        rows by broadcasting, that is looked at in each step.
        """
        axis, factor = slice_
        start, size = self.start(factor, tower), self.size(factor, tower)
        if dims[axis].static is None and dims[axis].rows is None:
            one = self._add('Equal', [self.number(dims[axis], tower), 1], T=tf.int32)
            start = self._add('SelectV2', [one, 0, start], T=tf.int32)
            size = self._add('SelectV2', [one, 1, size], T=tf.int32)
        begin = self.vector([start if i == axis else 0 for i in range(len(dims))])
        sizes = self.vector([size if i == axis else -1 for i in range(len(dims))])
        return self._nodes.add('Slice', [whole, begin, sizes], device, T=dtype, Index=tf.int32)

    def local(self, need: Local, dtype: tf.DType, tower: int, scalar: bool = False) -> str:
        """A shape with a tower's rows."""
        own = self.size(need.factor, tower)
        if scalar:
            return self.scalar(own, dtype)
        numbers = [self.number(size, tower) for size in need.entries]
        return self.vector([*numbers[: need.position], own, *numbers[need.position + 1 :]], dtype)

    def scalar(self, number: Number, dtype: tf.DType = tf.int32) -> str:
        """An integer as a tensor."""
        if isinstance(number, int):
            return self._nodes.const(number, dtype, self.host)
        return self._cast(number, dtype)

    def vector(self, numbers: Sequence[Number], dtype: tf.DType = tf.int32) -> str:
        """A vector of integers."""
        if all(isinstance(n, int) for n in numbers):
            return self._nodes.const(list(numbers), dtype, self.host)
        return self._cast(self._add('Pack', numbers, T=tf.int32, N=len(numbers), axis=0), dtype)

    def _cast(self, number: str, dtype: tf.DType) -> str:
        return (
            number if dtype == tf.int32 else self._add('Cast', [number], SrcT=tf.int32, DstT=dtype)
        )

    def _times(self, a: Number, b: Number) -> Number:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        return b if a == 1 else a if b == 1 else self._add('Mul', [a, b], T=tf.int32)

    def _add(self, op: str, inputs: Sequence[Number], **attrs: Any) -> str:
        """Adds a node, unless there is one."""
        key = (op, *inputs, attrs.get('DstT'))
        if key not in self._memo:
            references = [self.scalar(n) if isinstance(n, int) else n for n in inputs]
            self._memo[key] = self._nodes.add(op, references, self.host, **attrs)
        return self._memo[key]
