"""Every private name of TensorFlow that this package leans on.

They are looked up when the package is imported, so that a TensorFlow that has dropped one says so
at once, by name.
"""

from __future__ import annotations

import importlib
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

_NEEDED = {
    'tensorflow.python.framework.dtypes': 'DType._is_ref_dtype',
    'tensorflow.python.framework.op_def_registry': 'get',
    'tensorflow.python.framework.ops': (
        'Graph._get_function Operation._add_control_inputs Operation._clear_attr '
        'Operation._control_outputs Operation._get_control_flow_context Operation._id '
        'Operation._remove_all_control_inputs Operation._set_device Operation._update_input'
    ),
    'tensorflow.python.framework.tensor_util': 'try_evaluate_constant',
    'tensorflow.python.training.training_util': 'GLOBAL_STEP_READ_KEY',
}


def _find(module: str, names: str) -> Any:
    """Returns a module that has these names, some of them those of classes' members."""
    try:
        found = importlib.import_module(module)
        for name in names.split():
            operator.attrgetter(name)(found)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f'TensorFlow {tf.__version__} has no {module} with {names}, which '
            'estimator_mgpu needs. Install a TensorFlow that it was tested with (2.15 to 2.21).'
        ) from error
    return found


_, _op_def_registry, _, _tensor_util, _training_util = itertools.starmap(_find, _NEEDED.items())

# The collection in which Estimator keeps its read of the global step when it trains.
GLOBAL_STEP_READ = _training_util.GLOBAL_STEP_READ_KEY


def constant_value(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns the tensor's value if the graph alone determines it, else None."""
    if tensor.dtype in (tf.resource, tf.variant):
        return None  # TensorFlow makes no array of these, and says so by an error.
    return _tensor_util.try_evaluate_constant(tensor)


def op_def(op_type: str) -> Any:
    """Returns the `OpDef` of an op type, or None where there is none (a function's name)."""
    return _op_def_registry.get(op_type)


def called(node: Any) -> list[Any]:
    """Returns what a NodeDef says of the functions that it calls: a loop's condition is first."""
    found = []
    for name in ('cond', 'body', 'then_branch', 'else_branch', 'branches', 'f'):
        if name in node.attr:
            value = node.attr[name]
            found += list(value.list.func) or [value.func]
    return found


def function_graphs(op: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of the functions that an op calls, in the order of `called`.

    None where the graph doesn't keep them, as one that was imported.
    """
    names = [function.name for function in called(op.node_def)]
    found = [getattr(op.graph._get_function(name), 'graph', None) for name in names]
    return [] if None in found else found


def function_definition(graph: tf.Graph, name: str) -> tuple[Any, Any]:
    """Returns a copy of a function's FunctionDef, and its graph."""
    function = graph._get_function(name)
    definition = getattr(function, 'cached_definition', None) or function.definition
    copy = type(definition)()
    copy.CopyFrom(definition)
    return copy, function.graph


def function_ops(definition: Any, graph: Any) -> list[tf.Operation]:
    """Returns the ops of a function's graph that its FunctionDef's nodes are, in their order.

    Some have other names there.
    """
    arguments = {t.op.name for t in graph.inputs}
    found = [op for op in graph.get_operations() if op.name not in arguments]
    if [op.type for op in found] != [node.op for node in definition.node_def]:
        raise RuntimeError(
            f'The nodes of the function {definition.signature.name} are not in the order of its '
            f'graph in TensorFlow {tf.__version__}. Please report this.'
        )
    return found


def add_control_inputs(op: tf.Operation, inputs: list[tf.Operation]) -> None:
    """Makes an op that exists already wait for others."""
    op._add_control_inputs(inputs)


def set_control_inputs(op: tf.Operation, inputs: Sequence[tf.Operation]) -> None:
    """Makes an op that exists already wait for these, and for no others."""
    op._remove_all_control_inputs()
    op._add_control_inputs(list(dict.fromkeys(inputs)))


def waiting(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that a control edge leads to from an op."""
    return list(op._control_outputs)


def followers(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that directly wait for an op."""
    return [user for t in op.outputs for user in t.consumers()] + waiting(op)


def set_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Gives an op that exists already another input."""
    op._update_input(index, tensor)


def replace(op: tf.Operation, outputs: dict[int, tf.Tensor], last: tf.Operation) -> None:
    """Gives whoever uses an op's outputs others; whoever waits for it waits for `last` instead."""
    for index, tensor in outputs.items():
        old = op.outputs[index]
        for user in old.consumers():
            for i, given in enumerate(user.inputs):
                if given is old:
                    set_input(user, i, tensor)
    for user in waiting(op):
        set_control_inputs(user, [*(c for c in user.control_inputs if c is not op), last])


def number(op: tf.Operation) -> int:
    """Returns an op's number, in the order in which ops were made."""
    return op._id


def set_device(op: tf.Operation, device: str) -> None:
    """Puts an op that exists already on another device."""
    op._set_device(device)


def is_reference(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a variable of TensorFlow 1's kind, rather than a value."""
    return tensor.dtype._is_ref_dtype


def colocated_with(op: tf.Operation) -> list[str]:
    """Names the ops that an op has to be with."""
    groups = op.node_def.attr['_class'].list.s if '_class' in op.node_def.attr else []
    return [group.decode()[len('loc:@') :] for group in groups]


def free(op: tf.Operation) -> None:
    """Lets an op be elsewhere than those that it had to be with."""
    op._clear_attr('_class')


def in_control_flow(op: tf.Operation) -> bool:
    """Whether an op is inside a v1 `while_loop` or `cond`."""
    return op._get_control_flow_context() is not None


def outermost(graph: tf.Graph) -> tf.Graph:
    """Returns the graph that a function's graph is being traced for, or the graph itself."""
    while hasattr(graph, 'outer_graph'):
        graph = graph.outer_graph
    return graph
