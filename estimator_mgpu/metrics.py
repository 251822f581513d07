"""Metrics over towers: updates with the whole batch's values, or one tower after another.

Where a metric's update writes what follows from sums and means over rows, it is run once, with the
whole batch's (see losses.py). Any other update runs on every tower, one after another: a streaming
metric is defined over a stream of batches, so shards are as good as one batch, whether or not what
it keeps is additive. The towers' copies of the update share the metric's variables; the forward
passes run in parallel, and only what reads or writes these variables waits for the tower before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import losses, private, sharing
from estimator_mgpu.importing import TowerCopy, absolute_scope
from estimator_mgpu.rows import Rows
from estimator_mgpu.towers import Towers
from estimator_mgpu.updates import Updates

_ADDITIONS = frozenset(['AssignAddVariableOp', 'AssignAdd'])


def merge(
    metrics: dict[str, Any],
    towers: Towers,
    rows: Sequence[tf.Tensor] | None,
    forward: Sequence[tf.Tensor],
) -> dict[str, Any]:
    """Returns metrics whose updates are those of the whole batch.

    Args:
      metrics: as `eval_metric_ops` of an EstimatorSpec, (value, update) by name.
      towers: the towers; the metrics are of tower 0.
      rows: one scalar a tower, the rows it has: a tower without rows updates nothing. None where
        all towers have rows.
      forward: tower 0's loss and predictions. What is to be written for these is written once.

    Returns:
      `eval_metric_ops` for the whole batch.
    """
    if not metrics:
        return {}
    with absolute_scope(towers.graph, 'replicate'), tf.device(towers.devices[0]):
        updates = {name: _tensor(update) for name, (_, update) in sorted(metrics.items())}
    merged: dict[str, tf.Tensor] = {}
    streamed: dict[str, tf.Tensor] = {}
    known = towers.rows()
    once = towers.copies.updates(forward).writes
    for group in _groups(updates, towers, once):
        needed = towers.copies.updates(group.values()).without(once)
        apart = _take_apart(needed.writes, known, towers)
        if needed.writes and apart is not None:
            # In place, for it may be run by others too: by a hook, or for a summary.
            wholes = towers.values([(op.inputs[i], parts) for op, i, parts in apart])
            for (op, i, _), whole in zip(apart, wholes):
                private.set_input(op, i, whole)
            merged.update(group)
        else:
            for name in group:
                _check_not_by_position(name, needed, known)
            counts = [op for op in needed.writes if _counts_batches(op)]
            values = [metrics[name][0] for name in group]
            alone = [op for op in counts if not _is_combined(op, needed, values)]
            if len(alone) < len(counts):
                tf.logging.warning(
                    'The metrics %s count batches, and what they do with them is neither a sum nor '
                    'a mean over rows: they are taken over shards instead. Evaluate with '
                    'replicate(devices=1) for one value a batch.',
                    ', '.join(group),
                )
            towers.copies.let_write(needed.without(alone))
            streamed.update(group)
    merged.update(_one_after_another(streamed, towers, rows))
    return {name: (metrics[name][0], update) for name, update in merged.items()}


def _groups(
    updates: dict[str, tf.Tensor], towers: Towers, once: Sequence[tf.Operation]
) -> list[dict[str, tf.Tensor]]:
    """Groups updates that share writes, as a metric made of two others does with theirs."""
    groups: list[tuple[set[str], dict[str, tf.Tensor]]] = []
    for name, update in updates.items():
        writes = {op.name for op in towers.copies.updates([update]).without(once).writes}
        group = {name: update}
        for other in [g for g in groups if g[0] & writes]:
            groups.remove(other)
            writes |= other[0]
            group.update(other[1])
        groups.append((writes, group))
    return [group for _, group in groups]


def _take_apart(
    writes: Sequence[tf.Operation], rows: Rows, towers: Towers
) -> list[tuple[tf.Operation, int, losses.Parts]] | None:
    """Takes apart what ops write, each with its place; None if anything isn't certain."""
    found, certain = [], True
    for write in writes:
        if write.type in sharing.PYTHON_FUNCTIONS:
            certain = False  # Whatever it does with what it's given.
            continue
        for i, value in enumerate(write.inputs):
            if sharing.is_handle(value):
                continue
            if value.op.name not in rows.dependents:
                certain = certain and not _may_count_rows(value, rows)
                continue
            towers.notices.unknown_shapes(rows, value)
            parts = losses.take_apart(value, rows, losses.AUTO, len(towers.devices))
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


def _is_combined(
    write: tf.Operation, updates: Updates, values: Sequence[tf.Tensor | tf.Operation]
) -> bool:
    """Whether what a write counts is used together with other variables of its metrics."""
    ops = dict(updates.ops)
    waiting = [value.op for value in values if isinstance(value, tf.Tensor)]
    while waiting:
        op = waiting.pop()
        if op.name not in ops:
            ops[op.name] = op
            waiting += [t.op for t in op.inputs]
    own, others = sharing.shared_handles(write), set()
    for name in updates.own:
        others |= sharing.shared_handles(updates.ops[name]) - own
    reach = []
    for handles in (own, others):
        found = {op.name for op in ops.values() if sharing.shared_handles(op) & handles}
        size = -1
        while size < len(found):
            size = len(found)
            found |= {o.name for o in ops.values() if any(t.op.name in found for t in o.inputs)}
        reach.append(found)
    return bool(reach[0] & reach[1])


def _check_not_by_position(name: str, updates: Updates, rows: Rows) -> None:
    """Checks that a metric doesn't add up batches row by row."""
    counts = [op for op in updates.writes if _counts_batches(op)]
    shapes = [op.inputs[1].shape.as_list() for op in counts if op.inputs[1].shape.rank]
    for op in updates.writes:
        added = op.inputs[1] if op.type in _ADDITIONS else None
        if added is None or not added.shape.rank or not rows.has(added):
            continue
        if added.shape.as_list() in shapes:
            raise ValueError(
                f'The metric {name!r} adds up batches row by row, as tf.metrics.mean_tensor does '
                'with values that have rows, so it has no value for shards of other sizes. Take '
                'the mean over the rows first, or evaluate with replicate(devices=1). If these '
                f'are no rows, but as many as a shard has ({rows.static}), take another batch '
                'size.'
            )


def _counts_batches(write: tf.Operation) -> bool:
    """Whether a write adds 1 for a batch; where the rest is streamed, it still happens once."""
    if write.type not in _ADDITIONS:
        return False
    value = private.constant_value(write.inputs[1])
    return value is not None and bool((value == 1).all())


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
