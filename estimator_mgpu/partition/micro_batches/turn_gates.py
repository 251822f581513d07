"""Gates: what lets the chained ops of a turn wait for the turn before.

The towers of a device are a chain: a turn begins when the turn before has left nothing but its
results, such as a running sum of each gradient. Until then, its ops wait for a *gate*:

    before the chain      turn 0                     turn 1

                          slice        +---> gate -> slice
                            |          |               |
    longest sequence -----> forward    |             forward
                            |          |               |
                            backward   |             backward
                            |          |               |
                            gradient --+-------------> running sum --> after the chain

In: the units of a step, and the `Schedule` that says which of them are chained. Out: the gates, and
nodes that wait for them.
"""

from __future__ import annotations

from collections import defaultdict

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.micro_batches.edges import StepUnits, Unit, op_name
from estimator_mgpu.partition.micro_batches.schedule import Schedule
from estimator_mgpu.partition.tower import Tower
from estimator_mgpu.tf_internals import op_types


def add_gates(step: StepUnits, schedule: Schedule) -> None:
    """Adds gates: each turn's ops wait until the turn before has left its results."""
    results = _results_of_turns(step, schedule)
    deadness = _Deadness(step)
    gates: dict[int, str] = {}  # as control inputs, by the number of the tower that waits
    for tower in step.towers:
        if tower.turn > 0:
            # If a gate waited for what is in a branch that isn't taken, no later turn would run.
            names = results.get(tower.number - 1, [])
            always_alive = [name for name in names if not deadness.may_be_dead(name)]
            gate = step.builder.gate(tower.number, always_alive, tower.device)
            gates[tower.number] = f'^{gate}'

    slices = _slices_of_turns(step, schedule)
    for unit in step.order:
        if unit.tower not in gates or unit.name not in schedule.chained:
            continue
        # The slices that a copy uses wait, so that they take no memory before the turn. A copy
        # without any waits itself, unless it uses what another copy of its turn gives.
        waiting = slices.get(unit, [])
        if not waiting and not _follows_in_turn(unit, step, schedule):
            waiting = step.enters(unit)
        for name in waiting:
            node = step.nodes[name]
            if gates[unit.tower] not in node.input:
                node.input.append(gates[unit.tower])


class _Deadness:
    """Tells which nodes may be in a v1 branch that isn't taken."""

    def __init__(self, step: StepUnits):
        self._step = step
        self._liveness = step.division.order.liveness
        self._known: dict[str, bool] = {}

    def may_be_dead(self, name: str) -> bool:
        """Whether a node may be dead: one of the user's, a copy, or one that is made of these."""
        # There may be hundreds of turns, and a running sum is made of that of the turn before. That
        # one is known already, as turns are asked for in order: so the recursion isn't deep.
        if name not in self._known:
            users_op = self._users_op(name)
            if users_op is not None:
                self._known[name] = self._liveness.may_be_dead(users_op)
            else:
                operands = self._step.nodes[name].input
                self._known[name] = any(map(self._operand_may_be_dead, operands))
        return self._known[name]

    def _operand_may_be_dead(self, operand: str) -> bool:
        """Whether an input of a node may be dead: an output of an op, or what it waits for."""
        name = op_name(operand)
        users_op = self._users_op(name)
        # A switch is alive, though one of its outputs isn't.
        is_switch = users_op is not None and users_op.type in op_types.SWITCH
        return is_switch or self.may_be_dead(name)

    def _users_op(self, name: str) -> tf.Operation | None:
        """The user's op of a name, be it that of the op or of a copy; None for other nodes."""
        copy = self._step.builder.names.copy_of(name)
        if copy is None and name in self._step.nodes:
            return None
        graph = self._step.division.graph
        return graph.get_operation_by_name(name if copy is None else copy.op_name)


def _results_of_turns(step: StepUnits, schedule: Schedule) -> dict[int, list[str]]:
    """The nodes of each turn that others use, by the number of the turn's tower.

    Of turn 1, the running sum of turns 0 and 1 is a result: that of turns 0 to 2 uses it.
    """
    last_turns = _last_turns(step, schedule)
    results = defaultdict[int, dict[str, None]](dict)
    for unit in step.order:
        for edge in step.inputs[unit]:
            turn = last_turns.get(edge.unit)
            if turn is not None and turn != last_turns.get(unit):
                results[turn.number][edge.source] = None
    return {number: list(names) for number, names in results.items()}


def _last_turns(step: StepUnits, schedule: Schedule) -> dict[Unit, Tower]:
    """The last turn that each unit is made of: turn 1 for the running sum of turns 0 and 1.

    Only units of a single chain have one. The user's own ops have none, as they run once.
    """
    last_turns: dict[Unit, Tower] = {}
    made_of: dict[Unit, set[Tower]] = {}  # by unit, the towers whose chained copies it's made of
    for unit in step.order:
        turns: set[Tower] = set()
        for edge in step.inputs[unit]:
            turns |= made_of.get(edge.unit, set())
        if unit.tower is not None and unit.name in schedule.chained:
            turns.add(step.towers[unit.tower])
        made_of[unit] = turns

        first_towers = {tower.number - tower.turn for tower in turns}
        if len(first_towers) == 1 and step.is_added(unit):
            last_turns[unit] = max(turns)
    return last_turns


def _slices_of_turns(step: StepUnits, schedule: Schedule) -> dict[Unit, list[str]]:
    """The slices of full values that only chained copies of one turn use, by these copies."""
    slices = defaultdict[Unit, list[str]](list)
    for name, users in _users_of_slices(step).items():
        in_step = [user for user in users if user in step.inputs]
        towers = {user.tower for user in users}
        is_chained = all(user.name in schedule.chained for user in in_step)
        if len(towers) == 1 and is_chained:
            for user in in_step:
                slices[user].append(name)
    return slices


def _users_of_slices(step: StepUnits) -> dict[str, set[Unit]]:
    """The units that use each slice of a full value, by the slice's name: copies, mostly.

    A slice may come to a copy by way of other nodes, such as those that unpack a mask.
    """
    users_of_nodes = _users_of_nodes(step)
    users_of_slices = defaultdict[str, set[Unit]](set)
    for name, node in step.nodes.items():
        if node.op not in op_types.TAKE_SLICES or not _stands_alone(step, name):
            continue

        stack = [name]
        while stack:
            for user in users_of_nodes[stack.pop()]:
                passes_on = step.nodes[user].op in op_types.PASS_SLICES
                if passes_on and _stands_alone(step, user):
                    stack.append(user)
                else:
                    users_of_slices[name].add(step.unit_of(user))
    return users_of_slices


def _users_of_nodes(step: StepUnits) -> dict[str, list[str]]:
    """The names of the added nodes that use each node or op, by the name of what they use."""
    users = defaultdict[str, list[str]](list)
    for name, node in step.nodes.items():
        for operand in node.input:
            users[op_name(operand)].append(name)
    return users


def _stands_alone(step: StepUnits, name: str) -> bool:
    """Whether an added node is a unit by itself: neither a tower's copy nor in a loop."""
    return step.unit_of(name) == Unit(None, name)


def _follows_in_turn(unit: Unit, step: StepUnits, schedule: Schedule) -> bool:
    """Whether a unit uses what another chained unit of the same turn gives."""
    return any(
        edge.unit.tower == unit.tower and edge.unit.name in schedule.chained
        for edge in step.inputs[unit]
    )
