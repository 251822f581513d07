"""What a model_fn returned: checked, and with whole values in place of what was divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import compat


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

    def replaced(leaf: Any) -> Any:
        return replace(leaf) if isinstance(leaf, tf.Tensor) else leaf

    results = {
        name: tf.nest.map_structure(replaced, getattr(spec, name), expand_composites=True)
        for name in ('loss', 'predictions', 'train_op', 'eval_metric_ops')
    }
    return spec._replace(**results)
