"""Merging what a model_fn returned for one tower into the spec of all."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.towers import Towers


def check(spec: Any) -> Any:
    """Returns the spec, if it is one.

    Raises:
      TypeError: if a model_fn returned anything else.
    """
    if not isinstance(spec, tf.estimator.EstimatorSpec):
        raise TypeError(
            f'The model_fn returned {spec!r} of {type(spec).__name__}. It has to return a '
            'tf.estimator.EstimatorSpec; is a return statement missing?'
        )
    return spec


def merge_train(spec: Any, towers: Towers) -> Any:
    """Returns a TRAIN spec whose loss is that of the whole batch.

    Raises:
      ValueError: if the model_fn computed no gradient that could be reduced.
    """
    if not towers.reductions:
        raise ValueError(
            f'The model_fn is to train on {len(towers.devices)} devices, but no gradient of a '
            'loss with respect to variables was computed, so there is nothing to reduce: the loss '
            'depends on no variable, or the gradient came about in an unknown way. Known are '
            'Optimizer.minimize() and compute_gradients() of any tf.train.Optimizer, '
            'tf.gradients(), tf.GradientTape.gradient() and Keras optimizers. Use one of these in '
            'the model_fn, or train with replicate(devices=1).'
        )
    return spec._replace(loss=towers.whole(spec.loss))
