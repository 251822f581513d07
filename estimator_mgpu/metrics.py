"""Streaming metrics over towers: their updates run one tower after another.

A streaming metric is defined over a stream of batches, so shards one after another are as good as
one batch, whether or not what it keeps is additive. Each tower has its own copy of the update, on
the same variables; the forward passes run in parallel, and only what reads or writes these
variables waits for the tower before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private, sharing
from estimator_mgpu.copying import TowerCopy, Updates, absolute_scope
from estimator_mgpu.towers import Towers


def merge(metrics: dict[str, Any], towers: Towers, rows: Sequence[tf.Tensor] | None) -> dict:
    """Returns metrics whose updates are those of all towers.

    Args:
      metrics: as `eval_metric_ops` of an EstimatorSpec, (value, update) by name.
      towers: the towers; the metrics are of tower 0.
      rows: one scalar a tower, the rows it has: a tower without rows updates nothing. None where
        all towers have rows.

    Returns:
      `eval_metric_ops` for the whole batch.
    """
    if not metrics:
        return metrics
    merged = {}
    streamed: dict[str, tf.Tensor] = {}
    for name in sorted(metrics):
        value, update = metrics[name]
        with absolute_scope(towers.graph, 'replicate'), tf.device(towers.devices[0]):
            update = _tensor(update)
        updates = towers.copies.updates([update])
        if any(_counts_batches(op) for op in updates.writes):
            merged[name] = value, _once(name, update, updates, towers)
        else:
            streamed[name] = update
            towers.copies.let_write(updates.own)
    for name, update in _one_after_another(streamed, towers, rows).items():
        merged[name] = metrics[name][0], update
    return merged


def _one_after_another(
    first: dict[str, tf.Tensor], towers: Towers, rows: Sequence[tf.Tensor] | None
) -> dict[str, tf.Tensor]:
    """Returns the updates of all towers, each tower's after those of the tower before."""
    if not first:
        return {}
    skipped: list[list[tf.Tensor]] = []
    gates: list[Any] = [None]

    def after(tower: TowerCopy, before: Sequence[tf.Tensor]) -> tf.Tensor:
        """What a tower's updates wait for: all of the tower before, and to have rows at all.

        Where the latter fails, the output of a Switch is dead, and what waits for it isn't run.
        """
        with absolute_scope(towers.graph, 'replicate'), tf.device('/device:CPU:0'):
            before = _gated(before, gates[-1])
            with tf.control_dependencies(before):
                done = tf.constant(0, name='updated')
            if rows is None:
                return done
            has_rows = rows[tower.index] > 0
            skipped.append([tf.raw_ops.Switch(data=t, pred=has_rows)[0] for t in before])
            gates.append(tf.identity(tf.raw_ops.Switch(data=done, pred=has_rows)[1]))
            return gates[-1]

    last = towers.copies.copy(list(first.values()), after)[-1]
    with absolute_scope(towers.graph, 'replicate'), tf.device('/device:CPU:0'):
        last = _gated(last, gates[-1])
        if skipped:
            # Of the last tower's and what was passed by for want of rows, one is alive.
            last = [tf.raw_ops.Merge(inputs=list(ends))[0] for ends in zip(last, *skipped)]
        with tf.control_dependencies(last):
            updates = [tf.identity(t) for t in last]
    towers.copies.share(updates)
    return dict(zip(first, updates))


def _counts_batches(write: tf.Operation) -> bool:
    """Whether a write adds 1 for a batch, where a metric of rows adds their number.

    The mean of a batch's loss, say, is taken over batches, and to have shards instead of these
    would be another mean where they are of different sizes.
    """
    if write.type not in ('AssignAddVariableOp', 'AssignAdd'):
        return False
    value = private.constant_value(write.inputs[1])
    return value is not None and bool((value == 1).all())


def _once(name: str, update: tf.Tensor, updates: Updates, towers: Towers) -> tf.Tensor:
    """Returns a metric's update with the whole batch's values in the place of tower 0's."""
    values = [t for op in updates.writes for t in op.inputs if not sharing.is_handle(t)]
    rows = towers.rows()
    for value in values:
        if rows.has(value):
            raise ValueError(
                f'The metric {name!r} adds up batches row by row, as tf.metrics.mean_tensor does '
                'with values that have rows, so it has no value for shards of other sizes. Take '
                'the mean over the rows first, or evaluate with replicate(devices=1).'
            )
    return towers.whole_update(update, values, updates)


def _gated(tensors: Sequence[tf.Tensor], gate: tf.Tensor | None) -> list[tf.Tensor]:
    """Lets tensors be there only if `gate` is."""
    with tf.control_dependencies(None if gate is None else [gate]):
        return [tf.identity(t) for t in tensors]


def _tensor(update: Any) -> tf.Tensor:
    """Returns a tensor that is there once an update has run."""
    if isinstance(update, tf.Operation):
        with tf.control_dependencies([update]):
            return tf.constant(0, name='updated')
    return tf.convert_to_tensor(update)
