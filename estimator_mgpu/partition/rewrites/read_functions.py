"""Functions that are known by their definitions only get graphs, so that their ops are sharded.

A loop, a branch or a call names functions. Propagation visits the ops of a function's graph, which
`tf.while_loop` and `tf.function` keep. But an imported graph has only definitions of its functions,
and so have the loops of `tf.nn.ctc_loss`, whose functions are made by TensorFlow 1's `Defun`. Here
these are read, and their callers name what was read in their place:

    While(body=f)        =>        While(body=f_of_while)    # with the same ops, in a graph

A definition may call another function by an op of that name, as one made by `Defun` does. Such a
call is replaced by the function's ops.

The graph has no shapes but those of what the function is given. A loop's variable is assumed to
have its first shape in each step. Where a step changes that, the dimension, or the rank, is
unknown.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence, Set
from graphlib import CycleError, TopologicalSorter
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import function_calls, op_types, private


def read_functions(graph: tf.Graph, existing_ops: Set[str] = frozenset()) -> None:
    """Lets callers of functions without graphs name functions with graphs, if these can be read.

    Args:
      graph: the graph that the model_fn has built, or the graph of a function.
      existing_ops: names of ops that were there before the model_fn, which stay as they are.
    """
    for op in graph.get_operations():
        if op.type not in op_types.FUNCTION_CALLERS or op.name in existing_ops:
            continue
        functions = [] if function_calls.function_graphs(op) else _read_all(op)
        if functions:
            for function in functions:
                read_functions(function)
            names = [private.add_function(function) for function in functions]
            function_calls.set_functions(op, names)


def _read_all(op: tf.Operation) -> list[Any]:
    """The graphs of the functions that an op calls; [] if they can't be read."""
    called = function_calls.called_functions(op.node_def)
    names = [function.name for function in called]
    if not all(_is_readable(op.graph, name) for name in names):
        return []
    definitions = [_without_calls(op.graph, _definition(op.graph, name)) for name in names]

    arguments = list(op.inputs)[1:] if op.type in op_types.BRANCHES else list(op.inputs)
    shapes: Sequence[tf.TensorShape] = [argument.shape for argument in arguments]
    try:
        if op.type in op_types.LOOPS:
            shapes = _shapes_in_steps(op, definitions[-1], shapes)
        return [_read(op, definition, shapes) for definition in definitions]
    except ValueError:
        return []  # A branch that is never taken needn't be legal for these shapes.


def _is_readable(graph: tf.Graph, name: str) -> bool:
    """Whether a function can be read: it's known, isn't to be compiled, and doesn't call itself."""
    definition = _definition(graph, name)
    if definition is None or definition.signature.attr:
        return False
    return not op_types.STAYS_A_CALL & set(definition.attr) and not _calls_itself(graph, name)


def _calls_itself(graph: tf.Graph, name: str) -> bool:
    """Whether a function calls itself, also by way of others."""
    calls: dict[str, list[str]] = {}  # by the name of a function, those that it calls
    stack = [name]
    while stack:
        caller = stack.pop()
        definition = _definition(graph, caller)
        if caller not in calls and definition is not None:
            nodes = definition.node_def
            by_attributes = [
                each.name for node in nodes for each in function_calls.called_functions(node)
            ]
            calls[caller] = [*(node.op for node in nodes), *by_attributes]
            stack += calls[caller]
    try:
        TopologicalSorter(calls).prepare()
    except CycleError:
        return True
    return False


def _definition(graph: tf.Graph, name: str) -> Any:
    """A function's FunctionDef; None if the graph, and those around it, don't know the function."""
    while private.get_function(graph, name) is None:
        if not hasattr(graph, 'outer_graph'):
            return None
        graph = graph.outer_graph
    return private.get_function(graph, name).cached_definition


