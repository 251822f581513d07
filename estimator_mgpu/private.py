"""Every private name of TensorFlow that this package leans on.

They are looked up when the package is imported, so a TensorFlow that has dropped one says so at
once, by name, rather than in the middle of a training script.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf


def _module(name: str, *attributes: str) -> Any:
    try:
        module = importlib.import_module(name)
        for attribute in attributes:
            getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f'TensorFlow {tf.__version__} has no {name}.{"/".join(attributes)}, which '
            'estimator_mgpu needs. Install a TensorFlow that it was tested with (2.15 to 2.21).'
        ) from error
    return module


# What tf.gradients, Optimizer.compute_gradients and Keras' get_gradients all end in.
GRADIENTS = (
    _module('tensorflow.python.ops.gradients_util', '_GradientsHelper'),
    '_GradientsHelper',
)
# What tf.GradientTape.gradient ends in.
TAPE_GRADIENTS = (
    _module('tensorflow.python.eager.imperative_grad', 'imperative_grad'),
    'imperative_grad',
)
# What tf.shape and tf.size end in.
_ARRAY_OPS = 'tensorflow.python.ops.array_ops'
SIZES = [(_module(_ARRAY_OPS, name), name) for name in ('shape_internal', 'size_internal')]

# The collection in which Estimator keeps its read of the global step when it trains.
GLOBAL_STEP_READ = _module(
    'tensorflow.python.training.training_util', 'GLOBAL_STEP_READ_KEY'
).GLOBAL_STEP_READ_KEY

_tensor_util = _module('tensorflow.python.framework.tensor_util', 'try_evaluate_constant')
_op_def_registry = _module('tensorflow.python.framework.op_def_registry', 'get')
_kernels = _module('tensorflow.python.framework.kernels', 'get_registered_kernels_for_op')
_script_ops = _module(
    'tensorflow.python.ops.script_ops', 'EagerFunc', '_py_funcs', 'tape_cache', '_EagerPyFuncGrad'
)
_ops = _module('tensorflow.python.framework.ops', 'Operation')
if not hasattr(_ops.Graph, '_get_function'):
    raise ImportError(
        f'TensorFlow {tf.__version__} has no Graph._get_function, which estimator_mgpu needs. '
        'Install a TensorFlow that it was tested with (2.15 to 2.21).'
    )
for _method in (
    '_add_control_inputs',
    '_clear_attr',
    '_remove_all_control_inputs',
    '_control_outputs',
    '_get_control_flow_context',
    '_set_device',
    '_update_input',
):
    if not hasattr(_ops.Operation, _method):
        raise ImportError(
            f'TensorFlow {tf.__version__} has no Operation.{_method}, which estimator_mgpu needs. '
            'Install a TensorFlow that it was tested with (2.15 to 2.21).'
        )


def constant_value(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns the tensor's value if the graph alone determines it, else None."""
    if tensor.dtype in (tf.resource, tf.variant):
        return None  # TensorFlow makes no array of these, and says so by an error.
    return _tensor_util.try_evaluate_constant(tensor)


def op_def(op_type: str) -> Any:
    """Returns the `OpDef` of an op type, or None where there is none (a function's name)."""
    return _op_def_registry.get(op_type)


def has_kernel(op_type: str) -> bool:
    """Whether this build of TensorFlow can run an op on any kind of device."""
    return bool(_kernels.get_registered_kernels_for_op(op_type).kernel)


def function_graphs(
    op: tf.Operation,
    names: Sequence[str] = ('body', 'f', 'then_branch', 'else_branch', 'branches'),
) -> list[tf.Graph]:
    """Returns the graphs of the body of a loop, the branches or the function that an op calls.

    None where the graph doesn't keep them, as one that was imported.

    Args:
      op: the op.
      names: the attributes that say which: 'cond' is what a loop goes by.
    """
    refs = [op.node_def.attr[name] for name in names if name in op.node_def.attr]
    refs = [f for attr in refs for f in ([attr.func] if attr.HasField('func') else attr.list.func)]
    found = [getattr(op.graph._get_function(ref.name), 'graph', None) for ref in refs]
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
    return [user for t in op.outputs for user in t.consumers()] + list(op._control_outputs)


def set_input(op: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Gives an op that exists already another input."""
    op._update_input(index, tensor)


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


def in_loop(op: tf.Operation) -> bool:
    """Whether an op is inside a v1 `while_loop`."""
    return bool(loops_of(op))


def loops_of(op: tf.Operation) -> list[str]:
    """Returns the names of the v1 `while_loop`s that an op is inside of, the innermost first."""
    return [context.name for context in _contexts(op) if context.IsWhileContext()]


def _contexts(op: tf.Operation) -> Iterator[Any]:
    """Yields the v1 loops and branches that an op is inside of, the innermost first."""
    context = op._get_control_flow_context()
    while context is not None:
        yield context
        context = context.outer_context


def own_python_function(token: bytes, graph: tf.Graph, own: Callable[[bytes], bytes]) -> bytes:
    """Registers the function of a `py_function` again, for it to keep another tape.

    The tape of a call is kept, until the gradient takes it, under the token that the op has.

    Args:
      token: what the function is registered as.
      graph: the graph that it's called in, which keeps it alive.
      own: own(token of a function) -> what that was registered as again.

    Returns:
      The new token.
    """
    function = _script_ops._py_funcs.get(token.decode())
    if function is None:  # It was made in another process, say; running it says so.
        return token
    if function._is_grad_func:
        forward = inspect.getclosurevars(inspect.unwrap(function._func)).nonlocals['token']
        forward = own(forward)

        def gradient(*grads: tf.Tensor) -> list[Any]:
            tape, inputs, outputs = _script_ops.tape_cache.pop(forward)
            return tape.gradient(outputs, inputs, output_gradients=grads)

        function = _script_ops.EagerFunc(gradient, function._out_dtypes, True)
        graph._py_funcs_used_in_graph.append(function)
    return _script_ops._py_funcs.insert(function).encode()


def branched_on(op: tf.Operation) -> list[tf.Tensor]:
    """Lists what decides on the v1 `cond`s that an op is inside of."""
    return [context.pred for context in _contexts(op) if context.IsCondContext()]


def loop_ends(op: tf.Operation) -> list[tf.Operation]:
    """Returns the `Exit`s of the v1 `while_loop` that an op is in, if that's in nothing else."""
    *_, context = _contexts(op)
    return [t.op for t in context.loop_exits] if context.IsWhileContext() else []


def outermost(graph: tf.Graph) -> tf.Graph:
    """Returns the graph that a function's graph is being traced for, or the graph itself."""
    while hasattr(graph, 'outer_graph'):
        graph = graph.outer_graph
    return graph
