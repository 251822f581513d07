"""Carries out a plan: adds each tower's copies of ops, and gives full values to the user's ops.

In: a `Plan`, the devices and their turns, and where full values are made. Out: `Towers`, by which
the user's tensors are found again.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import host_of
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.messages.packing import find_packs
from estimator_mgpu.partition.messages.slices import Slices, find_sent
from estimator_mgpu.partition.micro_batches.edges import StepUnits
from estimator_mgpu.partition.micro_batches.schedule import Schedule, find_schedule
from estimator_mgpu.partition.micro_batches.turn_gates import add_gates
from estimator_mgpu.partition.nodes.names import Names, unused_word
from estimator_mgpu.partition.nodes.node_builder import NodeBuilder
from estimator_mgpu.partition.once_devices import device_of
from estimator_mgpu.partition.tower import Tower, towers_of
from estimator_mgpu.partition.towers.everywhere import Everywhere, find_small, packs_of_ops
from estimator_mgpu.partition.towers.only_fetched import worth_making
from estimator_mgpu.partition.towers.op_copies import Copies
from estimator_mgpu.partition.towers.origins import Origins
from estimator_mgpu.partition.towers.sending import Sender
from estimator_mgpu.partition.towers.values import Values
from estimator_mgpu.partition.towers.waits import Waits
from estimator_mgpu.tf_internals import graphs, op_paths, op_types, private, tracebacks


@dataclass
class Towers:
    """A graph that runs on several devices, or in several turns.

    Attributes:
      division: what is known of the graph.
      towers: a device and a turn each.
      names: of the nodes that were added.
      schedule: which ops run one turn after another; None if one turn was asked for.
    """

    division: Division
    towers: Sequence[Tower]
    names: Names
    schedule: Schedule | None
    _values: Values
    _waits: Waits

    @property
    def graph(self) -> tf.Graph:
        """The user's, with the towers' copies of ops."""
        return self.division.graph

    def full_value(self, tensor: tf.Tensor) -> tf.Tensor:
        """The value of one of the user's tensors for the global batch, and its side effects."""
        replacements = self.division.replacements(tensor)
        value = self._value_in_use(replacements)
        missing = self._waits.missing(replacements)
        if not missing:
            return value
        return self._identity_after(value, self._copies_of(missing), tensor.op)

    def _value_in_use(self, replacements: Sequence[tf.Tensor]) -> tf.Tensor:
        """The full value of a tensor, given with its replacements, as users of it have it."""
        replacement = replacements[-1]
        name = self._values.full_values.get(replacement.name)
        return replacement if name is None else self.graph.get_tensor_by_name(name)

    def _copies_of(self, ops: Sequence[tf.Operation]) -> list[tf.Operation]:
        """Ops, and in the place of a sharded one all of its copies."""
        names = _names_of_ops(ops, self._values)
        return [self.graph.get_operation_by_name(name) for name in names]

    def _identity_after(
        self, value: tf.Tensor, before: Sequence[tf.Operation], op: tf.Operation
    ) -> tf.Tensor:
        """A full value of a user's op that waits for other ops."""
        with self._added_after(before, op, value.device):
            return tf.identity(value, self.names.result(op.name))

    @contextlib.contextmanager
    def _added_after(
        self, before: Sequence[tf.Operation], op: tf.Operation, device: str
    ) -> Iterator[None]:
        """A context in which an op can be added for a user's op; it waits for other ops."""
        with self.graph.as_default(), tf.device(device), tf.name_scope(None):
            with tf.control_dependencies(None), tf.control_dependencies(before):
                with tracebacks.made_for(op):
                    yield

    def make_values_of_stateful_ops(self) -> dict[str, tf.Tensor]:
        """Makes the full values of tensors whose ops mustn't run again, as they touch state.

        Returns:
          The values, by the names of the user's tensors. Only those that can be fetched have one.
        """
        values = {}
        waits: dict[int, tf.Operation] = {}  # by the side effects that they wait for
        for name in dict.fromkeys([*self._values.full_values, *self.division.replaced]):
            tensor = self.graph.get_tensor_by_name(name)
            replacements = self.division.replacements(tensor)
            is_of_user = tensor.op in self.division.user_ops and self.graph.is_fetchable(tensor.op)
            if not (is_of_user and self._waits.touches_state(replacements)):
                continue
            values[name] = self._value_in_use(replacements)
            if self._waits.missing(replacements):
                # Many tensors wait for the same, as gradients do for all updates of averages.
                effects = self._waits.effects_of(replacements)
                if effects not in waits:
                    before = self._copies_of(self.division.order.ops_for(effects, tensor.op))
                    with self._added_after(before, tensor.op, self.towers[0].device):
                        waits[effects] = tf.no_op(self.names.result(tensor.op.name))
                values[name] = self._identity_after(values[name], [waits[effects]], tensor.op)
        return values

    def local_values(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """What each tower has of the output of an op that is sharded."""
        names = [self._values.local(tensor, tower) for tower in self.towers]
        return [self.graph.get_tensor_by_name(name) for name in names]


def build_towers(division: Division) -> Towers:
    """Changes a graph so that it runs on several devices, or in several turns, as planned.

    The ops that the user made stay: those that run once, and the sharded ones, too, for whoever
    fetches them. They are given full values, which are gathered or reduced from what towers have.
    """
    graph = division.graph
    step_results = [division.in_place_of(result) for result in division.step_results]
    all_results = [*step_results, *division.results]
    ops = graphs.topological_order(graph.get_operations())
    result_ops = {getattr(result, 'op', result) for result in all_results}
    result_ops |= {division.op_in_place_of(op) for op in division.results}
    collect = functools.partial(_collect_nodes, division, ops, result_ops, unused_word(ops))

    towers = towers_of(division.devices, division.turns)
    values, waits, control_inputs = collect(towers)
    schedule = None
    if division.turns > 1:
        step = StepUnits(
            division, towers, values.nodes, values.full_values, control_inputs, step_results
        )
        schedule = find_schedule(step, all_results)
        if schedule.is_worth_it:
            add_gates(step, schedule)
        else:
            towers = towers_of(division.devices)
            values, waits, control_inputs = collect(towers)

    values.nodes.build({*values.full_values.values()})
    _use_full_values(values)
    for op, names in control_inputs.items():
        if names != [before.name for before in op.control_inputs]:
            graphs.set_control_inputs(op, [graph.get_operation_by_name(name) for name in names])
    op_paths.name_ops_by_paths(graph, {name.partition(':')[0] for name in division.replaced})
    return Towers(division, towers, values.nodes.names, schedule, values, waits)


def _collect_nodes(
    division: Division,
    ops: Mapping[tf.Operation, graphs.Inputs],
    result_ops: Set[tf.Operation],
    scope: str,
    towers: Sequence[Tower],
) -> tuple[Values, Waits, dict[tf.Operation, list[str]]]:
    """Collects the nodes of towers, without a change to the graph.

    Args:
      ops: those of the graph, as `topological_order` gives them.
      result_ops: those that give what steps are run for.
      scope: a word for the names of all nodes.

    Returns:
      What the user's ops are given, with the nodes that are added; what they wait for; and by op,
      the names of the ops for which it will wait.
    """
    graph = division.graph
    plan = division.plan
    sharded = {graph.get_operation_by_name(name): op_plan for name, op_plan in plan.ops.items()}
    first = next(iter(plan.order), None)
    nodes = NodeBuilder(graph, scope, host_of(division.devices[0]), first)
    origins = Origins(division)
    waits = Waits(ops, sharded, plan, division.order, origins)
    packs = find_packs(division, ops, sharded, origins.device_of_full)
    slices = Slices(find_sent(plan, sharded, packs, origins.device_of_full), division.devices)
    small = find_small(division, origins, packs, waits)
    values = Values(division, origins, packs, packs_of_ops(division, small), slices, towers, nodes)
    sender = Sender(values)
    everywhere = Everywhere(small, values)
    copies = Copies(values, sender, waits, everywhere)

    for op, op_plan in sharded.items():
        with nodes.serving(op):
            copies.add(op, op_plan)
    for tensor in worth_making(division, origins, sharded, result_ops):
        values.full(tensor)
    control_inputs: dict[tf.Operation, list[str]] = {}
    for op in dict.fromkeys([*plan.order, *waits.ops_with_added()]):
        if not (waits.of_op(op) or waits.added(op)):  # as of most ops
            control_inputs[op] = []
            continue
        with nodes.serving(op):
            control_inputs[op] = _control_inputs(op, values, waits)
    return values, waits, control_inputs


def _control_inputs(op: tf.Operation, values: Values, waits: Waits) -> list[str]:
    """Names the ops that one of the user's ops waits for: for a sharded op, all of its copies.

    The copies on one device are joined: an op there waits for all of them, so that the device sends
    one message. Ops that run once are joined, too, if a `tf.group` waits for them, or an op that
    only waits for them as something before it no longer does.
    """
    plan = values.division.plan
    before = waits.of_op(op)
    added = list(waits.added(op))
    is_group = op.type == op_types.NO_OP
    if values.origins.is_only_fetched(op):
        # No messages are saved by nodes that join others.
        waited_for = [op] if is_group and op.name in plan.ops else before
        return _names_of_ops([*waited_for, *added], values)

    names: list[str] = []
    for sharded in before:
        if sharded.name in plan.ops:
            names += _copies([sharded], values)
    names += _joined([b for b in before if b.name not in plan.ops], is_group, values.nodes)

    added_sharded = [before for before in added if before.name in plan.ops]
    if added_sharded:
        names += _copies(added_sharded, values)
    return names + _joined([b for b in added if b.name not in plan.ops], True, values.nodes)


def _copies(ops: Sequence[tf.Operation], values: Values) -> list[str]:
    """Names an op on each device that waits for all copies of ops there: a single copy itself."""
    names = []
    nodes = values.nodes
    for chain in values.shards.of_batch.chains:
        copies = [nodes.names.copy(op.name, tower.number) for op in ops for tower in chain]
        names.append(copies[0] if len(copies) == 1 else nodes.join(copies, chain[0].device))
    return names


def _names_of_ops(ops: Sequence[tf.Operation], values: Values) -> list[str]:
    """Names ops: in the place of a sharded op, all of its copies."""
    named: list[str] = []
    for op in ops:
        if op.name in values.division.plan.ops:
            named += [values.nodes.names.copy(op.name, tower.number) for tower in values.towers]
        else:
            named.append(op.name)
    return named


def _joined(ops: Sequence[tf.Operation], joins: bool, nodes: NodeBuilder) -> list[str]:
    """Names ops that run once; to join them, one op on each device that waits for those there."""
    by_device = defaultdict[str, list[tf.Operation]](list)
    for op in ops:
        by_device[device_of(op) or ''].append(op)

    names: list[str] = []
    # TensorFlow has control inputs in an order that isn't the same in each run.
    for device, ops_of_device in sorted(by_device.items()):
        if joins and device and len(ops_of_device) > 1:
            names.append(nodes.after(ops_of_device, device))
        else:
            names += [op.name for op in ops_of_device]
    return names


def _use_full_values(values: Values) -> None:
    """Gives full values to those of the user's ops that use what towers have."""
    graph = values.division.graph
    replaced = map(graph.get_tensor_by_name, values.full_values)
    users = {user for tensor in replaced for user in tensor.consumers()}
    for op in filter(users.__contains__, values.division.plan.order):
        for index, tensor in enumerate(op.inputs):
            name = values.full_values.get(tensor.name)
            if name is not None:
                private.set_input(op, index, graph.get_tensor_by_name(name))
