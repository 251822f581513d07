"""On which device ops that run once run, and on which one sums and gathers are made.

That is the device of the variable that they serve: a gradient is summed where its variable lives.
Only the gradient of a table's rows, which is summed by id, may be on a device without a table.
`variable_devices` decides where variables live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import device_spec
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.placements import rows_of
from estimator_mgpu.partition.plan import FULL, OpPlan, Plan
from estimator_mgpu.partition.sizes import UniqueRows
from estimator_mgpu.tf_internals import function_calls, graphs, kernels, op_types, private
from estimator_mgpu.tf_internals.effects import draws_numbers
from estimator_mgpu.tf_internals.liveness import Liveness

# Types whose ops may lack a kernel.
_NOT_ON_EVERY_DEVICE = frozenset(
    dtype.as_datatype_enum for dtype in (tf.string, tf.resource, tf.variant)
)


def place_ops(division: Division) -> None:
    """Moves ops that run once, if they may be moved.

    For example, with the variable `w` on the second device, the ops of

        update = -0.1 * tf.clip_by_norm(gradient, 1.0)   # assigned to w

    are placed there, and the partial sums of `gradient` are reduced there.

    It sets `division.full_value_devices`.
    """
    plan = division.plan
    devices: dict[tf.Operation, str] = {}  # What isn't in here may be anywhere.
    movable = _movable_ops(division.graph, plan, devices)
    local = {name: division.graph.get_tensor_by_name(name) for name in plan.placements}
    full_value_devices: dict[str, str] = {}

    # What a variable's update is computed from is placed where the update is, unless the result is
    # small: that is sent instead.
    _place_where_used(movable, devices, only_large=True)
    _place_full_values(local, full_value_devices, devices)

    _spread_draws([op for op in movable if op not in devices], division.devices, devices)
    _place_at_inputs(movable, devices, full_value_devices)

    # Ops of which no large input has a device, as those that prepare the ids for a lookup.
    _place_where_used(movable, devices)
    _place_full_values(local, full_value_devices, devices)
    _share_out_ids(plan, division.devices, full_value_devices)

    for op, is_colocated in movable.items():
        if op in devices:
            device = devices[op]
            if kernels.is_gpu(device):  # Only then is it worth the time that a NodeDef takes.
                device = kernels.device_for(op.node_def, device, division.graph)
            if is_colocated:
                private.clear_colocation(op)
            private.set_device(op, device)
    division.full_value_devices = full_value_devices


def _movable_ops(
    graph: tf.Graph, plan: Plan, devices: dict[tf.Operation, str]
) -> dict[tf.Operation, bool]:
    """The ops that run once and may be moved, in order, and whether each is colocated with others.

    Constants aren't among them, though they may be half of all: TensorFlow places one where it's
    used.

    Args:
      plan: which ops are sharded.
      devices: of ops, to which those of ops that can't be moved are added.
    """
    liveness = Liveness(graph.get_operations())
    movable: dict[tf.Operation, bool] = {}
    for op in graph.get_operations():
        if op.type == op_types.CONST or op.name in plan.ops:
            continue
        node = op.node_def
        device = _fixed_device(op, node, plan)
        if device is None and liveness.is_in_loop(op):
            device = ''
        if device is None:
            movable[op] = '_class' in node.attr
        elif device:
            devices[op] = device
            if function_calls.calls_compiled(op):  # XLA takes no variable of another device.
                private.set_device(op, device)
    return movable


def _place_where_used(
    ops: Collection[tf.Operation], devices: dict[tf.Operation, str], only_large: bool = False
) -> None:
    """Places ops where they are used, backwards from those that have a device.

    Args:
      devices: of ops, to which those of others are added.
      only_large: whether an op has to give at least as many bytes as each of its inputs has.
    """
    for op in reversed(list(ops)):
        for output in op.outputs:
            device = None if op in devices else _device_of_consumers(output, devices)
            if not device:
                continue
            if not only_large or bytes_of(output) >= max(map(bytes_of, op.inputs), default=0):
                devices[op] = device


def _place_at_inputs(
    ops: Iterable[tf.Operation],
    devices: dict[tf.Operation, str],
    full_value_devices: Mapping[str, str],
) -> None:
    """Places ops where their largest input is, each after those that it depends on."""
    for op in ops:
        if op not in devices and len(op.inputs):
            largest = max(op.inputs, key=bytes_of)
            device = full_value_devices.get(largest.name) or devices.get(largest.op)
            if device:
                devices[op] = device


def _place_full_values(
    tensors: Mapping[str, tf.Tensor],
    full_value_devices: dict[str, str],
    devices: Mapping[tf.Operation, str],
) -> None:
    """Decides where full values of sharded tensors are made: where they are used.

    Args:
      tensors: those that towers make, by name.
      full_value_devices: by name, the devices that were found, to which others are added.
    """
    for name, tensor in tensors.items():
        device = None if name in full_value_devices else _device_of_consumers(tensor, devices)
        if device:
            full_value_devices[name] = device


def _share_out_ids(
    plan: Plan, tower_devices: Sequence[str], full_value_devices: dict[str, str]
) -> None:
    """Decides where the different ids of towers are put together, and what belongs to them.

    These are the ids that are looked up in a table, and the sums of its gradient by id. The table's
    device is busy with the update. So a device without a table puts them together, if the machine
    has one, and sends one row of each id to the table's device. Otherwise the table's device does
    it: it's given the ids for the lookup anyhow.

    Args:
      plan: what towers have.
      tower_devices: those of towers.
      full_value_devices: of tensors, by name. Those of ids, and of what belongs to them, are set.
    """
    belonging: dict[UniqueRows, list[str]] = {}
    for name, placement in plan.placements.items():
        rows = rows_of(placement)
        if isinstance(rows, UniqueRows) and name in full_value_devices:
            belonging.setdefault(rows, []).append(name)

    tables = {ids: full_value_devices[names[0]] for ids, names in belonging.items()}
    with_tables = {full_value_devices[name] for names in belonging.values() for name in names}
    without_tables = [device for device in tower_devices if device not in with_tables]
    load = Counter(tables.values())
    for ids, table in tables.items():
        others = [device for device in without_tables if _is_like(device, table)]
        device = min([table, *others], key=load.__getitem__)
        load[device] += 1
        full_value_devices.update(dict.fromkeys([ids.name, *belonging[ids]], device))


def _spread_draws(
    ops: Sequence[tf.Operation], tower_devices: Sequence[str], devices: dict[tf.Operation, str]
) -> None:
    """Gives each device its part of the random numbers that are drawn for the global batch.

    Seeded masks of dropout take as much memory as the activations that they're for, or a fourth of
    it. Each is drawn on the device that has the fewest bytes of them so far. If all were drawn on
    one of four devices, that device would need 7% more memory in a step of a transformer.

    Only devices of the first one's kind and machine count: another kind may draw other numbers, and
    another machine, if it's restarted, begins with the first ones again.

    Args:
      ops: those that may be anywhere.
      devices: of ops, to which those of draws are added.
    """
    bytes_on = {device: 0 for device in tower_devices if _is_like(device, tower_devices[0])}
    for op in ops:
        if draws_numbers(op):
            emptiest = min(bytes_on, key=bytes_on.__getitem__)
            bytes_on[emptiest] += sum(map(bytes_of, op.outputs))
            devices[op] = emptiest


def _is_like(device: str, other: str) -> bool:
    """Whether two devices are of one kind, on one machine."""
    index = {'device_index': None}
    return device_spec(device).replace(**index) == device_spec(other).replace(**index)


def _device_of_consumers(tensor: tf.Tensor, devices: Mapping[tf.Operation, str]) -> str | None:
    """The device of a tensor's first consumer that has one."""
    placed: Sequence[tf.Operation] = [op for op in tensor.consumers() if op in devices]
    return devices[min(placed, key=private.creation_index)] if placed else None