def _read(op: tf.Operation, definition: Any, shapes: Sequence[tf.TensorShape]) -> Any:
    """The graph of a function that is given arguments of these shapes, with a name of its own."""
    renamed = copy.deepcopy(definition)
    renamed.signature.name = private.unique_function_name(
        f'{definition.signature.name}_of_', op.name
    )
    for attributes in renamed.arg_attr.values():
        attributes.attr.pop('_output_shapes', None)  # `Defun` says that they are unknown.
    with op.graph.as_default():
        return private.function_def_to_graph(renamed, input_shapes=shapes)


def _shapes_in_steps(
    loop: tf.Operation, body: Any, shapes: Sequence[tf.TensorShape]
) -> Sequence[tf.TensorShape]:
    """The shapes that a loop's variables have in each step, as far as they can be known.

    Args:
      loop: the `While`.
      body: the definition of its body.
      shapes: of the variables before the first step.
    """
    while True:
        graph = _read(loop, body, shapes)
        in_steps = [
            before.most_specific_compatible_shape(output.shape)
            for before, output in zip(shapes, graph.outputs)
        ]
        if [_dims(shape) for shape in in_steps] == [_dims(shape) for shape in shapes]:
            return shapes
        shapes = in_steps


def _dims(shape: tf.TensorShape) -> list[int | None] | None:
    return None if shape.rank is None else shape.as_list()


# Calls of functions by ops of their names.


def _without_calls(graph: tf.Graph, definition: Any) -> Any:
    """A copy of a function's definition, in which called functions' ops take the place of calls.

    Args:
      graph: which knows the functions.
      definition: a FunctionDef.
    """
    result = copy.deepcopy(definition)
    del result.node_def[:]
    awaited = {name for node in definition.node_def for name in _controls(node)}
    awaited.update(f'^{name}' for name in definition.control_ret.values())

    replaced: dict[str, str] = {}  # by the name of a call's output, what is used in its place
    for node in definition.node_def:
        called = _definition(graph, node.op)
        is_ordered = f'^{node.name}' in awaited or bool(_controls(node))
        if called is None or is_ordered or not _can_replace_call(called):
            result.node_def.append(node)
        else:
            replaced.update(_add_called(result, node, _without_calls(graph, called)))

    for node in result.node_def:
        node.input[:] = [_replacement(name, replaced) for name in node.input]
    for output, name in dict(result.ret).items():
        result.ret[output] = _replacement(name, replaced)
    return result


def _controls(node: Any) -> list[str]:
    """The control inputs of a node, such as '^x'."""
    return [name for name in node.input if name.startswith('^')]


def _can_replace_call(called: Any) -> bool:
    """Whether a function's ops can take the place of a call: no other op waits for a call's all."""
    arguments = {f'^{argument.name}' for argument in called.signature.input_arg}
    if any(not arguments.isdisjoint(_controls(node)) for node in called.node_def):
        return False
    return not called.signature.attr and not called.control_ret


def _add_called(definition: Any, call: Any, called: Any) -> dict[str, str]:
    """Adds the nodes of a called function; returns what takes the place of the call's outputs.

    Args:
      definition: the FunctionDef that the nodes are added to.
      call: the node that calls the function.
      called: the function's FunctionDef.
    """
    operands = zip(called.signature.input_arg, call.input)
    arguments = {argument.name: operand for argument, operand in operands}

    def name_outside(name: str) -> str:
        """What a tensor 'node:output:0' of the function, or an op '^node', is called outside."""
        if name in arguments:
            return arguments[name]
        if name.startswith('^'):
            return f'^{call.name}/{name[1:]}'
        return f'{call.name}/{name}'

    for node in called.node_def:
        added = definition.node_def.add()
        added.CopyFrom(node)
        added.name = f'{call.name}/{node.name}'
        added.input[:] = [name_outside(name) for name in node.input]
    return {
        f'{call.name}:{output.name}:0': name_outside(called.ret[output.name])
        for output in called.signature.output_arg
    }


def _replacement(name: str, replaced: dict[str, str]) -> str:
    """What takes the place of a tensor; of an output that is an argument, what the argument is."""
    while name in replaced:
        name = replaced[name]
    return name
