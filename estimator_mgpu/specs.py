"""Merging what a model_fn returned for one tower into the spec of all."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import metrics, sharding
from estimator_mgpu.copying import absolute_scope
from estimator_mgpu.sharding import Shards
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


def merge(spec: Any, towers: Towers, shards: Shards) -> Any:
    """Returns the spec of the whole batch.

    Args:
      spec: tower 0's EstimatorSpec.
      towers: the towers.
      shards: their shares of the batch.

    Raises:
      ValueError: if a TRAIN spec came without a gradient that could be reduced, or the rows of
        predictions aren't those of the batch.
    """
    if spec.mode == tf.estimator.ModeKeys.TRAIN:
        _check_reduced(towers)
        return spec._replace(loss=towers.whole(spec.loss))
    rows = _Rows(towers, shards)
    if spec.mode == tf.estimator.ModeKeys.PREDICT:
        return spec._replace(predictions=rows.join(spec.predictions))
    return spec._replace(
        loss=towers.whole(spec.loss),
        eval_metric_ops=metrics.merge(
            spec.eval_metric_ops, towers, None if shards.static_rows else shards.rows
        ),
        predictions=rows.join(spec.predictions, batch_values=True),
    )


def _check_reduced(towers: Towers) -> None:
    if not towers.reductions:
        raise ValueError(
            f'The model_fn is to train on {len(towers.devices)} devices, but no gradient of a '
            'loss with respect to variables was computed, so there is nothing to reduce: the loss '
            'depends on no variable, or the gradient came about in an unknown way. Known are '
            'Optimizer.minimize() and compute_gradients() of any tf.train.Optimizer, '
            'tf.gradients(), tf.GradientTape.gradient() and Keras optimizers. Use one of these in '
            'the model_fn, or train with replicate(devices=1).'
        )


class _Rows:
    """Joins the towers' rows of predictions, checked to be those of their shards."""

    def __init__(self, towers: Towers, shards: Shards):
        self._towers = towers
        self._shards = shards
        with absolute_scope(towers.graph, 'replicate'), tf.device('/device:CPU:0'):
            # A tower without rows computes on one.
            expected = [tf.maximum(rows, 1) for rows in shards.rows]
        self._expected = expected[0]
        towers.copies.replace(expected[0], expected[1:])

    def join(self, predictions: Any, batch_values: bool = False) -> Any:
        """Returns the whole batch's predictions.

        Args:
          predictions: a tensor, or a dict of tensors.
          batch_values: whether there may be values of the batch, a scalar say.
        """
        names = {'': predictions} if not isinstance(predictions, dict) else predictions
        checked = {
            name: self._checked(name, value)
            for name, value in names.items()
            if not (batch_values and value.shape.rank == 0)
        }
        own = list(checked.values())
        towers = dict(zip(checked, zip(own, *self._towers.copies.copy(own))))
        joined = {}
        with absolute_scope(self._towers.graph, 'replicate'), tf.device('/device:CPU:0'):
            for name, value in names.items():
                if name in checked:
                    joined[name] = sharding.join(towers[name], self._shards.rows)
                else:
                    joined[name] = self._of_batch(value)
        return joined if isinstance(predictions, dict) else joined['']

    def _of_batch(self, value: tf.Tensor) -> tf.Tensor:
        return self._towers.whole(value) if value.dtype.is_floating else value

    def _checked(self, name: str, value: tf.Tensor) -> tf.Tensor:
        """Returns a prediction of tower 0 that fails where its rows aren't the shard's."""
        what = f'predictions[{name!r}]' if name else 'predictions'
        advice = (
            'On several devices each prediction has one row an example, along dimension 0; leave '
            'out what is not per example, or predict with replicate(devices=1).'
        )
        if value.shape.rank == 0:
            raise ValueError(f'{what} is a scalar (rank 0). {advice}')
        static, rows = self._shards.static_rows, None
        if value.shape.rank is not None:
            rows = value.shape.as_list()[0]
        if static and rows not in (None, static):
            raise ValueError(f'{what} has {rows} rows where its shard has {static}. {advice}')
        with absolute_scope(self._towers.graph, 'replicate'), tf.device('/device:CPU:0'):
            check = tf.Assert(
                tf.equal(sharding.rows_of(value), self._expected),
                [f'{what} has another number of rows than its shard. {advice}', self._expected],
            )
        with absolute_scope(self._towers.graph, 'replicate'), tf.device(value.device):
            with tf.control_dependencies([check]):
                return tf.identity(value)
