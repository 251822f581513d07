"""What towers have, made whole: rows one after another, or partial results reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import relay

if TYPE_CHECKING:
    from .nodes import Nodes
    from .sharding import Sharding
    from .symbols import Size

_PAIRWISE = dict(max='Maximum', min='Minimum', prod='Mul', all='LogicalAnd', any='LogicalOr')
"""The op that combines two towers' results."""


def gather(
    sharding: Sharding, parts: Sequence[str], dtype: tf.DType, dims: list[Size], axis: int, to: str
) -> str:
    """All rows, in the batch's order, on a device: of towers' parts, and the whole's dimensions."""
    inputs = [*parts, sharding.tensor(axis)]
    joined = sharding.nodes.add('ConcatV2', inputs, to, T=dtype, N=len(parts), Tidx=tf.int32)
    if sharding.active is None:
        return joined
    # Towers without rows are the last.
    return sharding.cut(joined, dtype, len(dims), axis, (0, sharding.number(dims[axis])), to)


def reduce(sharding: Sharding, parts: Sequence[str], dtype: tf.DType, how: str, to: str) -> str:
    """What towers' partial results come to, on a device; `how` is a `Partial.reduce`."""
    if how == 'mean':
        return _mean(sharding, parts, dtype, to)
    nodes = sharding.nodes
    if sharding.active is not None:
        # The first has all rows there are, if there are fewer than two.
        parts, others = list(parts[:1]), parts[1:]
        for part, some, tower in zip(others, sharding.active[1:], sharding.devices[1:]):
            nothing = nodes.const(_neutral(how, dtype), dtype, tower)
            parts.append(nodes.add('SelectV2', [some, part, nothing], tower, T=dtype))
    # What another machine's towers have is combined there first, and sent once.
    groups: dict[str | int, list[str]] = {}
    for i, (part, tower) in enumerate(zip(parts, sharding.devices)):
        groups.setdefault(relay(sharding.devices, tower, to) or i, []).append(part)
    sent = [_combined(nodes, group, dtype, how, str(at)) for at, group in groups.items()]
    return _combined(nodes, sent, dtype, how, to)


def _combined(nodes: Nodes, parts: Sequence[str], dtype: tf.DType, how: str, to: str) -> str:
    """What some parts come to, on a device; one alone stays where it is."""
    if how == 'sum' and len(parts) > 1:
        return nodes.add('AddN', parts, to, T=dtype, N=len(parts))
    attrs = {} if dtype == tf.bool else {'T': dtype}
    result, *others = parts
    for part in others:
        result = nodes.add(_PAIRWISE[how], [result, part], to, **attrs)
    return result


def _mean(sharding: Sharding, parts: Sequence[str], dtype: tf.DType, to: str) -> str:
    """The towers' means, weighted by their rows; in float32 at least."""
    nodes = sharding.nodes
    wide = dtype if dtype.size > 2 else tf.float32
    weighted = []
    for part, rows, tower in zip(parts, sharding.counts, sharding.devices):
        given = [nodes.cast(part, dtype, wide, tower), sharding.tensor(rows, wide)]
        weighted.append(nodes.add('Mul', given, tower, T=wide))
    total = reduce(sharding, weighted, wide, 'sum', to)
    mean = nodes.add('RealDiv', [total, sharding.tensor(sharding.total, wide)], to, T=wide)
    return nodes.cast(mean, wide, dtype, to)


def _neutral(how: str, dtype: tf.DType) -> Any:
    """What changes nothing."""
    if how in ('max', 'min'):
        least, most = (-np.inf, np.inf) if dtype.is_floating else (dtype.min, dtype.max)
        return least if how == 'max' else most
    return {'sum': 0, 'prod': 1, 'all': True, 'any': False}[how]
