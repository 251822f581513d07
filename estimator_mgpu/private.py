"""TensorFlow's private names that are needed: importing this says which one has gone.

Those that `tf.estimator` itself needs are in `compat`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf


def _find(module: str, name: str) -> Any:
    """Returns what a module of `tensorflow.python` has under a name: `Operation._id`, say."""
    try:
        return operator.attrgetter(name)(importlib.import_module(f'tensorflow.python.{module}'))
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f'TensorFlow {tf.__version__} has no tensorflow.python.{module} with {name}, which '
            'estimator_mgpu needs. Install a TensorFlow that it was tested with (2.15 to 2.21).'
        ) from error


# The collection in which Estimator keeps its read of the global step when it trains.
GLOBAL_STEP_READ = _find('training.training_util', 'GLOBAL_STEP_READ_KEY')
# (nest): its leaves, in `tf.nest`'s order, each after the tuple of the keys that lead to it.
leaves = _find('util.nest', 'flatten_with_tuple_paths')

# Of an op that exists already, which comes first.
add_control_inputs = _find('framework.ops', 'Operation._add_control_inputs')  # of other ops
set_input = _find('framework.ops', 'Operation._update_input')  # (op, index, tensor)
set_device = _find('framework.ops', 'Operation._set_device')
# Lets it be elsewhere than the ops that it had to be with.
free = functools.partial(_find('framework.ops', 'Operation._clear_attr'), attr_name='_class')
number = _find('framework.ops', 'Operation._id').fget  # in the order in which ops were made
in_control_flow = _find('framework.ops', 'Operation._get_control_flow_context')  # v1's, or None
waiting = _find('framework.ops', 'Operation._control_outputs').fget  # the ops that wait for it
_remove_control_inputs = _find('framework.ops', 'Operation._remove_all_control_inputs')

# A graph's variables by name, from which `tf.get_variable` takes them.
_VariableStore: Any = _find('ops.variable_scope', '_VariableStore')
_STORE_ATTRIBUTES = _find('ops.variable_scope', '_VariableStore.__slots__')
_single_variable = _find('ops.variable_scope', '_VariableStore._get_single_variable')
_partitioned_variable = _find('ops.variable_scope', '_VariableStore._get_partitioned_variable')
_variable_store = _find('ops.variable_scope', '_get_default_variable_store')
_with_variable_store = _find('ops.variable_scope', 'with_variable_store')

_constant_value = _find('framework.tensor_util', 'try_evaluate_constant')
_get_function = _find('framework.ops', 'Graph._get_function')
# What MonitoredSession logs by; it has nothing else that tells why a session was lost.
_log = _find('training.monitored_session', 'logging')


def constant_value(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns the tensor's value if the graph alone determines it, else None."""
    if tensor.dtype in (tf.resource, tf.variant):
        return None  # TensorFlow makes no array of these, and says so by an error.
    return _constant_value(tensor)


def called(node: Any) -> list[Any]:
    """Returns what a NodeDef says of the functions that it calls: a loop's condition is first."""
    names = ('cond', 'body', 'then_branch', 'else_branch', 'branches', 'f')
    values = [node.attr[name] for name in names if name in node.attr]
    return [function for value in values for function in value.list.func or [value.func]]


