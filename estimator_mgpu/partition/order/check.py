"""Checks that a changed graph touches state in the order of the graph that the model_fn has built.

The facts (`facts`) are noted once open pairs are decided, and calls and loops are taken apart. The
changed graph is only read: how it was made isn't known here. It's checked that

- nothing waits for itself, and no placeholder waits for anything;
- what reads or writes a variable still comes before and after what it came before and after, each
  tower's copy included, and what is sent to other devices is sent after the writes before it;
- each write runs once a step, and each result still runs all side effects that it ran;
- no op has to wait for what is in a branch that may not be taken;
- no tower waits for another one, but for a value, or for a write before its own read;
- a step that finds no batch writes nothing.

It's on in the tests, and where the environment variable ESTIMATOR_MGPU_CHECK is set to 1.

In: a finished graph, and what became of it. Out: an error that says what is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError
from typing import Any, Protocol

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import device_spec
from estimator_mgpu.partition.order.accesses import asks_for_value, makers_of_state, read_by_users
from estimator_mgpu.partition.order.facts import VARIABLE, Facts, names_of, read_state
from estimator_mgpu.tf_internals import graphs, op_types
from estimator_mgpu.tf_internals.liveness import Liveness
from estimator_mgpu.tf_internals.upstream import CertainWaits, union_of, upstream_bits

_SHOWN = 5  # problems in an error message


class AddedNames(Protocol):
    """Tells which ops were added: `nodes.names.Names`."""

    def copy_of(self, name: str) -> tuple[int, str] | None:
        """The number of the tower, and the name of the op that is copied; None for other ops."""

    def is_added(self, name: str) -> bool:
        """Whether it's the name of a copy or of another op that was added."""


class _NothingAdded:
    """As `AddedNames`, where there are no towers."""

    def copy_of(self, name: str) -> None:
        return None

    def is_added(self, name: str) -> bool:
        return False


def check(
    facts: Facts,
    graph: tf.Graph,
    results: Sequence[tf.Operation],
    names: AddedNames | None = None,
    devices: Sequence[str] = (),
    not_held: Sequence[tf.Operation] = (),
) -> None:
    """Raises RuntimeError if a changed graph doesn't touch state as it did.

    Args:
      results: the ops of what steps are run for now, in the order of those of the facts.
      names: tell which op is a copy of which; None if the graph has no towers.
      not_held: writes that don't wait for the batch, and should.
    """
    problems = list(_problems(facts, graph, results, names or _NothingAdded(), devices))
    problems += [f'{op.name} writes although there may be no batch.' for op in not_held]
    if problems:
        shown = '\n'.join(f'- {problem}' for problem in problems[:_SHOWN])
        more = len(problems) - _SHOWN
        raise RuntimeError(
            'The order in which the graph touches state has changed:\n'
            f'{shown}\n' + (f'- and {more} more.\n' if more > 0 else '') + 'Please report the '
            f'model. Without {VARIABLE} in the environment, it trains unchecked.'
        )


def _problems(
    facts: Facts,
    graph: tf.Graph,
    results: Sequence[tf.Operation],
    names: AddedNames,
    devices: Sequence[str],
) -> Iterator[str]:
    try:
        order = graphs.topological_order(graph.get_operations())
    except CycleError as error:
        yield f'These wait for each other: {" -> ".join(op.name for op in error.args[1])}.'
        return
    changed = _Changed(facts, graph, order, results, names, devices)
    yield from _unordered(facts, changed)
    yield from _sent_too_early(facts, changed)
    yield from _repeated_or_lost(facts, changed, results)
    yield from _may_not_run(facts, changed)
    yield from _fed(facts, changed)
    yield from _other_towers(facts, changed)


