"""Nodes to be added to a graph all at once, some of which depend on ops that it has already."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.devices import host_of


class Nodes:
    """Collects NodeDefs under one scope. Tensors are referred to by name, the graph's own, too."""

    def __init__(self, graph: tf.Graph, scope: str):
        self.graph = graph
        self.scope = scope
        self.graph_def = tf.GraphDef()
        self.graph_def.versions.CopyFrom(graph.graph_def_versions)
        self._made: dict[Hashable, str] = {}
        self._consts: dict[str, tuple[Any, tf.DType, str]] = {}
        self._waits: dict[str, Sequence[tf.Operation]] = {}

    def copy(self, definition: Any, name: str, inputs: Sequence[str], device: str) -> Any:
        """Adds a node like another, by its full name."""
        node = self.graph_def.node.add()
        node.CopyFrom(definition)
        node.name, node.device = name, device
        node.input[:] = inputs
        return node

    def add(self, op: str, inputs: Sequence[str], device: str, **attrs: Hashable) -> str:
        """Adds a node, unless there is the same already; returns what its output is called."""
        key = (op, *inputs, device, *attrs.items())
        return f'{self._once(key, lambda: node_def(op, **attrs), inputs, device)}:0'

    def const(self, value: Any, dtype: tf.DType, device: str) -> str:
        """Adds a constant: a number or a list."""
        key = (repr(value), dtype, device)
        name = f'{self._once(key, lambda: const_def(value, dtype), [], device)}:0'
        self._consts[name] = value, dtype, device
        return name

    def cast(self, value: str, source: tf.DType, target: tf.DType, device: str) -> str:
        """Adds a cast, if one is needed."""
        if source == target:
            return value
        return self.add('Cast', [value], device, SrcT=source, DstT=target)

    def after(self, ops: Sequence[tf.Operation], device: str) -> str:
        """Adds a NoOp that waits for ops of the graph; returns it as a control input."""
        name = self._once((frozenset(ops), device), lambda: node_def('NoOp'), [], device)
        self._waits[name] = ops
        return f'^{name}'

    def _once(self, key: Any, make: Callable[[], Any], inputs: Sequence[str], device: str) -> str:
        if key not in self._made:
            definition = make()
            self._made[key] = f'{self.scope}/{definition.op}_{len(self._made)}'
            self.copy(definition, self._made[key], inputs, device)
        return self._made[key]

    def build(self) -> None:
        """Adds all nodes to the graph."""
        nodes = self.graph_def.node
        for node in list(nodes):  # A constant is made where it's used, rather than sent there.
            for i, name in enumerate(node.input):
                value, dtype, device = self._consts.get(name, (None, None, node.device))
                # On a GPU, int32 is in the host's memory; whatever else is a size is not.
                at = node.device if dtype == tf.int32 else host_of(node.device)
                if device not in (node.device, at):
                    node.input[i] = self.const(value, dtype, at)
        used = {name for node in nodes for name in node.input if name[0] != '^'}
        made = {node.name for node in nodes}
        outside = {name for name in used if name.partition(':')[0] not in made}
        # Importing a device takes as long as all the rest of a node.
        devices = {node.name: node.device for node in nodes if node.device}
        for node in nodes:
            node.device = ''
        with self.graph.as_default(), tf.control_dependencies(None), tf.device(None):
            given = {name: self.graph.get_tensor_by_name(name) for name in outside}
            tf.import_graph_def(self.graph_def, given, name='')
        for name, device in devices.items():
            private.set_device(self.graph.get_operation_by_name(name), device)
        for name, ops in self._waits.items():
            private.add_control_inputs(self.graph.get_operation_by_name(name), list(ops))


def node_def(op: str, **attrs: Any) -> Any:
    """A NodeDef that has neither a name nor inputs."""
    node = tf.NodeDef(op=op)
    for key, value in attrs.items():
        set_attr(node.attr[key], value)
    return node


def const_def(value: Any, dtype: tf.DType) -> Any:
    """The NodeDef of a constant."""
    return node_def('Const', dtype=dtype, value=np.asarray(value, dtype.as_numpy_dtype))


def set_attr(attr: Any, value: Any) -> None:
    """Sets an attribute of a NodeDef to a DType, a tensor, a number or a list of integers."""
    if isinstance(value, tf.DType):
        attr.type = value.as_datatype_enum
    elif isinstance(value, bytes):
        attr.tensor.ParseFromString(value)
    elif isinstance(value, np.ndarray):
        attr.tensor.CopyFrom(tf.make_tensor_proto(value))
    elif isinstance(value, int):
        attr.i = value
    else:
        attr.list.CopyFrom(tf.AttrValue.ListValue(i=value))
