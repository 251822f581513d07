"""Nodes that are added to a graph all at once, which is much faster than one by one.

In: types of ops, and names of tensors: the graph's own, or outputs of nodes that were added before.
Out: names of the nodes' outputs; and with `build()` the nodes in the graph, each with the traceback
of the user's op that it serves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import Any, Union

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import host_of
from estimator_mgpu.partition.nodes import host_memory
from estimator_mgpu.partition.nodes.names import Names
from estimator_mgpu.tf_internals import function_calls, kernels, private, tracebacks
from estimator_mgpu.tf_internals.node_defs import const_def, node_def, set_types, types_of

Number = Union[int, str]
"""An integer that is known, or what an integer scalar is referred to by: int32 by default."""

Frames = tuple[tuple[str, int], ...]
"""The frames of a v1 loop and of those around it, the outermost first: the name of each, and how
many steps may be under way."""


class NodeBuilder:
    """Collects NodeDefs.

    An input that is an integer, or a list of integers, becomes a tensor on the `host`.

    Args:
      graph: to which the nodes are added.
      scope: of what serves many ops; in names of others, it comes after the op's outermost scope.
      host: the device on which sizes are computed.
      served: the user's op for which nodes are added, if not within `serving()`.
    """

    def __init__(self, graph: tf.Graph, scope: str, host: str, served: tf.Operation | None):
        self.graph = graph
        self.scope = scope
        self.names = Names(scope)
        self.host = host
        self.graph_def = tf.GraphDef()
        self.graph_def.versions.CopyFrom(graph.graph_def_versions)
        # Names of nodes, by what they are: the same node is added only once.
        self._names: dict[Hashable, str] = {}
        self._added: dict[str, Any] = {}  # these nodes, by name
        self._dtypes: dict[str, tf.DType] = {}  # of tensors, by name, as far as somebody has asked
        self.waits: dict[str, Sequence[tf.Operation]] = {}
        """Ops of the graph that a node waits for, by the node's name."""
        # Value, dtype and device of constants, by the names of their outputs.
        self._consts: dict[str, tuple[Any, tf.DType, str]] = {}
        self._served = served
        self._is_for_many = True
        # The user's op that each node serves, by the node's name.
        self._served_by: dict[str, tf.Operation | None] = {}
        # The frames around tensors that are in v1 loops.
        self._frames: dict[str, Frames] = {}

    @contextlib.contextmanager
    def serving(self, op: tf.Operation | None, is_for_many: bool = False) -> Iterator[None]:
        """A context for nodes that are added for one of the user's ops, or for it and many more."""
        outer = self._served, self._is_for_many
        self._served = op
        self._is_for_many = is_for_many
        try:
            yield
        finally:
            self._served, self._is_for_many = outer

    def for_many(self) -> contextlib.AbstractContextManager[None]:
        """A context for nodes that many ops use, such as sizes; the present one is the first."""
        return self.serving(self._served, is_for_many=True)

    @contextlib.contextmanager
    def at_once(self, device: str, served: tf.Operation) -> Iterator[None]:
        """A context for ops that TensorFlow's functions add to the graph, without `build()`.

        They compute how many rows an op has given, and which of them each tower has.
        """
        scope = tf.name_scope(f'{self.scope}/rows/')
        with tf.control_dependencies(None), tf.device(device), scope:
            with tracebacks.made_for(served):
                yield

    def place_in_frames(self, tensor: str, frames: Frames) -> None:
        """Notes that a tensor is in a v1 loop: so is what is added of it."""
        self._frames[tensor] = frames

    def frame_of(self, node: str) -> str | None:
        """The outermost frame that a node's output is in; None if it's in none."""
        frames = self._frames.get(f'{node}:0')
        return None if frames is None else frames[0][0]

    def entered(self, name: str, frames: Frames, device: str) -> str:
        """A tensor that isn't in a v1 loop, as a constant of the loop."""
        for depth, (frame, iterations) in enumerate(frames, 1):
            attrs = {
                'frame_name': frame,
                'is_constant': True,
                'parallel_iterations': iterations,
            }
            name = self._add('Enter', [name], device, attrs)
            self._frames[name] = frames[:depth]
        return name

    def dtype(self, name: str) -> tf.DType:
        """The type of one of the graph's tensors, or of what was or will be added."""
        if name not in self._dtypes:
            self._dtypes[name] = self._find_dtype(name)
        return self._dtypes[name]

    def _find_dtype(self, name: str) -> tf.DType:
        op_name, _, index = name.partition(':')
        node = self._added.get(op_name)
        if node is not None:
            outputs = private.op_definition(node.op).output_arg
            return [dtype for output in outputs for dtype in types_of(node, output)][int(index)]

        # A copy has the types of the op that it serves. A tower's may be named before it's added.
        op = self._served_by.get(op_name)
        if op is None:
            copy = self.names.copy_of(op_name)
            op = self.graph.get_operation_by_name(op_name if copy is None else copy.op_name)
        return op.outputs[int(index)].dtype.base_dtype

    def copy(self, definition: Any, name: str, inputs: Sequence[str], device: str) -> Any:
        """Adds a node like another, by its full name."""
        node = self.graph_def.node.add()
        node.CopyFrom(definition)
        node.name = name
        node.device = device
        node.input[:] = inputs
        self._served_by[name] = self._served
        return node

    def add(self, op: str, inputs: Sequence[Any], device: str, **attrs: Hashable) -> str:
        """Adds a node, unless there is the same already; returns what its output is called.

        Attributes that follow from the inputs' types, and from how many they are, needn't be given.
        """
        names = [name if isinstance(name, str) else self.tensor(name) for name in inputs]
        around = [self._frames[name] for name in names if name in self._frames]
        if not around:
            return self._add(op, names, device, attrs)

        # What else it uses comes into the loop.
        frames = around[0]
        operands = [
            name if name in self._frames else self.entered(name, frames, device) for name in names
        ]
        output = self._add(op, operands, device, attrs)
        self._frames[output] = frames
        return output

    def _add(
        self, op: str, names: Sequence[str], device: str, attrs: Mapping[str, Hashable]
    ) -> str:
        def make() -> Any:
            node = node_def(op, **attrs)
            set_types(node, [self.dtype(name) for name in names if not name.startswith('^')])
            return node

        return f'{self._once((op, *names, device, *attrs.items()), make, names, device)}:0'

    def concat(self, values: Sequence[str], axis: int, device: str) -> str:
        """Adds a concatenation, unless of one value."""
        return values[0] if len(values) == 1 else self.add('ConcatV2', [*values, axis], device)

    def sum(self, values: Sequence[str], device: str) -> str:
        """Adds a sum, unless of one value."""
        return values[0] if len(values) == 1 else self.add('AddN', values, device)

    def split(self, value: str, sizes: list[int], device: str) -> list[str]:
        """Adds a split along the first dimension, unless into one part."""
        if len(sizes) == 1:
            return [value]
        first = self.add('SplitV', [value, sizes, 0], device, num_split=len(sizes))
        return [f'{first[:-1]}{i}' for i in range(len(sizes))]

    def take(self, value: str, positions: str, device: str, axis: int = 0) -> str:
        """Adds a gather of what is at some positions along an axis."""
        return self.add('GatherV2', [value, positions, axis], device)

    def argsort(self, numbers: str, device: str) -> str:
        """Adds the positions of different numbers, that of the smallest one first: int32."""
        negative = self.add('Neg', [numbers], device)
        count = self.add('Size', [numbers], device, out_type=tf.int32)
        return second_output(self.add('TopKV2', [negative, count], device))

    def scalar(self, value: Number, dtype: tf.DType) -> str:
        """Adds an integer as a scalar of its type, unless it is one."""
        return value if isinstance(value, str) else self.const(value, dtype, self.host)

    def tensor(self, value: Number | Sequence[Number], dtype: tf.DType = tf.int32) -> str:
        """Adds an integer, or a list of some, as a tensor; all that aren't known have one type."""
        if not isinstance(value, str):
            numbers = [value] if isinstance(value, int) else value
            names = [number for number in numbers if isinstance(number, str)]
            if not names:
                return self.const(value, dtype, self.host)
            scalars = [self.scalar(number, self.dtype(names[0])) for number in numbers]
            with self.for_many():
                value = self.add('Pack', scalars, self.host)
        with self.for_many():
            return self.cast(value, dtype, self.host)

    def const(self, value: Any, dtype: tf.DType, device: str) -> str:
        """Adds a constant: a number or a list."""
        key = (repr(value), dtype, device)
        name = f'{self._once(key, lambda: const_def(value, dtype), [], device)}:0'
        self._consts[name] = value, dtype, device
        return name

    def copy_of_constant(
        self, op: tf.Operation, device: str, control_inputs: Sequence[str] = ()
    ) -> str:
        """Adds a constant like one of the graph's."""
        value = op.node_def.attr['value'].tensor.SerializeToString()
        dtype = op.outputs[0].dtype.base_dtype
        return self.add('Const', control_inputs, device, dtype=dtype, value=value)

    def cast(self, value: str, dtype: tf.DType, device: str) -> str:
        """Adds a cast, if one is needed."""
        if self.dtype(value) == dtype:
            return value
        return self.add('Cast', [value], device, DstT=dtype)

    def after(self, ops: Sequence[tf.Operation], device: str) -> str:
        """Adds a NoOp that waits for ops of the graph; returns its name."""
        name = self._once((frozenset(ops), device), lambda: node_def('NoOp'), [], device)
        self.waits[name] = ops
        return name

    def join(self, names: Sequence[str], device: str) -> str:
        """Adds a NoOp that waits for nodes, which were added before; returns its name."""
        controls = [f'^{name}' for name in names]
        return self._once((*controls, device), lambda: node_def('NoOp'), controls, device)

    def gate(self, number: int, names: Sequence[str], device: str) -> str:
        """Adds a NoOp with a name of its own that waits for nodes; returns the name."""
        name = f'{self.scope}/gate_{number}'
        controls = [f'^{name}' for name in names]
        self.copy(node_def('NoOp'), name, controls, device)
        return name

    def _once(self, key: Any, make: Callable[[], Any], inputs: Sequence[str], device: str) -> str:
        """Adds a node unless there is one with the key; returns its name."""
        if key not in self._names:
            definition = make()
            served = '' if self._served is None or self._is_for_many else self._served.name
            self._names[key] = self.names.added(served, f'{definition.op}_{len(self._names)}')
            name = self._names[key]
            self._added[name] = self.copy(definition, name, inputs, device)
        return self._names[key]

    def build(self, results: Set[str] = frozenset()) -> None:
        """Adds all nodes to the graph; those without a kernel on a GPU, on the host beside it.

        Args:
          results: the names of outputs that ops of the graph will use.
        """
        kernels.place(self.graph_def.node)
        nodes_of_results = {name.partition(':')[0] for name in results}

        inputs = self._inputs_from_graph()

        def may_move(node: Any) -> bool:
            is_added = node.name in self._added and f'{node.name}:0' not in self._frames
            return is_added and node.name not in nodes_of_results

        host_memory.move_to_host(self.graph_def.node, inputs, may_move)
        self._copy_constants()

        added = private.import_nodes(self.graph, self.graph_def, inputs)
        shared = tracebacks.Tracebacks()
        by_served_op = {op: shared.of(op) for op in set(self._served_by.values())}
        for op in added:
            private.set_traceback(op, by_served_op[self._served_by[op.name]])

        for name, ops in self.waits.items():
            function_calls.let_wait(self.graph.get_operation_by_name(name), ops)

    def _copy_constants(self) -> None:
        """Makes a constant on each device that uses it, rather than send it there."""
        for node in list(self.graph_def.node):
            for position, name in enumerate(node.input):
                if name not in self._consts or not node.device:
                    continue
                value, dtype, device = self._consts[name]
                # On a GPU, int32 is in the host's memory anyhow; sizes of other types are not.
                is_size = kernels.is_gpu(node.device) and kernels.inputs_on_host(node)[position]
                wanted = host_of(node.device) if is_size and dtype != tf.int32 else node.device
                if device not in (node.device, wanted):
                    with self.serving(self._served_by[node.name]):
                        node.input[position] = self.const(value, dtype, wanted)

    def _inputs_from_graph(self) -> dict[str, tf.Tensor]:
        """The graph's own tensors that nodes use, by name."""
        nodes = self.graph_def.node
        used = {name for node in nodes for name in node.input if not name.startswith('^')}
        return {
            name: self.graph.get_tensor_by_name(name)
            for name in used
            if name.partition(':')[0] not in self._served_by
        }


def second_output(first: str) -> str:
    """The name of a node's second output, of the first, which `NodeBuilder.add` has returned."""
    return output_of(first, 1)


def output_of(first: str, index: int) -> str:
    """The name of another output of a node, of the first one's."""
    return f'{first.removesuffix(":0")}:{index}'