class _Changed:
    """A changed graph.

    Args:
      facts: of the graph, as it was.
      graph: as it is now.
      order: its ops, as `topological_order` gives them.
      results: the ops of what steps are run for now.
      names: tell which op is a copy of which.

    Attributes:
      ops: those that steps run, each after those that it waits for, and with these.
      instances: by the name of an op that touches state, the ops that do what it did.
      waited_for: the bits of the instances that have run whenever an op has.
      bits: of each instance.
      has_towers: whether there are towers, rather than one device.
      liveness: of the graph.
    """

    def __init__(
        self,
        facts: Facts,
        graph: tf.Graph,
        order: Mapping[tf.Operation, graphs.Inputs],
        results: Sequence[tf.Operation],
        names: AddedNames,
        devices: Sequence[str],
    ):
        self._facts = facts
        self._names = names
        self.liveness = Liveness(graph.get_operations())
        step = graphs.ancestors(results)
        self.ops = {op: befores for op, befores in order.items() if op in step}
        self._results = set(results)
        self.behind = read_by_users(graph, self.ops)

        self.instances = defaultdict[str, list[tf.Operation]](list)
        for op in self.ops:
            for original in self._originals(op):
                self.instances[original].append(op)
        for name, instances in self.instances.items():
            # Beside its copies, a loop may give the number of its steps, which reads nothing.
            copies = [op for op in instances if op.name != name]
            if copies and any(op.type in op_types.FUNCTION_CALLERS for op in instances):
                instances[:] = copies
        self.bits: dict[tf.Operation, int] = {}
        for instances in self.instances.values():
            for op in instances:
                self.bits.setdefault(op, 1 << len(self.bits))
        certain = CertainWaits(self.liveness, self.bits)
        self.waited_for = upstream_bits(self.ops, self.bits, certain)

        self.has_towers = bool(devices)
        self._devices = devices

    def tower(self, op: tf.Operation) -> int | None:
        """The number of the tower whose copy an op is."""
        copy = self._names.copy_of(op.name)
        # A `NoOp` waits on behalf of others, so these are looked at.
        return None if copy is None or op.type == op_types.NO_OP else copy[0]

    def towers_with(self, tower: int) -> int:
        """The towers that share a device with one, its micro-batches, as bits."""
        device = self._devices[tower]
        return sum(1 << number for number, other in enumerate(self._devices) if other == device)

    def is_added(self, op: tf.Operation) -> bool:
        """Whether an op was added, and is no copy."""
        return self._names.is_added(op.name) and self.tower(op) is None

    def device(self, op: tf.Operation) -> Any:
        """An op's device; the first tower's, if it isn't said."""
        return device_spec(op.device or self._devices[0])

    def is_gate(self, op: tf.Operation) -> bool:
        """Whether an op is the gate of a micro-batch, which waits for the one before it."""
        return self.is_added(op) and op.name.rpartition('/')[2].startswith('gate_')

    def original(self, op: tf.Operation) -> str:
        """The name of the op that one stands for: itself, or the one of which it's a copy."""
        copy = self._names.copy_of(op.name)
        name = op.name if copy is None else copy[1]
        if name in self._facts.names:
            return name
        scope, _, rest = name.partition('/')
        # Forward ops that are computed again have their names within such a scope.
        return rest if scope.split('_')[0] == 'recompute' and rest else name

    def _originals(self, op: tf.Operation) -> list[str]:
        """The names of the ops for which one touches state; none if it doesn't."""
        facts = self._facts
        name = self.original(op)
        if name in facts.names:
            changes_state = name in facts.written or name in facts.effects
            return [name] if changes_state or self._reads(op) else []
        # A read that was added serves the copies that use its value.
        if op.type in op_types.VALUE_READS or op.type == op_types.DEEP_COPY:
            users = map(self.original, self._users(op))
            return [name for name in users if name in facts.before]
        return []

    def _reads(self, op: tf.Operation) -> bool:
        """Whether an op reads state as it did, and somebody sees what it reads.

        Nobody does if others only wait for the op, or ask for the shape of what it gives.
        """
        if self.original(op) not in self._facts.read or not any(read_state(op, self.behind)):
            return False
        users = [user for output in op.outputs for user in output.consumers()]
        return op in self._results or any(map(asks_for_value, users))

    def _users(self, op: tf.Operation) -> Iterator[tf.Operation]:
        """The copies and the user's ops that use what an added op gives."""
        for output in op.outputs:
            for user in output.consumers():
                if self.tower(user) is None and user.type in (op_types.IDENTITY, *op_types.ENTER):
                    yield from self._users(user)
                elif user.type in op_types.ENTER:
                    yield from user.outputs[0].consumers()
                else:
                    yield user


def _unordered(facts: Facts, changed: _Changed) -> Iterator[str]:
    """Pairs that touch the same state, and have lost their order."""
    for second, before in facts.before.items():
        for later in changed.instances.get(second, ()):
            tower = changed.tower(later)
            own = names_of(makers_of_state(later.inputs))
            for first, both_use in before.items():
                # An added read reads only one of the variables that the user's op reads.
                here = both_use & own if changed.is_added(later) else both_use
                for earlier in changed.instances.get(first, ()):
                    is_of_tower = changed.tower(earlier) == tower
                    states = here if is_of_tower else here - facts.local_state
                    if states and not changed.waited_for[later] & changed.bits[earlier]:
                        shared = ' and '.join(sorted(states))
                        yield f'{later.name} no longer waits for {earlier.name}: both use {shared}.'


def _sent_too_early(facts: Facts, changed: _Changed) -> Iterator[str]:
    """Values of reference variables that are sent to another device before a write."""
    for second, instances in changed.instances.items():
        writes = {
            first: facts.written[first] & facts.read.get(second, set())
            for first in facts.before[second]
            if first in facts.written
        }
        for later in instances:
            for operand in later.inputs:
                read = _sent(operand, later, changed)
                if read is None:
                    continue
                variables = {v.name for v in changed.behind.get(read.outputs[0].name, ())}
                for first, written in writes.items():
                    for write in changed.instances.get(first, ()) if written & variables else ():
                        if not changed.waited_for[read] & changed.bits[write]:
                            yield (
                                f'{later.name} is sent what {read.name} reads before '
                                f'{write.name}, after which it has to be read.'
                            )


