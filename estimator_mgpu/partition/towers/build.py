"""Carries out a plan: adds each tower's copies of ops, and gives full values to the user's ops.

In: a `Plan`, the devices, and where full values are made. Out: `Towers`, by which the user's
tensors are found again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import host_of
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.partition.towers.copies import Copies
from estimator_mgpu.partition.towers.node_builder import NodeBuilder
from estimator_mgpu.partition.towers.op_devices import device_of
from estimator_mgpu.partition.towers.values import Values
from estimator_mgpu.partition.towers.waits import Waits
from estimator_mgpu.tf_internals import graphs, op_types, private
from estimator_mgpu.tf_internals.state_order import StateOrder


@dataclass
class Towers:
    """A graph that runs on several devices.

    Attributes:
      graph: the user's, with the towers' copies of ops.
      plan: which ops are sharded, and how.
      total: how many examples there are, an int32 scalar; None if the plan knows.
      devices: one for each tower.
    """

    graph: tf.Graph
    plan: Plan
    total: tf.Tensor | None
    devices: Sequence[str]
    _replaced: dict[str, tf.Tensor]
    _values: Values
    _waits: Waits

    def full_value(self, tensor: tf.Tensor) -> tf.Tensor:
        """The value of one of the user's tensors for the global batch, and its side effects."""
        replacement = _replacement(tensor, self._replaced)
        name = self._values.full_values.get(replacement.name)
        value = replacement if name is None else self.graph.get_tensor_by_name(name)

        missing = self._waits.missing(tensor, replacement)
        if not missing:
            return value
        names = _names_of_ops(missing, self.plan, len(self.devices), self._values)
        waits = [self.graph.get_operation_by_name(name) for name in names]
        with self.graph.as_default(), tf.device(value.device), tf.name_scope(None):
            with tf.control_dependencies(None), tf.control_dependencies(waits):
                return tf.identity(value, f'{self._values.scope}/{tensor.op.name}')

    def local_values(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """What each tower has of the output of an op that is sharded."""
        names = [self._values.local(tensor, tower) for tower in range(len(self.devices))]
        return [self.graph.get_tensor_by_name(name) for name in names]


def build_towers(
    graph: tf.Graph,
    plan: Plan,
    total: tf.Tensor | None,
    devices: Sequence[str],
    full_value_devices: dict[str, str],
    replaced: dict[str, tf.Tensor],
    order: StateOrder,
    calls: Sequence[Sequence[tf.Tensor]] = (),
) -> Towers:
    """Changes a graph so that it runs on several devices, as planned.

    The ops that the user made stay: those that run once, and the sharded ones, too, for whoever
    fetches them. They are given full values, which are gathered or reduced from what towers have.

    Args:
      graph: the user's, which is changed.
      plan: which ops are sharded, and how.
      total: how many examples there are, an int32 scalar; None if the plan knows.
      devices: one for each tower.
      full_value_devices: where full values are made, by the names of tensors.
      replaced: what rewrites use in place of tensors, by their names.
      order: in which the graph touched state, before rewrites changed what waits for what.
      calls: the gradients of each optimizer's call.
    """
    nodes = NodeBuilder(graph, graph.unique_name('replicate'), host_of(devices[0]))
    calls = [[_replacement(gradient, replaced) for gradient in call] for call in calls]
    values = Values(graph, plan, total, devices, full_value_devices, calls, order, nodes)
    waits = Waits(graph, plan, order, values)
    copies = Copies(plan, devices, values, waits, nodes)

    for name, op_plan in plan.ops.items():
        copies.add(graph.get_operation_by_name(name), op_plan)
    for op in plan.order:
        for tensor in op.outputs:
            values.full(tensor)
    control_inputs = {
        op: _control_inputs(op, plan, devices, values, waits, nodes)
        for op in dict.fromkeys([*plan.order, *waits.ops_with_added()])
    }
    nodes.build()

    for op in plan.order:
        _use_full_values(op, values)
    for op, names in control_inputs.items():
        _set_control_inputs(op, names)
    return Towers(graph, plan, total, devices, replaced, values, waits)


def _replacement(tensor: tf.Tensor, replaced: dict[str, tf.Tensor]) -> tf.Tensor:
    """What rewrites use in place of a tensor, if anything."""
    while tensor.name in replaced:
        tensor = replaced[tensor.name]
    return tensor


def _control_inputs(
    op: tf.Operation,
    plan: Plan,
    devices: Sequence[str],
    values: Values,
    waits: Waits,
    nodes: NodeBuilder,
) -> list[str]:
    """Names the ops that one of the user's ops waits for: for a sharded op, all of its copies.

    If the op is a group, it waits for only one op on each device, which waits for all others there:
    that is one message. What it waits for besides, as something before it doesn't, is joined, too.
    """
    added = list(waits.added(op))
    is_group = op.type == op_types.NO_OP
    if is_group and op.name in plan.ops:
        names = _names_of_ops([op], plan, len(devices), values)
    else:
        before = waits.of_op(op)
        names = _names_of_ops([b for b in before if b.name in plan.ops], plan, len(devices), values)
        names += _joined([b for b in before if b.name not in plan.ops], is_group, nodes)

    sharded = [before for before in added if before.name in plan.ops]
    for tower, device in enumerate(devices):
        if sharded:
            copies = [values.copy_name(before.name, tower) for before in sharded]
            names.append(nodes.join(copies, device))
    return names + _joined([b for b in added if b.name not in plan.ops], True, nodes)


def _names_of_ops(
    ops: Sequence[tf.Operation], plan: Plan, towers: int, values: Values
) -> list[str]:
    """Names ops, or instead of a sharded op all of its copies."""
    names: list[str] = []
    for op in ops:
        if op.name in plan.ops:
            names += [values.copy_name(op.name, tower) for tower in range(towers)]
        else:
            names.append(op.name)
    return names


def _joined(ops: Sequence[tf.Operation], joins: bool, nodes: NodeBuilder) -> list[str]:
    """Names ops that run once; if they are joined, one op on each device that waits for them."""
    by_device = defaultdict[str, list[tf.Operation]](list)
    for op in ops:
        by_device[device_of(op) or ''].append(op)

    names: list[str] = []
    for device, ops_of_device in by_device.items():
        if joins and device and len(ops_of_device) > 1:
            names.append(nodes.after(ops_of_device, device).removeprefix('^'))
        else:
            names += [op.name for op in ops_of_device]
    return names


def _use_full_values(op: tf.Operation, values: Values) -> None:
    """Gives full values to one of the user's ops."""
    for index, tensor in enumerate(list(op.inputs)):
        name = values.full_values.get(tensor.name)
        if name is not None:
            private.set_input(op, index, op.graph.get_tensor_by_name(name))


def _set_control_inputs(op: tf.Operation, names: Sequence[str]) -> None:
    if names != [before.name for before in op.control_inputs]:
        graphs.set_control_inputs(op, [op.graph.get_operation_by_name(name) for name in names])
