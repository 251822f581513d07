"""A plan, carried out: each tower's copies of ops, and what the others are given instead."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.devices import host_of, spec_of
from estimator_mgpu.partition.callees import Callees
from estimator_mgpu.partition.nodes import Nodes, set_attr
from estimator_mgpu.partition.placements import KEPT, Partial, Shard
from estimator_mgpu.partition.plan import First, Local, Numbers, OpPlan, Own, Plan, Slice, Whole
from estimator_mgpu.partition.reduction import Reduction
from estimator_mgpu.partition.sharding import Sharding
from estimator_mgpu.partition.sizes import ONE, SIZE_OPS, Dim, Size, product

_SMALL = 1024  # entries of a constant that each tower has a copy of


class Towers:
    """Divides a graph by a plan.

    The ops that the user made stay: those that run once, and the others, too, for whoever fetches
    them. They take whole values: what towers have, gathered or reduced.

    Args:
      graph: the graph.
      plan: the plan.
      total: how many rows there are, an int32 scalar; None if the plan's rows know.
      devices: one a tower.
      homes: devices of ops that run once, by name, and of what towers' tensors come to, by theirs.
      instead: by name, what is used in place of tensors.
    """

    def __init__(
        self,
        graph: tf.Graph,
        plan: Plan,
        total: tf.Tensor | None,
        devices: Sequence[str],
        homes: dict[str, str],
        instead: dict[str, tf.Tensor],
    ):
        self._graph = graph
        self._plan = plan
        self._devices = list(devices)
        self._homes = homes
        self._instead = instead
        self._sources = {t.name for t in plan.sources}
        self._nodes = Nodes(graph, graph.unique_name('replicate'))
        self._sharding = Sharding(plan.rows, total, devices, self._nodes, self._symbol)
        self._reduction = Reduction(self._nodes, self._sharding, devices)
        self._memo: dict[Hashable, str] = {}
        self._waits: dict[str, list[tf.Operation]] = {}  # what hubs wait for
        known = {op.name for op in plan.order}
        makers = [graph.get_operation_by_name(name) for name in plan.ops if name not in known]
        self._ops = makers + [op for op in plan.order if op.name in plan.ops]
        self._callees = Callees(
            graph, self._nodes.graph_def.library, self._nodes.scope, self._devices, self._static
        )
        self._build()

    def whole(self, tensor: tf.Tensor) -> tf.Tensor:
        """The whole value of one of the user's tensors."""
        while tensor.name in self._instead:
            tensor = self._instead[tensor.name]
        name = self._replaced.get(tensor.name)
        return tensor if name is None else self._nodes.tensor(name)

    def copies(self, op: tf.Operation) -> list[tf.Operation]:
        """Each tower's copy of an op; none if it runs once."""
        if op.name not in self._plan.ops:
            return []
        return [
            self._graph.get_operation_by_name(self._copy(op.name, i))
            for i in range(len(self._devices))
        ]

    def _build(self) -> None:
        rewired: list[tuple[tf.Operation, int, str]] = []
        self._replaced: dict[str, str] = {}
        for op in self._ops:
            definition = op.node_def
            for i in range(len(self._devices)):
                self._add_copy(op, definition, i)
        for op in self._plan.order:
            for index, tensor in enumerate(op.inputs):
                if self._is_ours(tensor):
                    reference = self._whole(tensor)
                    self._replaced[tensor.name] = reference
                    rewired.append((op, index, reference))
            for tensor in op.outputs:
                if self._is_ours(tensor):
                    self._replaced[tensor.name] = self._whole(tensor)
        self._nodes.build()
        for hub, ops in self._waits.items():
            private.add_control_inputs(self._graph.get_operation_by_name(hub), ops)
        for op, index, reference in rewired:
            private.set_input(op, index, self._nodes.tensor(reference))
        for op in self._graph.get_operations():
            before = op.control_inputs
            if before and any(c.name in self._plan.ops for c in before):
                self._wait_for_towers(op, before)

    def _wait_for_towers(self, op: tf.Operation, before: Sequence[tf.Operation]) -> None:
        """Lets one of the user's ops wait for towers' ops in place of the ops that these are of."""
        if op.name.startswith(f'{self._nodes.scope}/'):
            return
        if op.name in self._plan.ops and op.type == 'NoOp':
            waits = self.copies(op)
        else:
            waits = []
            for other in before:
                waits += self.copies(other) or [other]
        private.set_control_inputs(op, waits)

    def _is_ours(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of the user's has another whole value than that which its op makes."""
        if tensor.name in self._sources:
            return False
        placement = self._plan.placements.get(tensor.name)
        if isinstance(placement, KEPT):
            return False  # Its op makes its own, of what its inputs are as a whole.
        return placement is not None or self._is_size(tensor)

    def _is_size(self, tensor: tf.Tensor) -> bool:
        """Whether it's the size of what towers have, which isn't gathered for that."""
        op = tensor.op
        if op.type not in SIZE_OPS:
            return False
        of = op.inputs[tensor.value_index]
        if of.name in self._sources:
            return False
        return of.name in self._plan.placements and self._plan.sizes.dims(of) is not None

    def _copy(self, name: str, tower: int) -> str:
        return f'{self._nodes.scope}/tower_{tower}/{name}'

    def _own(self, tensor: tf.Tensor, tower: int) -> str:
        """What a tower has of a tensor."""
        if tensor.name in self._sources:
            return self._slice(tensor, Slice(0, ONE), tower)
        return f'{self._copy(tensor.op.name, tower)}:{tensor.value_index}'

    def _slice(self, tensor: tf.Tensor, need: Slice, tower: int) -> str:
        key = ('slice', tensor.name, need.axis, tower)
        if key not in self._memo:
            whole, dims = self._whole(tensor), self._plan.sizes.dims(tensor)
            assert dims is not None
            dtype, home = tensor.dtype.base_dtype, self._home(tensor)
            self._memo[key] = self._sharding.rows_of(whole, dtype, dims, need, tower, home)
        return self._memo[key]

    def _home(self, tensor: tf.Tensor) -> str:
        """Where a whole tensor is made."""
        home = self._homes.get(tensor.op.name) or tensor.op.device
        return home or (self._sharding.host if tensor.name in self._sources else '')

    def _whole(self, tensor: tf.Tensor) -> str:
        """The whole value, which may be made of towers'."""
        if not self._is_ours(tensor):
            return self._nodes.outside(tensor)
        if tensor.name not in self._memo:
            self._memo[tensor.name] = self._made_whole(tensor)
        return self._memo[tensor.name]

    def _made_whole(self, tensor: tf.Tensor) -> str:
        if self._is_size(tensor):
            return self._whole_size(tensor)
        placement = self._plan.placements[tensor.name]
        parts = [self._own(tensor, i) for i in range(len(self._devices))]
        home = self._homes.get(tensor.name, self._devices[0])
        dtype, dims = tensor.dtype, self._plan.sizes.dims(tensor)
        if isinstance(placement, Shard):
            assert dims is not None
            return self._reduction.gather(parts, dtype, dims, placement.axis, home)
        if isinstance(placement, Partial):
            return self._reduction.reduce(parts, dtype, placement.reduce, home)
        return parts[0]

    def _whole_size(self, tensor: tf.Tensor) -> str:
        """The sizes of all rows of what towers have."""
        dims = self._plan.sizes.dims(tensor.op.inputs[tensor.value_index]) or []
        dtype = tensor.dtype.base_dtype
        if tensor.op.type == 'Rank':
            return self._sharding.scalar(len(dims), dtype)
        if tensor.op.type == 'Size':
            return self._sharding.scalar(self._sharding.number(product(dims)), dtype)
        return self._sharding.vector([self._sharding.number(size) for size in dims], dtype)

    def _symbol(self, symbol: Any, tower: int | None) -> str:
        """What isn't known of a size before the step runs: an int32 scalar."""
        tensor = self._graph.get_tensor_by_name(symbol.tensor)
        own = tensor.name in self._plan.placements and tensor.name not in self._sources
        key = ('symbol', symbol, tower or 0 if own else None)
        if key not in self._memo:
            host, dtype = self._sharding.host, tensor.dtype.base_dtype
            if isinstance(symbol, Dim):
                given = self._own(tensor, tower or 0) if own else self._whole(tensor)
                where = self._devices[tower or 0] if own else self._home(tensor)
                vector = self._nodes.add('Shape', [given], where, T=dtype, out_type=tf.int32)
                index = symbol.axis
            else:
                flat = self._nodes.const([-1], tf.int32, host)
                inputs = [self._whole(tensor), flat]
                vector = self._nodes.add('Reshape', inputs, host, T=dtype, Tshape=tf.int32)
                if dtype != tf.int32:
                    vector = self._nodes.add('Cast', [vector], host, SrcT=dtype, DstT=tf.int32)
                index = symbol.position
            ends = [self._nodes.const(e, tf.int32, host) for e in ([index], [index + 1], [1])]
            attrs = {'T': tf.int32, 'Index': tf.int32, 'shrink_axis_mask': 1}
            self._memo[key] = self._nodes.add('StridedSlice', [vector, *ends], host, **attrs)
        return self._memo[key]

    def _given(self, tensor: tf.Tensor, need: Any, tower: int) -> str:
        """What a tower's op is given."""
        dtype = tensor.dtype.base_dtype
        if isinstance(need, Own):
            return self._own(tensor, tower)
        if isinstance(need, Slice):
            return self._slice(tensor, need, tower)
        if isinstance(need, Local):
            return self._sharding.local(need, dtype, tower, tensor.shape.rank == 0)
        if isinstance(need, Numbers):
            numbers = need.numbers[0] if need.scalar else list(need.numbers)
            return self._nodes.const(numbers, dtype, self._sharding.host)
        if isinstance(need, First):
            whole = self._whole(tensor)
            if tower == 0:
                return whole
            return self._nodes.add('ZerosLike', [whole], self._devices[tower], T=dtype)
        assert isinstance(need, Whole)
        placement = self._plan.placements.get(tensor.name)
        if placement is not None and not isinstance(placement, (Shard, Partial)):
            return self._own(tensor, tower)  # The same on all.
        op = tensor.op
        small = (tensor.shape.num_elements() or 0) <= _SMALL
        if op.type == 'Const' and small:
            return self._copied_constant(op, tower)
        return self._whole(tensor)

    def _copied_constant(self, op: tf.Operation, tower: int) -> str:
        key = ('const', op.name, tower)
        if key not in self._memo:
            name = self._copy(op.name, tower)
            node = self._nodes.node(name, '', [], '')
            node.CopyFrom(op.node_def)
            node.name = name
            node.device = self._device(op, tower)
            node.attr.pop('_class', None)
            del node.input[:]
            self._wait(node, op, tower)
            self._memo[key] = f'{name}:0'
        return self._memo[key]

    def _device(self, op: tf.Operation, tower: int) -> str:
        """Where a tower's copy runs: on its device, unless the user wants another kind."""
        device = self._devices[tower]
        pinned = spec_of(op.device) if op.device else None
        if pinned and pinned.device_type not in (None, spec_of(device).device_type):
            return op.device
        return device

    def _add_copy(self, op: tf.Operation, definition: Any, tower: int) -> None:
        node = self._nodes.graph_def.node.add()
        node.CopyFrom(definition)
        node.name = self._copy(op.name, tower)
        del node.input[:]
        planned = self._plan.ops[op.name]
        inputs = list(op.inputs)
        resources = [t for t in inputs if t.dtype == tf.resource]
        # What uses a variable or a table runs where that is.
        node.device = self._home(resources[0]) if resources else self._device(op, tower)
        if planned.fill is not None:
            self._fill(node, op.outputs[0].dtype, planned, tower)
            self._wait(node, op, tower)
            return
        for i, (tensor, need) in enumerate(zip(inputs, planned.needs)):
            given = self._given(tensor, need, tower)
            if planned.functions:
                given = self._argument(op, tensor, given, planned.values.get(i), tower)
            node.input.append(given)
        self._callees.own(node, planned, tower)
        for key, value in planned.attrs.items():
            set_attr(node.attr[key], value)
        node.attr.pop('_class', None)
        node.attr.pop('_output_shapes', None)
        self._wait(node, op, tower)

    def _wait(self, node: Any, op: tf.Operation, tower: int) -> None:
        """Lets a tower's copy wait for what the op waits for: its own, or what runs once."""
        once = []
        for other in op.control_inputs:
            if other.name in self._plan.ops:
                node.input.append(f'^{self._copy(other.name, tower)}')
            else:
                once.append(other)
        if once:
            node.input.append(f'^{self._hub(once, tower)}')

    def _fill(self, node: Any, dtype: tf.DType, planned: OpPlan, tower: int) -> None:
        """Makes a node one that needs to know nothing but the tower's number of rows."""
        [need] = planned.needs
        assert isinstance(need, Local)
        value = self._nodes.const(planned.fill, dtype, node.device)
        node.op = 'Fill'
        node.input.extend([self._sharding.local(need, tf.int32, tower), value])
        node.attr.clear()
        node.attr['T'].type = dtype.as_datatype_enum
        node.attr['index_type'].type = tf.int32.as_datatype_enum

    def _argument(
        self, op: tf.Operation, tensor: tf.Tensor, given: str, value: tf.DType | None, tower: int
    ) -> str:
        """What a tower's call of a function is given: on its device, where the loop begins."""
        if value:
            key = ('read', op.name, tensor.name)
            if key not in self._memo:
                where = self._home(tensor)
                read = self._nodes.add('ReadVariableOp', [given], where, dtype=value)
                self._memo[key] = read
                if op.control_inputs:
                    self._waits[read.partition(':')[0]] = list(op.control_inputs)
            return self._memo[key]
        if tensor.dtype == tf.resource:
            return given
        return self._nodes.add('Identity', [given], self._devices[tower], T=tensor.dtype.base_dtype)

    def _static(self, factor: Size, tower: int) -> tuple[Any, Any]:
        """Where a tower's entries start, and how many there are; numbers that the graph knows."""
        return self._sharding.start(factor, tower), self._sharding.size(factor, tower)

    def _hub(self, ops: Sequence[tf.Operation], tower: int) -> str:
        """A NoOp that waits for ops that run once, which many of a tower's may have in common."""
        key = ('hub', frozenset(op.name for op in ops), tower)
        if key not in self._memo:
            count = len(self._waits)
            name = f'{self._nodes.scope}/tower_{tower}/after_{count}'
            self._nodes.node(name, 'NoOp', [], host_of(self._devices[tower]))
            self._waits[name] = list(ops)
            self._memo[key] = name
        return self._memo[key]
