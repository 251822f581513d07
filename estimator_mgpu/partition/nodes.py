"""Nodes to be added to a graph all at once, some of which depend on ops that it has already."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import private


class Nodes:
    """Collects NodeDefs under one scope. Tensors are referred to by name.

    Args:
      graph: where they'll go.
      scope: what all their names begin with.
    """

    def __init__(self, graph: tf.Graph, scope: str):
        self._graph = graph
        self.scope = scope
        self.graph_def = tf.GraphDef()
        self.graph_def.versions.CopyFrom(graph.graph_def_versions)
        self._outside: dict[str, tf.Tensor] = {}
        self._counts: dict[str, int] = {}
        self._consts: dict[Hashable, str] = {}

    def outside(self, tensor: tf.Tensor) -> str:
        """Refers to a tensor that the graph has already."""
        self._outside[tensor.name] = tensor
        return tensor.name

    def node(self, name: str, op: str, inputs: Sequence[str], device: str) -> Any:
        """Adds a NodeDef by its full name, without attributes."""
        node = self.graph_def.node.add(name=name, op=op, device=device)
        node.input.extend(inputs)
        return node

    def add(self, op: str, inputs: Sequence[str], device: str, **attrs: Any) -> str:
        """Adds a node.

        Args:
          op: its type.
          inputs: what it's given.
          device: a device string, or ''.
          **attrs: attributes: DTypes, ints, bools or arrays.

        Returns:
          What its first output is referred to by.
        """
        count = self._counts[op] = self._counts.get(op, 0) + 1
        node = self.node(f'{self.scope}/{op}_{count}', op, inputs, device)
        for key, value in attrs.items():
            set_attr(node.attr[key], value)
        return f'{node.name}:0'

    def const(self, value: Any, dtype: tf.DType, device: str) -> str:
        """A constant, one for each value and device."""
        array = np.asarray(value, dtype.as_numpy_dtype)
        key = (array.tobytes(), array.shape, dtype, device)
        if key not in self._consts:
            self._consts[key] = self.add('Const', [], device, dtype=dtype, value=array)
        return self._consts[key]

    def build(self) -> None:
        """Adds all nodes to the graph."""
        used = {name for node in self.graph_def.node for name in node.input}
        outside = {name: tensor for name, tensor in self._outside.items() if name in used}
        with self._graph.as_default(), tf.control_dependencies(None), tf.device(None):
            # Importing a device takes as long as all the rest of a node.
            devices = [node.device for node in self.graph_def.node]
            for node in self.graph_def.node:
                node.device = ''
            tf.import_graph_def(self.graph_def, outside, name='')
            for node, device in zip(self.graph_def.node, devices):
                if device:
                    private.set_device(self._graph.get_operation_by_name(node.name), device)

    def tensor(self, reference: str) -> tf.Tensor:
        """What a reference refers to, after `build`."""
        return self._graph.get_tensor_by_name(reference)


def set_attr(attr: Any, value: Any) -> None:
    """Sets an attribute of a NodeDef to a DType, an array, a number or a list of integers."""
    if isinstance(value, tf.DType):
        attr.type = value.as_datatype_enum
    elif isinstance(value, np.ndarray):
        attr.tensor.CopyFrom(tf.make_tensor_proto(value))
    elif isinstance(value, bool):
        attr.b = value
    elif isinstance(value, int):
        attr.i = value
    elif isinstance(value, (list, tuple)):
        attr.list.SetInParent()
        attr.list.i[:] = value
    else:
        raise TypeError(f'{value!r} is no attribute.')
