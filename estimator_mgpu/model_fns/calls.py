"""A model_fn is called: what it may be, which modes and configs it gets, and what it has to return.

`replicate` leaves out what a model_fn doesn't take.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.optimizer import tower_optimizers
from estimator_mgpu.tf_internals import graphs, tf_estimator, variable_sharing

_DEEPEST = 20  # frames of a traceback, among which is each of an endless recursion
_building: set[tf.Graph] = set()  # graphs whose model_fn is being called, in any thread


def call_model_fn(
    model_fn: Callable[..., Any], bound: inspect.BoundArguments, device: str = ''
) -> Any:
    """Calls a model_fn, and returns its EstimatorSpec, also if it returns a TPUEstimatorSpec."""
    with _not_nested():
        try:
            # A device string, unlike a function, stays out of the bodies of loops and branches.
            pinned = tf.device(device) if device else contextlib.nullcontext()
            with pinned, variable_sharing.shared_variables(), tower_optimizers():
                spec = model_fn(*bound.args, **bound.kwargs)
        except RecursionError as error:
            _explain_endless_super(error)
            raise
        except Exception as error:
            remedy = tf_estimator.legacy_keras_remedy(error)
            if remedy:
                raise RuntimeError(remedy) from error
            raise

    spec = tf_estimator.as_estimator_spec(spec)
    if not isinstance(spec, tf_estimator.estimator.EstimatorSpec):
        raise TypeError(
            f'The model_fn returned {spec!r} of {type(spec).__name__}. It has to return a '
            'tf.estimator.EstimatorSpec; is a return statement missing?'
        )
    return spec


def _explain_endless_super(error: RecursionError) -> None:
    """Raises an error that says more, if a method of an optimizer's calls itself by its `super`.

    The class of a tower optimizer is derived from the user's.
    """
    for frame in traceback.extract_tb(error.__traceback__)[-_DEEPEST:]:
        if 'super(type(self), self)' in (frame.line or ''):
            raise RecursionError(
                f'{frame.name}() calls itself without end in File "{frame.filename}", line '
                f'{frame.lineno}: in a replicated model_fn, the type of an optimizer is a class '
                'that is derived from its own, so super(type(self), self) finds the method itself. '
                'Write super() instead.'
            ) from None


@contextlib.contextmanager
def _not_nested() -> Iterator[None]:
    """Fails if a replicated model_fn is called by another one, in the same graph."""
    graph = graphs.outermost_graph(tf.get_default_graph())
    if graph in _building:
        raise ValueError(
            'A replicated model_fn is called by another one, that of replicate_estimator() or '
            'contrib say. Replicate it once.'
        )
    _building.add(graph)
    try:
        yield
    finally:
        _building.remove(graph)


def check_builds_graph() -> None:
    """Fails where no graph is being built, or only a function's."""
    graph = tf.get_default_graph()
    is_nested = graphs.outermost_graph(graph) in _building  # `_not_nested` has an error for that.
    if tf.executing_eagerly() or (graph.building_function and not is_nested):
        raise RuntimeError(
            'A replicated model_fn builds a graph. Let an Estimator call it, or call it within '
            '`with tf.Graph().as_default():`, rather than eagerly or in a function of TensorFlow.'
        )


def check_model_fn(model_fn: Any) -> None:
    """Fails for what can't be replicated, or is already."""
    if not callable(model_fn):
        raise TypeError(
            f'model_fn={model_fn!r} is of {type(model_fn).__name__}, not a function. Devices are '
            'given by name: replicate(devices=2); an Estimator goes to replicate_estimator().'
        )
    if hasattr(model_fn, 'replicate_options'):
        raise ValueError('This model_fn is replicated already. Apply replicate() once.')
    if isinstance(model_fn, functools.partial) and hasattr(model_fn.func, 'replicate_options'):
        raise ValueError(
            'This model_fn is a functools.partial of one that is replicated already. Replicate it '
            'once, last: replicate(functools.partial(model_fn, ...), devices=2).'
        )


def model_fn_signature(model_fn: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of a model_fn; fails if it takes no features."""
    try:
        signature = inspect.signature(model_fn)
    except ValueError:  # Some built-in types, such as dict, have none.
        signature = inspect.Signature()
    if 'features' not in signature.parameters:
        raise ValueError(
            f'The model_fn takes {signature}, and no features. An Estimator calls it with '
            'features, and with labels, mode, params and config if it takes them: name them so.'
        )
    return signature


def with_mode_and_config(signature: inspect.Signature) -> inspect.Signature:
    """Adds the parameters mode and config, if they are missing.

    An Estimator passes only what a signature names, and a replicated model_fn needs both.
    """
    parameters = list(signature.parameters.values())
    for name in ('mode', 'config'):
        if name not in signature.parameters:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter(name, kind, default=None))
    # By kind, as Python wants it: **kwargs comes last.
    parameters.sort(key=lambda parameter: parameter.kind)
    return signature.replace(parameters=parameters)
