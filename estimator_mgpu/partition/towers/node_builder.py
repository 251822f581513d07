"""Builds nodes that are added to a graph all at once; some use ops that it has already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Union

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import host_of
from estimator_mgpu.tf_internals import private

Number = Union[int, str]
"""An integer that is known, or what an integer scalar is referred to by: int32 by default."""


class NodeBuilder:
    """Collects NodeDefs under one scope. Tensors are referred to by name, the graph's own, too.

    Where an input is an integer, or a list of some, it's made a tensor on the `host`.
    """

    def __init__(self, graph: tf.Graph, scope: str, host: str):
        self.graph, self.scope, self.host = graph, scope, host
        self.graph_def = tf.GraphDef()
        self.graph_def.versions.CopyFrom(graph.graph_def_versions)
        self._made: dict[Hashable, str] = {}
        self._waits: dict[str, Sequence[tf.Operation]] = {}
        self._consts: dict[str, tuple[Any, tf.DType, str]] = {}

    @contextlib.contextmanager
    def at_once(self, device: str) -> Iterator[None]:
        """Where TensorFlow's own functions add ops of how many rows there are."""
        scope = tf.name_scope(f'{self.scope}/rows/')
        with tf.control_dependencies(None), tf.device(device), scope:
            yield

    def copy(self, definition: Any, name: str, inputs: Sequence[str], device: str) -> Any:
        """Adds a node like another, by its full name."""
        node = self.graph_def.node.add()
        node.CopyFrom(definition)
        node.name, node.device = name, device
        node.input[:] = inputs
        return node

    def add(self, op: str, inputs: Sequence[Any], device: str, **attrs: Hashable) -> str:
        """Adds a node, unless there is the same already; returns what its output is called."""
        names = [given if isinstance(given, str) else self.tensor(given) for given in inputs]
        key = (op, *names, device, *attrs.items())
        return f'{self._once(key, lambda: node_def(op, **attrs), names, device)}:0'

    def concat(self, values: Sequence[str], axis: int, dtype: tf.DType, device: str) -> str:
        """Adds a concatenation, unless of one value."""
        if len(values) == 1:
            return values[0]
        return self.add('ConcatV2', [*values, axis], device, T=dtype, N=len(values))

    def split(self, value: str, sizes: list[int], dtype: tf.DType, device: str) -> list[str]:
        """Adds a split along the first dimension, unless into one part."""
        if len(sizes) == 1:
            return [value]
        attrs = {'T': dtype, 'Tlen': tf.int32, 'num_split': len(sizes)}
        first = self.add('SplitV', [value, sizes, 0], device, **attrs)
        return [f'{first[:-1]}{i}' for i in range(len(sizes))]

    def scalar(self, value: Number, dtype: tf.DType) -> str:
        """Adds an integer as a scalar of its type, unless it is one."""
        return value if isinstance(value, str) else self.const(value, dtype, self.host)

    def tensor(
        self,
        value: Number | Sequence[Number],
        dtype: tf.DType = tf.int32,
        source: tf.DType = tf.int32,
    ) -> str:
        """Adds an integer, or a list of some, as a tensor; those that aren't known are `source`."""
        if not isinstance(value, str):
            if isinstance(value, int) or all(isinstance(n, int) for n in value):
                return self.const(value, dtype, self.host)
            scalars = [self.scalar(n, source) for n in value]
            value = self.add('Pack', scalars, self.host, T=source, N=len(scalars))
        return self.cast(value, source, dtype, self.host)

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
                gpu = 'GPU' in node.device
                at = host_of(node.device) if gpu and dtype != tf.int32 else node.device
                if device not in (node.device, at):
                    node.input[i] = self.const(value, dtype, at)
        made = {node.name for node in nodes}
        used = {name for node in nodes for name in node.input if name[0] != '^'}
        outside = [name for name in used if name.partition(':')[0] not in made]
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
    """Sets an attribute of a NodeDef to a DType, shape, tensor, number or list of integers."""
    if isinstance(value, tf.DType):
        attr.type = value.as_datatype_enum
    elif isinstance(value, tf.TensorShape):
        attr.shape.CopyFrom(value.as_proto())
    elif isinstance(value, bytes):
        attr.tensor.ParseFromString(value)
    elif isinstance(value, np.ndarray):
        attr.tensor.CopyFrom(tf.make_tensor_proto(value))
    elif isinstance(value, int):
        attr.i = value
    else:
        attr.list.CopyFrom(tf.AttrValue.ListValue(i=value))
