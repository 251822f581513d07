"""On which device ops that run once run, and on which one sums and gathers are made.

That is the device of the variable that they serve: a gradient is summed where its variable lives.
Only the gradient of a table's rows, which is summed by id, may be on a device without a table.
`variable_devices` decides where variables live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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
    devices = _Devices(division)
    # What a variable's update is computed from is placed where the update is, unless the result is
    # small: that is sent instead.
    devices.place_where_used(only_large=True)
    devices.place_full_values()
    devices.spread_draws()
    devices.place_at_inputs()
    # Ops of which no large input has a device, as those that prepare the ids for a lookup.
    devices.place_where_used()
    devices.place_full_values()
    devices.share_out_ids()
    devices.move_ops()
    division.full_value_devices = devices.of_full_values


class _Devices:
    """The devices of ops that run once and of full values: more and more of them are found.

    What has none yet may be anywhere.

    Attributes:
      of_full_values: where full values of what towers have are made, by the tensors' names.
    """

    def __init__(self, division: Division):
        self._graph = division.graph
        self._plan = division.plan
        self._of_towers = division.devices
        self._local = [division.graph.get_tensor_by_name(name) for name in self._plan.placements]
        self.of_full_values: dict[str, str] = {}
        self._of_ops: dict[tf.Operation, str] = {}
        # In order, the ops that may be moved, and whether each is colocated with others.
        self._movable: dict[tf.Operation, bool] = {}
        self._sort_ops()

    def _sort_ops(self) -> None:
        """Tells the ops that may be moved from those that have their device."""
        liveness = Liveness(self._graph.get_operations())
        for op in self._graph.get_operations():
            if op.name in self._plan.ops:
                continue
            node = op.node_def
            device = _fixed_device(op, node, self._plan)
            if device is None and liveness.is_in_loop(op):
                device = ''
            if device is None:
                self._movable[op] = '_class' in node.attr
            elif device:
                self._of_ops[op] = device
                if function_calls.calls_compiled(op):  # XLA takes no variable of another device.
                    private.set_device(op, device)

    def _of_consumers(self, tensor: tf.Tensor) -> str | None:
        """The device of a tensor's first consumer that has one."""
        placed: Sequence[tf.Operation] = [op for op in tensor.consumers() if op in self._of_ops]
        return self._of_ops[min(placed, key=private.creation_index)] if placed else None

    def place_where_used(self, only_large: bool = False) -> None:
        """Places ops where they are used, backwards from those that have a device.

        Args:
          only_large: whether an op has to give at least as many bytes as each of its inputs has.
        """
        for op in reversed(list(self._movable)):
            for output in op.outputs:
                device = None if op in self._of_ops else self._of_consumers(output)
                if not device:
                    continue
                if not only_large or bytes_of(output) >= max(map(bytes_of, op.inputs), default=0):
                    self._of_ops[op] = device

    def place_at_inputs(self) -> None:
        """Places ops where their largest input is, each after those that it depends on."""
        for op in self._movable:
            if op not in self._of_ops and len(op.inputs):
                largest = max(op.inputs, key=bytes_of)
                device = self.of_full_values.get(largest.name) or self._of_ops.get(largest.op)
                if device:
                    self._of_ops[op] = device

    def place_full_values(self) -> None:
        """Decides where full values of sharded tensors are made: where they are used."""
        for tensor in self._local:
            if tensor.name not in self.of_full_values:
                device = self._of_consumers(tensor)
                if device:
                    self.of_full_values[tensor.name] = device

    def share_out_ids(self) -> None:
        """Decides where the different ids of towers are put together, and what belongs to them.

        These are the ids that are looked up in a table, and the sums of its gradient by id. The
        table's device is busy with the update. So a device without a table puts them together, if
        the machine has one, and sends one row of each id to the table's device. Otherwise the
        table's device does it: it's given the ids for the lookup anyhow.
        """
        belonging: dict[UniqueRows, list[str]] = {}
        for name, placement in self._plan.placements.items():
            rows = rows_of(placement)
            if isinstance(rows, UniqueRows) and name in self.of_full_values:
                belonging.setdefault(rows, []).append(name)

        tables = {ids: self.of_full_values[names[0]] for ids, names in belonging.items()}
        with_tables = {self.of_full_values[name] for names in belonging.values() for name in names}
        without_tables = [device for device in self._of_towers if device not in with_tables]
        load = Counter(tables.values())
        for ids, table in tables.items():
            others = [device for device in without_tables if _is_like(device, table)]
            device = min([table, *others], key=load.__getitem__)
            load[device] += 1
            self.of_full_values.update(dict.fromkeys([ids.name, *belonging[ids]], device))

    def spread_draws(self) -> None:
        """Gives each device its part of the random numbers that are drawn for the global batch.

        Seeded masks of dropout take as much memory as the activations that they're for, or a fourth
        of it. Each is drawn on the device that has the fewest bytes of them so far. If all were
        drawn on one of four devices, that device would need 7% more memory in a step of a
        transformer.

        Only devices of the first one's kind and machine count: another kind may draw other numbers,
        and another machine, if it's restarted, begins with the first ones again.
        """
        devices = self._of_towers
        bytes_on = {device: 0 for device in devices if _is_like(device, devices[0])}
        for op in self._movable:
            if op not in self._of_ops and draws_numbers(op):
                emptiest = min(bytes_on, key=bytes_on.__getitem__)
                bytes_on[emptiest] += sum(map(bytes_of, op.outputs))
                self._of_ops[op] = emptiest

    def move_ops(self) -> None:
        """Moves the ops to the devices that were found."""
        for op, is_colocated in self._movable.items():
            if op in self._of_ops:
                device = self._of_ops[op]
                if kernels.is_gpu(device):  # Only then is it worth the time that a NodeDef takes.
                    device = kernels.device_for(op.node_def, device, self._graph)
                if is_colocated:
                    private.clear_colocation(op)
                private.set_device(op, device)


def _is_like(device: str, other: str) -> bool:
    """Whether two devices are of one kind, on one machine."""
    index = {'device_index': None}
    return device_spec(device).replace(**index) == device_spec(other).replace(**index)


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
