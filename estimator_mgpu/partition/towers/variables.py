"""Where variables live, by `replicate(variables=...)`: spread over the devices by default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import machine_of
from estimator_mgpu.partition.costs import bytes_of
from estimator_mgpu.tf_internals import graphs, private

CPU, FIRST, SPREAD = CHOICES = ('cpu', 'first', 'spread')


def place_variables(choice: str, devices: Sequence[str], before: Set[str]) -> None:
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
    groups = graphs.colocated_with(variable.op)
    parts = own.split('/')
    above = ['/'.join(parts[:i]) for i in range(1, len(parts))]
    return next((name for name in [*groups, *above] if name in names - {own}), own)
