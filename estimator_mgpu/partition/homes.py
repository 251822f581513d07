"""Where ops that run once run: at the variable that they serve, else at their biggest input."""

from __future__ import annotations

import math
from collections.abc import Iterable

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from .plan import Plan

_ROWS = 64  # stands for a dimension that isn't known
_ANYWHERE = (tf.string, tf.resource, tf.variant)  # These types' kernels aren't on every device.


def settle(graph: tf.Graph, plan: Plan) -> dict[str, str]:
    """Moves ops that run once, but those that have a device, or have to be where another op is.

    Returns, by the names of tensors, where what towers have of them is made whole.
    """
    once = [op for op in graph.get_operations() if op.name not in plan.ops]
    fixed = {op.name: _fixed(op, plan) for op in once}
    free = [op for op in once if fixed[op.name] is None]
    found: dict[str, str] = {}  # by the names of ops and of tensors

    def home(op: tf.Operation) -> str:
        return fixed.get(op.name) or found.get(op.name, '')

    def put(name: str, devices: Iterable[str]) -> None:
        device = next(filter(None, devices), None)
        if device:
            found.setdefault(name, device)

    def put_wholes() -> None:
        for name in plan.placements:
            put(name, map(home, graph.get_tensor_by_name(name).consumers()))

    for op in reversed(free):  # What becomes of a gradient is where its variable is.
        given = max(map(_bytes, op.inputs), default=0)
        for tensor in op.outputs:
            if _bytes(tensor) >= given:
                put(op.name, map(home, tensor.consumers()))
    put_wholes()
    for op in free:
        if op.name not in found and len(op.inputs):
            biggest = max(op.inputs, key=_bytes)
            put(op.name, [found.get(biggest.name) or home(biggest.op)])
    put_wholes()
    for op in free:
        if op.name in found:
            private.free(op)
            private.set_device(op, found[op.name])
    return found


def _fixed(op: tf.Operation, plan: Plan) -> str | None:
    """The device of an op that can't be moved, '' if it isn't known; None if it can be."""
    if op.device:
        return op.device
    for tensor in op.inputs:
        if tensor.dtype == tf.resource or private.is_reference(tensor):
            return tensor.op.device
    tensors = [*op.inputs, *op.outputs]
    special = any(t.dtype.base_dtype in _ANYWHERE or private.is_reference(t) for t in tensors)
    if special or not op.outputs or private.in_control_flow(op):
        return ''
    # It has to be with others, but for those that towers have copies of.
    return '' if any(name not in plan.ops for name in private.colocated_with(op)) else None


def _bytes(tensor: tf.Tensor) -> int:
    if tensor.shape.rank is None:
        return _ROWS
    dims = [_ROWS if dim is None else dim for dim in tensor.shape.as_list()]
    return math.prod(dims) * (tensor.dtype.size or 1)
