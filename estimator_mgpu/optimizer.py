"""`TowerOptimizer`, for those who want to say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf


class TowerOptimizer(tf.train.Optimizer):
    """An optimizer for several towers, as contrib's was called.

    In a replicated model_fn every optimizer is one, so this wraps an optimizer and changes nothing:
    the gradients are reduced where they're computed, and once only.

    >>> optimizer = TowerOptimizer(tf.train.AdamOptimizer(0.01))
    >>> optimizer.get_name()
    'Adam'

    Args:
      optimizer_or_fn: a `tf.train.Optimizer`, or a function without arguments that makes one.

    Raises:
      TypeError: if it's neither.
    """

    def __init__(self, optimizer_or_fn: tf.train.Optimizer | Callable[[], tf.train.Optimizer]):
        optimizer = optimizer_or_fn
        if not isinstance(optimizer, tf.train.Optimizer) and callable(optimizer):
            optimizer = optimizer()
        if not isinstance(optimizer, tf.train.Optimizer):
            raise TypeError(
                f'TowerOptimizer({optimizer_or_fn!r}) gives a {type(optimizer).__name__}. It takes '
                'a tf.train.Optimizer, or a function without arguments that makes one. Keras '
                'optimizers need no wrapping in a replicated model_fn.'
            )
        super().__init__(use_locking=False, name=optimizer.get_name())
        self.optimizer = optimizer

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list:
        """As the wrapped optimizer's."""
        return self.optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, *args: Any, **kwargs: Any) -> tf.Operation:
        """As the wrapped optimizer's."""
        return self.optimizer.apply_gradients(*args, **kwargs)

    def minimize(self, *args: Any, **kwargs: Any) -> tf.Operation:
        """As the wrapped optimizer's."""
        return self.optimizer.minimize(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As the wrapped optimizer's."""
        return self.optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self) -> list[str]:
        """As the wrapped optimizer's."""
        return self.optimizer.get_slot_names()

    def variables(self) -> list:
        """As the wrapped optimizer's."""
        return self.optimizer.variables()
