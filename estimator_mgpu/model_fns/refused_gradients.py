"""Gradients that are taken after the model_fn has returned, for example in a hook's `begin()`.

`tf.gradients` goes back from a loss and asks each op for its gradient. A divided graph has the
values of one device, but not its ops: no path leads from a tensor in the middle, such as `h`, to
the loss, and what rewrites use in place of an op may have another gradient.

    x ---> h ---> loss                                   as the model_fn made it

    x ---> towers ---> full value of h ---> loss         divided

So `tf.gradients` raises an error if it would go through ops of a graph that was changed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs, op_types, private

_CHANGED = '_estimator_mgpu_changed'  # An attribute of the graph: a list of `_Changed`.


class _Changed(NamedTuple):
    """The ops of a model that was changed, by the order in which ops are made: `end` isn't one."""

    begin: int
    end: int

    def has(self, op: tf.Operation) -> bool:
        """Whether an op of the model computes something: it isn't, nor reads, a variable."""
        computes = any(not graphs.is_handle(operand) for operand in op.inputs)
        return computes and self.begin <= private.creation_index(op) < self.end


def refuse(graph: tf.Graph, begin: int) -> None:
    """Lets gradients that are taken from now on raise an error if they go through a model.

    Args:
      graph: the graph that the model_fn has built, and that was changed.
      begin: how many ops there were before the model_fn was called.
    """
    _extend_gradients()
    if not hasattr(graph, _CHANGED):
        setattr(graph, _CHANGED, [])
    end = private.creation_index(graph.get_operations()[-1]) + 1
    getattr(graph, _CHANGED).append(_Changed(begin, end))


@functools.cache
def _extend_gradients() -> None:
    """Lets `tf.gradients` know of models. TensorFlow's function is replaced only once."""
    private.replace_gradients(_with_check)


def _with_check(gradients: Callable[..., Any]) -> Callable[..., Any]:
    """Extends the function behind `tf.gradients`, whose first arguments are `ys` and `xs`."""
    depth = 0  # The gradients of some ops, such as loops, call it themselves.

    @functools.wraps(gradients)
    def checked(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        graph = graphs.outermost_graph(tf.get_default_graph())
        if depth == 0 and hasattr(graph, _CHANGED) and not graph.finalized:
            arguments = inspect.signature(gradients).bind(ys, xs, *args, **kwargs).arguments
            _check(graph, ys, xs, arguments.get('stop_gradients'))
        depth += 1
        try:
            return gradients(ys, xs, *args, **kwargs)
        finally:
            depth -= 1

    return checked


def _check(graph: tf.Graph, ys: Any, xs: Any, stopped: Any) -> None:
    """Raises an error if gradients of `ys` with respect to `xs` may go through a changed model.

    They stop at the tensors in `stopped`, if it isn't None.
    """
    x_ops = [op for op in map(_op_of, tf.nest.flatten(xs)) if op is not None and op.graph is graph]
    for model in getattr(graph, _CHANGED):
        # What is newer than a model isn't used in it.
        older = {op for op in x_ops if private.creation_index(op) < model.end}
        for y in tf.nest.flatten(ys) if older else ():
            passed = _passed_by_gradients(y, tf.nest.flatten(stopped))
            through = [op for op in passed if op.graph is graph and model.has(op)]
            if not through:
                continue
            # A divided graph may have no path from something in the middle of the model.
            in_middle = any(map(model.has, older))
            if in_middle or not older.isdisjoint(graphs.ancestors(through, graphs.data_inputs)):
                raise ValueError(
                    f'tf.gradients of {y.name} was called after the model_fn had returned, and '
                    'would go through ops that the model_fn made. The graph is divided by then, or '
                    'computes some ops twice. Call tf.gradients in the model_fn rather than in a '
                    "hook's begin(), say, and return the gradients among the predictions, or add "
                    'them to a collection. If only variables of your own are to be trained, pass '
                    'them as var_list=, or xs. If your model_fn calls a replicated one, replicate '
                    'yours instead.'
                )


def _op_of(x: Any) -> tf.Operation | None:
    """The op that gives a tensor, or that holds a variable."""
    op: tf.Operation | None = getattr(getattr(x, 'handle', x), 'op', None)
    return op


def _passed_by_gradients(y: Any, stopped: Sequence[Any]) -> set[tf.Operation]:
    """The ops that gradients of a tensor may go through, also out of the function that it is in."""
    seen: set[tf.Operation] = set()
    stack = [y] if tf.is_symbolic_tensor(y) else []
    while stack:
        tensor = stack.pop()
        dtype = tensor.dtype.base_dtype
        has_gradient = dtype.is_floating or dtype.is_complex or dtype == tf.variant  # a list
        is_stopped = tensor.op.type == op_types.STOP_GRADIENT or any(
            tensor is other for other in stopped
        )
        if tensor.op in seen or is_stopped or not has_gradient:
            continue
        seen.add(tensor.op)
        stack += tensor.op.inputs
        captures = getattr(tensor.op.graph, 'captures', ())
        stack += [outer for outer, inner in captures if inner is tensor]
    return seen
