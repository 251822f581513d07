"""Where ops that run once run: at the variable that they serve, else at their biggest input.

If all of them ran on the first device, each gradient that is clipped, and each variable that is
decayed, would be sent there and back.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.partition.plan import Plan

_ROWS = 64  # stands for a dimension that isn't known
_ANYWHERE = (tf.string, tf.resource, tf.variant)  # These types' kernels aren't on every device.


def homes(graph: tf.Graph, plan: Plan) -> dict[str, str]:
    """Chooses devices for ops that run once, and for what towers' tensors come to as a whole.

    Args:
      graph: the graph, its variables on their devices.
      plan: what runs in towers.

    Returns:
      Device strings by the names of ops and of tensors; for none of those that have a device, or
      have to be where another op is.
    """
    found: dict[str, str] = {}
    once = [op for op in graph.get_operations() if op.name not in plan.ops]
    fixed = {op.name: _fixed(op, plan) for op in once}

    def home(op: tf.Operation) -> str:
        return fixed.get(op.name) or found.get(op.name, '')

    for op in reversed(once):
        if fixed[op.name] is None:  # What becomes of a gradient is where its variable is.
            given = max(map(_bytes, op.inputs), default=0)
            for tensor in op.outputs:
                if _bytes(tensor) >= given:
                    _put(found, op.name, map(home, tensor.consumers()))
    for name in plan.placements:
        users = graph.get_tensor_by_name(name).consumers()
        _put(found, name, [home(user) for user in users if user.name not in plan.ops])
    for op in once:
        if fixed[op.name] is None and op.name not in found:
            inputs = sorted(op.inputs, key=_bytes, reverse=True)
            _put(found, op.name, (found.get(t.name) or home(t.op) for t in inputs[:1]))
    for name in plan.placements:
        users = graph.get_tensor_by_name(name).consumers()
        _put(found, name, [home(user) for user in users if user.name not in plan.ops])
    return found


def _put(found: dict[str, str], name: str, devices: object) -> None:
    device = next(filter(None, devices), None)  # type: ignore[call-overload]
    if device and name not in found:
        found[name] = device


def _fixed(op: tf.Operation, plan: Plan) -> str | None:
    """The device of an op that can't be moved, '' if it isn't known; None if it can be."""
    if op.device:
        return op.device
    for tensor in op.inputs:
        if tensor.dtype == tf.resource or private.is_reference(tensor):
            return tensor.op.device
    tensors = [*op.inputs, *op.outputs]
    fixed = any(t.dtype.base_dtype in _ANYWHERE or private.is_reference(t) for t in tensors)
    if fixed or not op.outputs or private.in_control_flow(op) or _others(op, plan):
        return ''
    return None


def _others(op: tf.Operation, plan: Plan) -> list[str]:
    """Ops that an op has to be with, but for those that towers have copies of."""
    return [name for name in private.colocated_with(op) if name not in plan.ops]


def _bytes(tensor: tf.Tensor) -> int:
    if tensor.shape.rank is None:
        return _ROWS
    size = tensor.dtype.size or 1
    for dim in tensor.shape.as_list():
        size *= _ROWS if dim is None else dim
    return size
