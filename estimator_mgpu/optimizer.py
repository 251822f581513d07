"""`TowerOptimizer`: what every optimizer is in a replicated model_fn."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
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

    def __init_subclass__(cls, **options: Any) -> None:
        """Tells an optimizer's own class, which may list its subclasses, only of a user's."""
        if '_own_class' not in vars(cls):
            super().__init_subclass__(**options)

    def __init__(self, *args: Any, **kwargs: Any):
        if not hasattr(self, '_tower_optimizer'):  # Otherwise it was given to the constructor.
            super().__init__(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own."""
        pairs, graph = list(grads_and_vars), tf.get_default_graph()
        applied = [(gradient, v) for gradient, v in pairs if gradient is not None]
        setattr(graph, _RECORD, [*getattr(graph, _RECORD, []), applied])
        return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]

    @property
    def __class__(self) -> type:
        """The optimizer's own class, as on one device; `type` tells of a `TowerOptimizer`."""
        return vars(type(self)).get('_own_class', type(self))

    @__class__.setter
    def __class__(self, other: type) -> None:
        object.__dict__['__class__'].__set__(self, other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Makes copies of its own class, which pickle finds by its name, and adopts them."""
        make, arguments, *state = tuple(super().__reduce_ex__(protocol))
        own = [self.__class__ if one is type(self) else one for one in arguments]
        return (_adopted, (make, *own), *state)


def applied(graph: tf.Graph) -> list[tuple[Any, Any]]:
    """Lists the gradients that tower optimizers applied in a graph, each with its variable."""
    return [pair for pairs in getattr(graph, _RECORD, []) for pair in pairs]


def gradients_by_call(graph: tf.Graph) -> list[list[tf.Tensor]]:
    """Lists the gradients of each call of a tower optimizer, as dense tensors."""
    found = [[gradient for gradient, _ in pairs] for pairs in getattr(graph, _RECORD, [])]
    return [tf.nest.flatten(gradients, expand_composites=True) for gradients in found]


_inside: list[int] = []  # the thread of each `tower_optimizers()` that hasn't ended yet
_lock = threading.Lock()  # of `_inside`, of the constructor that it tells of, and of classes
_at_the_end = contextlib.ExitStack()  # puts the constructor back


@contextlib.contextmanager
def tower_optimizers() -> Iterator[None]:
    """Every optimizer that this thread makes meanwhile is a `TowerOptimizer`.

    Several threads may be inside at once, and leave in any order: the constructor of optimizers is
    replaced as the first one enters, and put back as the last one leaves.
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
    """The constructor of optimizers, which adopts what a thread in `tower_optimizers()` makes."""

    @functools.wraps(constructor)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        if threading.get_ident() in _inside:
            _adopt(self)

    return __init__


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
    if not isinstance(optimizer, TowerOptimizer):
        optimizer.__class__ = _tower_class(type(optimizer))
        optimizer._tower_optimizer = True
    return optimizer


def _adopted(make: Callable[..., Any], *arguments: Any) -> tf.train.Optimizer:
    """Makes a copy of an optimizer, as pickle does, a tower optimizer."""
    return _adopt(make(*arguments))


def _tower_class(own: type) -> type:
    """Returns the class of an optimizer's tower optimizers, always the same one."""
    names = {'__module__': own.__module__, '__qualname__': own.__qualname__, '_own_class': own}
    with _lock:
        subclasses: list[type] = own.__subclasses__()
        for derived in subclasses:
            if vars(derived).get('_own_class') is own:
                return derived
        return type(own.__name__, (TowerOptimizer, own), names)