def device_of(op: tf.Operation) -> str | None:
    """An op's device, or else that of the variable that it uses.

    Returns:
      '' if it uses a variable without a device, and None if it uses none.
    """
    return op.device or _device_of_handle(op)


def _device_of_handle(op: tf.Operation) -> str | None:
    """As `device_of`, of an op that has no device."""
    for operand in op.inputs:
        if graphs.is_handle(operand):
            return operand.op.device
    return None


def runs_at_its_table(
    op: tf.Operation, op_plan: OpPlan, device_of_full: Callable[[tf.Tensor], str]
) -> bool:
    """Whether the copies of a sharded op run where its table is: then rows are sent, no table.

    Args:
      op_plan: what its copies are given.
      device_of_full: gives the device of a tensor's full value.
    """
    if op.type in op_types.LOOKUPS:
        return graphs.reads_reference(op.inputs[0])
    is_sum_of_rows = op.type in op_types.SPARSE_SEGMENTS and op_plan.needs[0] == FULL
    return is_sum_of_rows and bool(device_of_full(op.inputs[0]))


def _fixed_device(op: tf.Operation, node: Any, plan: Plan) -> str | None:
    """The device of an op that can't be moved, '' if it isn't known; None if it can be moved.

    Args:
      node: the op's NodeDef.
    """
    device = node.device or _device_of_handle(op)
    if device is not None:
        return device
    if not op.outputs:
        return ''
    for tensor in [*op.inputs, *op.outputs]:
        is_bound = tensor.dtype.as_datatype_enum in _NOT_ON_EVERY_DEVICE
        if is_bound or graphs.is_reference_variable(tensor):
            return ''
    # It has to stay with the ops that it's colocated with, unless towers have copies of these.
    together = [
        op.graph.get_operation_by_name(name)
        for name in graphs.colocations(node)
        if name not in plan.ops
    ]
    if together:
        return next((device for device in map(device_of, together) if device), '')
    return None
