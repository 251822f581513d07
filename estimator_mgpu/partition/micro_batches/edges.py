"""A graph with its towers, before these are added to it: units, and the edges between them.

Turns are chosen by it, as it tells by way of which units a tower needs something of another one.
Which control edges there are is decided in `waits`.

In: the nodes that are to be added, and what the user's ops will be given. Out: a `Unit` for each
node, and the units that it waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division, Result
from estimator_mgpu.partition.nodes.node_builder import NodeBuilder
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.partition.tower import Tower
from estimator_mgpu.tf_internals import graphs
from estimator_mgpu.tf_internals.v1_loops import V1Loop


class Unit(NamedTuple):
    """A node, or a v1 loop in the place of all of its nodes.

    A joint loop, whose steps all towers make together, is one unit, which is no tower's copy.

    Attributes:
      tower: the index of the tower whose copy it is; None if it's no copy.
      name: that of the user's op or loop, or of the node if it's another added one.
      is_joint: whether it's a joint loop of all towers, rather than the user's own loop.
    """

    tower: int | None
    name: str
    is_joint: bool = False

    @property
    def is_copy(self) -> bool:
        """Whether it's a tower's copy of the user's op or loop."""
        return self.tower is not None


class Edge(NamedTuple):
    """Something that a unit waits for.

    Attributes:
      source: the name of a node.
      unit: the unit that the node is in.
    """

    source: str
    unit: Unit


