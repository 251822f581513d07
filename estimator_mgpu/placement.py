"""Where variables live."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private, sharing
from estimator_mgpu.devices import spec_of

CPU, FIRST, SPREAD = CHOICES = ('cpu', 'first', 'spread')


def check(choice: str) -> str:
    """Returns the choice, if it's a legal one.

    >>> check('spread')
    'spread'

    Raises:
      ValueError: if it's none of 'cpu', 'first' and 'spread'.
    """
    if choice not in CHOICES:
        raise ValueError(
            f"variables={choice!r} is no place for variables: it's 'spread' (over the devices, by "
            "bytes), 'first' (the first device) or 'cpu'."
        )
    return choice


class Placement:
    """Puts a model's variables on devices, together with the ops that have to be where they are.

    A variable under another's name goes with that: Adam's moments, say, be they slots or made by
    hand. What the user has put on another device than tower 0's stays there.

    Args:
      choice: 'cpu', 'first' or 'spread'.
      devices: one device a tower.
    """

    def __init__(self, choice: str, devices: Sequence[str]):
        self._choice = choice
        self._home = devices[0]
        self._load = dict.fromkeys(devices, 0)  # bytes
        self._places: dict[str, str] = {}  # devices, by the names of variables' ops
        self._settled = False
        self._homes: dict[str, bool] = {}  # whether device strings mean tower 0's device

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The scope to build the model in."""
        if self._choice == FIRST:
            yield
            return
        with tf.variable_creator_scope(self._create):
            yield

    def settle(self, graph: tf.Graph) -> None:
        """Places all variables that are there by now, the largest first; others as they come."""
        if self._choice != FIRST and not self._settled:
            self._settled = True
            variables = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
            self._place(variables, graph)

    def _create(self, create: Callable[..., Any], **options: Any) -> Any:
        graph = private.outermost(tf.get_default_graph())
        variable = create(**options)
        if self._settled and self._is_home(variable):
            self._place([variable], graph)
        return variable

    def _place(self, variables: Sequence[Any], graph: tf.Graph) -> None:
        """Chooses devices for variables, and moves what isn't there."""
        groups: dict[str, list[Any]] = {}
        names = {_name(v) for v in variables if self._is_home(v)} | set(self._places)
        for variable in variables:
            if self._is_home(variable):
                groups.setdefault(_leader(variable, names), []).append(variable)
        moved = {}
        sizes = {leader: sum(map(bytes_of, group)) for leader, group in groups.items()}
        for leader in sorted(sizes, key=lambda leader: -sizes[leader]):
            device = self._places.get(leader) or self._choose(groups[leader])
            if device in self._load:
                self._load[device] += sizes[leader]
            for name in (leader, *map(_name, groups[leader])):
                self._places[name] = device
                if device != self._home:
                    moved[name] = device
        if moved:
            self._move(moved, graph)

    def _choose(self, group: Sequence[Any]) -> str:
        """Returns the device for a variable and what goes with it."""
        if self._choice == CPU:
            return '/device:CPU:0'
        if not any(variable.trainable for variable in group):
            return self._home  # Counters, moving averages: towers don't need them.
        return min(self._load, key=lambda device: self._load[device])

    def _move(self, moved: dict[str, str], graph: tf.Graph) -> None:
        """Gives its device to what has to be where a variable is, or where such an op is."""
        for op in graph.get_operations():
            if not self._is_home(op):
                continue
            names = {group.decode()[len('loc:@') :] for group in op.colocation_groups()}
            if sharing.stays_with_variable(op):
                names |= sharing.shared_handles(op)
            for name in names & moved.keys():
                private.set_device(op, moved[name])
                moved[op.name] = moved[name]

    def _is_home(self, where: Any) -> bool:
        """Whether an op or a variable is on tower 0's device."""
        device = where.device
        if device not in self._homes:
            try:
                self._homes[device] = spec_of(device) == spec_of(self._home)
            except ValueError:  # Copying says which op has no legal device.
                self._homes[device] = False
        return self._homes[device]


def _name(variable: Any) -> str:
    return variable.op.name


def _leader(variable: Any, names: set[str]) -> str:
    """Returns the name of the variable that another goes with: its own, if there is none."""
    own = _name(variable)
    groups = [group.decode()[len('loc:@') :] for group in variable.op.colocation_groups()]
    parts = own.split('/')
    above = ['/'.join(parts[:i]) for i in range(1, len(parts))]
    return next((name for name in [*groups, *above] if name in names - {own}), own)


def bytes_of(variable: Any) -> int:
    return (variable.shape.num_elements() or 0) * variable.dtype.base_dtype.size
