"""Merging what a model_fn returned for one tower into the spec of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import compat, metrics, reports, sharding, writes
from estimator_mgpu.importing import absolute_scope
from estimator_mgpu.nests import flat_tensors
from estimator_mgpu.sharding import Shards
from estimator_mgpu.towers import Towers


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
    towers.placement.settle(towers.graph)
    towers.fill_stubs()
    modes = compat.estimator.ModeKeys
    metric_ops = spec.eval_metric_ops if spec.mode == modes.EVAL else {}
    if spec.mode == modes.TRAIN:
        _check_reduced(towers)
        results = [spec.train_op, spec.loss]
        hooks = [*spec.training_hooks, *spec.training_chief_hooks]
    else:
        results = flat_tensors([spec.loss, spec.predictions])
        hooks = spec.evaluation_hooks if spec.mode == modes.EVAL else spec.prediction_hooks
    others = tf.nest.flatten(spec.eval_metric_ops)
    shown = reports.Reports(hooks, results, others, towers)
    wholes = {}
    # What the forward pass does comes first, so that it doesn't wait where metrics do.
    if spec.mode != modes.PREDICT:
        wholes[spec.loss.name] = whole = towers.whole(spec.loss)
        spec = spec._replace(loss=whole)
    if spec.mode != modes.TRAIN:
        rows = _Rows(towers, shards).join(spec.predictions, spec.mode == modes.EVAL)
        spec = spec._replace(predictions=rows)
    updates = shown.updates(metric_ops)
    static = shards.static_rows is not None
    merged, updated = metrics.merge(
        metric_ops, updates, towers, None if static else shards.rows, results
    )
    if spec.mode == modes.EVAL:
        spec = spec._replace(eval_metric_ops=merged)
    writes.of_whole_batch([*results, *shown.run], towers)
    wholes.update(towers.extremes())
    shown.show(wholes, {updates[name].name: value for name, value in updated.items()})
    return spec


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
            # A tower without rows computes on one, if there is one.
            expected = [tf.minimum(tf.maximum(rows, 1), shards.total) for rows in shards.rows]
        self._expected = expected[0]
        self._places = towers.rows()
        self._across = self._places.across()
        towers.copies.replace(expected[0], expected[1:])

    def join(self, predictions: Any, batch_values: bool = False) -> Any:
        """Returns the whole batch's predictions.

        Args:
          predictions: a tensor, or a dict of tensors.
          batch_values: whether there may be values of the batch, a scalar say.
        """
        names = {'': predictions} if not isinstance(predictions, dict) else predictions
        checked = {
            name: self._checked(name, value, batch_values)
            for name, value in names.items()
            if not (batch_values and self._is_of_batch(value))
        }
        own = list(checked.values())
        towers = dict(zip(checked, zip(own, *self._towers.copies.copy(own))))
        joined = {}
        for name, value in names.items():
            if name in checked:
                joined[name] = self._joined(name, towers[name])
            else:
                joined[name] = self._of_batch(value)
        return joined if isinstance(predictions, dict) else joined['']

    def _joined(self, name: str, towers: Sequence[tf.Tensor]) -> tf.Tensor:
        with absolute_scope(self._towers.graph, 'replicate'), tf.device('/device:CPU:0'):
            checks = []
            if not towers[0].shape[1:].is_fully_defined():
                sizes = tf.stack([tf.shape(part)[1:] for part in towers])
                message = (
                    f'{_describe(name)} has rows of different sizes on different devices, as they '
                    'go by the rows of a shard (its longest sequence, say). Pad them to one size '
                    'in the model_fn, or predict with replicate(devices=1). The sizes are'
                )
                same = tf.reduce_all(tf.equal(sizes, sizes[:1]))
                checks.append(tf.Assert(same, [message, sizes], summarize=100))
            with tf.control_dependencies(checks):
                towers = [tf.identity(part) for part in towers]
            return sharding.join(towers, self._shards.rows)

    def _is_of_batch(self, value: tf.Tensor) -> bool:
        """Whether a value has no row an example: a scalar, or another number of rows."""
        if value.shape.rank == 0:
            return True
        rows = None if value.shape.rank is None else value.shape.as_list()[0]
        return bool(self._shards.static_rows) and rows not in (None, self._shards.static_rows)

    def _of_batch(self, value: tf.Tensor) -> tf.Tensor:
        known = self._towers.extremes()
        return known[value.name] if value.name in known else self._towers.whole(value)

    def _checked(self, name: str, value: tf.Tensor, evaluates: bool) -> tf.Tensor:
        """Returns a prediction of tower 0 that fails where its rows aren't the shard's.

        In an evaluation, which fetches no predictions, it fails only where somebody does.
        """
        what = _describe(name)
        advice = (
            'On several devices each prediction has one row an example, along dimension 0; leave '
            'out what is not per example, or predict with replicate(devices=1).'
        )
        if value.shape.rank == 0:
            raise ValueError(f'{what} is a scalar (rank 0). {advice}')
        found = [places.axis(value) for places in (self._places, self._across)]
        axes = {axis for axis in found if axis is not None}
        wrong = ''
        if len(axes) > 1:
            wrong = (
                f'{what} has rows along the dimensions {sorted(axes)}: it is of pairs of rows, and '
                f'each device has those of its shard only. {advice}'
            )
            static = self._shards.static_rows
            if static and value.shape.rank and value.shape.as_list().count(static) > 1:
                wrong += ' If one of these has as many entries by chance, take another batch size.'
        elif self._places.is_plain(value) and 0 not in axes:
            wrong = f'{what} has its rows along dimension {axes.pop()}. {advice}'
        if wrong and not evaluates:
            raise ValueError(wrong)
        self._towers.notices.values(self._places, value)
        self._towers.notices.mixing(self._places, value)
        static, rows = self._shards.static_rows, None
        if value.shape.rank is not None:
            rows = value.shape.as_list()[0]
        if static and rows not in (None, static):
            raise ValueError(f'{what} has {rows} rows where its shard has {static}. {advice}')
        with absolute_scope(self._towers.graph, 'replicate'), tf.device('/device:CPU:0'):
            message = f'{what} has another number of rows than its shard. {advice}'
            same = tf.equal(sharding.rows_of(value), self._expected)
            check = tf.Assert(same & (not wrong), [wrong or message, self._expected])
        with absolute_scope(self._towers.graph, 'replicate'), tf.device(value.device):
            with tf.control_dependencies([check]):
                return tf.identity(value)


def _describe(name: str) -> str:
    return f'predictions[{name!r}]' if name else 'predictions'
