"""`TowerOptimizer`: what every optimizer is in a replicated model_fn.

In: the optimizers that a model_fn makes, which `tower_optimizers()` turns into tower optimizers.
Out: which gradients they applied, by call. `partition` lets the small ones of a call share
messages; `explain` and `verify` show them.

An optimizer becomes a tower optimizer when its type is changed: to a class that is derived from its
own class, and gives that as its `__class__`. So it keeps all that it has, and it's an instance of
both.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow.compat.v1 as tf

# An attribute of the graph: for each call, the pairs of gradient and variable. It isn't a
# collection, as no MetaGraph could hold these.
_RECORD = '_estimator_mgpu_applied'
_WAITS_FOR_REPLICAS = (
    'SyncReplicasOptimizer waits for the gradients of other processes. There are none here, so a '
    'step may never end. Leave it out: the gradients are those of the global batch anyway.'
)


class TowerOptimizer:
    """A `tf.train.Optimizer`, or a function without arguments that makes one, as contrib had it.

    In a replicated model_fn, every `tf.train.Optimizer` is a tower optimizer, and still an instance
    of its own class. Nobody has to wrap one, and wrapping one changes nothing. An optimizer sees
    the gradients of the whole batch. Those that it applies are recorded: small ones that are
    applied in one call share messages, and `Estimator.explain()` and `verify()` show them.

    Examples:
      >>> optimizer = TowerOptimizer(tf.train.AdamOptimizer(0.01))
      >>> isinstance(optimizer, tf.train.AdamOptimizer), isinstance(optimizer, TowerOptimizer)
      (True, True)

    """

    if TYPE_CHECKING:  # It has what the optimizer has.

        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _wrapped(*args, **kwargs) if cls is TowerOptimizer else super().__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        """Hides the classes that `_tower_class` makes from a class that lists its subclasses."""
        if '_own_class' not in vars(cls):
            super().__init_subclass__(**options)

    def __init__(self, *args: Any, **kwargs: Any):
        # `TowerOptimizer(optimizer)` returns an optimizer that has been constructed before.
        if not hasattr(self, '_tower_optimizer'):
            super().__init__(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own method, and records the gradients."""
        if isinstance(self, tf.train.SyncReplicasOptimizer):
            tf.logging.warning(_WAITS_FOR_REPLICAS)
        pairs = list(grads_and_vars)
        applied = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        graph = tf.get_default_graph()
        setattr(graph, _RECORD, [*_calls(graph), applied])
        return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]

    @property
    def __class__(self) -> type:
        """The optimizer's own class. Its `type` is the class that `_tower_class` has made."""
        return vars(type(self)).get('_own_class', type(self))

    @__class__.setter
    def __class__(self, other: type) -> None:
        object.__dict__['__class__'].__set__(self, other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Lets pickle make an instance of the own class, which it finds by name, and adopt that."""
        make, arguments, *state = tuple(super().__reduce_ex__(protocol))
        findable = [self.__class__ if one is type(self) else one for one in arguments]
        return (_adopted, (make, *findable), *state)


def applied(graph: tf.Graph) -> list[tuple[Any, Any]]:
    """Lists the gradients that tower optimizers applied in a graph, each with its variable."""
    return [pair for pairs in _calls(graph) for pair in pairs]


def gradients_by_call(graph: tf.Graph) -> list[list[tf.Tensor]]:
    """Lists the gradients that each call of `apply_gradients` applied, as dense tensors.

    A sparse gradient is listed by its components: its values and its indices.
    """
    calls = []
    for pairs in _calls(graph):
        gradients = [gradient for gradient, _ in pairs]
        calls.append(tf.nest.flatten(gradients, expand_composites=True))
    return calls


def _calls(graph: tf.Graph) -> list[list[tuple[Any, Any]]]:
    """The gradients and variables of each call of `apply_gradients` in a graph, in order."""
    return getattr(graph, _RECORD, [])


# Optimizers become tower optimizers.

_inside: list[int] = []  # the thread of each `tower_optimizers()` that hasn't ended yet
_lock = threading.Lock()  # for `_inside`, the constructor that is replaced, and tower classes
_at_the_end = contextlib.ExitStack()  # puts the constructor back


@contextlib.contextmanager
def tower_optimizers() -> Iterator[None]:
    """Makes every optimizer that this thread constructs inside a `TowerOptimizer`.

    Several threads may be inside at once, and leave in any order: the first one to enter replaces
    the constructor of optimizers, and the last one to leave puts it back.
    """
    thread = threading.get_ident()
    with _lock:
        if not _inside:
            original = tf.train.Optimizer.__init__
            tf.train.Optimizer.__init__ = _adopting(original)
            _at_the_end.callback(setattr, tf.train.Optimizer, '__init__', original)
        _inside.append(thread)
    try:
        yield
    finally:
        with _lock:
            _inside.remove(thread)
            if not _inside:
                _at_the_end.close()


def _adopting(constructor: Callable[..., None]) -> Callable[..., None]:
    """A constructor of optimizers that adopts those of threads inside of `tower_optimizers()`."""

    @functools.wraps(constructor)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        if threading.get_ident() in _inside:
            _adopt(self)

    return __init__


def _wrapped(optimizer_or_optimizer_fn: Any) -> tf.train.Optimizer:
    """What `TowerOptimizer(...)` returns."""
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
    """Makes an optimizer a tower optimizer, unless it is one; returns the same object."""
    if not isinstance(optimizer, TowerOptimizer):
        optimizer.__class__ = _tower_class(type(optimizer))
        optimizer._tower_optimizer = True
    return optimizer


def _adopted(make: Callable[..., Any], *arguments: Any) -> tf.train.Optimizer:
    """Makes a copy of an optimizer, as pickle does, a tower optimizer."""
    return _adopt(make(*arguments))


def _tower_class(own: type) -> type:
    """Returns the class of tower optimizers that is derived from an optimizer's own class.

    It is made once for each class, and has the same name.
    """
    with _lock:
        subclasses: list[type] = own.__subclasses__()
        for derived in subclasses:
            if vars(derived).get('_own_class') is own:
                return derived

        names = {'__module__': own.__module__, '__qualname__': own.__qualname__}
        return type(own.__name__, (TowerOptimizer, own), {**names, '_own_class': own})