def function_graphs(op: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of `called` functions; none where op.graph, an imported one, has none."""
    found = [getattr(_get_function(op.graph, f.name), 'graph', None) for f in called(op.node_def)]
    return [] if None in found else found


def function_definition(graph: tf.Graph, name: str) -> tuple[Any, Any]:
    """Returns a function's FunctionDef, which isn't to be changed, and its graph."""
    function = _get_function(graph, name)
    definition = getattr(function, 'cached_definition', None) or function.definition
    return definition, function.graph


def function_ops(definition: Any, graph: Any) -> list[tf.Operation]:
    """Lists the ops that a FunctionDef's nodes, in order, are in its graph, some by other names."""
    arguments = {t.op.name for t in graph.inputs}
    found = [op for op in graph.get_operations() if op.name not in arguments]
    found = found[: len(definition.node_def)]  # Gradients of the function may have come since.
    if [op.type for op in found] != [node.op for node in definition.node_def]:
        raise RuntimeError(
            f'The nodes of the function {definition.signature.name} are not in the order of its '
            f'graph in TensorFlow {tf.__version__}. Please report this.'
        )
    return found


class _SharingStore(_VariableStore):
    """Gives a variable that exists to whoever would make another one of its name.

    It works like `tf.AUTO_REUSE`, but underneath scopes and custom getters, which therefore show
    the user's own `reuse`. `reuse=True` still demands a variable that exists.
    """

    __slots__ = ()

    def __init__(self, store: Any):
        """Shares the variables of another store, which keeps those that are made here, too."""
        super().__init__()
        for name in _STORE_ATTRIBUTES:
            setattr(self, name, getattr(store, name))

    def _get_single_variable(self, *args: Any, reuse: Any = None, **kwargs: Any) -> Any:
        return _single_variable(self, *args, reuse=reuse or tf.AUTO_REUSE, **kwargs)

    def _get_partitioned_variable(self, *args: Any, reuse: Any = None, **kwargs: Any) -> Any:
        return _partitioned_variable(self, *args, reuse=reuse or tf.AUTO_REUSE, **kwargs)


@contextlib.contextmanager
def shared_variables() -> Iterator[None]:
    """Lets `tf.get_variable` share the variables of one name in the default graph."""
    store = _variable_store()
    if not isinstance(store, _VariableStore):
        yield  # That of `track_tf1_style_variables`, which shares them itself.
        return
    with _with_variable_store(_SharingStore(store)):
        yield


def set_control_inputs(op: tf.Operation, inputs: Sequence[tf.Operation]) -> None:
    """Makes an op that exists already wait for these, and for no others."""
    _remove_control_inputs(op)
    add_control_inputs(op, list(dict.fromkeys(inputs)))


def followers(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that directly wait for an op."""
    return [user for t in op.outputs for user in t.consumers()] + waiting(op)


def waited(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that an op directly waits for."""
    return [*(t.op for t in op.inputs), *op.control_inputs]


def backward(ops: Sequence[tf.Operation]) -> set[tf.Operation]:
    """Returns these ops, and all that they wait for, by data or control."""
    seen, stack = set(ops), list(ops)
    while stack:
        before = set(waited(stack.pop()))
        stack += before - seen
        seen |= before
    return seen


def replace(op: tf.Operation, outputs: dict[int, tf.Tensor], last: tf.Operation) -> None:
    """Gives whoever uses an op's outputs others; whoever waits for it waits for `last` instead."""
    for index, tensor in outputs.items():
        for user in op.outputs[index].consumers():
            for i, given in enumerate(user.inputs):
                if given is op.outputs[index]:
                    set_input(user, i, tensor)
    for user in waiting(op):
        set_control_inputs(user, [*(c for c in user.control_inputs if c is not op), last])


def is_reference(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a variable of TensorFlow 1's kind, rather than a value."""
    return tensor.dtype is not tensor.dtype.base_dtype


def colocated_with(op: tf.Operation) -> list[str]:
    """Names the ops that an op has to be with."""
    return [name.decode()[len('loc:@') :] for name in op.node_def.attr['_class'].list.s]


def outermost(graph: tf.Graph) -> tf.Graph:
    """Returns the graph that a function's graph is being traced for, or the graph itself."""
    while hasattr(graph, 'outer_graph'):
        graph = graph.outer_graph
    return graph


@contextlib.contextmanager
def lost_sessions(tell: Callable[[Exception], None]) -> Iterator[None]:
    """Calls a function with each error for which a MonitoredSession makes a new session."""
    module = importlib.import_module('tensorflow.python.training.monitored_session')

    class Log:
        def __getattr__(self, name: str) -> Any:
            return getattr(_log, name)

        def info(self, text: str, *args: Any) -> None:
            _log.info(text, *args)
            for error in args:
                if isinstance(error, (tf.errors.AbortedError, tf.errors.UnavailableError)):
                    tell(error)

    module.logging = Log()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.logging = _log  # type: ignore[attr-defined]
