"""What towers have, made whole: rows one after another, or partial results reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.nodes import Nodes
from estimator_mgpu.partition.placements import Partial
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


def _neutral(reduce: str, dtype: tf.DType) -> Any:
    """What changes nothing."""
    if reduce in ('max', 'min'):
        if dtype.is_floating:
            return -np.inf if reduce == 'max' else np.inf
        return dtype.min if reduce == 'max' else dtype.max
    return {'sum': 0, 'prod': 1, 'all': True, 'any': False}[reduce]


def gather(
    nodes: Nodes,
    sharding: Sharding,
    parts: Sequence[str],
    tensor: tf.Tensor,
    rank: int,
    axis: int,
    factor: Size,
    device: str,
) -> str:
    """All rows, in the batch's order.

    Args:
      nodes: where nodes go.
      sharding: how the rows are divided.
      parts: one tensor a tower.
      tensor: what was divided.
      rank: how many dimensions it has.
      axis: the dimension that has the rows.
      factor: how many entries a row has there.
      device: where to.
    """
    at = nodes.const(axis, tf.int32, sharding.host)
    joined = nodes.add(
        'ConcatV2', [*parts, at], device, T=tensor.dtype, N=len(parts), Tidx=tf.int32
    )
    if sharding.active is None:
        return joined
    # Towers without rows are the last.
    begin = sharding.vector([0] * rank)
    size = sharding.vector([sharding.whole_size(factor) if i == axis else -1 for i in range(rank)])
    return nodes.add('Slice', [joined, begin, size], device, T=tensor.dtype, Index=tf.int32)


def reduce(
    nodes: Nodes,
    sharding: Sharding,
    parts: Sequence[str],
    tensor: tf.Tensor,
    placement: Partial,
    devices: Sequence[str],
    device: str,
) -> str:
    """What partial results come to.

    Args:
      nodes: where nodes go.
      sharding: how the rows are divided.
      parts: one tensor a tower.
      tensor: what was divided.
      placement: how they're reduced.
      devices: the towers'.
      device: where to.
    """
    dtype = tensor.dtype
    if placement.reduce == 'mean':
        return _mean(nodes, sharding, parts, dtype, devices, device)
    if placement.reduce == 'sum':
        parts = _masked(nodes, sharding, parts, dtype, _neutral('sum', dtype), devices)
        return nodes.add('AddN', parts, device, T=dtype, N=len(parts))
    neutral = _neutral(placement.reduce, dtype)
    result, *others = _masked(nodes, sharding, parts, dtype, neutral, devices)
    attrs = {} if dtype == tf.bool else {'T': dtype}
    for part in others:
        result = nodes.add(_PAIRWISE[placement.reduce], [result, part], device, **attrs)
    return result


def _mean(
    nodes: Nodes,
    sharding: Sharding,
    parts: Sequence[str],
    dtype: tf.DType,
    devices: Sequence[str],
    device: str,
) -> str:
    """The towers' means, weighted by their rows; in float32 at least."""
    wide = dtype if dtype.size > 2 else tf.float32

    def cast(value: str, source: tf.DType, target: tf.DType, where: str) -> str:
        if source == target:
            return value
        return nodes.add('Cast', [value], where, SrcT=source, DstT=target)

    weighted = []
    for part, rows, tower in zip(parts, sharding.counts, devices):
        count = cast(sharding.reference(rows), tf.int32, wide, tower)
        value = cast(part, dtype, wide, tower)
        weighted.append(nodes.add('Mul', [value, count], tower, T=wide))
    weighted = _masked(nodes, sharding, weighted, wide, 0, devices)
    total = nodes.add('AddN', weighted, device, T=wide, N=len(weighted))
    count = cast(sharding.reference(sharding.total), tf.int32, wide, device)
    return cast(nodes.add('RealDiv', [total, count], device, T=wide), wide, dtype, device)


def _masked(
    nodes: Nodes,
    sharding: Sharding,
    parts: Sequence[str],
    dtype: tf.DType,
    neutral: object,
    devices: Sequence[str],
) -> list[str]:
    """The same, with what changes nothing for towers that have no row."""
    if sharding.active is None:
        return list(parts)
    # The first has all rows there are, if there are fewer than two.
    masked = [parts[0]]
    for part, active, device in zip(parts[1:], sharding.active[1:], devices[1:]):
        other = nodes.const(neutral, dtype, device)
        masked.append(nodes.add('SelectV2', [active, part, other], device, T=dtype))
    return masked
