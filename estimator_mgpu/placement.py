"""Where variables live."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private

CPU, FIRST, SPREAD = CHOICES = ('cpu', 'first', 'spread')


def place(graph: tf.Graph, choice: str, devices: Sequence[str], before: Set[str]) -> None:
    """Puts a model's variables on devices, but for those that have one already.

    A variable under another's name goes with that: Adam's moments, say, be they slots or made by
    hand. What else has to be where a variable is follows by itself, as TensorFlow places it.
    """
    keys = (tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.LOCAL_VARIABLES)
    variables = [v for key in keys for v in graph.get_collection(key)]
    variables = [v for v in variables if not v.device and v.op.name not in before]
    names = {v.op.name for v in variables}
    groups: dict[str, list[Any]] = {}
    for variable in variables:
        groups.setdefault(_leader(variable, names), []).append(variable)
    sizes = {leader: sum(map(bytes_of, group)) for leader, group in groups.items()}
    load = dict.fromkeys(devices, 0)  # bytes
    for leader in sorted(sizes, key=lambda leader: -sizes[leader]):
        group = groups[leader]
        if choice == CPU:
            device = '/device:CPU:0'
        elif choice == FIRST or not any(variable.trainable for variable in group):
            device = devices[0]  # Counters, metrics, moving averages: towers don't need them.
        else:
            device = min(load, key=lambda device: load[device])
        load[device] = load.get(device, 0) + sizes[leader]
        for variable in group:
            private.set_device(variable.op, device)


def _leader(variable: Any, names: set[str]) -> str:
    """Returns the name of the variable that another goes with: its own, if there is none."""
    own = variable.op.name
    groups = private.colocated_with(variable.op)
    parts = own.split('/')
    above = ['/'.join(parts[:i]) for i in range(1, len(parts))]
    return next((name for name in [*groups, *above] if name in names - {own}), own)


def bytes_of(variable: Any) -> int:
    """The bytes of a variable's value; 0 if its shape is unknown."""
    return (variable.shape.num_elements() or 0) * variable.dtype.base_dtype.size
