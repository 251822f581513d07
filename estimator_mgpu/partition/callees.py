"""Each tower's own copies of the functions that its ops call, with its device on every node.

TensorFlow takes loops apart before it places their nodes, and nodes without a device would all go
to the session's first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.partition.nodes import set_attr
from estimator_mgpu.partition.plan import FunctionPlan, Numbers, OpPlan, Slice
from estimator_mgpu.partition.sizes import Size

Extent = Callable[[Size, int], tuple[int, int]]
"""(entries a row, tower) -> where the tower's entries start, and how many there are."""


class Callees:
    """Makes the copies.

    Args:
      graph: the graph whose functions they are.
      library: where the copies go.
      scope: what their names end with.
      devices: one a tower.
      extent: the tower's share of a static size.
    """

    def __init__(
        self, graph: tf.Graph, library: Any, scope: str, devices: Sequence[str], extent: Extent
    ):
        self._graph = graph
        self._library = library
        self._suffix = scope.replace('/', '_')
        self._devices = devices
        self._extent = extent
        self._count = 0

    def own(self, node: Any, planned: OpPlan, tower: int) -> None:
        """Lets a tower's copy of an op call the tower's copies of functions."""
        for called, plan in zip(private.called(node), planned.functions):
            called.name = self._copy(called.name, plan, tower, planned.values)
        if 'T' in node.attr and node.attr['T'].HasField('list'):
            types = node.attr['T'].list.type
            for i, dtype in planned.values.items():
                types[i] = dtype.as_datatype_enum
        if 'output_shapes' in node.attr:
            for shape in node.attr['output_shapes'].list.shape:
                shape.Clear()
                shape.unknown_rank = True
        for attr in [a for a in node.attr if a.startswith('_') and a in _SHAPES]:
            del node.attr[attr]

    def _copy(self, name: str, plan: FunctionPlan, tower: int, values: dict[int, tf.DType]) -> str:
        """Adds a tower's copy of a function; returns its name."""
        definition, graph = private.function_definition(self._graph, name)
        self._count += 1
        new = f'{name}_{self._suffix}_{self._count}'
        definition.signature.name = new
        definition.arg_attr.clear()
        definition.resource_arg_unique_id.clear()
        arguments = [a.name for a in definition.signature.input_arg]
        returned = dict(definition.ret)
        for i, dtype in values.items():
            definition.signature.input_arg[i].type = dtype.as_datatype_enum
            for output in definition.signature.output_arg:
                if returned[output.name] == arguments[i]:
                    output.type = dtype.as_datatype_enum
        read = {arguments[i] for i in values}
        identities: set[str] = set()  # what reads became
        for node, op in zip(list(definition.node_def), private.function_ops(definition, graph)):
            resources = any(t.dtype == tf.resource for t in op.inputs)
            node.device = '' if resources and node.input[0] not in read else self._devices[tower]
            node.attr.pop('_class', None)
            if node.op == 'ReadVariableOp' and node.input[0] in read:
                _as_identity(node)
                identities.add(node.name)
            inner = plan.ops.get(op.name, OpPlan())
            for key, value in inner.attrs.items():
                set_attr(node.attr[key], value)
            for position in range(-1, len(op.inputs)):
                need = plan.given.get((op.name, position))
                if isinstance(need, Slice):
                    value = np.take(
                        private.constant_value(op.outputs[0]), self._range(need, tower), need.axis
                    )
                    set_attr(node.attr['value'], value)
                elif need is not None:
                    dtype = op.inputs[position].dtype
                    node.input[position] = self._constant(definition, need, dtype, tower)
            self.own(node, inner, tower)
        for node in definition.node_def:
            node.input[:] = [_renamed(name, identities) for name in node.input]
        for output, name in definition.ret.items():
            definition.ret[output] = _renamed(name, identities)
        self._library.function.append(definition)
        return new

    def _range(self, need: Slice, tower: int) -> range:
        start, size = self._extent(need.factor, tower)
        return range(start, start + size)

    def _constant(self, definition: Any, need: Any, dtype: tf.DType, tower: int) -> str:
        """Adds a constant to a function; returns what it's referred to by."""
        if isinstance(need, Numbers):
            numbers: Any = need.numbers[0] if need.scalar else list(need.numbers)
        else:
            numbers = [e.static for e in need.entries]
            _, numbers[need.position] = self._extent(need.factor, tower)
        name = f'given_{len(definition.node_def)}'
        node = definition.node_def.add(name=name, op='Const', device=self._devices[tower])
        node.attr['dtype'].type = dtype.as_datatype_enum
        proto = tf.make_tensor_proto(numbers, dtype, [len(numbers)] if numbers == [] else None)
        node.attr['value'].tensor.CopyFrom(proto)
        return f'{name}:output:0'


_SHAPES = ('_output_shapes', '_handle_dtypes', '_handle_shapes')


def _renamed(name: str, identities: set[str]) -> str:
    """What a node's output is called once the node is an Identity."""
    node, _, output = name.partition(':')
    return f'{node}:output:0' if node in identities and output == 'value:0' else name


def _as_identity(node: Any) -> None:
    """Makes a node that reads a variable pass on its value."""
    dtype = node.attr['dtype'].type
    node.attr.clear()
    node.op = 'Identity'
    node.attr['T'].type = dtype
