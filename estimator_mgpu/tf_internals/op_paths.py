"""The paths of ops in functions: 'scope/cond/then_branch/check' is `check` in a branch of a cond.

A name tells the ops of one graph, or of one function, from each other; a path those of a graph and
of all functions that it calls. An op of the graph itself has its name as its path.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import function_calls


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
    functions = dict(zip(labels, function_calls.function_graphs(split.caller)))
    if split.label not in functions:
        return None
    return op_of_path(functions[split.label], split.rest)


def ops_of_node(caller: tf.Operation, name: str) -> Iterator[tuple[str, tf.Operation]]:
    """Gives the ops of an op's functions whose nodes have a name there, each with its path.

    These functions may call others, whose ops are given, too.
    """
    if not function_calls.function_graphs(caller):
        return
    labels = function_calls.function_labels(caller.node_def)
    called = function_calls.called_functions(caller.node_def)
    for label, function in zip(labels, called):
        definition, graph = function_calls.function_definition(caller.graph, function.name)
        ops = function_calls.function_ops(definition, graph)
        for node, op in zip(definition.node_def, ops):
            if node.name == name:
                yield path_in_function(caller.name, label, op.name), op
            for path, inner_op in ops_of_node(op, name):
                yield path_in_function(caller.name, label, path), inner_op


def _op_or_none(graph: tf.Graph, name: str) -> tf.Operation | None:
    try:
        return graph.get_operation_by_name(name)
    except KeyError:
        return None
