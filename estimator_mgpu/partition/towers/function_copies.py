"""Each tower's copies of the functions that its ops call: loops, branches and `tf.function`.

In: the copy of a node that calls functions, and the functions' plans. Out: new functions in the
graph's library, with the tower's device on every node, or its host on nodes without a kernel there.
TensorFlow takes loops apart when a session begins, and then places all nodes without a device on
the session's first one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import (
    FULL_ON_FIRST,
    Constant,
    LocalShape,
    OpPlan,
    Slice,
    VariableValue,
)
from estimator_mgpu.partition.tower import Tower
from estimator_mgpu.partition.towers.shards import Shards
from estimator_mgpu.tf_internals import function_calls, kernels, op_paths, op_types
from estimator_mgpu.tf_internals.node_defs import const_def, node_def, set_attr

# Attributes that say where the user's op is, and which shapes it has for the global batch.
ATTRS_OF_GLOBAL_BATCH = {'_class', '_output_shapes', '_handle_dtypes', '_handle_shapes'}


def adapt_node(
    shards: Shards, node: Any, op_plan: OpPlan, tower: Tower, path: str | None = None
) -> None:
    """Changes the copy of a node into that of a tower.

    Args:
      node: the copy, in the graph or in a function.
      path: of a node in a function, as in `op_paths`.
    """
    if node.op in op_types.FORWARDS:
        # No reference leads to a variable of another device, so copies give on its value.
        node.op = node.op.removeprefix('Ref')
    for attr in ATTRS_OF_GLOBAL_BATCH.intersection(node.attr):
        del node.attr[attr]
    for key, value in op_plan.attrs.items():
        if isinstance(value, LocalShape):
            value = _static_shape(shards, value, tower)
        set_attr(node.attr[key], value)
    for need in op_plan.needs:
        if node.op == op_types.CONST and isinstance(need, Slice):
            _slice_constant(shards, node, need, tower)

    variable_types = {
        position: need.dtype.as_datatype_enum
        for position, need in enumerate(op_plan.needs)
        if isinstance(need, VariableValue)
    }
    if op_plan.functions:
        called = function_calls.functions_by_label(node)
        for (label, function), op_plans in zip(called.items(), op_plan.functions):
            path_of = functools.partial(op_paths.path_in_function, path or node.name, label)
            function.name = _copy_function(
                shards, function.name, op_plans, tower, variable_types, path_of
            )
    for position, dtype in variable_types.items():
        if node.op == op_types.READ_VARIABLE:
            _replace_read(node, dtype)
        elif node.op in op_types.ENTER:
            node.attr['T'].type = dtype
        else:
            types = 'Tin' if node.op in op_types.PARTITIONED_CALLS else 'T'
            node.attr[types].list.type[position] = dtype

    if 'output_shapes' in node.attr:
        for shape in node.attr['output_shapes'].list.shape:
            shape.Clear()
            shape.unknown_rank = True


def _copy_function(
    shards: Shards,
    name: str,
    op_plans: dict[str, OpPlan],
    tower: Tower,
    variable_types: dict[int, int],
    path_of: Callable[[str], str],
) -> str:
    """Adds a tower's copy of a function; returns its name.

    Args:
      name: of the function.
      op_plans: of the ops in it that are sharded, by name.
      variable_types: by position, the types of arguments that are the values of variables in the
        copy, and variables in the function.
      path_of: returns the path of an op's copy, by the op's name.
    """
    original, graph = function_calls.function_definition(shards.nodes.graph, name)
    definition = copy.deepcopy(original)
    library = shards.nodes.graph_def.library.function
    scope = shards.nodes.scope.replace('/', '_')
    definition.signature.name = f'{name}_{scope}_{len(library)}'
    definition.arg_attr.clear()
    definition.resource_arg_unique_id.clear()

    types_of_values = {
        definition.signature.input_arg[position].name: dtype
        for position, dtype in variable_types.items()
    }
    _set_signature_types(definition, types_of_values)

    renamed: dict[str, str] = {}  # outputs of nodes that are called otherwise in the copy
    device = tower.device
    # A list, as constants are added to the nodes on the way.
    nodes = list(definition.node_def)
    for node, op in zip(nodes, function_calls.function_ops(definition, graph)):
        operand = node.input[0] if node.input else ''
        is_value = operand in types_of_values
        if node.op == op_types.READ_VARIABLE and is_value:
            _replace_read(node, types_of_values[operand])
            renamed[f'{node.name}:value:0'] = f'{node.name}:output:0'

        # What uses a variable has to run where that is.
        uses_resource = any(t.dtype == tf.resource for t in op.inputs)
        node.device = '' if uses_resource and not is_value else device

        op_plan = op_plans.get(op.name, OpPlan())
        _set_operands(shards, definition, node, op, op_plan, tower)
        path = path_of(op.name)
        adapt_node(shards, node, op_plan, tower, path)
        node.device = kernels.device_for(node, node.device)
        op_paths.set_path(node, path)  # It tells of which tower the node is.

    _rename_tensors(definition, renamed)
    library.append(definition)
    return definition.signature.name


def _set_signature_types(definition: Any, types_of_values: dict[str, int]) -> None:
    """Sets the types of arguments, and of outputs that are one, that have become values."""
    for arg in definition.signature.input_arg:
        arg.type = types_of_values.get(arg.name, arg.type)
    for arg in definition.signature.output_arg:
        arg.type = types_of_values.get(definition.ret[arg.name], arg.type)


def _replace_read(node: Any, dtype: int) -> None:
    """Turns the read of a variable into an `Identity` of the variable's value."""
    node.op = op_types.IDENTITY
    node.attr.clear()
    node.attr['T'].type = dtype


