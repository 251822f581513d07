"""The functions that ops call: loops, branches and `tf.function`."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import op_types, private

# The attributes that name functions, in the order in which these are listed.
_FUNCTION_ATTRS = ('cond', 'body', 'then_branch', 'else_branch', 'branches', 'f')


def called_functions(node: Any) -> list[Any]:
    """Returns what a NodeDef says of the functions that it calls: a loop's condition is first."""
    return list(_functions_by_label(node).values())


def function_labels(node: Any) -> list[str]:
    """Labels the functions that a NodeDef calls: 'then_branch', say, or 'branches_1'."""
    return list(_functions_by_label(node))


def _functions_by_label(node: Any) -> dict[str, Any]:
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


def function_graphs(op: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of the functions that an op calls; [] if one is missing.

    An imported graph has none.
    """
    graphs = []
    for called in called_functions(op.node_def):
        function = private.get_function(op.graph, called.name)
        graphs.append(getattr(function, 'graph', None))
    return [] if None in graphs else graphs


def function_definition(graph: tf.Graph, name: str) -> tuple[Any, Any]:
    """Returns a function's FunctionDef, which isn't to be changed, and its graph."""
    function = private.get_function(graph, name)
    definition = getattr(function, 'cached_definition', None) or function.definition
    return definition, function.graph


class OpPath(NamedTuple):
    """Where an op of a function is: 'scope/cond/then_branch/check', say."""

    caller: tf.Operation  # of the graph: scope/cond
    label: str  # of the function that it calls: then_branch
    rest: str  # check; or the path of an op that this function calls, in turn


def path_in_function(caller: str, label: str, op_name: str) -> str:
    """The path of an op of a function.

    Args:
      caller: the op that calls the function; its own path, if it's in a function, too.
      label: of the function, as in `function_labels()`.
      op_name: in the function's graph.
    """
    return f'{caller}/{label}/{op_name}'


def split_path(graph: tf.Graph, path: str) -> OpPath | None:
    """Reads the path of an op of a function; None for another name."""
    parts = path.split('/')
    for end in range(1, len(parts) - 1):
        caller = _op_or_none(graph, '/'.join(parts[:end]))
        if caller is not None and parts[end] in function_labels(caller.node_def):
            return OpPath(caller, parts[end], '/'.join(parts[end + 1 :]))
    return None


def op_of_path(graph: tf.Graph, path: str) -> tf.Operation | None:
    """The op of a graph, or of a function that it calls, by its path; None if there is none."""
    split = split_path(graph, path)
    if split is None:
        return _op_or_none(graph, path)
    labels = function_labels(split.caller.node_def)
    functions = dict(zip(labels, function_graphs(split.caller)))
    if split.label not in functions:
        return None
    return op_of_path(functions[split.label], split.rest)


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
        original, function = function_definition(graph, name)
        ops = _ops_of_nodes(original, function)
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
    functions = _functions_by_label(caller.node_def)
    for (label, function), inner in zip(functions.items(), function_graphs(caller)):
        callers[function.name].append((path, label))
        if len(callers[function.name]) == 1:
            for op in inner.get_operations():
                _note_calls(op, path_in_function(path, label, op.name), callers)


def _op_or_none(graph: tf.Graph, name: str) -> tf.Operation | None:
    try:
        return graph.get_operation_by_name(name)
    except KeyError:
        return None


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
    ops = _ops_of_nodes(definition, graph)
    if ops is None:
        raise RuntimeError(
            f'The nodes of the function {definition.signature.name} are not in the order of its '
            f'graph in TensorFlow {tf.__version__}. Please report this.'
        )
    return ops


def _ops_of_nodes(definition: Any, graph: Any) -> list[tf.Operation] | None:
    """As `function_ops`; None if ops and nodes don't match."""
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
        device = op.device or before[0].device
        with op.graph.as_default(), tf.name_scope(None), tf.device(device or None):
            with tf.control_dependencies(None), tf.control_dependencies([*before, *arguments]):
                before = [tf.no_op(f'{op.name}/arguments_are_there')]
    private.add_control_inputs(op, list(dict.fromkeys(before)))
