"""A plan, carried out: each tower's copies of ops, and what the others are given instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.devices import host_of, relay, spec_of
from .callees import adapt
from .homes import home_of
from .nodes import Nodes
from .packing import Pack, packs
from .plan import FIRST, OWN, Kept, Local, Need, Numbers, OpPlan, Partial, Plan, Shard, Slice, Value
from .reduction import gather, reduce
from .rules import kinds
from .sharding import Number, Sharding
from .symbols import ONE, Dim, Rows

_SMALL = 1024  # entries of a constant that each tower has a copy of


@dataclass
class Towers:
    """Divides a graph by a plan.

    The ops that the user made stay: those that run once, and the others, too, for whoever fetches
    them. They take whole values: what towers have, gathered or reduced. By names of tensors,
    `homes` says where that is made, `instead` what is used in their place, and `parts` of what
    machines' rows they are joined. `calls` are the gradients of each optimizer's call.
    """

    graph: tf.Graph
    plan: Plan
    total: tf.Tensor | None  # how many rows there are, an int32 scalar, if the plan doesn't know
    devices: Sequence[str]
    homes: dict[str, str]
    instead: dict[str, tf.Tensor]
    parts: dict[str, Sequence[tf.Tensor]]
    calls: Sequence[Sequence[tf.Tensor]] = ()

    def __post_init__(self) -> None:
        self._sources = {t.name for t in self.plan.sources}
        self._nodes = Nodes(self.graph, self.graph.unique_name('replicate'))
        rows = self.plan.rows
        self._sharding = Sharding(rows, self.total, self.devices, self._nodes, self._symbol)
        self._shardings = {rows: self._sharding}
        self._wholes: dict[str, str] = {}  # by name, what is made of what towers have
        calls = [[*map(self._current, gradients)] for gradients in self.calls]
        self._packs = packs(self.graph, self.plan, calls, self._place)
        self._unpacked: dict[tuple[str, str], str] = {}  # by name, and device
        self._build()

    def whole(self, tensor: tf.Tensor) -> tf.Tensor:
        """The whole value of one of the user's tensors."""
        tensor = self._current(tensor)
        name = self._wholes.get(tensor.name)
        return tensor if name is None else self.graph.get_tensor_by_name(name)

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
        self._nodes.build()
        for op in self.plan.order:
            for index, tensor in enumerate(list(op.inputs)):
                if tensor.name in self._wholes:
                    private.set_input(op, index, self.whole(tensor))
            before = op.control_inputs
            if any(c.name in self.plan.ops for c in before):
                waits = [op] if op.type == kinds.GROUP and op.name in self.plan.ops else before
                once = [w for w in waits if w.name not in self.plan.ops]
                towers = range(len(self.devices))
                copies = [self._copy(w.name, i) for w in waits if w not in once for i in towers]
                found = [self.graph.get_operation_by_name(name) for name in copies]
                private.set_control_inputs(op, [*once, *found])

    def _is_ours(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of the user's has another whole value than that which its op makes."""
        placement = self.plan.placements.get(tensor.name)
        if tensor.name in self._sources or isinstance(placement, Kept):
            return False  # An op makes its own list, of what its inputs are as a whole.
        return placement is not None or self._is_size(tensor)

    def _is_size(self, tensor: tf.Tensor) -> bool:
        """Whether its op gives sizes of what towers have, which isn't gathered for that."""
        if tensor.op.type not in kinds.SIZES:
            return False
        kept = self._sources - {*self.parts}
        made = any(t.name in self.plan.placements and t.name not in kept for t in tensor.op.inputs)
        return made and self.plan.sizes.dims(tensor.op.inputs[tensor.value_index]) is not None

    def _copy(self, name: str, tower: int) -> str:
        return f'{self._nodes.scope}/tower_{tower}/{name}'

    def _own(self, tensor: tf.Tensor, tower: int) -> str:
        """What a tower has of a tensor."""
        if tensor.name in self.parts:
            return self._sharding.join(self.parts[tensor.name], tower)
        if tensor.name in self._sources:
            return self._slice(tensor, Slice(0, self.plan.rows, ONE), tower)
        return f'{self._copy(tensor.op.name, tower)}:{tensor.value_index}'

    def _slice(self, tensor: tf.Tensor, need: Slice, tower: int) -> str:
        dims = self.plan.sizes.dims(tensor) or []
        sharding = self._sharding_of(need.rows)
        extent = sharding.extent(need.factor, tower)
        whole, dtype, home = self._whole(tensor), tensor.dtype.base_dtype, self._home(tensor)
        return sharding.cut(whole, dtype, len(dims), need.axis, extent, home)

    def _home(self, tensor: tf.Tensor) -> str:
        """Where a tensor of the user's is made."""
        return home_of(tensor.op) or (self._sharding.host if tensor.name in self._sources else '')

    def _place(self, tensor: tf.Tensor) -> str:
        """Where a tensor's whole value is made, which may be made of towers'."""
        ours = self._is_ours(tensor)
        return self.homes.get(tensor.name, self.devices[0]) if ours else self._home(tensor)

    def _whole(self, tensor: tf.Tensor) -> str:
        """The whole value, which may be made of towers'."""
        if self._is_ours(tensor) and tensor.name not in self._wholes:
            if tensor.name in self._packs:
                self._wholes.update(self._sums(self._packs[tensor.name]))
            else:
                self._wholes[tensor.name] = self._made_whole(tensor)
        return self._wholes.get(tensor.name, tensor.name)

    def _made_whole(self, tensor: tf.Tensor) -> str:
        dtype, sizes = tensor.dtype.base_dtype, self.plan.sizes
        home = self._place(tensor)
        if self._is_size(tensor):
            numbers = [self._sharding.number(size) for size in sizes.entries(tensor) or []]
            return self._sharding.tensor(numbers if tensor.shape.rank else numbers[0], dtype)
        placement = self.plan.placements[tensor.name]
        parts = [self._own(tensor, i) for i in range(len(self.devices))]
        if not isinstance(placement, (Shard, Partial)):
            return parts[0]
        sharding = self._sharding_of(placement.rows)
        if isinstance(placement, Partial):
            return reduce(sharding, parts, dtype, placement.reduce, home)
        return gather(sharding, parts, dtype, sizes.dims(tensor) or [], placement.axis, home)

    def _sums(self, pack: Pack) -> dict[str, str]:
        """The sums of what towers have of a pack's tensors, by their names."""
        placement, home = self.plan.placements[pack.tensors[0].name], self._place(pack.tensors[0])
        assert isinstance(placement, Partial)
        sharding, parts = self._sharding_of(placement.rows), []
        for i, device in enumerate(self.devices):
            parts.append(pack.join([self._own(t, i) for t in pack.tensors], sharding, device))
        return pack.split(reduce(sharding, parts, pack.dtype, 'sum', home), sharding, home)

    def _received(self, tensor: tf.Tensor, device: str) -> str:
        """A tensor's value on a device to which its pack is sent."""
        pack, home, sharding = self._packs[tensor.name], self._place(tensor), self._sharding
        if (tensor.name, device) not in self._unpacked:
            vector = pack.join([t.name for t in pack.tensors], sharding, home)
            sent = self._sent(vector, pack.dtype, home, device)
            found = pack.split(sent, sharding, device)
            self._unpacked.update({(name, device): value for name, value in found.items()})
        return self._unpacked[tensor.name, device]

    def _sharding_of(self, rows: Rows) -> Sharding:
        """How rows are divided: the batch's, or those that a tensor has, which is made whole."""
        if rows not in self._shardings:
            tensor = self.graph.get_tensor_by_name(rows.name)
            scope = tf.name_scope(f'{self._nodes.scope}/rows/')
            with tf.control_dependencies(None), tf.device(self._home(tensor)), scope:
                total = tf.shape(tensor)[0]
            self._shardings[rows] = Sharding(rows, total, self.devices, self._nodes, self._symbol)
        return self._shardings[rows]

    def _symbol(self, symbol: Any, tower: int | None) -> Number:
        """What a size depends on: a number, or an int32 scalar."""
        if isinstance(symbol, Rows):
            return self._sharding_of(symbol).total
        name, index = symbol
        tensor = self.graph.get_tensor_by_name(name)
        own = tensor.name in self.plan.placements and tensor.name not in self._sources
        host, dtype, add = self._sharding.host, tensor.dtype.base_dtype, self._nodes.add
        if isinstance(symbol, Dim):
            given = self._own(tensor, tower or 0) if own else self._whole(tensor)
            where = self.devices[tower or 0] if own else self._home(tensor)
            vector = add('Shape', [given], where, T=dtype, out_type=tf.int32)
        else:
            flat = [self._whole(tensor), self._sharding.tensor([-1])]
            vector = add('Reshape', flat, host, T=dtype, Tshape=tf.int32)
            vector = self._nodes.cast(vector, dtype, tf.int32, host)
        types = {'Tparams': tf.int32, 'Tindices': tf.int32}
        return add('Gather', [vector, self._sharding.tensor(index)], host, **types)

    def _given(self, tensor: tf.Tensor, need: Need, tower: int, device: str) -> str:
        """What a tower's op on a device is given."""
        dtype, op = tensor.dtype.base_dtype, tensor.op
        placement = self.plan.placements.get(tensor.name)
        zeros = need == FIRST and tower > 0
        if need == OWN:
            return self._own(tensor, tower)
        if isinstance(need, Slice):
            return self._slice(tensor, need, tower)
        if isinstance(need, (Local, Numbers)):
            sharding = self._sharding_of(need.rows) if isinstance(need, Local) else self._sharding
            numbers = sharding.integers(need, tower, tensor.shape.rank == 0)
            return self._sharding.tensor(numbers, dtype)
        made = isinstance(placement, (Shard, Partial))
        if placement is not None and not made and need != FIRST:
            return self._own(tensor, tower)  # The same on all.
        copied = placement is None and op.type == kinds.CONST and not zeros
        if copied and tensor.shape.num_elements() <= _SMALL:
            waits, where = self._waits(op, tower), self._device(op, tower)
            value = op.get_attr('value').SerializeToString()
            return self._nodes.add('Const', waits, where, dtype=dtype, value=value)
        home = self._place(tensor)
        if tensor.name in self._packs and placement is None and device != home and not zeros:
            return self._received(tensor, device)
        whole = self._whole(tensor)
        if dtype not in (tf.resource, tf.variant) and not private.is_reference(tensor):
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
        same = not pinned or spec_of(pinned).device_type in (None, spec_of(device).device_type)
        return device if same else pinned

    def _add_copy(self, op: tf.Operation, definition: Any, planned: OpPlan, tower: int) -> None:
        device, waits = self._device(op, tower), self._waits(op, tower)
        given = [self._given(t, n, tower, device) for t, n in zip(op.inputs, planned.needs)]
        for i, tensor in enumerate(op.inputs if planned.functions else []):
            need, dtype = planned.needs[i], tensor.dtype.base_dtype
            if isinstance(need, Value):
                home, read = self._home(tensor), [given[i], *waits]
                value = self._nodes.add('ReadVariableOp', read, home, dtype=need.dtype)
                given[i] = self._sent(value, need.dtype, home, device)
            elif dtype != tf.resource:  # Where a loop begins is where its inputs come from.
                given[i] = self._nodes.add('Identity', [given[i]], self.devices[tower], T=dtype)
        node = self._nodes.copy(definition, self._copy(op.name, tower), [*given, *waits], device)
        adapt(self._sharding, node, planned, tower)

    def _waits(self, op: tf.Operation, tower: int) -> list[str]:
        """What a tower's copy waits for, as the op does: the tower's own, or what runs once."""
        before = op.control_inputs
        done = [c for c in before if c.type == kinds.GROUP and not c.control_inputs]  # at once
        once = [c for c in before if c.name not in self.plan.ops and c not in done]
        waits = [f'^{self._copy(c.name, tower)}' for c in before if c.name in self.plan.ops]
        if once:
            waits.append(self._nodes.after(once, host_of(self.devices[tower])))
        return waits
