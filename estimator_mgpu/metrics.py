"""Metrics over towers: updates with the whole batch's values, or one tower after another.

Where a metric's update writes what follows from sums and means over rows, it is run once, with the
whole batch's (see losses.py). Any other update runs on every tower, one after another: a streaming
metric is defined over a stream of batches, so shards are as good as one batch, whether or not what
it keeps is additive. The towers' copies of the update share the metric's variables; the forward
passes run in parallel, and only what reads or writes these variables waits for the tower before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import losses, private, sharing, streams
from estimator_mgpu.importing import TowerCopy, absolute_scope
from estimator_mgpu.rows import Rows
from estimator_mgpu.towers import Towers
from estimator_mgpu.updates import Updates


def merge(
    metrics: dict[str, Any],
    shown: dict[str, tf.Tensor | tf.Operation],
    towers: Towers,
    rows: Sequence[tf.Tensor] | None,
    forward: Sequence[tf.Tensor],
) -> tuple[dict[str, Any], dict[str, tf.Tensor]]:
    """Returns metrics whose updates are those of the whole batch, and what's shown after these.

    Args:
      metrics: as `eval_metric_ops` of an EstimatorSpec, (value, update) by name.
      shown: what hooks and summaries show, and need updates of metrics for.
      towers: the towers; the metrics are of tower 0.
      rows: one scalar a tower, the rows it has: a tower without rows updates nothing. None where
        all towers have rows.
      forward: tower 0's loss and predictions. What is to be written for these is written once.

    Returns:
      `eval_metric_ops` for the whole batch, and of what is shown that which can be.
    """
    if not metrics and not shown:
        return {}, {}
    merging = _Merging(towers, towers.copies.updates(forward).writes)
    with absolute_scope(towers.graph, 'replicate'), tf.device(towers.devices[0]):
        updates = {name: _tensor(update) for name, (_, update) in sorted(metrics.items())}
        others = {name: _tensor(value) for name, value in shown.items()}
    for group in merging.groups(updates):
        merging.add(group, [metrics[name][0] for name in group])
    # What's shown changes nothing about metrics that an evaluation returns.
    merging.settle()
    for group in merging.groups(others):
        try:
            merging.add(group, [])
        except ValueError as error:
            tf.logging.warning('%s', error)
    streamed = _one_after_another(merging.streamed, towers, rows)
    merged = {**merging.merged, **streamed}
    ours = {name: (metrics[name][0], merged[name]) for name in metrics}
    return ours, {name: merged[name] for name in shown if name in merged}


class _Merging:
    """Metrics, as they're merged.

    Attributes:
      merged: updates that write the whole batch's values.
      streamed: those that each tower is to run.

    Args:
      towers: the towers.
      once: what is written for others, once.
    """

    def __init__(self, towers: Towers, once: Sequence[tf.Operation]):
        self.merged: dict[str, tf.Tensor] = {}
        self.streamed: dict[str, tf.Tensor] = {}
        self._towers = towers
        self._rows = towers.rows()
        self._once = list(once)
        self._settled: list[tf.Operation] = []
        self._own: set[str] = set()

    def groups(self, updates: dict[str, tf.Tensor]) -> list[dict[str, tf.Tensor]]:
        """Groups updates that share writes, as a metric made of two others does with theirs."""
        groups: list[tuple[set[str], dict[str, tf.Tensor]]] = []
        for name, update in updates.items():
            writes = {op.name for op in self._needed([update]).writes}
            group = {name: update}
            for other in [g for g in groups if g[0] & writes]:
                groups.remove(other)
                writes |= other[0]
                group.update(other[1])
            groups.append((writes, group))
        return [group for _, group in groups]

    def settle(self) -> None:
        """Lets what was added so far have what it writes once, whatever is to come."""
        self._once += self._settled

    def _needed(self, updates: Iterable[tf.Tensor]) -> Updates:
        return self._towers.copies.updates(updates).without(self._once)

    def add(self, group: dict[str, tf.Tensor], values: Sequence[Any]) -> None:
        """Merges updates that share writes.

        Args:
          group: the updates, by their metrics' names.
          values: the metrics' values.

        Raises:
          ValueError: if they can't be those of the whole batch.
        """
        needed = self._needed(group.values())
        new = [op for op in needed.writes if op.name not in self._own]
        apart = _take_apart(new, self._rows, self._towers)
        if apart is None:
            for name in group:
                streams.check_not_by_position(name, needed, self._rows)
            alone = self._alone(group, needed, values)
            self._settled += alone
            by_shards = needed.without(alone)
        else:
            # In place, for it may be run by others too: by a hook, or for a summary.
            wholes = self._towers.values([(op.inputs[i], parts) for op, i, parts in apart])
            for (op, i, _), whole in zip(apart, wholes):
                private.set_input(op, i, whole)
            self._settled += new
            by_shards = needed.without(new)
        if apart is not None and not by_shards.writes:
            self.merged.update(group)
            return
        self._towers.copies.let_write(by_shards)
        self._own |= by_shards.own
        self.streamed.update(group)

    def _alone(
        self, group: dict[str, tf.Tensor], needed: Updates, values: Sequence[Any]
    ) -> list[tf.Operation]:
        """Returns what happens once a batch, and warns of what should do so and doesn't."""
        counts = [op for op in needed.writes if streams.counts_batches(op)]
        alone = [op for op in counts if not streams.is_combined(op, needed, values)]
        others = [op for op in needed.writes if op not in counts]
        unlike = streams.unlike(others, self._rows, self._towers.parts)
        if len(alone) < len(counts):
            tf.logging.warning(
                'The metrics %s count batches, and what they do with them is neither a sum nor '
                'a mean over rows: they are taken over shards instead. Evaluate with '
                'replicate(devices=1) for one value a batch.',
                ', '.join(group),
            )
        elif unlike:
            tf.logging.warning(
                'The metrics %s are taken over shards, one after another, instead of over batches. '
                'What is written by %r (%s) may differ by that. Evaluate with '
                'replicate(devices=1) for one value a batch.',
                ', '.join(group),
                unlike[0].name,
                unlike[0].type,
            )
        return alone


