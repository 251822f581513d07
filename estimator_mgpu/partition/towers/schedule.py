"""Which of the towers' ops run one turn after another.

A *join* is a value that a tower needs and that is made of the examples of all towers, such as the
mean of exact batch normalization. No turn can get past it before all turns have come that far. So
what a join is made of runs before the chain, in all turns at once, and what needs a join of the
chain's results, such as the norm by which gradients are clipped, runs after the chain.

The level of an op is the number of joins on the longest path to it. A chain up to level n has the
ops of levels 0 to n, without those that the joins on the way are made of. Here are two joins:

    layer 1 ---> mean ---> layer 2, gradient ---> norm ---> clipped gradient
    level 0                level 1                          level 2

    chain         before it           in it                after it
    to level 0                        layer 1              layer 2, gradient, clipped gradient
    to level 1    layer 1             layer 2, gradient    clipped gradient
    to level 2    all others          clipped gradient

The chain with the most bytes of activations is chosen.

In: the units of a step, before they are in the graph. Out: a `Schedule`, by which `gates` lets ops
wait for their turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence, Set
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
      share: of all activations, those that are computed for it, in all turns at once: 0 to 1.
    """

    op: str
    share: float


class Schedule(NamedTuple):
    """Which ops run one turn after another.

    Attributes:
      turns: how many turns were asked for.
      chained: the names of the ops and v1 loops that run one turn after another.
      chainable: the share of all activations that these ops make: 0 to 1.
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
    joint_loops = [unit.name for unit in step.order if unit.is_joint]
    sizes = {
        name: _bytes_of_activations(graph, plan, step.edges, name)
        for name in [*levels, *joint_loops]
    }
    total = sum(sizes.values()) or 1

    writes = _initial_writes(graph, plan, results)
    before_any_turn = [step.edges.unit_of(op.name) for op in writes]
    chains = _chains_by_level(step, levels, sizes, before_any_turn)
    chain = max(chains, key=lambda chain: chain.size, default=_Chain())

    # A joint loop runs in all turns at once, whatever is made of it.
    bytes_by_join = Counter(chain.bytes_by_join)
    for name in joint_loops:
        bytes_by_join[name] += sizes[name]
    joins = [Join(name, size / total) for name, size in bytes_by_join.most_common() if size]
    return Schedule(towers[-1].turn + 1, chain.ops, chain.size / total, joins)


class _Chain(NamedTuple):
    """Ops that could run one turn after another.

    Attributes:
      ops: their names.
      size: the bytes of their activations.
      bytes_by_join: the bytes of activations that are computed before the chain, by the op whose
        value a join needs.
    """

    ops: Set[str] = frozenset()
    size: int = 0
    bytes_by_join: Mapping[str, int] = {}


def _chains_by_level(
    step: StepUnits, levels: dict[str, int], sizes: dict[str, int], first: Sequence[Unit]
) -> Iterator[_Chain]:
    """Yields the chain up to each level: with each, more ops are added, and more are left out.

    Args:
      step: the units that a step runs.
      levels: of each sharded op, by its name.
      sizes: the bytes of the activations of each sharded op.
      first: units that can't wait for a turn, and so nothing that they are made of can.
    """
    joins = _joins_by_level(step, levels)
    before = _BeforeChain(step, sizes)
    before.add(first)
    for level in sorted(set(levels.values())):
        before.add(joins[level])
        up_to_level = {name for name in levels if levels[name] <= level}
        ops = up_to_level - before.ops
        size = sum(sizes[name] for name in ops)
        yield _Chain(ops, size, before.bytes_by_join.copy())


def _levels(step: StepUnits) -> dict[str, int]:
    """The number of joins on the longest path to each sharded op that a step runs, by its name.

    All copies of an op have the level of the highest copy. If another copy was visited before with
    a lower level, so were the ops that follow from it: then all are visited again.
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
                if unit.name in levels:  # Another copy was visited with a lower level.
                    is_complete = False
                levels[unit.name] = level
    return levels


def _joins_by_level(step: StepUnits, levels: dict[str, int]) -> dict[int, list[Unit]]:
    """The joins that copies need, by the level of these copies."""
    joins = defaultdict[int, list[Unit]](list)
    for unit in step.order:
        if unit.is_copy:
            joined = [edge.unit for edge in step.inputs[unit] if step.is_join(edge, unit)]
            joins[levels[unit.name]] += joined
    return joins


class _BeforeChain:
    """The ops that joins are made of, which run before the chain.

    Args:
      step: the units that a step runs.
      sizes: the bytes of the activations of each sharded op.

    Attributes:
      ops: their names.
      bytes_by_join: the bytes of their activations, by the op whose value a join needs. What
        several joins are made of counts for the first of them.
    """

    def __init__(self, step: StepUnits, sizes: dict[str, int]):
        self.ops: set[str] = set()
        self.bytes_by_join = Counter[str]()
        self._step = step
        self._sizes = sizes
        self._seen: set[Unit] = set()

    def add(self, joins: Sequence[Unit]) -> None:
        """Adds the ops that some joins are made of."""
        for join in joins:
            needed_op = ''  # the last op before the join
            for unit in self._unseen_before(join):
                if unit.is_copy and unit.name not in self.ops:
                    needed_op = needed_op or unit.name
                    self.ops.add(unit.name)
                    self.bytes_by_join[needed_op] += self._sizes.get(unit.name, 0)

    def _unseen_before(self, join: Unit) -> Iterator[Unit]:
        """Yields those units that weren't seen before: the join, and all that it waits for."""
        queue = deque([join])
        while queue:
            unit = queue.popleft()
            if unit not in self._seen:
                self._seen.add(unit)
                yield unit
                queue.extend(edge.unit for edge in self._step.inputs_of(unit))


def _bytes_of_activations(graph: tf.Graph, plan: Plan, edges: Edges, name: str) -> int:
    """The bytes of activations that all copies of an op, or of a v1 loop, compute from a batch.

    Of a loop, these are the bytes of one step, as nobody knows how many steps it will take.

    Args:
      graph: the user's.
      plan: which tensors are sharded.
      edges: those of the graph.
      name: of the op or the loop, as in `Unit`.
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


def _initial_writes(graph: tf.Graph, plan: Plan, results: Sequence[Result]) -> list[tf.Operation]:
    """The ops that compute initial values of variables from the batch.

    Such an op is an initializer, or it writes to a trained variable outside of a step. It can't
    wait for the gradients of a turn, as these need the variables.
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
