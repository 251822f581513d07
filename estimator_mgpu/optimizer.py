"""`TowerOptimizer`: what every optimizer is in a replicated model_fn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow.compat.v1 as tf

_RECORD = '_estimator_mgpu_applied'  # An attribute of the graph: no MetaGraph could hold these.


class TowerOptimizer:
    """A `tf.train.Optimizer`, or a function without arguments that makes one, as contrib had it.

    In a replicated model_fn every `tf.train.Optimizer` is one, of its own class still: nobody has
    to wrap one, and who does changes nothing. Gradients are of the whole batch before an optimizer
    sees them. Which are applied is recorded: the small ones of a call share messages;
    `Estimator.explain()` and `verify()` show them.

    Examples:
      >>> optimizer = TowerOptimizer(tf.train.AdamOptimizer(0.01))
      >>> isinstance(optimizer, tf.train.AdamOptimizer), isinstance(optimizer, TowerOptimizer)
      (True, True)
    """

    if TYPE_CHECKING:  # It has what the optimizer has.

        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _wrapped(*args, **kwargs) if cls is TowerOptimizer else super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        if not hasattr(self, '_tower_optimizer'):  # Otherwise it was given to the constructor.
            super().__init__(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own."""
        pairs, graph = list(grads_and_vars), tf.get_default_graph()
        applied = [(gradient, v) for gradient, v in pairs if gradient is not None]
        setattr(graph, _RECORD, [*getattr(graph, _RECORD, []), applied])
        return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]


def applied(graph: tf.Graph) -> list[tuple[Any, Any]]:
    """Lists the gradients that tower optimizers applied in a graph, each with its variable."""
    return [pair for pairs in getattr(graph, _RECORD, []) for pair in pairs]


def gradients_by_call(graph: tf.Graph) -> list[list[tf.Tensor]]:
    """Lists the gradients of each call of a tower optimizer, as dense tensors."""
    found = [[gradient for gradient, _ in pairs] for pairs in getattr(graph, _RECORD, [])]
    return [tf.nest.flatten(gradients, expand_composites=True) for gradients in found]


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


def _wrapped(optimizer_or_optimizer_fn: Any) -> tf.train.Optimizer:
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