class StepUnits:
    """The units that a step runs, and the edges between them.

    What a unit that can't depend on a tower waits for is left out.

    Args:
      full_values: what the user's ops will be given, by the names of tensors.
      control_inputs: the names of the ops that the user's ops will wait for.
      results: what a step is run for, as rewrites have left it.

    Attributes:
      division: the graph and its plan.
      towers: some of which share a device.
      builder: has the nodes that will be added.
      nodes: these, by name.
      loops: the v1 loops, by the names of their units.
      order: the units that a step runs, each after those that it waits for.
      inputs: the edges to each of them.
    """

    def __init__(
        self,
        division: Division,
        towers: Sequence[Tower],
        builder: NodeBuilder,
        full_values: dict[str, str],
        control_inputs: dict[tf.Operation, list[str]],
        results: Sequence[Result],
    ):
        plan = division.plan
        self.division = division
        self.towers = towers
        self.builder = builder
        self.nodes = {node.name: node for node in builder.graph_def.node}
        self._full_values = full_values
        self._control_inputs = control_inputs

        self._users_ops = {op.name: op for op in control_inputs}
        # An op that doesn't depend on the batch may wait for one that does, and others for it.
        of_batch = set(plan.order)
        not_of_batch = [op for op in control_inputs if op not in of_batch]
        self._users_ops.update((op.name, op) for op in graphs.descendants(not_of_batch))

        self.loops = {f'{loop.name} (loop)': loop for loop in division.loops}
        self._loop_of = {op.name: key for key, loop in self.loops.items() for op in loop.all_ops}
        self._joint = {key for key, loop in self.loops.items() if _is_joint(loop, plan)}
        self._loops_by_frame = {loop.name: key for key, loop in self.loops.items()}
        self._added_to_loops = self._find_added_to_loops()

        self.order: list[Unit] = []
        self.inputs: dict[Unit, list[Edge]] = {}
        for result in map(self._unit_of_result, results):
            if result not in self.inputs:
                self._visit(result)

        # The towers from whose copies a unit is made, directly or by way of units that are no
        # copies, such as sums. They are bits of an int: 0b101 stands for towers 0 and 2.
        self._made_of: dict[Unit, int] = {}
        for unit in self.order:
            bits = 0
            for edge in self.inputs[unit]:
                bits |= self._towers_behind(edge)
            self._made_of[unit] = bits

    def unit_of(self, name: str) -> Unit:
        """The unit of an added node, or of one of the user's ops."""
        copy = self.builder.names.copy_of(name)
        if copy is not None:
            return self._copy(copy.tower, self._loop_of.get(copy.op_name, copy.op_name))
        if name in self.nodes:
            return self._loop_around(name) or Unit(None, name)
        return Unit(None, self._loop_of.get(name, name))

    def _copy(self, tower: int, name: str) -> Unit:
        """A tower's copy of an op or a loop, or a joint loop of all towers."""
        return Unit(None, name, is_joint=True) if name in self._joint else Unit(tower, name)

    def _loop_around(self, name: str) -> Unit | None:
        """The unit of the v1 loop that an added node is in; None if it's in none."""
        frame = self.builder.frame_of(name)
        if frame is None:
            return None
        copy = self.builder.names.loop_of_frame(frame)
        return self._copy(copy.tower, self._loops_by_frame[copy.op_name])

    def _find_added_to_loops(self) -> dict[Unit, list[str]]:
        """The added nodes that are in v1 loops and aren't copies, by the loops' units."""
        added = defaultdict[Unit, list[str]](list)
        if not self.loops:
            return added
        for name in self.nodes:
            if self.builder.names.copy_of(name) is None:
                loop = self._loop_around(name)
                if loop is not None:
                    added[loop].append(name)
        return added

    def members(self, unit: Unit) -> list[str]:
        """The names of a unit's nodes, or of the user's ops."""
        if unit.name not in self.loops:
            return [self._node_name(unit.name, unit.tower)]

        towers = list(range(len(self.towers))) if unit.is_joint else [unit.tower]
        names = []
        for tower in towers:
            for op in self.loops[unit.name].all_ops:
                names.append(self._node_name(op.name, tower))
        return names + self._added_to_loops[unit]

    def enters(self, unit: Unit) -> list[str]:
        """The names of the nodes of a copy that can wait for others: of a loop, its `Enter` ops."""
        if unit.name not in self.loops:
            return self.members(unit)
        return [self._node_name(op.name, unit.tower) for op in self.loops[unit.name].enters]

    def inputs_of(self, unit: Unit) -> list[Edge]:
        """The edges to any unit, also to one that a step doesn't run."""
        if unit in self.inputs:
            return self.inputs[unit]
        edges = []
        for member in self.members(unit):
            for name in self._inputs_of_node(member):
                source = self.unit_of(name)
                if source != unit:
                    edges.append(Edge(name, source))
        return edges

    def _unit_of_result(self, result: Result) -> Unit:
        """The unit of one of the user's ops, or of a tensor's full value."""
        if isinstance(result, tf.Operation):
            return self.unit_of(result.name)
        return self.unit_of(op_name(self._full_values.get(result.name, result.name)))

    def is_added(self, unit: Unit) -> bool:
        """Whether a unit is added to the graph, rather than the user's."""
        return unit.is_copy or unit.is_joint or unit.name in self.nodes

    def _node_name(self, name: str, tower: int | None) -> str:
        """The name of a tower's copy of an op; without a tower, the name itself."""
        return name if tower is None else self.builder.names.copy(name, tower)

    def _inputs_of_node(self, name: str) -> Sequence[str]:
        """The names of what a node, or one of the user's ops, waits for; see `inputs_of`."""
        node = self.nodes.get(name)
        if node is not None:
            names = [op_name(operand) for operand in node.input]
            return names + [op.name for op in self.builder.waits.get(name, ())]

        op = self._users_ops.get(name)
        if op is not None:
            operands = [self._full_values.get(tensor.name, tensor.name) for tensor in op.inputs]
            waits = self._control_inputs.get(op)
            if waits is None:
                waits = [before.name for before in op.control_inputs]
            return [*map(op_name, operands), *waits]

        if name.startswith(f'{self.builder.scope}/'):  # It computes which rows towers have.
            op = self.division.graph.get_operation_by_name(name)
            return [before.name for before in graphs.direct_inputs(op)]
        return ()

    def is_join(self, edge: Edge, copy: Unit) -> bool:
        """Whether what an edge brings to a copy is made of copies of other towers."""
        assert copy.tower is not None
        return bool(self._towers_behind(edge) & ~(1 << copy.tower))

    def _towers_behind(self, edge: Edge) -> int:
        """The towers whose copies an edge comes from, as in `_made_of`."""
        tower = edge.unit.tower
        return self._made_of.get(edge.unit, 0) if tower is None else 1 << tower

    def _visit(self, result: Unit) -> None:
        """Adds a unit and all that it waits for; without recursion, as paths are long."""
        self.inputs[result] = self.inputs_of(result)
        stack = [(result, iter(self.inputs[result]))]
        while stack:
            unit, remaining = stack[-1]
            edge = next(remaining, None)
            if edge is None:
                self.order.append(unit)
                stack.pop()
            elif edge.unit not in self.inputs:
                self.inputs[edge.unit] = self.inputs_of(edge.unit)
                stack.append((edge.unit, iter(self.inputs[edge.unit])))


def _is_joint(loop: V1Loop, plan: Plan) -> bool:
    """Whether all towers make the steps of a loop together."""
    plan_of_enter = plan.ops.get(loop.enters[0].name)
    return plan_of_enter is not None and plan_of_enter.is_joint


def op_name(operand: str) -> str:
    """The name of the node that an operand of a node is an output of, or that is waited for."""
    return operand.partition(':')[0].removeprefix('^')
