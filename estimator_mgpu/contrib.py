"""`replicate_model_fn()`, as `tf.contrib.estimator` had it.

In: a model_fn, with contrib's arguments. Out: what `replicate()` makes of it, with the signature
that contrib's had. `TowerOptimizer` is in `optimizer`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.model_fns.model_function import ModelFunction
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
      loss_reduction: not used, as the model_fn computes the loss of the global batch.
      devices: device strings, one a tower; None for every GPU, or a CPU where there is none.

    Returns:
      A function (features, labels, mode, params=None, config=None), called by position or by name.
    """
    replicated: Any = replicate(devices=devices)(model_fn)
    parameters = inspect.signature(replicated).parameters

    @functools.wraps(model_fn, updated=())
    def replicated_model_fn(
        features: Any, labels: Any, mode: str, params: Any = None, config: Any = None
    ) -> Any:
        arguments = dict(features=features, labels=labels, mode=mode, params=params, config=config)
        taken = {name: value for name, value in arguments.items() if name in parameters}
        return replicated(**taken)

    # Estimator looks at the signature: it's contrib's, whatever the model_fn takes.
    signature = inspect.signature(replicated_model_fn, follow_wrapped=False)
    options = replicated.replicate_options
    vars(replicated_model_fn).update(__signature__=signature, replicate_options=options)
    return ModelFunction(replicated_model_fn, replicate_model_fn, model_fn, loss_reduction, devices)
