"""The functions that ops call: loops, branches and `tf.function`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import op_types, private

# The attributes that name functions, in the order in which these are listed.
_FUNCTION_ATTRS = ('cond', 'body', 'then_branch', 'else_branch', 'branches', 'f')


def called_functions(node: Any) -> list[Any]:
    """Returns what a NodeDef says of the functions that it calls: a loop's condition is first."""
    return list(functions_by_label(node).values())


def functions_by_label(node: Any) -> dict[str, Any]:
    """As `called_functions()`, by labels such as 'then_branch', or 'branches_1'."""
    functions = {}
    for name in _FUNCTION_ATTRS:
        if name in node.attr:
            value = node.attr[name]
            if value.list.func:
                for number, function in enumerate(value.list.func):
                    functions[f'{name}_{number}'] = function
            else:
                functions[name] = value.func
    return functions


def set_functions(op: tf.Operation, names: Sequence[str]) -> None:
    """Lets an op call other functions of its graph, in the order of `called_functions()`."""
    node = op.node_def
    for function, name in zip(called_functions(node), names):
        function.name = name
    for attr in _FUNCTION_ATTRS:
        if attr in node.attr:
            private.set_attribute(op, attr, node.attr[attr])


def function_graphs(op: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of the functions that an op calls; [] if one is missing.

    A function of which TensorFlow has only a definition has none: see `read_functions`. Nor has one
    whose graph has more arguments than its definition: a gradient that failed leaves them there.
    """
    graphs = []
    for called in called_functions(op.node_def):
        graph = getattr(private.get_function(op.graph, called.name), 'graph', None)
        if graph is None:
            return []
        if len(graph.inputs) != len(definition_of(op.graph, called.name).signature.input_arg):
            return []
        graphs.append(graph)
    return graphs


def function_definition(graph: tf.Graph, name: str) -> tuple[Any, Any]:
    """Returns a function's FunctionDef, which isn't to be changed, and its graph."""
    return definition_of(graph, name), private.get_function(graph, name).graph


def definition_of(graph: tf.Graph, name: str) -> Any:
    """Returns a function's FunctionDef, which isn't to be changed."""
    function = private.get_function(graph, name)
    return getattr(function, 'cached_definition', None) or function.definition


def has_function_with(graph: tf.Graph, op_type: str) -> bool:
    """Whether a graph has a function with an op of a type: an input pipeline's, say."""
    functions = graph.as_graph_def().library.function
    return any(node.op == op_type for function in functions for node in function.node_def)


def ops_of_functions(graph: tf.Graph, name: str) -> list[tf.Operation]:
    """Returns the ops of a name that functions of a graph have, those of input pipelines too."""
    ops = []
    for definition in graph.as_graph_def().library.function:
        function = private.get_function(graph, definition.signature.name)
        body = getattr(function, 'graph', None)
        if body is not None:
            ops += [op for op in body.get_operations() if op.name == name]
    return ops


def knows_functions_of(graph: tf.Graph, function: tf.Graph) -> bool:
    """Whether a graph has all functions that ops in the graph of one of its functions call."""
    return all(
        private.get_function(graph, called.name) is not None
        for op in function.get_operations()
        if op.type in op_types.FUNCTION_CALLERS
        for called in called_functions(op.node_def)
    )


def call_attributes(call: tf.Operation) -> set[str]:
    """Returns the names of the attributes of a call, and of the function that it calls."""
    names = set(call.node_def.attr)
    for called in called_functions(call.node_def):
        definition, _ = function_definition(call.graph, called.name)
        names.update(definition.attr)
    return names


def calls_compiled(op: tf.Operation) -> bool:
    """Whether an op calls a function that XLA has to compile, also by way of other functions."""
    if op.type not in op_types.FUNCTION_CALLERS:
        return False
    if op_types.MUST_COMPILE in op.node_def.attr:
        return True
    functions = function_graphs(op)
    if functions and op_types.MUST_COMPILE in call_attributes(op):
        return True
    return any(calls_compiled(inner) for graph in functions for inner in graph.get_operations())


def function_ops(definition: Any, graph: Any) -> list[tf.Operation]:
    """Lists the ops of a function's graph that match the nodes of its FunctionDef, in their order.

    Their names may differ.
    """
    ops = function_ops_or_none(definition, graph)
    if ops is None:
        raise RuntimeError(
            f'The nodes of the function {definition.signature.name} are not in the order of its '
            f'graph in TensorFlow {tf.__version__}. Please report this.'
        )
    return ops


def function_ops_or_none(definition: Any, graph: Any) -> list[tf.Operation] | None:
    """As `function_ops`; None if the nodes aren't in the order of the ops."""
    arguments = {t.op.name for t in graph.inputs}
    ops = [op for op in graph.get_operations() if op.name not in arguments]
    ops = ops[: len(definition.node_def)]  # Gradients of the function may have come since.
    matches = [op.type for op in ops] == [node.op for node in definition.node_def]
    return ops if matches else None


def let_wait(op: tf.Operation, before: Sequence[tf.Operation]) -> None:
    """Lets an op wait for others; if it calls a function, for the call's arguments, too.

    TensorFlow's optimizer takes calls apart. A call that waits for no other op begins when all of
    its arguments are there. If it does wait for one, that is taken for its place in the order of
    side effects: then what it reads and writes no longer waits for its arguments.

    Args:
      op: the op that has to wait.
      before: the ops to wait for.
    """
    if before and op.type in op_types.FUNCTION_CALLERS and not op.control_inputs:
        arguments = [operand.op for operand in op.inputs if operand.dtype != tf.resource]
        # TensorFlow gives an op's control inputs in no order: their addresses decide.
        device = op.device or min(before, key=private.creation_index).device
        with op.graph.as_default(), tf.name_scope(None), tf.device(device or None):
            with tf.control_dependencies(None), tf.control_dependencies([*before, *arguments]):
                before = [tf.no_op(f'{op.name}/arguments_are_there')]
    private.add_control_inputs(op, list(dict.fromkeys(before)))
