"""The two names of `tf.contrib.estimator`, for code that was written for them.

Such code runs as it is, once it takes them from here; docs/contrib.md lists what is otherwise.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import losses
from estimator_mgpu.replicate import replicate, with_parameters


def replicate_model_fn(
    model_fn: Callable[..., Any],
    loss_reduction: str = tf.losses.Reduction.SUM_BY_NONZERO_WEIGHTS,
    devices: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """`replicate()` with the arguments of `tf.contrib.estimator.replicate_model_fn`.

    Examples:
      >>> def model_fn(features, labels, mode):
      ...     loss = tf.losses.mean_squared_error(labels, tf.layers.dense(features, 1))
      ...     optimizer = TowerOptimizer(tf.train.GradientDescentOptimizer(0.1))
      ...     train_op = optimizer.minimize(loss, tf.train.get_global_step())
      ...     return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
      >>> replicated = replicate_model_fn(model_fn, devices=['/cpu:0', '/cpu:1'])

    Args:
      model_fn: as for `tf.estimator.Estimator`.
      loss_reduction: `tf.losses.Reduction.SUM` adds the towers' losses up. All others of these
        constants averaged them; the default does so where the graph doesn't tell that the loss is
        a sum, or some other value of the batch, of which a plain average would be wrong.
      devices: device strings, one a tower; None for every GPU, or a CPU where there is none.

    Returns:
      The replicated model_fn.

    Raises:
      TypeError, ValueError: as `replicate()`.
    """
    if not callable(model_fn):
        raise TypeError(f'model_fn={model_fn!r} is of {type(model_fn).__name__}, not a function.')
    if 'params' not in inspect.signature(model_fn).parameters:
        model_fn = _with_params(model_fn)
    if loss_reduction == tf.losses.Reduction.SUM_BY_NONZERO_WEIGHTS:
        loss_reduction = losses.AUTO
    return replicate(model_fn, devices=devices, loss_reduction=loss_reduction)


def _with_params(model_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a model_fn be given params, as contrib's could be, though it has no use for them."""
    own = inspect.signature(model_fn)
    signature = with_parameters(own, 'params')

    @functools.wraps(model_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        arguments.pop('params', None)
        bound = inspect.BoundArguments(own, arguments)
        return model_fn(*bound.args, **bound.kwargs)

    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    return wrapped


class TowerOptimizer(tf.train.Optimizer):
    """An optimizer for several towers, as contrib's was called.

    In a replicated model_fn every optimizer is one, so this wraps an optimizer and changes nothing:
    the gradients are reduced where they're computed, and once only.

    Examples:
      >>> optimizer = TowerOptimizer(tf.train.AdamOptimizer(0.01))
      >>> optimizer.get_name()
      'Adam'

    Args:
      optimizer_or_optimizer_fn: a `tf.train.Optimizer`, or a function without arguments that makes
        one. What it has besides an optimizer's methods can be had from here, too.

    Raises:
      TypeError: if it's neither.
    """

    def __init__(
        self, optimizer_or_optimizer_fn: tf.train.Optimizer | Callable[[], tf.train.Optimizer]
    ):
        optimizer = optimizer_or_optimizer_fn
        if not isinstance(optimizer, tf.train.Optimizer) and callable(optimizer):
            optimizer = optimizer()
        if not isinstance(optimizer, tf.train.Optimizer):
            raise TypeError(
                f'TowerOptimizer({optimizer_or_optimizer_fn!r}) gives a '
                f'{type(optimizer).__name__}. It takes a tf.train.Optimizer, or a function without '
                'arguments that makes one. Keras optimizers need no wrapping in a replicated '
                'model_fn.'
            )
        super().__init__(use_locking=False, name=optimizer.get_name())
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        if name == 'optimizer':  # Not there yet.
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[Any]:
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

    def variables(self) -> list[Any]:
        """As the wrapped optimizer's."""
        return self.optimizer.variables()
