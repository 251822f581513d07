"""Lets functions have graphs that the graph around them knows, so that their ops can be sharded.

A loop, a branch or a call names functions. Propagation visits the ops of a function's graph, which
`tf.while_loop` and `tf.function` keep. But the functions of an imported graph only have
definitions, and so have those of the loops in `tf.nn.ctc_loss`, which TensorFlow 1's `Defun` makes.
Here such a definition is read to a graph with the same ops, and its caller names that instead:

    While(body=f)        =>        While(body=f_of_while)

A graph may also have changed since its definition was made. If `tf.gradients` goes through a call
of a `tf.function` in a loop for a second time, it lets the body's graph call another function, of
which the graph around the loop knows nothing. Then the graph is defined anew.

A definition may call another function by an op of that name, as one made by `Defun` does. The
function's ops take the place of such a call.

Shapes in the graph follow from those of the arguments. Those of a loop's variables are found as
`loop_shapes` says.

In: a graph that the model_fn has built. Out: the same graph, whose callers name other functions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence, Set
from graphlib import CycleError, TopologicalSorter
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.rewrites.loop_shapes import Shapes, Variable, changed_shapes
from estimator_mgpu.tf_internals import function_calls, op_types, private


def read_functions(division: Division) -> None:
    """Lets each caller name functions that have graphs, and call functions that are known.

    If the definition of one without a graph can't be read, the caller stays as it is, and will run
    once.
    """
    _visit(division.graph, division.existing_ops, visited=set())


def _visit(graph: tf.Graph, existing_ops: Set[str], visited: set[tf.Graph]) -> None:
    """As `read_functions`, for a graph or that of a function, but for functions visited before."""
    visited.add(graph)
    for op in graph.get_operations():
        if op.type not in op_types.FUNCTION_CALLERS or op.name in existing_ops:
            continue
        functions = function_calls.function_graphs(op) or _read_all(op)
        for function in functions:
            if function not in visited:
                _visit(function, frozenset(), visited)
        if not _are_defined(op, functions):
            names = [_define(op, function) for function in functions]
            function_calls.set_functions(op, names)


def _are_defined(op: tf.Operation, functions: Sequence[Any]) -> bool:
    """Whether an op names these functions already, and its graph has those that they call."""
    if function_calls.function_graphs(op) != functions:
        return False
    return all(function_calls.knows_functions_of(op.graph, function) for function in functions)


def _define(op: tf.Operation, function: Any) -> str:
    """Adds the definition of a function's graph, under a new name; returns the name.

    Args:
      op: the function's caller.
      function: the graph.
    """
    function.name = private.unique_function_name(f'{function.name}_of_', op.name)
    return private.add_function(function)


def _read_all(op: tf.Operation) -> list[Any]:
    """The graphs of the functions that an op calls; [] if they can't be read."""
    names = [function.name for function in function_calls.called_functions(op.node_def)]
    if not all(_is_readable(op.graph, name) for name in names):
        return []
    definitions = [_without_calls(op.graph, _definition(op.graph, name)) for name in names]

    arguments = list(op.inputs)
    if op.type in op_types.BRANCHES:
        arguments = arguments[1:]  # The first input chooses a branch.
    shapes: Sequence[tf.TensorShape] = [argument.shape for argument in arguments]
    try:
        if op.type in op_types.LOOPS:
            _, body = definitions
            shapes = _shapes_in_steps(op, body, shapes)
        return [_read(op, definition, shapes) for definition in definitions]
    except ValueError:
        return []  # A branch that is never taken needn't be legal for these shapes.


def _is_readable(graph: tf.Graph, name: str) -> bool:
    """Whether a function can be read.

    It's known, and doesn't call itself. Its types don't depend on the caller, as TensorFlow allows
    by attributes in the signature. And it needn't stay as it is, for XLA to compile it, say.
    """
    definition = _definition(graph, name)
    if definition is None or definition.signature.attr:
        return False
    stays_a_call = not op_types.STAYS_A_CALL.isdisjoint(definition.attr)
    return not stays_a_call and not _calls_itself(graph, name)


