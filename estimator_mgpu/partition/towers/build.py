"""A plan, carried out: each tower's copies of ops, and what the others are given instead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.batch import parts_of
from estimator_mgpu.devices import device_spec, host_of, relay
from estimator_mgpu.partition.placements import NotGatherable, Partial, Shard
from estimator_mgpu.partition.plan import (
    FULL_ON_FIRST,
    LOCAL,
    Constant,
    LocalShape,
    Need,
    OpPlan,
    Plan,
    Slice,
    VariableValue,
)
from estimator_mgpu.partition.sizes import ONE, Dim, RowSpace
from estimator_mgpu.partition.towers.functions import adapt
from estimator_mgpu.partition.towers.node_builder import NodeBuilder, Number
from estimator_mgpu.partition.towers.packing import find_packs
from estimator_mgpu.partition.towers.placement import device_of
from estimator_mgpu.partition.towers.shards import Sharding
from estimator_mgpu.tf_internals import graphs, op_types, private

_SMALL = 1024  # entries of a constant that each tower has a copy of


@dataclass
class Towers:
    """Divides a graph by a plan.

    The ops that the user made stay: those that run once, and the others, too, for whoever fetches
    them. They take whole values: what towers have, gathered or reduced. By names of tensors,
    `homes` says where that is made, and `instead` what is used in their place. `calls` are the
    gradients of each optimizer's call.
    """

    graph: tf.Graph
    plan: Plan
    total: tf.Tensor | None  # how many rows there are, an int32 scalar, if the plan doesn't know
    devices: Sequence[str]
    homes: dict[str, str]
    instead: dict[str, tf.Tensor]
    calls: Sequence[Sequence[tf.Tensor]] = ()

    def __post_init__(self) -> None:
        self._sources = {t.name for t in self.plan.sources}
        scope, host = self.graph.unique_name('replicate'), host_of(self.devices[0])
        self._nodes, rows = NodeBuilder(self.graph, scope, host), self.plan.rows
        self._sharding = Sharding(rows, self.total, self.devices, self._nodes, self._symbol)
        self._shardings = {rows: self._sharding}
        self._wholes: dict[str, str] = {}  # by name, what is made of what towers have
        calls = [[*map(self._current, gradients)] for gradients in self.calls]
        self._packs = find_packs(self.graph, self.plan, calls, self._home)
        self._unpacked = defaultdict[str, dict[str, str]](dict)  # by device, and name
        self._build()

    def full_value(self, tensor: tf.Tensor) -> tf.Tensor:
        """The whole value of one of the user's tensors."""
        tensor = self._current(tensor)
        name = self._wholes.get(tensor.name)
        return tensor if name is None else self.graph.get_tensor_by_name(name)

    def local_values(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """What each tower has of a tensor that towers make."""
        own = (self._own(tensor, i) for i in range(len(self.devices)))
        return [*map(self.graph.get_tensor_by_name, own)]

    def _current(self, tensor: tf.Tensor) -> tf.Tensor:
        while tensor.name in self.instead:
            tensor = self.instead[tensor.name]
        return tensor

    def _build(self) -> None:
        for name, planned in self.plan.ops.items():
            op = self.graph.get_operation_by_name(name)
            definition = op.node_def
            for i in range(len(self.devices)):
                self._add_copy(op, definition, planned, i)
        for op in self.plan.order:
            for tensor in op.outputs:
                self._whole(tensor)
        waits = {op: self._waits_of_whole(op) for op in self.plan.order}
        self._nodes.build()
        for op, names in waits.items():
            for index, tensor in enumerate(list(op.inputs)):
                if tensor.name in self._wholes:
                    private.set_input(op, index, self.full_value(tensor))
            if names != [before.name for before in op.control_inputs]:
                graphs.set_control_inputs(op, [*map(self.graph.get_operation_by_name, names)])

    def _waits_of_whole(self, op: tf.Operation) -> list[str]:
        """Names what one of the user's ops waits for; a group for one op of each device."""
        group, towers = op.type == op_types.NO_OP, range(len(self.devices))
        if group and op.name in self.plan.ops:
            return [self._copy(op.name, i) for i in towers]
        joins, found = group and not private.in_v1_control_flow(op), list[str]()
        once = defaultdict[str, list[tf.Operation]](list)  # by device
        for before in op.control_inputs:
            if before.name in self.plan.ops:
                found += [self._copy(before.name, i) for i in towers]
            else:
                once[device_of(before) or ''].append(before)
        for device, waited in once.items():
            if joins and device and len(waited) > 1:
                found.append(self._nodes.after(waited, device)[1:])
            else:
                found += [before.name for before in waited]
        return found

    def _is_made(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor's whole value is another one than that which the user's op makes."""
        placement = self.plan.placements.get(tensor.name)
        if tensor.name in self._sources or isinstance(placement, NotGatherable):
            return False  # An op makes its own list, of what its inputs are as a whole.
        return placement is not None or self._is_size(tensor)

    def _is_size(self, tensor: tf.Tensor) -> bool:
        """Whether its op gives sizes of what towers have, which isn't gathered for that."""
        if tensor.op.type not in op_types.SHAPE_QUERIES:
            return False
        kept = {t.name for t in self.plan.sources if len(parts_of(t)) == 1}
        made = any(t.name in self.plan.placements and t.name not in kept for t in tensor.op.inputs)
        return made and self.plan.sizes.dims(tensor.op.inputs[tensor.value_index]) is not None

    def _copy(self, name: str, tower: int) -> str:
        return f'{self._nodes.scope}/tower_{tower}/{name}'

    def _own(self, tensor: tf.Tensor, tower: int) -> str:
        """What a tower has of a tensor."""
        if len(parts := parts_of(tensor)) > 1:
            return self._sharding.join(parts, tower)
        if tensor.name in self._sources:
            return self._slice(tensor, Slice(0, self.plan.rows, ONE), tower)
        return f'{self._copy(tensor.op.name, tower)}:{tensor.value_index}'

    def _slice(self, tensor: tf.Tensor, need: Slice, tower: int) -> str:
        sharding, dtype = self._sharding_of(need.rows), tensor.dtype.base_dtype
        whole, home = self._whole(tensor), self._home(tensor)
        return sharding.slice(whole, dtype, need.axis, need.factor, tower, home)

    def _home(self, tensor: tf.Tensor) -> str:
        """Where a tensor's whole value is made, be it by the user's op or of what towers have."""
        if self._is_made(tensor):
            return self.homes.get(tensor.name, self.devices[0])
        return device_of(tensor.op) or (self._nodes.host if tensor.name in self._sources else '')

    def _whole(self, tensor: tf.Tensor) -> str:
        """The whole value, be it the user's op's or made of what towers have."""
        if self._is_made(tensor) and tensor.name not in self._wholes:
            self._wholes.update(self._made(tensor))
        return self._wholes.get(tensor.name, tensor.name)

    def _made(self, tensor: tf.Tensor) -> dict[str, str]:
        """The whole value, by name, of what towers have of a tensor, and of others of its pack."""
        name, dtype, home = tensor.name, tensor.dtype.base_dtype, self._home(tensor)
        if self._is_size(tensor):
            entries = self.plan.sizes.entries(tensor) or []
            numbers = [self._sharding.number(size, None, dtype) for size in entries]
            found = numbers if tensor.shape.rank else numbers[0]
            return {name: self._nodes.tensor(found, dtype, dtype)}
        placement = self.plan.placements[name]
        if not isinstance(placement, (Shard, Partial)):
            return {name: self._own(tensor, 0)}
        sharding = self._sharding_of(placement.rows)
        if pack := self._packs.get(name):
            own = ([self._own(t, i) for t in pack.tensors] for i in range(len(self.devices)))
            vectors = [pack.join(o, self._nodes, to) for o, to in zip(own, self.devices)]
            return pack.split(sharding.reduce(vectors, dtype, 'sum', home), self._nodes, home)
        parts = [self._own(tensor, i) for i in range(len(self.devices))]
        if isinstance(placement, Partial):
            return {name: sharding.reduce(parts, dtype, placement.reduce, home)}
        axis = placement.axis
        size = (self.plan.sizes.dims(tensor) or [])[axis]
        return {name: sharding.gather(parts, dtype, axis, size, home)}

    def _received(self, tensor: tf.Tensor, device: str) -> str:
        """A tensor's value on a device to which its pack is sent."""
        received, home = self._unpacked[device], self._home(tensor)
        if tensor.name not in received:
            pack = self._packs[tensor.name]
            vector = pack.join([t.name for t in pack.tensors], self._nodes, home)
            sent = self._sent(vector, pack.dtype, home, device)
            received.update(pack.split(sent, self._nodes, device))
        return received[tensor.name]

    def _sharding_of(self, rows: RowSpace) -> Sharding:
        """How rows are divided: the batch's, or those that a tensor has, which is made whole."""
        if rows not in self._shardings:
            tensor = self.graph.get_tensor_by_name(rows.name)
            with self._nodes.at_once(self._home(tensor)):
                total = tf.shape(tensor)[0]
            self._shardings[rows] = Sharding(rows, total, self.devices, self._nodes, self._symbol)
        return self._shardings[rows]

    def _symbol(self, symbol: Any, tower: int | None, dtype: tf.DType) -> Number:
        """What a size depends on: a number, or an integer scalar of a type."""
        if isinstance(symbol, RowSpace):
            return self._sharding_of(symbol).all_rows(dtype)
        name, index = symbol
        tensor, nodes = self.graph.get_tensor_by_name(name), self._nodes
        own_type = tensor.dtype.base_dtype
        if not isinstance(symbol, Dim):
            flat = nodes.add('Reshape', [self._whole(tensor), [-1]], nodes.host, T=own_type)
            vector = nodes.cast(flat, own_type, dtype, nodes.host)
        elif name in self.plan.placements and name not in self._sources:
            own, to = self._own(tensor, tower or 0), self.devices[tower or 0]
            vector = nodes.add('Shape', [own], to, T=own_type, out_type=dtype)
        else:
            vector = nodes.add(
                'Shape', [self._whole(tensor)], self._home(tensor), T=own_type, out_type=dtype
            )
        types = {'Tparams': dtype, 'Tindices': tf.int32}
        return nodes.add('Gather', [vector, index], nodes.host, **types)

    def _given(self, tensor: tf.Tensor, need: Need, tower: int, device: str) -> str:
        """What a tower's op on a device is given."""
        dtype, op = tensor.dtype.base_dtype, tensor.op
        placement = self.plan.placements.get(tensor.name)
        if need == LOCAL:
            return self._own(tensor, tower)
        if isinstance(need, Slice):
            return self._slice(tensor, need, tower)
        if isinstance(need, (LocalShape, Constant)):
            sharding = (
                self._sharding_of(need.rows) if isinstance(need, LocalShape) else self._sharding
            )
            numbers = sharding.integers(need, tower, tensor.shape.rank == 0, dtype)
            return self._nodes.tensor(numbers, dtype, dtype)
        made = placement is None or isinstance(placement, (Shard, Partial))
        if need != FULL_ON_FIRST and not made:
            return self._own(tensor, tower)  # The same on all.
        zeros, home = need == FULL_ON_FIRST and tower > 0, self._home(tensor)
        if placement is None and not zeros:
            if op.type == op_types.CONST and tensor.shape.num_elements() <= _SMALL:
                value = op.get_attr('value').SerializeToString()
                waits, to = self._waits(op, tower), self._device(op, tower)
                return self._nodes.add('Const', waits, to, dtype=dtype, value=value)
            if tensor.name in self._packs and device != home:
                return self._received(tensor, device)
        whole = self._whole(tensor)
        if dtype not in (tf.resource, tf.variant) and not graphs.is_reference_variable(tensor):
            whole = self._sent(whole, dtype, home, device)
        return self._nodes.add('ZerosLike', [whole], device, T=dtype) if zeros else whole

    def _sent(self, value: str, dtype: tf.DType, source: str, device: str) -> str:
        """A value that is made on a device, sent to another one's machine once for all there."""
        to = relay(self.devices, device, source)
        return self._nodes.add('Identity', [value], to, T=dtype) if to else value

    def _device(self, op: tf.Operation, tower: int) -> str:
        """Where a tower's copy runs: on its device, unless the user wants another kind."""
        resource = next((t for t in op.inputs if t.dtype == tf.resource), None)
        if resource is not None:  # What uses a variable or a table runs where that is.
            return self._home(resource)
        device, pinned = self.devices[tower], op.device
        same = not pinned or device_spec(pinned).device_type in (
            None,
            device_spec(device).device_type,
        )
        return device if same else pinned

    def _add_copy(self, op: tf.Operation, definition: Any, planned: OpPlan, tower: int) -> None:
        device, waits = self._device(op, tower), self._waits(op, tower)
        given = [self._given(t, n, tower, device) for t, n in zip(op.inputs, planned.needs)]
        for i, tensor in enumerate(op.inputs if planned.functions else []):
            need, dtype = planned.needs[i], tensor.dtype.base_dtype
            if isinstance(need, VariableValue):
                home, read = self._home(tensor), [given[i], *waits]
                value = self._nodes.add('ReadVariableOp', read, home, dtype=need.dtype)
                given[i] = self._sent(value, need.dtype, home, device)
            elif dtype != tf.resource:  # Where a loop begins is where its inputs come from.
                given[i] = self._nodes.add('Identity', [given[i]], self.devices[tower], T=dtype)
        node = self._nodes.copy(definition, self._copy(op.name, tower), [*given, *waits], device)
        adapt(self._sharding, node, planned, tower)

    def _waits(self, op: tf.Operation, tower: int) -> list[str]:
        """What a tower's copy waits for, as the op does: the tower's own, or what runs once."""
        waits, once = [], []
        for before in op.control_inputs:
            if before.name in self.plan.ops:
                waits.append(f'^{self._copy(before.name, tower)}')
            elif before.type != op_types.NO_OP or before.control_inputs:  # Else it's there at once.
                once.append(before)
        return [*waits, self._nodes.after(once, host_of(self.devices[tower]))] if once else waits
