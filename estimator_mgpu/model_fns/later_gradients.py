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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs, private

_CHANGED = '_estimator_mgpu_changed'  # An attribute of the graph: a list of `_Changed`.


class _Changed(NamedTuple):
    """The ops of a model that was changed, by the order in which ops are made: `end` isn't one."""

    begin: int
    end: int


def refuse(graph: tf.Graph, begin: int) -> None:
    """Lets gradients that are taken from now on raise an error if they go through a model.

    Args:
      graph: the graph that the model_fn has built, and that was changed.
      begin: how many ops there were before the model_fn was called.
    """
    _extend_gradients()
    if not hasattr(graph, _CHANGED):
        setattr(graph, _CHANGED, [])
    end = max(map(private.creation_index, graph.get_operations())) + 1
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
            _check(graph, ys, xs)
        depth += 1
        try:
            return gradients(ys, xs, *args, **kwargs)
        finally:
            depth -= 1

    return checked


def _check(graph: tf.Graph, ys: Any, xs: Any) -> None:
    """Raises an error if gradients of `ys` with respect to `xs` may go through a changed model."""
    # What is newer than a model isn't used in it.
    models = [
        model
        for model in getattr(graph, _CHANGED)
        if not all(_is_newer(x, graph, model) for x in _as_list(xs))
    ]
    for op in _before(_as_list(ys)) if models else ():
        if op.graph is not graph or not _computes(op):
            continue
        index = private.creation_index(op)
        if any(model.begin <= index < model.end for model in models):
            raise ValueError(
                'tf.gradients was called after the model_fn had returned, of something that '
                f'depends on its op {op.name}. The graph is divided by then, or computes some ops '
                "twice. Call tf.gradients in the model_fn rather than in a hook's begin(), say, "
                'and return the gradients among the predictions, or add them to a collection. If '
                'your model_fn calls a replicated one, replicate yours instead.'
            )


def _as_list(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def _is_newer(x: Any, graph: tf.Graph, model: _Changed) -> bool:
    """Whether a tensor or variable was made after a model."""
    op = getattr(getattr(x, 'handle', x), 'op', None)
    is_of_graph = op is not None and op.graph is graph
    return is_of_graph and private.creation_index(op) >= model.end


def _before(ys: Iterable[Any]) -> set[tf.Operation]:
    """The ops from which tensors are computed, also outside of the functions that they are in."""
    seen: set[tf.Operation] = set()
    ops = {y.op for y in ys if tf.is_symbolic_tensor(y)}
    while ops:
        before = graphs.ancestors(list(ops), by_control=False) - seen
        seen |= before
        functions = {op.graph for op in before if hasattr(op.graph, 'captures')}
        captured = {outer for function in functions for outer, _ in function.captures}
        ops = {tensor.op for tensor in captured if tf.is_symbolic_tensor(tensor)} - seen
    return seen


def _computes(op: tf.Operation) -> bool:
    """Whether an op computes something of others, rather than being a variable or a read of one."""
    return any(not graphs.is_handle(operand) for operand in op.inputs)
