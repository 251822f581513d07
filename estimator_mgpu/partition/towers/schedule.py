"""Which of the towers' ops run one turn after another.

A turn can't wait for another one if something that it needs is made of the examples of all towers:
a *join*, such as the mean of exact batch normalization. What a join is made of runs before the
chain, in all turns at once. What needs a join of the chain's results, such as the norm by which
gradients are clipped, runs after it. So ops have levels, by the number of joins on their longest
path. A chain up to level n has all ops of levels 0 to n, but for those that joins of these levels
are made of. With each level more ops could be chained, but more are needed by joins, so the level
is chosen that leaves the most bytes of activations in the chain.

In: the units of a step, before they are in the graph. Out: a `Schedule`, by which `gates` lets ops
wait for their turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.placements import NotGatherable, Shard
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.partition.towers.edges import Edges, Result, StepUnits, Unit
from estimator_mgpu.partition.towers.turns import Tower
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

    before = _Before(step, sizes, first)
    chained: set[str] = set()
    bytes_by_join = Counter[str]()
    most_bytes = -1
    # With each level, more ops can be in the chain, but more of them are needed by joins.
    for level in sorted(set(levels.values())):
        before.add(joins[level])
        up_to_level = {name for name in levels if levels[name] <= level}
        remaining = up_to_level - before.names
        bytes_in_chain = sum(sizes[name] for name in remaining)
        if bytes_in_chain > most_bytes:
            chained = remaining
            bytes_by_join = before.by_join.copy()
            most_bytes = bytes_in_chain

    total = sum(sizes.values()) or 1
    chainable = sum(sizes[name] for name in chained) / total
    # A joint loop runs in all turns at once, whatever is made of it.
    for name in joint_loops:
        bytes_by_join[name] += sizes[name]
    costliest = [Join(name, size / total) for name, size in bytes_by_join.most_common() if size]
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
      by_join: the bytes of their activations, by the op that first needs them all.
    """

    def __init__(self, step: StepUnits, sizes: dict[str, int], first: Sequence[Unit]):
        self.names: set[str] = set()
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
                    self.names.add(unit.name)
                    self.by_join[reason] += self._sizes.get(unit.name, 0)

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
