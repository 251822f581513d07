"""Where variables live; and ops that run once: at the variable that they serve, if any."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.devices import machine_of
from .plan import Plan

CPU, FIRST, SPREAD = CHOICES = ('cpu', 'first', 'spread')
_ROWS = 64  # stands for a dimension that isn't known
_ANYWHERE = (tf.string, tf.resource, tf.variant)  # These types' kernels aren't on every device.


def place(choice: str, devices: Sequence[str], before: Set[str]) -> None:
    """Puts a model's variables on devices, but for those that have one already.

    A variable under another's name goes with that: Adam's moments, say, be they slots or made by
    hand. What else has to be where a variable is follows by itself, as TensorFlow places it.
    """
    made = [v for v in tf.global_variables() + tf.local_variables() if v.op.name not in before]
    variables = [v for v in made if not v.device]
    names = {v.op.name for v in variables}
    groups: dict[str, list[Any]] = {}
    for variable in variables:
        groups.setdefault(_leader(variable, names), []).append(variable)
    sized = [(sum(map(bytes_of, group)), group) for group in groups.values()]
    load: Counter[str] = Counter()  # bytes, of devices and of machines
    for size, group in sorted(sized, key=lambda pair: -pair[0]):
        if choice == CPU:
            device = '/device:CPU:0'
        elif choice == FIRST or not any(variable.trainable for variable in group):
            device = devices[0]  # Counters, metrics, moving averages: towers don't need them.
        else:
            device = min(devices, key=lambda d: (load[d], load[machine_of(d)]))
        load[device] += size
        load[machine_of(device)] += size
        for variable in group:
            private.set_device(variable.op, device)


def _leader(variable: Any, names: set[str]) -> str:
    """Returns the name of the variable that another goes with: its own, if there is none."""
    own = variable.op.name
    groups = private.colocated_with(variable.op)
    parts = own.split('/')
    above = ['/'.join(parts[:i]) for i in range(1, len(parts))]
    return next((name for name in [*groups, *above] if name in names - {own}), own)


def settle(graph: tf.Graph, plan: Plan) -> dict[str, str]:
    """Moves ops that run once, if they may be moved; returns where tensors are made whole."""
    fixed = {op: _fixed(op, plan) for op in graph.get_operations() if op.name not in plan.ops}
    free = [op for op, home in fixed.items() if home is None]
    found = {op.name: home for op, home in fixed.items() if home}  # by names of ops and of tensors

    def follow(name: str, users: Sequence[tf.Operation]) -> None:
        """Puts what has no home yet where the first of its users is that has one."""
        if name not in found and (with_home := [user for user in users if user.name in found]):
            found[name] = found[min(with_home, key=private.number).name]

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
            private.free(op)
            private.set_device(op, found[op.name])
    return found


def home_of(op: tf.Operation) -> str | None:
    """An op's device, else that of the variable it uses, which may be ''; None if it uses none."""
    used = (t.op for t in op.inputs if t.dtype == tf.resource or private.is_reference(t))
    return op.device or next((variable.device for variable in used), None)


def _fixed(op: tf.Operation, plan: Plan) -> str | None:
    """The device of an op that can't be moved, '' if it isn't known; None if it can be."""
    if (home := home_of(op)) is not None:
        return home
    tensors = [*op.inputs, *op.outputs]
    special = any(t.dtype.base_dtype in _ANYWHERE or private.is_reference(t) for t in tensors)
    fixed = special or not op.outputs or private.in_control_flow(op)
    # It has to be with others, but for those that towers have copies of.
    return '' if fixed or any(name not in plan.ops for name in private.colocated_with(op)) else None


def bytes_of(tensor: Any) -> int:
    """The bytes of a tensor, or of a variable's value; as if there were 64 rows, where unknown."""
    first, *others = [None] if tensor.shape.rank is None else [*tensor.shape.as_list(), 1]
    known = [_ROWS if first is None else first, *(1 if d is None else d for d in others)]
    return math.prod(known) * (tensor.dtype.base_dtype.size or 1)
