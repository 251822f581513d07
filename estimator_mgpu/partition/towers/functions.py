"""Each tower's own copies of the functions that its ops call, with its device on every node.

TensorFlow takes loops apart, and then places all nodes without a device on the session's first one.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import Constant, LocalShape, OpPlan, Slice, VariableValue
from estimator_mgpu.partition.towers.node_builder import const_def, set_attr
from estimator_mgpu.tf_internals import function_calls, op_types, private

if TYPE_CHECKING:
    from estimator_mgpu.partition.towers.shards import Sharding


# Attributes that say where the user's op is, and what it makes.
_OF_THE_WHOLE = {'_class', '_output_shapes', '_handle_dtypes', '_handle_shapes'}


def adapt(sharding: Sharding, node: Any, planned: OpPlan, tower: int) -> None:
    """Makes the copy of a node, in the graph or in a function, that of a tower."""
    for attr in _OF_THE_WHOLE.intersection(node.attr):
        del node.attr[attr]
    for key, value in planned.attrs.items():
        set_attr(node.attr[key], value)
    values = {i: n.dtype for i, n in enumerate(planned.needs) if isinstance(n, VariableValue)}
    for called, ops in zip(function_calls.called_functions(node), planned.functions):
        called.name = _copy(sharding, called.name, ops, tower, values)
    for i, dtype in values.items():
        node.attr['T'].list.type[i] = dtype.as_datatype_enum
    for shape in node.attr['output_shapes'].list.shape if 'output_shapes' in node.attr else ():
        shape.Clear()
        shape.unknown_rank = True


def _copy(
    sharding: Sharding, name: str, ops: dict[str, OpPlan], tower: int, values: dict[int, Any]
) -> str:
    """Adds a tower's copy of a function, given `values` of variables; returns its name."""
    original, graph = function_calls.function_definition(sharding.nodes.graph, name)
    definition = copy.deepcopy(original)
    signature, device = definition.signature, sharding.devices[tower]
    made = sharding.nodes.graph_def.library.function
    signature.name = f'{name}_{sharding.nodes.scope.replace("/", "_")}_{len(made)}'
    definition.arg_attr.clear()
    definition.resource_arg_unique_id.clear()
    read = {signature.input_arg[i].name: t.as_datatype_enum for i, t in values.items()}
    for arg in signature.input_arg:
        arg.type = read.get(arg.name, arg.type)
    for arg in signature.output_arg:
        arg.type = read.get(definition.ret[arg.name], arg.type)
    renamed: dict[str, str] = {}
    for node, op in zip(list(definition.node_def), function_calls.function_ops(definition, graph)):
        given = node.input[0] if node.input else ''
        if node.op == op_types.READ_VARIABLE and given in read:
            renamed[f'{node.name}:value:0'] = f'{node.name}:output:0'
            node.op = op_types.IDENTITY
            node.attr.clear()
            node.attr['T'].type = read[given]
        resources = any(t.dtype == tf.resource for t in op.inputs)
        node.device = '' if resources and given not in read else device
        planned = ops.get(op.name, OpPlan())
        for position, need in enumerate(planned.needs):
            if isinstance(need, Slice):
                start, size = map(int, sharding.extent(need.factor, tower))
                value = private.constant_value(op.outputs[0])
                own = np.take(value, range(start, start + size), need.axis)
                set_attr(node.attr['value'], own)
            elif isinstance(need, (LocalShape, Constant)):
                tensor = op.inputs[position]
                numbers = sharding.integers(need, tower, tensor.shape.rank == 0, tensor.dtype)
                constant = definition.node_def.add()
                constant.CopyFrom(const_def(numbers, tensor.dtype))
                constant.name, constant.device = f'given_{len(definition.node_def)}', device
                node.input[position] = f'{constant.name}:output:0'
        adapt(sharding, node, planned, tower)
    for node in definition.node_def:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    for output, name in dict(definition.ret).items():  # An older protobuf stops at a change.
        definition.ret[output] = renamed.get(name, name)
    made.append(definition)
    return signature.name