def _sent(operand: tf.Tensor, user: tf.Operation, changed: _Changed) -> tf.Operation | None:
    """The read of a reference variable whose value an op on another device is sent."""
    op = operand.op
    # What was added on the way, such as a pack, was computed when the read was sent.
    while (changed.is_added(op) or op.type in op_types.ENTER) and op.inputs:
        op = op.inputs[0].op
    if operand.dtype == tf.resource or not op.outputs or not changed.has_towers:
        return None
    variables = _lies_in(op.outputs[0])
    if not variables or graphs.is_reference_variable(op.outputs[0]):
        return None
    devices = {changed.device(variable) for variable in variables}
    return None if changed.device(user) in devices else op


def _lies_in(tensor: tf.Tensor) -> list[tf.Operation]:
    """The reference variables in one of whose memory a tensor lies for certain."""
    found: list[tf.Operation] = []
    views = [tensor]
    seen: set[str] = set()
    while views:
        view = views.pop()
        if view.op.type in op_types.REFERENCE_VARIABLES:
            found.append(view.op)
        elif view.name not in seen and view.op.type in (*op_types.VIEWS, *op_types.FORWARDS):
            seen.add(view.name)
            views += view.op.inputs if view.op.type in op_types.MERGE else view.op.inputs[:1]
    return found


def _repeated_or_lost(
    facts: Facts, changed: _Changed, results: Sequence[tf.Operation]
) -> Iterator[str]:
    """Writes that don't run exactly once, and side effects that results no longer run."""
    for writer in sorted(facts.writers - facts.in_loops):
        instances = changed.instances.get(writer, [])
        if len(instances) > 1:
            yield f'{writer} writes {len(instances)} times a step: {_listed(instances)}.'

    if len(results) != len(facts.of_results):
        yield f'There were {len(facts.of_results)} results, and now there are {len(results)}.'
    for result, effects in zip(results, facts.of_results):
        needed = graphs.ancestors([result])
        for effect in sorted(effects):
            if not any(op in needed for op in changed.instances.get(effect, ())):
                yield f'{result.name} no longer runs {effect}, which has a side effect.'


def _may_not_run(facts: Facts, changed: _Changed) -> Iterator[str]:
    """Ops that wait for what is in a branch that may not be taken, and didn't."""
    for op in changed.ops:
        name = changed.original(op)
        if name not in facts.names or name in facts.may_be_dead:
            continue
        if changed.liveness.may_be_dead(op):
            dead = [b for b in graphs.direct_inputs(op) if changed.liveness.may_be_dead(b)]
            yield f'{op.name} waits for {_listed(dead)}, in a branch that may not be taken.'


def _fed(facts: Facts, changed: _Changed) -> Iterator[str]:
    """Placeholders that wait for something: TensorFlow drops what they wait for."""
    for op in changed.ops:
        if op.type not in op_types.PLACEHOLDERS or op.name in facts.waiting_placeholders:
            continue
        if op.control_inputs:
            yield f'{op.name} may be fed, so it cannot wait for {_listed(op.control_inputs)}.'


def _other_towers(facts: Facts, changed: _Changed) -> Iterator[str]:
    """Copies that wait for other towers, but for no value, nor to read what is written before."""
    behind = _towers_behind(changed)
    for op in changed.ops:
        tower = changed.tower(op)
        name = changed.original(op)
        if tower is None or name in facts.in_loops or name in facts.may_be_dead:
            continue
        of_values = union_of(behind[operand.op] for operand in op.inputs)
        for before in op.control_inputs:
            if changed.tower(before) == tower or changed.is_gate(before):
                continue  # The other one needs a value, or is of an earlier micro-batch.
            others = behind[before] & ~changed.towers_with(tower) & ~of_values
            if others and not _has_to_wait(op, before, facts, changed):
                yield f'{op.name} waits for {before.name}, which waits for another tower.'


def _towers_behind(changed: _Changed) -> dict[tf.Operation, int]:
    """The towers of the copies that each op is made of, as bits; of a copy, its own."""
    behind: dict[tf.Operation, int] = {}
    for op, befores in changed.ops.items():
        tower = changed.tower(op)
        if tower is None:
            behind[op] = union_of(behind.get(before, 0) for before in befores)
        else:
            behind[op] = 1 << tower
    return behind


def _has_to_wait(op: tf.Operation, before: tf.Operation, facts: Facts, changed: _Changed) -> bool:
    """Whether an op reads what something before another op, or that itself, writes."""
    writes = 0
    for write in facts.writes_before.get(changed.original(op), ()):
        for instance in changed.instances.get(write, ()):
            writes |= changed.bits[instance]
    return bool(changed.waited_for[before] & writes)


def _listed(ops: Sequence[tf.Operation]) -> str:
    names = [op.name for op in ops[:3]]
    return ', '.join(names) + (' ...' if len(ops) > 3 else '')
