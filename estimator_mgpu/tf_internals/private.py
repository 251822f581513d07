"""TensorFlow's private names that are needed: importing this says which one is missing.

Those that `tf.estimator` itself needs are in `tf_estimator`.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf


def _find(module: str, name: str = '') -> Any:
    """Returns what a module of `tensorflow.python` has under a name: `Operation._id`, say.

    Without a name, it's the module.
    """
    try:
        found = importlib.import_module(f'tensorflow.python.{module}')
        return operator.attrgetter(name)(found) if name else found
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f'TensorFlow {tf.__version__} has no tensorflow.python.{module} with {name}, which '
            'estimator_mgpu needs. Install a TensorFlow that it was tested with (2.15 to 2.21).'
        ) from error


# The collection in which Estimator keeps its read of the global step when it trains.
GLOBAL_STEP_READ = _find('training.training_util', 'GLOBAL_STEP_READ_KEY')

# What a session asks `Graph.as_graph_element` for each thing that it fetches; nobody else does.
ASKED_BY_FETCH = dict(allow_tensor=True, allow_operation=True)

# (nest): its leaves, in `tf.nest`'s order, each after the tuple of the keys that lead to it.
flatten_with_paths = _find('util.nest', 'flatten_with_tuple_paths')

# Changes of an op that exists already; the op is the first argument.
add_control_inputs = _find('framework.ops', 'Operation._add_control_inputs')  # (op, other ops)
remove_control_inputs = _find('framework.ops', 'Operation._remove_all_control_inputs')
set_input = _find('framework.ops', 'Operation._update_input')  # (op, index, tensor)
set_device = _find('framework.ops', 'Operation._set_device')
# Lets an op run elsewhere than the ops with which it was colocated.
clear_colocation = functools.partial(
    _find('framework.ops', 'Operation._clear_attr'), attr_name='_class'
)

# (type of op): what TensorFlow declares of the type, an OpDef; None if it knows no such type.
op_definition = _find('framework.op_def_registry', 'get')

# (type of op): the kernels that are registered for it, a KernelList: also those for GPUs.
registered_kernels = functools.cache(_find('framework.kernels', 'get_registered_kernels_for_op'))

# (op in C, traceback): what `Operation.traceback` then gives.
_set_traceback = _find('client.pywrap_tf_session', 'TF_SetOpStackTrace')
# They remove a function of a graph by its name, make one of a serialized FunctionDef, and add it.
_remove_function = _find('client.pywrap_tf_session', 'TF_GraphRemoveFunction')
_import_function = _find('client.pywrap_tf_session', 'TF_FunctionImportFunctionDef')
_add_function = _find('client.pywrap_tf_session', 'TF_GraphCopyFunction')
# (function in C, name): holds it, and frees it in the end.
_owned_function = _find('framework.c_api_util', 'ScopedTFFunction')

# What `tf.import_graph_def` calls. The options of an import, and
# (options in C, prefix of names, inputs by name, names to return, whether to check colocations):
_ImportOptions = _find('framework.c_api_util', 'ScopedTFImportGraphDefOptions')
_set_import_options = _find('framework.importer', '_PopulateTFImportGraphDefOptions')
# (graph in C, buffer in C, options in C): adds the ops. `_owned_results` frees what it returns.
_import_in_c = _find('client.pywrap_tf_session', 'TF_GraphImportGraphDefWithResults')
_owned_results = _find('framework.c_api_util', 'ScopedTFImportGraphDefResults')
_buffer = _find('framework.c_api_util', 'tf_buffer')  # (bytes): a context with a buffer in C
# (FunctionDefLibrary): its functions, which can be added to a graph.
_functions_of = _find('framework.function', 'from_library')
# (graph): the ops in C for which there is no `tf.Operation` yet.
_new_operations = _find('framework.ops', 'Graph.new_operations')
# (op in C, graph): makes the `tf.Operation`.
_operation_from_c = _find('framework.ops', 'Operation._from_c_op')

# (predicate, function, function): `tf.cond` as one op, also after `tf.disable_v2_behavior()`.
cond = _find('ops.cond_v2', 'cond_v2')

# (): the traceback of whoever calls it.
own_traceback = _find('util.tf_stack', 'extract_stack')

# (graph): its ops in the order in which they were made: the list itself, which grows as they do.
operations = _find('framework.ops', 'Graph.operations').fget

# Facts about an op.
creation_index = _find('framework.ops', 'Operation._id').fget  # the order in which ops were made
control_consumers = _find('framework.ops', 'Operation._control_outputs').fget

# A graph's variables by name, from which `tf.get_variable` takes them.
VariableStore: Any = _find('ops.variable_scope', '_VariableStore')
VARIABLE_STORE_ATTRIBUTES = _find('ops.variable_scope', '_VariableStore.__slots__')
single_variable = _find('ops.variable_scope', '_VariableStore._get_single_variable')
partitioned_variable = _find('ops.variable_scope', '_VariableStore._get_partitioned_variable')
variable_store = _find('ops.variable_scope', '_get_default_variable_store')
with_variable_store = _find('ops.variable_scope', 'with_variable_store')

# (tensor): its value as an array if the graph alone determines it, else None.
constant_value = _find('framework.tensor_util', 'try_evaluate_constant')
get_function = _find('framework.ops', 'Graph._get_function')

# (FunctionDef, input_shapes=): the graph of a function that ops of the default graph may call.
function_def_to_graph = _find('framework.function_def_to_graph', 'function_def_to_graph')
# (function's graph): adds the function to the graph whose ops may call it; returns its name.
add_function = _find('ops.control_flow_util_v2', 'create_new_tf_function')
unique_function_name = _find('ops.control_flow_util_v2', 'unique_fn_name')  # (scope, name)
set_attribute = _find('framework.ops', 'Operation._set_attr')  # (op, name, AttrValue)

# The log of MonitoredSession, which has nothing else that tells why a session was lost.
session_log = _find('training.monitored_session', 'logging')
# tf.train.ChiefSessionCreator, by the name under which MonitoredTrainingSession looks it up.
ChiefSessionCreator: Any = _find('training.monitored_session', 'ChiefSessionCreator')
monitored_session: Any = _find('training.monitored_session')  # the module that has both

# Protobuf's module, by which graphs are written as text.
graph_text_format = _find('framework.graph_io', 'text_format')
graph_io: Any = _find('framework.graph_io')  # the module that writes them


def set_traceback(op: tf.Operation, traceback: Any) -> None:
    """Sets where an op was made, as `Operation.traceback` gives it."""
    _set_traceback(op._c_op, traceback)


def import_nodes(
    graph: tf.Graph, nodes: tf.GraphDef, inputs: dict[str, tf.Tensor]
) -> list[tf.Operation]:
    """Adds nodes to a graph, in less than half of the time that `tf.import_graph_def` takes.

    `tf.import_graph_def` sets default attributes in Python, though its C code does so anyhow, and
    then sets the device of each op once more.

    Each op is what its node says. A `tf.device`, `tf.colocate_with`, `tf.control_dependencies` or
    another scope that changes ops doesn't count.

    Args:
      nodes: new nodes. No op of the graph may have the name of one.
      inputs: tensors of the graph, by the names under which the nodes refer to them.

    Returns:
      The ops that the nodes have become.

    Raises:
      tf.errors.InvalidArgumentError: if a node isn't one that TensorFlow can add.
    """
    options = _ImportOptions()
    _set_import_options(options.options, '', inputs, None, True)
    added: list[tf.Operation] = []
    with graph.as_default(), graph._mutation_lock(), graph.control_dependencies(None):
        with graph._c_graph.get() as graph_in_c, _buffer(nodes.SerializeToString()) as buffer:
            _owned_results(_import_in_c(graph_in_c, buffer, options.options))
        for op_in_c in _new_operations(graph):
            op = _operation_from_c(op_in_c, graph)
            graph._names_in_use[op.name.lower()] = 1
            added.append(op)
        for function in _functions_of(nodes.library):
            function.add_to_graph(graph)
    return added


def replace_function(graph: tf.Graph, definition: Any) -> None:
    """Gives a function of a graph another FunctionDef, with the same name."""
    name = definition.signature.name
    imported = _owned_function(_import_function(definition.SerializeToString()), name)
    with graph._c_graph.get() as in_c, imported.get() as function:
        _remove_function(in_c, name)
        _add_function(in_c, function, None)


def replace_gradients(make: Callable[[Any], Any]) -> None:
    """Replaces the function by which TensorFlow makes all gradients, also those of optimizers.

    Args:
      make: returns the new function, given the present one. The first arguments of that are those
        of `tf.gradients`.
    """
    present = _find('ops.gradients_util', '_GradientsHelper')
    module = importlib.import_module(present.__module__)
    setattr(module, present.__name__, make(present))


def is_made_by_gradients(op: tf.Operation) -> bool:
    """Whether `tf.gradients` made an op; False also for all ops of an imported graph."""
    return getattr(op, '_original_op', None) is not None
