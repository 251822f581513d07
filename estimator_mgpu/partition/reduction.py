"""What towers have, made whole: rows one after another, or partial results reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.nodes import Nodes
from estimator_mgpu.partition.sharding import Sharding
from estimator_mgpu.partition.sizes import Size

_PAIRWISE = {
    'max': 'Maximum',
    'min': 'Minimum',
    'prod': 'Mul',
    'all': 'LogicalAnd',
    'any': 'LogicalOr',
}
"""The op that combines two towers' results."""


class Reduction:
    """Makes nodes that gather and reduce.

    Args:
      nodes: where they go.
      sharding: how the rows are divided.
      devices: one a tower.
    """

    def __init__(self, nodes: Nodes, sharding: Sharding, devices: Sequence[str]):
        self._nodes = nodes
        self._sharding = sharding
        self._devices = devices

    def gather(
        self, parts: Sequence[str], dtype: tf.DType, dims: Sequence[Size], axis: int, device: str
    ) -> str:
        """All rows, in the batch's order.

        Args:
          parts: one tensor a tower.
          dtype: their type.
          dims: the dimensions of the whole.
          axis: the one that has the rows.
          device: where to.
        """
        n = len(parts)
        at = self._nodes.const(axis, tf.int32, self._sharding.host)
        joined = self._nodes.add('ConcatV2', [*parts, at], device, T=dtype, N=n, Tidx=tf.int32)
        if self._sharding.active is None:
            return joined
        # Towers without rows are the last.
        begin = self._sharding.vector([0] * len(dims))
        rows = self._sharding.number(dims[axis])
        size = self._sharding.vector([rows if i == axis else -1 for i in range(len(dims))])
        return self._nodes.add('Slice', [joined, begin, size], device, T=dtype, Index=tf.int32)

    def reduce(self, parts: Sequence[str], dtype: tf.DType, reduce: str, device: str) -> str:
        """What partial results come to.

        Args:
          parts: one tensor a tower.
          dtype: their type.
          reduce: as `Partial.reduce`.
          device: where to.
        """
        if reduce == 'mean':
            return self._mean(parts, dtype, device)
        parts = self._masked(parts, dtype, _neutral(reduce, dtype))
        if reduce == 'sum':
            return self._nodes.add('AddN', parts, device, T=dtype, N=len(parts))
        attrs = {} if dtype == tf.bool else {'T': dtype}
        result, *others = parts
        for part in others:
            result = self._nodes.add(_PAIRWISE[reduce], [result, part], device, **attrs)
        return result

    def _mean(self, parts: Sequence[str], dtype: tf.DType, device: str) -> str:
        """The towers' means, weighted by their rows; in float32 at least."""
        wide = dtype if dtype.size > 2 else tf.float32
        weighted = []
        for part, rows, tower in zip(parts, self._sharding.counts, self._devices):
            count = self._cast(self._sharding.scalar(rows), tf.int32, wide, tower)
            value = self._cast(part, dtype, wide, tower)
            weighted.append(self._nodes.add('Mul', [value, count], tower, T=wide))
        total = self.reduce(weighted, wide, 'sum', device)
        count = self._cast(self._sharding.scalar(self._sharding.total), tf.int32, wide, device)
        mean = self._nodes.add('RealDiv', [total, count], device, T=wide)
        return self._cast(mean, wide, dtype, device)

    def _cast(self, value: str, source: tf.DType, target: tf.DType, device: str) -> str:
        if source == target:
            return value
        return self._nodes.add('Cast', [value], device, SrcT=source, DstT=target)

    def _masked(self, parts: Sequence[str], dtype: tf.DType, neutral: object) -> list[str]:
        """The same, with what changes nothing for towers that have no row."""
        if self._sharding.active is None:
            return list(parts)
        # The first has all rows there are, if there are fewer than two.
        masked = [parts[0]]
        others = zip(parts[1:], self._sharding.active[1:], self._devices[1:])
        for part, active, device in others:
            other = self._nodes.const(neutral, dtype, device)
            masked.append(self._nodes.add('SelectV2', [active, part, other], device, T=dtype))
        return masked


def _neutral(reduce: str, dtype: tf.DType) -> Any:
    """What changes nothing."""
    if reduce in ('max', 'min'):
        if dtype.is_floating:
            return -np.inf if reduce == 'max' else np.inf
        return dtype.min if reduce == 'max' else dtype.max
    return {'sum': 0, 'prod': 1, 'all': True, 'any': False}[reduce]
