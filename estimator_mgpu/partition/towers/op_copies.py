"""Each tower's copies of ops: where they run, what they are given, and what they wait for.

In: an op and its `OpPlan`. Out: a node for each tower, named as `names` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import device_spec, host_of
from estimator_mgpu.partition.once_devices import runs_at_its_table
from estimator_mgpu.partition.placements import CountedByTower, Partial, Shard
from estimator_mgpu.partition.plan import (
    FULL_ON_FIRST,
    LOCAL,
    OF_SIZES,
    Constant,
    CountedFromFirst,
    FullSizes,
    LocalRange,
    LocalShape,
    Need,
    OpPlan,
    RaggedRows,
    Reduced,
    Slice,
    SparseRows,
    VariableValue,
)
from estimator_mgpu.partition.tower import Tower
from estimator_mgpu.partition.towers.everywhere import Everywhere
from estimator_mgpu.partition.towers.function_copies import adapt_node
from estimator_mgpu.partition.towers.sending import Sender
from estimator_mgpu.partition.towers.values import Values
from estimator_mgpu.partition.towers.waits import Waits
from estimator_mgpu.tf_internals import graphs, op_types
from estimator_mgpu.tf_internals.v1_loops import entered

_SMALL_CONSTANT = 1024  # entries of a constant that each tower has a copy of


class Copies:
    """Adds each tower's copies of ops.

    Args:
      values: what copies give, and are given.
      sender: sends that to other devices.
      everywhere: what each device makes for itself of what the copies are given.
    """

    def __init__(self, values: Values, sender: Sender, waits: Waits, everywhere: Everywhere):
        self._plan = values.division.plan
        self._towers = values.towers
        self._values = values
        self._sender = sender
        self._waits = waits
        self._everywhere = everywhere
        self._nodes = values.nodes

    def add(self, op: tf.Operation, op_plan: OpPlan) -> None:
        """Adds a copy of an op for each tower."""
        definition = op.node_def
        at_state = self._device_of_state(op, op_plan)
        for tower in self._towers:
            device = self._device_for(definition.device, tower) if at_state is None else at_state
            control_inputs = self._control_inputs(op, tower) or self._waits_in_loop(op, tower)
            operands = [
                self._operand(op, tensor, need, tower, device)
                for tensor, need in zip(op.inputs, op_plan.needs)
            ]
            if op_plan.functions:
                operands = self._function_operands(op, operands, tower, device)
            elif op.type in op_types.ENTER:
                operands = self._values_of_variables(op, operands, device)
            name = self._nodes.names.copy(op.name, tower.number)
            node = self._nodes.copy(definition, name, [*operands, *control_inputs], device)
            adapt_node(self._values.shards.of_batch, node, op_plan, tower)

            if op.type in op_types.ENTER:
                frame = node.attr['frame_name'].s.decode()
                frame = self._nodes.names.frame(frame, tower.number, op_plan.is_joint)
                node.attr['frame_name'].s = frame.encode()
            elif op_plan.is_joint and tower.number > 0:
                self._use_first_condition(op, node)

    def _use_first_condition(self, op: tf.Operation, node: Any) -> None:
        """A frame has one `LoopCond`, so other towers have the first tower's."""
        node.op = op_types.IDENTITY
        node.attr['T'].type = tf.bool.as_datatype_enum
        node.input[:] = [self._values.local(op.outputs[0], self._towers[0])]

    def _device_for(self, wanted: str, tower: Tower) -> str:
        """Where a copy runs that uses no state: not on its tower if the user wants another kind."""
        if not wanted:
            return tower.device
        kinds = (None, device_spec(tower.device).device_type)
        return tower.device if device_spec(wanted).device_type in kinds else wanted

    def _device_of_state(self, op: tf.Operation, op_plan: OpPlan) -> str | None:
        """Where an op runs that uses a variable or a table: where that is; None for others."""
        for operand, need in zip(op.inputs, op_plan.needs):
            if operand.dtype == tf.resource and not isinstance(need, VariableValue):
                source = entered(operand)
                if source.op.type not in op_types.HANDLES:
                    return self._values.origins.device_of_full(source)

        if runs_at_its_table(op, op_plan, self._values.origins.device_of_full):
            return self._values.origins.device_of_full(op.inputs[0])
        return None

    def _control_inputs(self, op: tf.Operation, tower: Tower) -> list[str]:
        """What a copy waits for, as its op does: the tower's copies, and ops that run once."""
        return self._names_of_waits(self._waits.of_copy(op), host_of(tower.device), [tower])

    def _names_of_waits(
        self, ops: Sequence[tf.Operation], device: str, towers: Sequence[Tower]
    ) -> list[str]:
        """Control inputs: towers' copies of ops, and one op on a device for those that run once."""
        names = []
        unsharded = []
        for before in ops:
            # A NoOp that waits for nothing isn't worth waiting for.
            is_immediate = before.type == op_types.NO_OP and not before.control_inputs
            if before.name in self._plan.ops:
                names += [
                    f'^{self._nodes.names.copy(before.name, tower.number)}' for tower in towers
                ]
            elif not is_immediate:
                unsharded.append(before)
        if unsharded:
            names.append(f'^{self._nodes.after(unsharded, device)}')
        return names

    def _waits_in_loop(self, op: tf.Operation, tower: Tower) -> list[str]:
        """What a copy in a v1 loop waits for if all that it's given is the same in each step.

        TensorFlow runs the steps of a loop on a device if something there is made anew in each of
        them. So an op that uses nothing but constants of the loop waits for something that the loop
        makes, wherever its loop comes from. A copy may be given constants in place of that:

            Const, in the loop --> Max of x        =>        sizes --> Enter --> Max of x
                                                             Const, in the loop - - ^
        """
        if op.name not in self._plan.frames:
            return []
        replaced = []
        for tensor, need in zip(op.inputs, self._plan.ops[op.name].needs):
            if isinstance(need, OF_SIZES):
                replaced.append(tensor.op)
            elif tensor.op.type not in op_types.ENTER:
                return []
        return [f'^{self._nodes.names.copy(before.name, tower.number)}' for before in replaced]

    def _operand(
        self, op: tf.Operation, tensor: tf.Tensor, need: Need, tower: Tower, device: str
    ) -> str:
        """What a copy on a device is given for an input of its op."""
        if op.name in self._plan.frames:
            return self._operand_in_loop(op, tensor, need, tower, device)
        if need == LOCAL:
            return self._values.local(tensor, tower)
        if isinstance(need, Slice):
            return self._values.local_parts.slice(tensor, need, tower)
        if isinstance(need, (SparseRows, RaggedRows)):
            return self._values.local_parts.of_feature(tensor, need, tower)
        if isinstance(need, CountedFromFirst):
            indices = self._operand(op, tensor, need.indices, tower, device)
            return self._values.local_parts.counted_from_first(tensor, indices, need, tower, device)
        if isinstance(need, (LocalShape, Constant)):
            return self._sizes(tensor, need, tower)
        if isinstance(need, LocalRange):
            return self._range(tensor.dtype.base_dtype, need, tower)

        if need == FULL_ON_FIRST and tower.number > 0:
            return self._nodes.add('ZerosLike', [self._received(tensor, device)], device)
        placement = self._plan.placements.get(tensor.name)
        differs = placement is None or isinstance(placement, (Shard, Partial, CountedByTower))
        if differs or need == FULL_ON_FIRST:
            return self._full_operand(tensor, tower, device)
        return self._values.local(tensor, tower)  # It's the same on all towers.

    def _operand_in_loop(
        self, op: tf.Operation, tensor: tf.Tensor, need: Need, tower: Tower, device: str
    ) -> str:
        """The same in a v1 loop, where a full value is what each tower has."""
        loops = self._plan.frames[op.name]
        if isinstance(need, Reduced):
            return self._values.reduced(tensor, need, loops)
        if isinstance(need, OF_SIZES):
            sizes = self._sizes(tensor, need, tower)
            return self._nodes.entered(sizes, self._values.frames(loops, tower), device)

        full = self._values.local_in_loop(tensor, tower, loops)
        if isinstance(need, Slice):
            shards = self._values.shards.of_batch
            return shards.slice(full, need.axis, need.factor, tower, device)
        if need == FULL_ON_FIRST and tower.number > 0:
            return self._nodes.add('ZerosLike', [full], device)
        return full

    def _sizes(
        self, tensor: tf.Tensor, need: LocalShape | Constant | FullSizes, tower: Tower
    ) -> str:
        """The integers that a copy is given in place of a tensor of sizes."""
        shards = self._values.shards.of_batch
        if isinstance(need, LocalShape):
            shards = self._values.shards.of(need.rows)
        dtype = tensor.dtype.base_dtype
        is_scalar = tensor.shape.rank == 0
        if isinstance(need, LocalShape) and len(need.entries) > 1:
            is_scalar = False  # It may take the place of a -1, which asks for any shape.
        sizes = shards.local_sizes(need, tower, is_scalar, dtype)
        flat = self._nodes.tensor(sizes, dtype)
        if not isinstance(need, LocalShape) or tensor.shape.rank != 2:
            return flat
        # Paddings are a matrix.
        return self._nodes.add('Reshape', [flat, tensor.shape.as_list()], self._nodes.host)

    def _range(self, dtype: tf.DType, need: LocalRange, tower: Tower) -> str:
        """The numbers of the entries that a tower's rows have."""
        size = self._values.shards.of(need.rows).local_size(need.factor, tower, dtype)
        ends = [self._nodes.scalar(number, dtype) for number in (0, size, 1)]
        return self._nodes.add('Range', ends, tower.device)

    def _full_operand(self, tensor: tf.Tensor, tower: Tower, device: str) -> str:
        """A full value on a device."""
        if tensor.name not in self._plan.placements:
            is_constant = tensor.op.type == op_types.CONST
            if is_constant and tensor.shape.num_elements() <= _SMALL_CONSTANT:
                control_inputs = self._control_inputs(tensor.op, tower)
                device_of_copy = self._device_for(tensor.op.device, tower)
                return self._nodes.copy_of_constant(tensor.op, device_of_copy, control_inputs)
            is_sent = device != self._values.origins.device_of_full(tensor)
            if is_sent and self._sender.is_packed(tensor):
                return self._sender.receive_packed(tensor, device)
        return self._everywhere.value(tensor, device) or self._received(tensor, device)

    def _received(self, tensor: tf.Tensor, device: str) -> str:
        """A full value, sent to a device. Handles and reference variables can't be sent."""
        is_handle = tensor.dtype.base_dtype in (tf.resource, tf.variant)
        if is_handle or graphs.is_reference_variable(tensor):
            return self._values.full(tensor)
        return self._sender.receive(tensor, device)

    def _function_operands(
        self, op: tf.Operation, operands: Sequence[str], tower: Tower, device: str
    ) -> list[str]:
        """What a copy of an op that calls functions is given: values of variables, say."""
        operands = self._values_of_variables(op, operands, device)
        function_operands = []
        for tensor, operand in zip(op.inputs, operands):
            if tensor.dtype != tf.resource:
                # TensorFlow begins a loop on the devices of its inputs, so they are the tower's.
                operand = self._nodes.add('Identity', [operand], tower.device)
            function_operands.append(operand)
        return function_operands

    def _values_of_variables(
        self, op: tf.Operation, operands: Sequence[str], device: str
    ) -> list[str]:
        """The operands, with the value of each variable that a loop, say, only reads."""
        values = []
        for tensor, need, operand in zip(op.inputs, self._plan.ops[op.name].needs, operands):
            if isinstance(need, VariableValue):
                source = self._values.origins.device_of_full(tensor)
                waits = self._waits.of_read(op, tensor)
                before = self._names_of_waits(waits, source, self._towers)
                read = self._nodes.add(
                    'ReadVariableOp', [operand, *before], source, dtype=need.dtype
                )
                operand = self._sender.send(read, source, device)
            values.append(operand)
        return values
