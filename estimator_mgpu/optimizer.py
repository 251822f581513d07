"""`TowerOptimizer`: what every optimizer is in a replicated model_fn."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf


class Applied(NamedTuple):
    """A gradient that an optimizer was given to apply.

    Attributes:
      optimizer: the optimizer's name.
      gradient: a tensor or `IndexedSlices`.
      variable: the variable.
    """

    optimizer: str
    gradient: Any
    variable: Any


# By graph: the optimizer's name, the names of the gradient's tensors and the variable's. None of
# these keeps the graph alive.
_applied: weakref.WeakKeyDictionary[tf.Graph, list[tuple[str, list[str], str]]] = (
    weakref.WeakKeyDictionary()
)


class TowerOptimizer:
    """An optimizer for several towers, as contrib's was called.

    In a replicated model_fn every `tf.train.Optimizer` is one, and stays an instance of its own
    class, too; so nobody has to wrap one, and who does, as for contrib, changes nothing. Gradients
    are of the whole batch before any optimizer sees them. A tower optimizer keeps a record of which
    are applied to which variables, for `Estimator.explain()` and `verify()`.

    Examples:
      >>> optimizer = TowerOptimizer(tf.train.AdamOptimizer(0.01))
      >>> isinstance(optimizer, tf.train.AdamOptimizer), isinstance(optimizer, TowerOptimizer)
      (True, True)

    It takes a `tf.train.Optimizer`, or a function without arguments that makes one.

    Raises:
      TypeError: if it's neither.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is TowerOptimizer:
            return _wrapped(*args, **kwargs)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        if not hasattr(self, '_tower_optimizer'):  # Otherwise it was given to the constructor.
            super().__init__(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own."""
        pairs = list(grads_and_vars)
        record = _applied.setdefault(tf.get_default_graph(), [])
        for gradient, variable in pairs:
            if gradient is not None:
                names = [t.name for t in tf.nest.flatten(gradient, expand_composites=True)]
                record.append((self.get_name(), names, variable.op.name))  # type: ignore
        return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]


def applied(graph: tf.Graph) -> list[Applied]:
    """Lists the gradients that tower optimizers applied in a graph."""
    variables = {v.op.name: v for v in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)}
    found = []
    for optimizer, names, variable in _applied.get(graph, []):
        tensors = [graph.get_tensor_by_name(name) for name in names]
        gradient = tensors[0] if len(tensors) == 1 else tf.IndexedSlices(*tensors)
        if variable in variables:
            found.append(Applied(optimizer, gradient, variables[variable]))
    return found


@contextlib.contextmanager
def tower_optimizers() -> Iterator[None]:
    """Every optimizer that is made meanwhile is a `TowerOptimizer`."""
    original = tf.train.Optimizer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _adopt(self)

    tf.train.Optimizer.__init__ = __init__
    try:
        yield
    finally:
        tf.train.Optimizer.__init__ = original


def _wrapped(
    optimizer_or_optimizer_fn: tf.train.Optimizer | Callable[[], tf.train.Optimizer],
) -> tf.train.Optimizer:
    optimizer = optimizer_or_optimizer_fn
    if not isinstance(optimizer, tf.train.Optimizer) and callable(optimizer):
        optimizer = optimizer()
    if not isinstance(optimizer, tf.train.Optimizer):
        raise TypeError(
            f'TowerOptimizer({optimizer_or_optimizer_fn!r}) gives a {type(optimizer).__name__}. It '
            'takes a tf.train.Optimizer, or a function without arguments that makes one. Keras '
            'optimizers need no wrapping in a replicated model_fn.'
        )
    return _adopt(optimizer)


def _adopt(optimizer: tf.train.Optimizer) -> tf.train.Optimizer:
    """Makes an optimizer a tower optimizer, of its own class still."""
    own = type(optimizer)
    if not issubclass(own, TowerOptimizer):
        names = {'__module__': own.__module__, '__qualname__': own.__qualname__}
        optimizer.__class__ = type(own.__name__, (TowerOptimizer, own), names)
        optimizer._tower_optimizer = True
    return optimizer
