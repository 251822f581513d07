"""What a model_fn returned: checked, and with whole values in place of what was divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import compat
from estimator_mgpu.nests import flat_tensors, pack_tensors


def check(spec: Any) -> Any:
    """Returns the EstimatorSpec, if it is one or, like a TPUEstimatorSpec, can be made one.

    Raises:
      TypeError: if a model_fn returned anything else.
    """
    spec = spec.as_estimator_spec() if hasattr(spec, 'as_estimator_spec') else spec
    if not isinstance(spec, compat.estimator.EstimatorSpec):
        raise TypeError(
            f'The model_fn returned {spec!r} of {type(spec).__name__}. It has to return a '
            'tf.estimator.EstimatorSpec; is a return statement missing?'
        )
    return spec


def whole(spec: Any, replace: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Returns a spec whose results are `replace(tensor)`, so that none is computed twice."""

    def replaced(nest: Any) -> Any:
        return pack_tensors(nest, [replace(t) for t in flat_tensors(nest)])

    train_op = spec.train_op
    if isinstance(train_op, tf.Tensor):
        train_op = replace(train_op)
    metrics = spec.eval_metric_ops
    if metrics:
        metrics = {
            name: value if not isinstance(value, tuple) else tuple(map(replaced, value))
            for name, value in metrics.items()
        }
    return spec._replace(
        loss=replaced(spec.loss),
        predictions=replaced(spec.predictions),
        train_op=train_op,
        eval_metric_ops=metrics,
    )