def _calls_itself(graph: tf.Graph, name: str) -> bool:
    """Whether a function calls itself, also by way of others."""
    calls: dict[str, list[str]] = {}  # by the name of a function, what it calls, or may call
    stack = [name]
    while stack:
        caller = stack.pop()
        definition = _definition(graph, caller)
        if caller not in calls and definition is not None:
            nodes = definition.node_def
            calls[caller] = [node.op for node in nodes]  # Some are names of functions.
            for node in nodes:
                calls[caller] += [called.name for called in function_calls.called_functions(node)]
            stack += calls[caller]
    try:
        TopologicalSorter(calls).prepare()
    except CycleError:
        return True
    return False


def _definition(graph: tf.Graph, name: str) -> Any:
    """A function's FunctionDef; None if the graph, and those around it, don't know the function."""
    function = private.get_function(graph, name)
    while function is None and hasattr(graph, 'outer_graph'):
        graph = graph.outer_graph
        function = private.get_function(graph, name)
    return None if function is None else function.cached_definition


def _read(op: tf.Operation, definition: Any, shapes: Sequence[tf.TensorShape]) -> Any:
    """Reads a definition to a graph, for arguments of some shapes.

    Args:
      op: the function's caller.
      definition: a FunctionDef.
      shapes: those of the arguments.
    """
    without_shapes = copy.deepcopy(definition)
    for attributes in without_shapes.arg_attr.values():
        attributes.attr.pop('_output_shapes', None)  # `Defun` says that they are unknown.
    with op.graph.as_default():
        return private.function_def_to_graph(without_shapes, input_shapes=shapes)


def _shapes_in_steps(
    loop: tf.Operation, body: Any, first: Sequence[tf.TensorShape]
) -> Sequence[tf.TensorShape]:
    """The shapes that a loop's variables have in each step, as far as they can be known.

    Args:
      loop: the `While`.
      body: the definition of its body.
      first: the shapes before the first step.
    """

    def in_steps(changed: Shapes) -> list[tf.TensorShape]:
        return [changed.get(index, shape) for index, shape in enumerate(first)]

    def infer(changed: Shapes) -> Iterable[tuple[Variable, tf.TensorShape, tf.TensorShape]]:
        before = in_steps(changed)
        after = [output.shape for output in _read(loop, body, before).outputs]
        return zip(range(len(before)), before, after)

    return in_steps(changed_shapes(infer))


# Calls of functions by ops of their names.


def _without_calls(graph: tf.Graph, definition: Any) -> Any:
    """A copy of a function's definition, in which called functions' ops take the place of calls.

    A call stays if it waits for ops by control, or if others wait for it: the function's ops would
    all have to. Once a definition is read, it's too late for `function_ops`: in the graph, what
    follows from such a call has no shape.

    Args:
      graph: the graph that has the functions.
      definition: a FunctionDef.
    """
    result = copy.deepcopy(definition)
    del result.node_def[:]
    awaited = {name for node in definition.node_def for name in _controls(node)}
    awaited.update(f'^{name}' for name in definition.control_ret.values())

    replaced: dict[str, str] = {}  # by the name of a call's output, what is used in its place
    for node in definition.node_def:
        called = _definition(graph, node.op)  # None for most, whose ops aren't calls
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
    """Whether a function's ops can take the place of a call that no op waits for.

    Its types don't depend on the call, and it runs no ops only for their effects. No op in it waits
    for an argument by control: outside, an argument isn't an op, but may be any output of one.
    """
    arguments = {f'^{argument.name}' for argument in called.signature.input_arg}
    if any(not arguments.isdisjoint(_controls(node)) for node in called.node_def):
        return False
    return not called.signature.attr and not called.control_ret


def _add_called(definition: Any, call: Any, called: Any) -> dict[str, str]:
    """Adds the nodes of a called function; returns by name what replaces the call's outputs.

    Args:
      definition: the FunctionDef that the nodes are added to.
      call: the node that calls the function.
      called: the function's FunctionDef.
    """
    operands: dict[str, str] = {}  # by the name of an argument
    for argument, operand in zip(called.signature.input_arg, call.input):
        operands[argument.name] = operand

    def name_outside(name: str) -> str:
        """The name outside of the function of 'node:output:0', '^node' or an argument in it."""
        if name in operands:
            return operands[name]
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
    """The name of what takes the place of a tensor; its own name if nothing does."""
    while name in replaced:  # A function may return an argument, which another call gives.
        name = replaced[name]
    return name
