"""Lets functions have graphs that the graph around them knows, so that their ops can be sharded.

A loop, a branch or a call names functions. Propagation visits the ops of a function's graph, which
`tf.while_loop` and `tf.function` keep. But the functions of an imported graph only have
definitions. Here such a definition is read to a graph with the same ops, and its caller names that
instead:

    While(body=f)        =>        While(body=f_of_while)

A graph may also have changed since its definition was made. If `tf.gradients` goes through a call
of a `tf.function` in a loop for a second time, it lets the body's graph call another function, of
which the graph around the loop knows nothing. Then the graph is defined anew.

Shapes in the graph follow from those of the arguments. A loop's variable is assumed to have its
first shape in each step. Where a step changes that, the dimension, or the rank, stays unknown.

In: a graph that the model_fn has built. Out: the same graph, whose callers name other functions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence, Set
from graphlib import CycleError, TopologicalSorter
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private


def read_functions(division: Division) -> None:
    """Lets each caller name functions that have graphs, and call functions that are known.

    If the definition of one without a graph can't be read, the caller stays as it is, and will run
    once.
    """
    _visit(division.graph, division.existing_ops, visited=set())


def _visit(graph: tf.Graph, existing_ops: Set[str], visited: set[tf.Graph]) -> None:
    """As `read_functions`, for a graph or that of a function, but for functions visited before."""
    visited.add(graph)
    for op in graphs.ops_of_types(graph, op_types.FUNCTION_CALLERS):
        if op.name in existing_ops:
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
    definitions = [_definition(op.graph, name) for name in names]

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
    shapes = first
    while True:  # Each round makes a dimension or a rank unknown that was known, or is the last.
        after = [output.shape for output in _read(loop, body, shapes).outputs]
        common = [
            before.most_specific_compatible_shape(shape) for before, shape in zip(shapes, after)
        ]
        if [_dims(shape) for shape in common] == [_dims(shape) for shape in shapes]:
            return shapes
        shapes = common


def _dims(shape: tf.TensorShape) -> Any:
    """The dimensions as a list; None if the rank is unknown."""
    return None if shape.rank is None else shape.as_list()