def _take_apart(
    writes: Sequence[tf.Operation], rows: Rows, towers: Towers
) -> list[tuple[tf.Operation, int, losses.Parts]] | None:
    """Takes apart what ops write, each with its place; None if anything isn't certain."""
    found, certain = [], True
    for write in writes:
        if write.type in sharing.PYTHON_FUNCTIONS:
            certain = False  # Whatever it does with what it's given.
            continue
        if any(rows.depends(t.op) for t in private.branched_on(write)):
            certain = False  # Each shard may have another branch.
        for i, value in enumerate(write.inputs):
            if sharing.is_handle(value):
                continue
            if value.op.name not in rows.dependents:
                certain = certain and not _may_count_rows(value, rows)
                continue
            towers.notices.unknown_shapes(rows, value)
            parts = towers.parts(value, rows)
            towers.notices.mixed(parts)
            towers.notices.mixing(rows, value)
            certain = certain and not rows.has(value) and not parts.doubts
            found.append((write, i, parts))
    return found if certain else None


def _may_count_rows(value: tf.Tensor, rows: Rows) -> bool:
    """Whether a value that doesn't depend on the batch may be a shard's static row count."""
    if rows.static is None:
        return False
    waiting, seen = [value.op], set()
    while waiting:
        op = waiting.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        constant = private.constant_value(op.outputs[0]) if op.outputs else None
        if constant is None:
            waiting += [t.op for t in op.inputs]
        elif (
            constant.dtype.kind in 'fiu' and ((constant % rows.static == 0) & (constant > 0)).any()
        ):
            return True
    return False


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
