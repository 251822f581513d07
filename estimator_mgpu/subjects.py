"""What gradients are taken with respect to: weights, which are the same on all towers, or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import sharing
from estimator_mgpu.rows import ELEMENTWISE
from estimator_mgpu.towers import Towers
from estimator_mgpu.walks import inputs, walk


def is_variable(x: Any) -> bool:
    """Whether something is a variable, or a plain read of one."""
    if isinstance(x, tf.Tensor):
        return sharing.is_handle(x) or sharing.is_plain_read(x.op)
    return isinstance(x, tf.Variable) or hasattr(x, 'handle')


def are_weights(towers: Towers, xs: Sequence[Any]) -> list[bool]:
    """Tells of each of `xs` whether all towers have the same, so that gradients are summed.

    That's a variable, and whatever else doesn't depend on the shard: a weight that was normalized
    or cast, the parts of a variable put together, a read of one made by hand.
    """
    found = [is_variable(x) for x in xs]
    if not all(found):
        dependents = towers.dependents()
        found = [known or _is_weight(towers, x, dependents) for known, x in zip(found, xs)]
    return found


def _is_weight(towers: Towers, x: Any, dependents: set[str]) -> bool:
    if not isinstance(x, tf.Tensor) or x.graph is not towers.graph or x.op.name in dependents:
        return False
    if any(sharing.makes_handle(op) for op in walk([x.op], inputs)):
        return True
    return not _is_of_rows(towers, x)


def _is_of_rows(towers: Towers, x: tf.Tensor) -> bool:
    """Whether a constant or noise of a shard's static size is combined with its rows."""
    rows = towers.rows()
    if rows.static is None or not x.shape.rank or x.shape.as_list()[0] != rows.static:
        return False
    waiting, seen = [x], set()
    while waiting:
        tensor = waiting.pop()
        for op in tensor.consumers():
            if op.name in seen or op.type not in ELEMENTWISE:
                continue
            seen.add(op.name)
            if any(rows.axis(t) == 0 and t.shape.rank == x.shape.rank for t in op.inputs):
                return True
            waiting += op.outputs
    return False
