"""How many bytes of activations a step keeps in memory at the same time.

A tensor is in memory from the op that computes it until the last op that uses it. So an activation
that the gradients need is kept from the forward pass on, and a gradient that goes from layer to
layer is freed at once. When an op runs is an estimate: after all those on the longest path to it.

With turns, the ops of a step run in *stages*. What a turn computes and uses up within a stage is
freed then. What a later stage uses is kept for all turns, as no turn gets there before all turns
have come so far. Here the gradients need the mean of all examples, so what they use of the network
is kept:

    stage 0                      stage 1      stage 2
    layer 1 ---> layer 2 ------> mean ------> gradient ---> gradient
       |            |                         of layer 2    of layer 1
       |            +--- kept --------------------+             |
       +---------------- kept ----------------------------------+

In: the units of a step, and the stages of its ops. Out: bytes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.micro_batches.edges import StepUnits, Unit
from estimator_mgpu.partition.placements import NotGatherable, Shard
from estimator_mgpu.tf_internals import op_types


class Stage(NamedTuple):
    """When an op of a step runs. Stages are in the order of their fields.

    Attributes:
      joins: how many joins are before it.
      is_for_all: whether it runs for all turns at once, on what these have computed before.
    """

    joins: int
    is_for_all: bool


class _Activation(NamedTuple):
    """A sharded tensor, or all those of a v1 loop.

    Attributes:
      name: that of the op or the loop that computes it, as in `Unit`.
      size: its bytes, for all examples.
      users: the names of the ops and loops that use it in a step.
    """

    name: str
    size: int
    users: Sequence[str]


class Activations:
    """The activations of a step, and how long they are kept.

    Args:
      step: the units that a step runs.
      names: those of the sharded ops and v1 loops that it runs, as in `Unit`.

    Attributes:
      sizes: the bytes that each of these computes, by its name.
    """

    def __init__(self, step: StepUnits, names: Iterable[str]):
        self._graph = step.division.graph
        self._plan = step.division.plan
        self._step = step
        self._times = _times(step)
        self._all = [activation for name in names for activation in self._activations_of(name)]
        self.sizes = Counter[str]()
        for activation in self._all:
            self.sizes[activation.name] += activation.size

    def most(self) -> Counter[str]:
        """Returns what is kept when most is, without turns: bytes, by who has computed them."""
        return self._most((activation, 0, 0) for activation in self._all)

    def most_for_all_turns(self, stages: Mapping[str, Stage]) -> Counter[str]:
        """Returns what is kept for all turns when most is, in the same way.

        Args:
          stages: of the ops and loops that a step runs, by their names.
        """
        places = {stage: place for place, stage in enumerate(sorted(set(stages.values())))}
        kept = []
        for activation in self._all:
            stage = stages[activation.name]
            last_stage = max((stages[user] for user in activation.users), default=stage)
            if stage.is_for_all or last_stage > stage:
                kept.append((activation, places[stage], places[last_stage]))
        return self._most(kept)

    def _most(self, kept: Iterable[tuple[_Activation, int, int]]) -> Counter[str]:
        """The bytes that are kept when most are, by the name of the op or loop that computes them.

        Args:
          kept: activations, and the places of the stages that compute them and that use them last.
        """
        duration = 1 + max(self._times.values(), default=0)  # of a stage
        intervals = []
        changes = Counter[int]()
        for activation, first, last in kept:
            begin = first * duration + self._times[activation.name]
            end = last * duration + max((self._times[user] for user in activation.users), default=0)
            end = max(begin, end)
            intervals.append((activation, begin, end))
            changes[begin] += activation.size
            changes[end + 1] -= activation.size

        moments = sorted(changes)
        totals = list(itertools.accumulate(changes[moment] for moment in moments))
        sizes = Counter[str]()
        if totals:
            fullest = moments[totals.index(max(totals))]
            for activation, begin, end in intervals:
                if begin <= fullest <= end:
                    sizes[activation.name] += activation.size
        return sizes

    def _activations_of(self, name: str) -> Iterator[_Activation]:
        """Yields what all copies of an op, or of a v1 loop, compute from a batch.

        Of a loop, that is what one step of it computes, as nobody knows how many steps it will
        take. It's kept for whatever uses the loop, as the loop's gradient does.
        """
        loop = self._step.loops.get(name)
        if loop is None:
            groups = [[tensor] for tensor in self._graph.get_operation_by_name(name).outputs]
        else:
            groups = [[tensor for op in loop.all_ops for tensor in op.outputs]]
        for tensors in groups:
            size = sum(map(self._size, tensors))
            if size:
                yield _Activation(name, size, self._users(name, tensors))

    def _size(self, tensor: tf.Tensor) -> int:
        """The bytes of a tensor, if it's sharded and in memory of its own."""
        if _is_view(tensor.op):
            return 0
        placement = self._plan.placements.get(tensor.name) or self._plan.in_loops.get(tensor.name)
        return bytes_of(tensor) if isinstance(placement, (NotGatherable, Shard)) else 0

    def _users(self, name: str, tensors: Sequence[tf.Tensor]) -> list[str]:
        """The names of all that uses an op's or a loop's tensors, or views of them, in a step."""
        users: dict[str, None] = {}
        seen = set(tensors)
        stack = list(tensors)
        while stack:
            for op in stack.pop().consumers():
                user = self._step.unit_of(op.name).name
                if user != name and user in self._times:
                    users[user] = None
                if _is_view(op):
                    views = [output for output in op.outputs if output not in seen]
                    seen.update(views)
                    stack += views
        return list(users)


def _is_view(op: tf.Operation) -> bool:
    return op.type in op_types.VIEWS or op.type in op_types.FORWARDS


def _times(step: StepUnits) -> dict[str, int]:
    """How many units are on the longest path to each op and loop that a step runs, by its name."""
    times: dict[str, int] = {}
    time_of: dict[Unit, int] = {}
    for unit in step.order:
        # A node in a loop may wait for another one there, by way of a unit outside of it.
        before = [time_of.get(edge.unit, -1) for edge in step.inputs[unit]]
        time = 1 + max(before, default=-1)
        time_of[unit] = time
        times[unit.name] = max(time, times.get(unit.name, 0))
    return times
