"""`replicate_model_fn()`, as `tf.contrib.estimator` had it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.model_function import ModelFunction
from estimator_mgpu.replicate import replicate


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
      loss_reduction: it changes nothing, as the model_fn computes the loss of the global batch.
      devices: device strings, one a tower; None for every GPU, or a CPU where there is none.

    Returns:
      A function (features, labels, mode, params=None, config=None), called by position or by name.
    """
    inner: Any = replicate(devices=devices)(model_fn)
    takes = inspect.signature(inner).parameters

    @functools.wraps(model_fn, updated=())
    def replicated_model_fn(
        features: Any, labels: Any, mode: str, params: Any = None, config: Any = None
    ) -> Any:
        given = dict(features=features, labels=labels, mode=mode, params=params, config=config)
        return inner(**{name: value for name, value in given.items() if name in takes})

    signature = inspect.signature(replicated_model_fn, follow_wrapped=False)
    attributes = {'replicate_options': inner.replicate_options, '__signature__': signature}
    vars(replicated_model_fn).update(attributes)
    made_of = model_fn, loss_reduction, devices
    return ModelFunction(replicated_model_fn, replicate_model_fn, *made_of)
