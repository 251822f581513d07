"""The paths of ops in functions: 'scope/cond/then_branch/check' is `check` in a branch of a cond.

A name tells the ops of one graph, or of one function, from each other; a path those of a graph and
of all functions that it calls. An op of the graph itself has its name as its path.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Container
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import function_calls, op_types, private


class OpPath(NamedTuple):
    """Where an op of a function is: 'scope/cond/then_branch/check', say."""

    caller: tf.Operation  # of the graph: scope/cond
    label: str  # of the function that it calls: then_branch
    rest: str  # check; or the path of an op that this function calls, in turn


def path_in_function(caller: str, label: str, op_name: str) -> str:
    """The path of an op of a function.

    Args:
      caller: the op that calls the function; its own path, if it's in a function, too.
      label: of the function, as in `function_calls.function_labels()`.
      op_name: in the function's graph.
    """
    return f'{caller}/{label}/{op_name}'


def split_path(graph: tf.Graph, path: str) -> OpPath | None:
    """Reads the path of an op of a function; None for another name."""
    parts = path.split('/')
    for end in range(1, len(parts) - 1):
        caller = _op_or_none(graph, '/'.join(parts[:end]))
        if caller is not None and parts[end] in function_calls.function_labels(caller.node_def):
            return OpPath(caller, parts[end], '/'.join(parts[end + 1 :]))
    return None


def op_of_path(graph: tf.Graph, path: str) -> tf.Operation | None:
    """The op of a graph, or of a function that it calls, by its path; None if there is none."""
    split = split_path(graph, path)
    if split is None:
        return _op_or_none(graph, path)
    labels = function_calls.function_labels(split.caller.node_def)
    function = dict(zip(labels, function_calls.function_graphs(split.caller))).get(split.label)
    return None if function is None else op_of_path(function, split.rest)


def name_ops_by_paths(graph: tf.Graph, unused: Container[str]) -> None:
    """Lets errors name the ops of functions by their paths.

    Otherwise they name an op as it's called in its function, and several functions may have such
    an op. Of a function that is called in several places, that's all that can be told.

    Args:
      graph: the graph, whose functions are changed.
      unused: names of its ops that don't run.
    """
    callers = defaultdict[str, list[tuple[str, str]]](list)  # by function: paths, with labels
    for op in graph.get_operations():
        if op.name not in unused:
            _note_calls(op, op.name, callers)
    for name, places in callers.items():
        if len(places) > 1:
            continue
        [(caller, label)] = places
        original, function = function_calls.function_definition(graph, name)
        ops = function_calls.ops_of_nodes(original, function)
        if ops is None:
            continue
        definition = copy.deepcopy(original)
        for node, op in zip(definition.node_def, ops):
            set_path(node, path_in_function(caller, label, op.name))
        private.replace_function(graph, definition)


def set_path(node: Any, path: str) -> None:
    """Sets what errors call a node of a function."""
    node.experimental_debug_info.original_node_names[:] = [path]


def _note_calls(caller: tf.Operation, path: str, callers: dict[str, list[tuple[str, str]]]) -> None:
    """Notes which functions an op calls, and which of them call others, in turn.

    Args:
      caller: the op.
      path: its own.
      callers: by the names of functions, the paths of their callers, each with a label.
    """
    if caller.type not in op_types.FUNCTION_CALLERS:
        return
    labels = function_calls.function_labels(caller.node_def)
    called = function_calls.called_functions(caller.node_def)
    for label, function, inner in zip(labels, called, function_calls.function_graphs(caller)):
        callers[function.name].append((path, label))
        if len(callers[function.name]) == 1:
            for op in inner.get_operations():
                _note_calls(op, path_in_function(path, label, op.name), callers)


def _op_or_none(graph: tf.Graph, name: str) -> tf.Operation | None:
    try:
        return graph.get_operation_by_name(name)
    except KeyError:
        return None
