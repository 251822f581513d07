"""Which of the towers' ops are chained: run one turn after another.

A *join* is a value that a tower needs and that is made of the examples of all towers, such as the
mean of exact batch normalization. No turn can get past it before all turns have come that far. So
only one stretch of a step can be chained: what a join is made of runs before it, in all turns at
once, and what needs a join of its results, such as the norm by which gradients are clipped, runs
after it.

The level of an op is the number of joins on the longest path to it. The stretch that ends with
level n has the ops up to that level, but for those that a join on the way is made of. Here are two
joins, and so three stretches to choose from:

    layer 1 ---> mean ---> layer 2, gradient ---> norm ---> clipped gradient
    level 0                level 1                          level 2

    ends with     before it           chained              after it
    level 0                           layer 1              layer 2, gradient, clipped gradient
    level 1       layer 1             layer 2, gradient    clipped gradient
    level 2       all others          clipped gradient

The one with the most bytes of activations is chosen. It's worth it only if little has to be kept
for all turns until a join is there. If the norm is that of the gradients of both layers, that is
nothing but these. But if the mean was at the end of the network, the activations of both layers
would be kept for their gradients, and nothing would be saved: see `activation_bytes`.

In: the units of a step, before they are in the graph. Out: a `Schedule`, by which `turn_gates` lets
ops wait for their turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division, Result
from estimator_mgpu.partition.micro_batches.activation_bytes import Activations, Stage
from estimator_mgpu.partition.micro_batches.edges import StepUnits, Unit
from estimator_mgpu.tf_internals import graphs
from estimator_mgpu.tf_internals.effects import has_side_effect

# Of the memory of activations, the least that turns have to save. If it's less, nothing is chained.
_LEAST_SHARE_CHAINED = 0.5


class Join(NamedTuple):
    """An op whose value for the global batch the towers need.

    Attributes:
      op: its name.
      share: of the activations that are kept at the same time without turns, those that are kept
        for all turns until this op's value is there: 0 to 1.
    """

    op: str
    share: float


class Schedule(NamedTuple):
    """Which ops run one turn after another.

    Attributes:
      turns: how many turns were asked for.
      chained: the names of the ops and v1 loops that run one turn after another.
      chainable: of the activations that are kept at the same time without turns, the share that is
        kept for one turn at a time: 0 to 1.
      joins: what keeps other ops from it, the costliest first; joint loops are among them.
    """

    turns: int
    chained: Set[str]
    chainable: float
    joins: Sequence[Join]

    @property
    def is_worth_it(self) -> bool:
        """Whether turns save enough memory. If not, there is only one."""
        return self.chainable >= _LEAST_SHARE_CHAINED

    @property
    def why_others_are_kept(self) -> str:
        """Says for how long other activations are kept for all turns, at the end of a sentence."""
        names = ', '.join(join.op for join in self.joins[:2])
        return f'until all examples have reached {names}' if names else 'for what the step gives'


def find_schedule(step: StepUnits, results: Sequence[Result]) -> Schedule:
    """Chooses the ops that run one turn after another.

    Args:
      step: the units that a step runs.
      results: what steps of any mode are run for, before towers are added.
    """
    levels = _levels(step)
    levels_of_copies = {unit.name: level for unit, level in levels.items() if unit.is_copy}
    joint_loops = [unit.name for unit in step.order if unit.is_joint]
    activations = Activations(step, [*levels_of_copies, *joint_loops])

    writes = _initial_writes(step.division, results)
    before_any_turn = [step.unit_of(op.name) for op in writes]
    joined = _joined(step, levels_of_copies, before_any_turn)
    chains = _chains_by_level(levels_of_copies, activations.sizes, joined)
    chain = max(chains, key=lambda chain: chain.size, default=_Chain())

    kept = activations.most_for_all_turns(_stages(levels, chain, joined))
    total = sum(activations.most().values())
    saved = max(0, 1 - sum(kept.values()) / total) if total else 0
    bytes_by_join = Counter[str]()
    for name, size in kept.items():
        bytes_by_join[name if name in joint_loops else joined.ops.get(name, '')] += size
    joins = [Join(name, size / total) for name, size in bytes_by_join.most_common() if name]
    return Schedule(step.towers[-1].turn + 1, chain.ops, saved, joins)


class _Chain(NamedTuple):
    """Ops that could run one turn after another.

    Attributes:
      ops: their names.
      level: the highest of their levels.
      size: the bytes of their activations.
    """

    ops: Set[str] = frozenset()
    level: int = 0
    size: int = 0


def _chains_by_level(
    levels: Mapping[str, int], sizes: Mapping[str, int], joined: _Joined
) -> Iterator[_Chain]:
    """Yields the chain up to each level: with each, more ops are added, and more are left out.

    Args:
      levels: of each sharded op, by its name.
      sizes: the bytes of the activations of each sharded op.
      joined: what joins are made of.
    """
    for level in sorted(set(levels.values())):
        ops = frozenset(
            name
            for name, level_of_op in levels.items()
            if level_of_op <= level and not joined.runs_before(name, level)
        )
        yield _Chain(ops, level, sum(sizes[name] for name in ops))


def _levels(step: StepUnits) -> dict[Unit, int]:
    """The number of joins on the longest path to each unit that a step runs.

    All copies of an op have the level of the highest copy. If another copy was visited before with
    a lower level, so were the ops that follow from it: then all are visited again. That ends, as
    levels only grow, and none exceeds the number of ops: no op depends on another copy of itself.
    """
    levels: dict[Unit, int] = {}
    levels_of_copies: dict[str, int] = {}
    is_complete = False
    while not is_complete:
        is_complete = True
        levels = {}
        for unit in step.order:
            level = levels_of_copies.get(unit.name, 0) if unit.is_copy else 0
            for edge in step.inputs[unit]:
                is_join = unit.is_copy and step.is_join(edge, unit)
                level = max(level, levels.get(edge.unit, 0) + is_join)
            levels[unit] = level

            if unit.is_copy and level > levels_of_copies.get(unit.name, -1):
                if unit.name in levels_of_copies:  # Another copy was visited with a lower level.
                    is_complete = False
                levels_of_copies[unit.name] = level
    return levels


class _Joined(NamedTuple):
    """What joins are made of, by the names of units.

    Attributes:
      levels: the lowest level of a chain with copies that need such a join.
      ops: for a sharded op, the op whose value that join needs.
    """

    levels: dict[str, int]
    ops: dict[str, str]

    def runs_before(self, name: str, level: int) -> bool:
        """Whether an op runs before the chain up to a level."""
        return name in self.levels and self.levels[name] <= level


def _joined(step: StepUnits, levels: Mapping[str, int], first: Sequence[Unit]) -> _Joined:
    """Finds what joins are made of.

    Args:
      step: the units that a step runs.
      levels: of each sharded op, by its name.
      first: units that can't wait for a turn, and so nothing that they are made of can.
    """
    joins = defaultdict[int, list[Unit]](list)  # by the level of the copies that need them
    joins[0] += first
    for unit in step.order:
        if unit.is_copy:
            edges = [edge for edge in step.inputs[unit] if step.is_join(edge, unit)]
            joins[levels[unit.name]] += [edge.unit for edge in edges]

    joined = _Joined({}, {})
    seen: set[Unit] = set()
    for level in sorted(joins):
        for join in joins[level]:
            needed_op = ''  # the last op before the join
            queue = deque([join])
            while queue:
                unit = queue.popleft()
                if unit in seen:
                    continue
                seen.add(unit)
                queue.extend(edge.unit for edge in step.inputs_of(unit))
                joined.levels.setdefault(unit.name, level)
                if unit.is_copy and unit.name not in joined.ops:
                    needed_op = needed_op or unit.name
                    joined.ops[unit.name] = needed_op
    return joined


def _stages(levels: Mapping[Unit, int], chain: _Chain, joined: _Joined) -> dict[str, Stage]:
    """The stages of all units, by their names.

    Args:
      levels: of the units.
      chain: what runs one turn after another.
      joined: what joins are made of.
    """
    stages: dict[str, Stage] = {}
    for unit, level in levels.items():
        is_later = not joined.runs_before(unit.name, chain.level)
        stage = Stage(max(level, chain.level) if is_later else level, not unit.is_copy)
        stages[unit.name] = max(stage, stages.get(unit.name, stage))
    return stages


def _initial_writes(division: Division, results: Sequence[Result]) -> list[tf.Operation]:
    """The ops that compute initial values of variables from the batch.

    Such an op is an initializer, or it writes to a trained variable outside of a step. It can't
    wait for the gradients of a turn, as these need the variables.
    """
    step = graphs.ancestors([getattr(result, 'op', result) for result in results])
    graph = division.graph
    trained = {variable.op for variable in graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)}
    initializers = {
        variable.initializer for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    }
    writes = []
    for op in division.plan.order:
        if op in step or not has_side_effect(op):
            continue
        if op in initializers or any(tensor.op in trained for tensor in op.inputs):
            writes.append(op)
    return writes
