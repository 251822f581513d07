"""Which of the towers' ops run one turn after another, and what lets them wait for their turn.

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

A turn can't wait for another one if something that it needs is made of the examples of all towers:
a *join*, such as the mean of exact batch normalization. What a join is made of runs before the
chain, in all turns at once. What needs a join of the chain's results, such as the norm by which
gradients are clipped, runs after it. So ops have levels, by the number of joins on their longest
path. A chain up to level n has all ops of levels 0 to n, but for those that joins of these levels
are made of. With each level more ops could be chained, but more are needed by joins, so the level
is chosen that leaves the most bytes of activations in the chain.

In: the units of a step, before they are in the graph. Out: a `Schedule`, and gates.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.placements import NotGatherable, Shard
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.partition.towers.edges import Edges, Result, StepUnits, Unit, op_name
from estimator_mgpu.partition.towers.node_builder import NodeBuilder
from estimator_mgpu.partition.towers.turns import Tower, chains_of
from estimator_mgpu.tf_internals import graphs, op_types
from estimator_mgpu.tf_internals.effects import has_side_effect

_WORTH_IT = 0.5  # a share of the activations: with less in the chain, nothing is chained


class Join(NamedTuple):
    """An op whose value for the global batch the towers need.

    Attributes:
      op: its name.
      share: the part of all activations that is computed for it, in all turns at once: 0 to 1.
    """

    op: str
    share: float


class Schedule(NamedTuple):
    """Which ops run one turn after another.

    Attributes:
      turns: how many turns were asked for.
      chained: the names of the ops and v1 loops that run one turn after another.
      chainable: the part of all activations that these ops make: 0 to 1.
      joins: what keeps other ops from it, the costliest first; joint loops are among them.
    """

    turns: int
    chained: Set[str]
    chainable: float
    joins: Sequence[Join]

    @property
    def is_worth_it(self) -> bool:
        """Whether turns save enough memory. If not, there is only one."""
        return self.chainable >= _WORTH_IT


def find_schedule(
    graph: tf.Graph,
    plan: Plan,
    step: StepUnits,
    towers: Sequence[Tower],
    results: Sequence[Result],
) -> Schedule:
    """Chooses the ops that run one turn after another.

    Args:
      graph: the user's, before towers are added.
      plan: which ops are sharded.
      step: the units that a step runs.
      towers: some of which share a device.
      results: what steps of any mode are run for, before towers are added.
    """
    levels = _levels(step)
    joins = _joins_by_level(step, levels)
    joint_loops = [unit.name for unit in step.order if unit.is_joint]
    sizes = {
        name: _bytes_of_activations(graph, plan, step.edges, name)
        for name in [*levels, *joint_loops]
    }
    first = [step.edges.unit_of(op.name) for op in _first_writes(graph, plan, results)]

    # With each level, more ops can be in the chain, but more of them are needed by joins.
    best_level = -1
    most_bytes = -1
    before = _Before(step, sizes, first)
    for level in sorted(set(levels.values())):
        before.add(joins[level])
        up_to_level = sum(sizes[name] for name in levels if levels[name] <= level)
        if up_to_level - before.bytes > most_bytes:
            best_level = level
            most_bytes = up_to_level - before.bytes

    before = _Before(step, sizes, first)
    for level in range(best_level + 1):
        before.add(joins[level])
    chained = {name for name in levels if levels[name] <= best_level} - before.names

    total = sum(sizes.values()) or 1
    chainable = sum(sizes[name] for name in chained) / total
    # A joint loop runs in all turns at once, whatever is made of it.
    for name in joint_loops:
        before.by_join[name] += sizes[name]
    costliest = [Join(name, size / total) for name, size in before.by_join.most_common() if size]
    return Schedule(towers[-1].turn + 1, chained, chainable, costliest)


def _levels(step: StepUnits) -> dict[str, int]:
    """The number of joins on the longest path to each sharded op that a step runs, by its name.

    All copies of an op have the level of the highest one. That may raise the level of ops that were
    visited before it, so all are visited until nothing changes.
    """
    levels: dict[str, int] = {}
    is_complete = False
    while not is_complete:
        is_complete = True
        level_of: dict[Unit, int] = {}
        for unit in step.order:
            level = levels.get(unit.name, 0) if unit.is_copy else 0
            for edge in step.inputs[unit]:
                is_join = unit.is_copy and step.is_join(edge, unit)
                level = max(level, level_of.get(edge.unit, 0) + is_join)
            level_of[unit] = level
            if unit.is_copy and level > levels.get(unit.name, -1):
                is_complete = is_complete and unit.name not in levels
                levels[unit.name] = level
    return levels


def _joins_by_level(step: StepUnits, levels: dict[str, int]) -> dict[int, list[Unit]]:
    """What copies are given that is made of copies of other towers, by the level of the former."""
    joins = defaultdict[int, list[Unit]](list)
    for unit in step.order:
        if unit.is_copy:
            joined = [edge.unit for edge in step.inputs[unit] if step.is_join(edge, unit)]
            joins[levels[unit.name]] += joined
    return joins


class _Before:
    """The ops that joins are made of, which run before the chain.

    Args:
      step: the units that a step runs.
      sizes: the bytes of the activations of each sharded op.
      first: other units whose ops can't wait for a turn.

    Attributes:
      names: those of the ops.
      bytes: those of their activations.
      by_join: the same, by the op that first needs them all.
    """

    def __init__(self, step: StepUnits, sizes: dict[str, int], first: Sequence[Unit]):
        self.names: set[str] = set()
        self.bytes = 0
        self.by_join = Counter[str]()
        self._step = step
        self._sizes = sizes
        self._seen: set[Unit] = set()
        self.add(first)

    def add(self, joins: Sequence[Unit]) -> None:
        """Adds the ops that some joins are made of."""
        for join in joins:
            reason = ''
            for unit in self._unseen_before(join):
                if unit.is_copy and unit.name not in self.names:
                    reason = reason or unit.name
                    size = self._sizes.get(unit.name, 0)
                    self.names.add(unit.name)
                    self.bytes += size
                    self.by_join[reason] += size

    def _unseen_before(self, join: Unit) -> Iterator[Unit]:
        """A unit and all that it waits for, but for what was seen before."""
        queue = deque([join])
        while queue:
            unit = queue.popleft()
            if unit not in self._seen:
                self._seen.add(unit)
                yield unit
                queue.extend(edge.unit for edge in self._step.inputs_of(unit))


def _bytes_of_activations(graph: tf.Graph, plan: Plan, edges: Edges, name: str) -> int:
    """The bytes that all copies of an op, or of a v1 loop, make of the examples of a batch.

    Of a loop, these are the bytes of one step, as nobody knows how many steps it will take.
    """
    ops = edges.loops[name].all_ops if name in edges.loops else [graph.get_operation_by_name(name)]
    size = 0
    for op in ops:
        if op.type in op_types.VIEWS or op.type in op_types.FORWARDS:
            continue
        for tensor in op.outputs:
            placement = plan.placements.get(tensor.name) or plan.in_loops.get(tensor.name)
            if isinstance(placement, (NotGatherable, Shard)):
                size += bytes_of(tensor)
    return size


def _first_writes(graph: tf.Graph, plan: Plan, results: Sequence[Result]) -> list[tf.Operation]:
    """The ops that give the variables of a step their first values, if these need the batch.

    A turn's gradients can't be waited for there, as they need the variables. Such an op is an
    initializer, or it writes to a trained variable outside of a step.
    """
    step = graphs.ancestors([getattr(result, 'op', result) for result in results])
    trained = {variable.op for variable in graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)}
    initializers = {
        variable.initializer for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    }
    writes = []
    for op in plan.order:
        if op in step or not has_side_effect(op):
            continue
        if op in initializers or any(tensor.op in trained for tensor in op.inputs):
            writes.append(op)
    return writes


def add_gates(
    nodes: NodeBuilder, step: StepUnits, schedule: Schedule, towers: Sequence[Tower]
) -> None:
    """Adds gates: each turn's ops wait until the turn before has left its results.

    Args:
      nodes: where the gates are added.
      step: the units that a step runs.
      schedule: which of them run one turn after another.
      towers: a device and a turn each.
    """
    ends = _ends_of_turns(step, schedule, towers)
    gates: dict[int, str] = {}  # by tower
    for tower in towers:
        if tower.turn > 0:
            gates[tower.number] = nodes.gate(
                tower.number, ends.get(tower.number - 1, []), tower.device
            )

    consumers = _consumers_of_parts(step.edges)
    for unit in step.order:
        if unit.tower not in gates or unit.name not in schedule.chained:
            continue
        gate = gates[unit.tower]
        parts = _own_parts(unit, step, schedule, consumers)
        for part in parts:
            _let_wait(step.edges.nodes[part], gate)
        if not parts and not _follows_in_turn(unit, step, schedule):
            for name in step.edges.entries(unit):
                _let_wait(step.edges.nodes[name], gate)


def _ends_of_turns(
    step: StepUnits, schedule: Schedule, towers: Sequence[Tower]
) -> dict[int, list[str]]:
    """What each turn leaves: the last nodes that are made of its chain up to this turn.

    A running sum is one, as what waits for it is made of the next turn, too.
    """
    chains = [sum(1 << tower.number for tower in chain) for chain in chains_of(towers)]
    made_of: dict[Unit, int] = {}  # chained copies, as the bits of their towers
    last_turn: dict[Unit, int] = {}  # of units of one chain only
    ends = defaultdict[int, dict[str, None]](dict)
    for unit in step.order:
        bits = 0
        for edge in step.inputs[unit]:
            bits |= made_of.get(edge.unit, 0)
        if unit.tower is not None and unit.name in schedule.chained:
            bits |= 1 << unit.tower
        made_of[unit] = bits
        if bits and step.edges.is_added(unit) and any(bits & ~chain == 0 for chain in chains):
            last_turn[unit] = bits.bit_length() - 1

        for edge in step.inputs[unit]:
            turn = last_turn.get(edge.unit)
            if turn is not None and turn != last_turn.get(unit):
                ends[turn][edge.source] = None
    return {turn: list(names) for turn, names in ends.items()}


def _own_parts(
    unit: Unit, step: StepUnits, schedule: Schedule, consumers: dict[str, set[Unit]]
) -> list[str]:
    """The parts of full values that are taken only for a turn's chain, for this unit among them."""
    parts = []
    for edge in step.inputs[unit]:
        users = consumers.get(edge.source)
        if users and all(
            user.tower == unit.tower and (user.name in schedule.chained or user not in step.inputs)
            for user in users
        ):
            parts.append(edge.source)
    return parts


def _consumers_of_parts(edges: Edges) -> dict[str, set[Unit]]:
    """The units that use each part of a full value, by the name of the part."""
    parts = {name for name, node in edges.nodes.items() if node.op in op_types.TAKE_PARTS}
    parts = {name for name in parts if edges.unit_of(name) == Unit(None, name)}
    consumers = defaultdict[str, set[Unit]](set)
    for name, node in edges.nodes.items():
        for operand in node.input:
            source = op_name(operand)
            if source in parts:
                consumers[source].add(edges.unit_of(name))
    return consumers


def _follows_in_turn(unit: Unit, step: StepUnits, schedule: Schedule) -> bool:
    """Whether a unit is given something by another one of the same turn's chain."""
    return any(
        edge.unit.tower == unit.tower and edge.unit.name in schedule.chained
        for edge in step.inputs[unit]
    )


def _let_wait(node: Any, gate: str) -> None:
    if gate not in node.input:
        node.input.append(gate)
