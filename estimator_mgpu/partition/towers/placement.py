"""On which device ops that run once run, and on which one sums and gathers are made.

That is the device of the variable that they serve: a gradient is summed where its variable lives.
`variables` decides where variables live.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.costs import bytes_of
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.tf_internals import graphs, private

_ANYWHERE = (tf.string, tf.resource, tf.variant)  # These types' kernels aren't on every device.


def place_ops(graph: tf.Graph, plan: Plan) -> dict[str, str]:
    """Moves ops that run once, if they may be moved; returns the devices of ops and full values."""
    fixed = {op: _fixed(op, plan) for op in graph.get_operations() if op.name not in plan.ops}
    free = [op for op, home in fixed.items() if home is None]
    found = {op.name: home for op, home in fixed.items() if home}  # by names of ops and of tensors

    def follow(name: str, users: Sequence[tf.Operation]) -> None:
        """Puts what has no home yet where the first of its users is that has one."""
        if name not in found and (with_home := [user for user in users if user.name in found]):
            found[name] = found[min(with_home, key=private.creation_index).name]

    def follow_wholes() -> None:
        for name in plan.placements:
            follow(name, graph.get_tensor_by_name(name).consumers())

    for op in reversed(free):  # What becomes of a gradient is where its variable is.
        given = max(map(bytes_of, op.inputs), default=0)
        for tensor in op.outputs:
            if bytes_of(tensor) >= given:
                follow(op.name, tensor.consumers())
    follow_wholes()
    for op in free:
        if op.name not in found and len(op.inputs):
            biggest = max(op.inputs, key=bytes_of)
            if home := found.get(biggest.name) or found.get(biggest.op.name):
                found[op.name] = home
    follow_wholes()
    for op in free:
        if op.name in found:
            private.clear_colocation(op)
            private.set_device(op, found[op.name])
    return found


def device_of(op: tf.Operation) -> str | None:
    """An op's device, else that of the variable it uses, which may be ''; None if it uses none."""
    used = (t.op for t in op.inputs if t.dtype == tf.resource or graphs.is_reference_variable(t))
    return op.device or next((variable.device for variable in used), None)


def _fixed(op: tf.Operation, plan: Plan) -> str | None:
    """The device of an op that can't be moved, '' if it isn't known; None if it can be."""
    if (home := device_of(op)) is not None:
        return home
    tensors = [*op.inputs, *op.outputs]
    special = any(
        t.dtype.base_dtype in _ANYWHERE or graphs.is_reference_variable(t) for t in tensors
    )
    fixed = special or not op.outputs or private.in_v1_control_flow(op)
    # It has to be with others, but for those that towers have copies of.
    return '' if fixed or any(name not in plan.ops for name in graphs.colocated_with(op)) else None
