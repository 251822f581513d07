"""The paths of ops in functions: 'scope/cond/then_branch/check' is `check` in a branch of a cond.

Names tell the ops of one graph, or of one function, from each other. Paths tell the ops of a graph
and of all functions that it calls from each other. The path of an op of the graph itself is its
name.

In: a graph. Out: its ops by their paths, and functions in which errors name ops by these.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private

PathOf = Callable[[str], str]
"""Gives the path of an op of a function, by its name there."""


class OpPath(NamedTuple):
    """Where an op of a function is: 'scope/cond/then_branch/check', say."""

    caller: tf.Operation  # of the graph: scope/cond
    label: str  # of the function that it calls: then_branch
    rest: str  # check; or the path of an op that this function calls, in turn


def path_in_function(caller: str, label: str, op_name: str) -> str:
    """The path of an op of a function.

    Args:
      caller: the op that calls the function; its own path, if it's in a function, too.
      label: of the function, as in `function_calls.functions_by_label()`.
      op_name: in the function's graph.
    """
    return f'{caller}/{label}/{op_name}'


def split_path(graph: tf.Graph, path: str) -> OpPath | None:
    """Reads the path of an op of a function; None for another name."""
    parts = path.split('/')
    for end in range(1, len(parts) - 1):
        caller = _op_or_none(graph, '/'.join(parts[:end]))
        if caller is not None and parts[end] in function_calls.functions_by_label(caller.node_def):
            return OpPath(caller, parts[end], '/'.join(parts[end + 1 :]))
    return None


def op_of_path(graph: tf.Graph, path: str) -> tf.Operation | None:
    """The op of a graph, or of a function that it calls, by its path; None if there is none."""
    split = split_path(graph, path)
    if split is None:
        return _op_or_none(graph, path)
    labels = function_calls.functions_by_label(split.caller.node_def)
    functions = dict(zip(labels, function_calls.function_graphs(split.caller)))
    if split.label not in functions:  # The functions have no graphs.
        return None
    return op_of_path(functions[split.label], split.rest)


def name_ops_by_paths(graph: tf.Graph, unused: Container[str]) -> None:
    """Lets errors name the ops of functions by their paths.

    Otherwise they name an op as it's called in its function, and several functions may have such
    an op. If a function is called in several places, its ops have several paths, and keep their
    names.

    Args:
      graph: the graph, whose functions are changed.
      unused: names of its ops that don't run.
    """
    calls = defaultdict[str, list[PathOf]](list)  # by the name of the function
    for op in graphs.ops_of_types(graph, op_types.FUNCTION_CALLERS):
        if op.name not in unused:
            _note_calls(op, op.name, calls)
    for function, calls_of_function in calls.items():
        if len(calls_of_function) == 1:
            [path_of] = calls_of_function
            _set_paths_in_function(graph, function, path_of)


def set_path(node: Any, path: str) -> None:
    """Sets what errors call a node of a function."""
    node.experimental_debug_info.original_node_names[:] = [path]


def _note_calls(caller: tf.Operation, path: str, calls: dict[str, list[PathOf]]) -> None:
    """Notes which functions an op calls, and which of them call others, in turn.

    Args:
      path: the op's.
      calls: by the names of functions, the paths that their ops have where they are called.
    """
    if caller.type not in op_types.FUNCTION_CALLERS:
        return
    called = function_calls.functions_by_label(caller.node_def)
    for (label, function), body in zip(called.items(), function_calls.function_graphs(caller)):
        path_of = functools.partial(path_in_function, path, label)
        calls[function.name].append(path_of)
        # A second call tells that what the function calls is called in two places, too. A third
        # one would tell nothing new.
        if len(calls[function.name]) <= 2:
            for op in body.get_operations():
                _note_calls(op, path_of(op.name), calls)


def _set_paths_in_function(graph: tf.Graph, function: str, path_of: PathOf) -> None:
    """Sets the paths of a function's ops, if TensorFlow's definition has them as its graph has."""
    original, body = function_calls.function_definition(graph, function)
    ops = function_calls.function_ops_or_none(original, body)
    if ops is None:
        return
    definition = copy.deepcopy(original)
    for node, op in zip(definition.node_def, ops):
        set_path(node, path_of(op.name))
    private.replace_function(graph, definition)


def _op_or_none(graph: tf.Graph, name: str) -> tf.Operation | None:
    try:
        return graph.get_operation_by_name(name)
    except KeyError:
        return None
