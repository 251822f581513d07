"""What an EstimatorSpec gives: loss, predictions, metrics; and what of it a step is run for."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.order.open_pairs import OpenPair, decide_open_pairs
from estimator_mgpu.partition.towers.build_towers import Towers
from estimator_mgpu.tf_internals import tf_estimator

_RESULTS = ('loss', 'train_op', 'predictions', 'eval_metric_ops')  # of an EstimatorSpec


def result_ops(spec: Any) -> list[tf.Operation]:
    """The ops of all that an EstimatorSpec gives for a step, in any mode."""
    return _ops_of([getattr(spec, name) for name in _RESULTS])


def results_of_step(spec: Any) -> list[tf.Tensor | tf.Operation]:
    """What a step of training, evaluation or prediction is run for."""
    modes = tf_estimator.estimator.ModeKeys
    results: Any = spec.train_op
    if spec.mode == modes.EVAL:
        results = [spec.loss, spec.eval_metric_ops]
    elif spec.mode == modes.PREDICT:
        results = spec.predictions
    leaves = tf.nest.flatten(results, expand_composites=True)
    return [leaf for leaf in leaves if isinstance(leaf, (tf.Tensor, tf.Operation))]


def decide_order(spec: Any) -> list[OpenPair]:
    """Decides the order of what a step of the default graph reads and writes, where it's left open.

    Args:
      spec: the EstimatorSpec of the model_fn that has built the graph.

    Returns:
      The pairs whose order was open.
    """
    modes = tf_estimator.estimator.ModeKeys
    results: Any = [spec.loss, spec.train_op]
    if spec.mode == modes.EVAL:
        # The values of metrics are read once, after all steps.
        updates = [update for _, update in (spec.eval_metric_ops or {}).values()]
        results = [spec.loss, updates]
    elif spec.mode == modes.PREDICT:
        results = spec.predictions
    return decide_open_pairs(tf.get_default_graph(), _ops_of(results))


def with_full_values(spec: Any, towers: Towers) -> Any:
    """An EstimatorSpec whose results are full values: of the global batch, not of one tower."""

    def full_value(leaf: Any) -> Any:
        return towers.full_value(leaf) if isinstance(leaf, tf.Tensor) else leaf

    results = {name: getattr(spec, name) for name in _RESULTS}
    full = tf.nest.map_structure(full_value, results, expand_composites=True)
    return spec._replace(**full)


def _ops_of(results: Any) -> list[tf.Operation]:
    """The ops of a nest of tensors, ops and whatever else."""
    ops = []
    for leaf in tf.nest.flatten(results, expand_composites=True):
        op = leaf if isinstance(leaf, tf.Operation) else getattr(leaf, 'op', None)
        if op is not None:
            ops.append(op)
    return ops