def _static_shape(shards: Shards, need: LocalShape, tower: Tower) -> tf.TensorShape:
    """A tower's shape, as far as it's known before a step."""
    sizes = shards.local_sizes(need, tower, False, tf.int32)
    assert isinstance(sizes, list)
    return tf.TensorShape([size if isinstance(size, int) and size >= 0 else None for size in sizes])


def _slice_constant(shards: Shards, node: Any, need: Slice, tower: Tower) -> None:
    """Turns the copy of a constant into the tower's slice of it."""
    start, size = map(int, shards.extent(need.factor, tower))
    value = tf.make_ndarray(node.attr['value'].tensor)
    set_attr(node.attr['value'], np.take(value, range(start, start + size), need.axis))


def _set_operands(
    shards: Shards, definition: Any, node: Any, op: tf.Operation, op_plan: OpPlan, tower: Tower
) -> None:
    """Gives a node the tower's own sizes, as constants, slices of full values, or zeros."""
    if node.op == op_types.CONST:
        return  # It's replaced itself.
    for position, (operand, need) in enumerate(zip(op.inputs, op_plan.needs)):
        full = node.input[position]
        if isinstance(need, (LocalShape, Constant)):
            sizes = shards.local_sizes(need, tower, operand.shape.rank == 0, operand.dtype)
            constant = _add_node(definition, const_def(sizes, operand.dtype), [], tower.device)
            node.input[position] = f'{constant}:output:0'
        elif need == FULL_ON_FIRST and tower.number > 0:
            zeros = node_def('ZerosLike', T=operand.dtype.base_dtype)
            node.input[position] = f'{_add_node(definition, zeros, [full], node.device)}:y:0'
        elif isinstance(need, Slice):
            start, size = map(int, shards.extent(need.factor, tower))
            axes = range(operand.shape.rank)
            begins = [start if axis == need.axis else 0 for axis in axes]
            lengths = [size if axis == need.axis else -1 for axis in axes]
            vectors = [
                _add_node(definition, const_def(vector, tf.int32), [], node.device)
                for vector in (begins, lengths)
            ]
            operands = [full, *[f'{vector}:output:0' for vector in vectors]]
            part = node_def('Slice', T=operand.dtype.base_dtype, Index=tf.int32)
            node.input[position] = f'{_add_node(definition, part, operands, node.device)}:output:0'


def _add_node(definition: Any, node: Any, inputs: Sequence[str], device: str) -> str:
    """Adds a node to a function; returns its name."""
    added = definition.node_def.add()
    added.CopyFrom(node)
    added.name = f'given_{len(definition.node_def)}'
    added.device = kernels.device_for(added, device)
    added.input[:] = inputs
    return added.name


def _rename_tensors(definition: Any, renamed: dict[str, str]) -> None:
    for node in definition.node_def:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    # A copy of the map, as older versions of protobuf stop iterating at a change.
    for output, name in dict(definition.ret).items():
        definition.ret[output] = renamed.get(name, name)
