"""What is written once a step, in tower 0, is the whole batch's where that can be.

A learning rate that depends on the loss, gradients divided by the size of the batch, a counter of
examples, a moving average of the batch's mean: what is written or used there comes from tower 0's
shard, and goes where something is done once for all towers. There, the whole batch's value takes
its place, or the average over the towers where it is a statistic that only a shard has, such as a
variance.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu import losses, private, shard_values, sharing
from estimator_mgpu.copying import Copies, move_consumers
from estimator_mgpu.importing import TowerCopy, absolute_scope
from estimator_mgpu.rows import SUMS, Rows
from estimator_mgpu.towers import Towers, is_own, unique_scope
from estimator_mgpu.walks import before, inputs, walk

_FIRST_ONLY = 'of the first shard only: the other shards do not count for it'
_AVERAGED = 'averaged over the shards: it cannot be told to be a sum or a mean over rows'
_REMEDIES = {
    _FIRST_ONLY: 'If they have to, train this model with replicate(devices=1).',
    _AVERAGED: "If that isn't what it's for, train this model with replicate(devices=1).",
}
# v2 branches, which an input decides on, and calls of functions.
_BRANCHES = frozenset(['If', 'Case'])
_CALLS = _BRANCHES | frozenset(['PartitionedCall', 'StatefulPartitionedCall'])
# Linear in each of their inputs, but for a constant.
_LINEAR = frozenset(['Identity', 'Neg', 'Add', 'AddV2', 'Sub', 'Mul'])
_QUOTIENTS = frozenset(['RealDiv', 'Div', 'DivNoNan', 'FloorDiv'])
# Writes of rows in any number, each to its place in a variable or a table.
_SCATTER = re.compile('Scatter|LookupTableInsert')


def of_whole_batch(results: Sequence[tf.Tensor | tf.Operation], towers: Towers) -> None:
    """Gives what is written, or done with reduced gradients, the whole batch's values.

    Args:
      results: what tower 0 is run for: a train_op, a loss, predictions.
      towers: the towers.
    """
    results = [getattr(result, 'op', result) for result in results]
    variables = [*tf.global_variables(), *tf.local_variables()]
    # Initial values may be statistics of the batch that a session starts with.
    initializers = [v.initializer for v in variables if isinstance(v.initializer, tf.Operation)]
    rows = towers.rows()
    after = towers.copies.dependents(towers.reduced)
    needed: list[tuple[tf.Operation, int, tf.Tensor, losses.Parts]] = []
    parts: dict[str, losses.Parts | None] = {}

    def onward(op: tf.Operation) -> list[tf.Operation]:
        # Gradients that only a gate waits for are nobody's, and other towers have none.
        return inputs(op) if towers.copies.is_gate(op) else before(op)

    # Of tower 0, the forward pass too.
    found = walk([*results, *initializers], onward, towers.copies.names())
    ops = [op for op in found if not (towers.copies.is_boundary(op) or is_own(op))]
    names = {op.name for op in ops}
    apart = {op.name for op in ops if _can_write_apart(op, rows, towers) and op not in results}
    for op in ops:
        if op.name in apart:
            _write_apart(op, towers)
    if apart:
        rows = towers.rows()

    def used(op: tf.Operation) -> bool:
        return towers.copies.has_copies(op) and op.name not in apart

    def each_has(op: tf.Operation) -> bool:
        """Whether each tower has its own, of which nothing is written once a step."""
        write = towers.copies.writes_for_all(op)
        return used(op) and not write and not _is_written(op, names, towers)

    for op in ops:
        write = towers.copies.writes_for_all(op)
        if not write and op.name not in after:
            continue
        for i, value in enumerate(op.inputs):
            if sharing.is_handle(value) or value.op.name in after:
                continue
            if value.op.name not in rows.dependents:
                counts = sharing.is_write(op) and op not in initializers
                if counts or (op.type in _QUOTIENTS and i == 1 and not each_has(op)):
                    _check_static_rows(op, i, rows)
                if counts and op.type.startswith('Assign'):
                    _check_counts(value, rows, towers, after)
                continue
            if each_has(op):
                continue
            if private.in_loop(op) or used(op):
                _warn(op, value, _FIRST_ONLY)
                continue
            if _SCATTER.search(op.type) and rows.axis(value) == 0:
                towers.notices.values(rows, value)
                towers.notices.mixing(rows, value)
                private.set_input(op, i, towers.joined(value))
                _fit_to_rows(op, rows, towers, after)
                continue
            if value.name not in parts:
                parts[value.name] = _parts(value, rows, towers, op)
            own = parts[value.name]
            if own is not None:
                needed.append((op, i, value, own))
    # Of all in one request, for each takes time.
    wholes = towers.values([(value, own) for _, _, value, own in needed])
    for (op, i, _, _), whole in zip(needed, wholes):
        private.set_input(op, i, _fitting(whole, op.inputs[i], towers))


def _is_written(op: tf.Operation, names: set[str], towers: Towers) -> bool:
    """Whether what comes of an op is written once a step, other than by what is reduced.

    Args:
      op: the op, of tower 0.
      names: the ops that tower 0 is run for.
      towers: the towers.
    """

    def onward(user: tf.Operation) -> list[tf.Operation]:
        if is_own(user) or towers.copies.is_boundary(user):
            return []
        return [c for t in user.outputs for c in t.consumers() if c.name in names]

    return any(map(towers.copies.writes_for_all, walk([op], onward)))


def _fit_to_rows(op: tf.Operation, rows: Rows, towers: Towers, after: set[str]) -> None:
    """Gives what scatters the rows of all shards as many places, or values, or says it can't be."""
    for i, other in enumerate(op.inputs):
        known = other.op.name in rows.dependents | after or towers.copies.is_boundary(other.op)
        if known or sharing.is_handle(other) or other.shape[:1].as_list() != [rows.static]:
            continue
        constant = private.constant_value(other)
        if constant is None or (constant != constant.flat[0]).any():
            raise ValueError(
                f'{op.name!r} ({op.type}) is to write a row for each of the batch, but '
                f'{other.name!r} has one for each of a shard: it does not depend on the batch. If '
                'it was made for features.shape[0] rows, take tf.shape(features)[0]; or train '
                'this model with replicate(devices=1).'
            )
        private.set_input(op, i, towers.joined(other))


def _fitting(whole: tf.Tensor, value: tf.Tensor, towers: Towers) -> tf.Tensor:
    """Returns the whole batch's value as one that may take the place of tower 0's."""
    if whole.shape.is_compatible_with(value.shape):
        return whole
    # It has a size that goes by the number of rows, say a range of them.
    with absolute_scope(towers.graph, 'replicate'), tf.device(whole.device):
        fitting = tf.placeholder_with_default(whole, [None] * whole.shape.rank)
    towers.copies.share([fitting])
    return fitting


def _can_write_apart(op: tf.Operation, rows: Rows, towers: Towers) -> bool:
    """Whether a branch or call of the forward pass can be divided into what it writes and gives."""
    if op.type not in _CALLS or not towers.copies.has_copies(op) or private.in_control_flow(op):
        return False
    given = rows.dependent_inputs(op)
    if not towers.copies.writes_for_all(op) or towers.copies.gives_written(op):
        return False
    if all(map(rows.has, given)):
        return False
    return op.type not in _BRANCHES or op.inputs[0].op.name not in rows.dependents


def _write_apart(op: tf.Operation, towers: Towers) -> None:
    """Gives what uses an op's results those of a copy that doesn't write, as other towers have."""
    own = TowerCopy(0, unique_scope(towers.graph, 'apart'), towers.devices[0])
    Copies(towers.graph, towers.devices[0], [own], only={op.name}).copy(op.outputs)
    copy = own.ops[op.name]
    move_consumers(op, copy)
    with absolute_scope(towers.graph, own.scope), tf.device(op.device):
        # A function writes what its results wait for.
        written = [tf.identity(result, name='written').op for result in op.outputs]
    private.add_control_inputs(copy, written)
    for tower in towers.copies.towers:
        tower.ops[copy.name] = tower.ops[op.name]


def _check_static_rows(op: tf.Operation, index: int, rows: Rows) -> None:
    """Warns of a constant that is the static size of a shard, but may be meant for the batch's."""
    value = op.inputs[index]
    number = value.dtype.is_floating or value.dtype.is_integer
    if rows.static is None or value.shape.num_elements() != 1 or not number:
        return
    constant = private.constant_value(value)
    if constant is not None and float(constant.flat[0]) == rows.static:
        tf.logging.warning(
            '%r (%s) happens once a step, with the constant %d, which is also the number of rows '
            "of a shard. If it's meant to be that of the batch, take tf.shape(features)[0].",
            op.name,
            op.type,
            rows.static,
        )


def _check_counts(value: tf.Tensor, rows: Rows, towers: Towers, after: set[str]) -> None:
    """Checks sums and quotients that are written, of variables and what may be a shard's rows."""
    dependents = rows.dependents | after

    def onward(op: tf.Operation) -> list[tf.Operation]:
        known = op.name in dependents or towers.copies.has_copies(op)
        whole = towers.copies.is_boundary(op)  # A reduced gradient, say.
        return [] if known or whole or sharing.is_plain_read(op) else inputs(op)

    for op in walk([value.op], onward):
        if op.type in SUMS | _QUOTIENTS and not towers.copies.has_copies(op):
            for i in range(len(op.inputs)):
                if (i == 1 or op.type in SUMS) and op.inputs[i].op.name not in rows.dependents:
                    _check_static_rows(op, i, rows)


def _parts(value: tf.Tensor, rows: Rows, towers: Towers, user: tf.Operation) -> losses.Parts | None:
    """Returns what the whole batch's value, or the towers' average, follows from.

    It's None for rows in any number.
    """
    scalar = value.shape.num_elements() == 1
    has_rows = not scalar and rows.has(value)
    if has_rows and (sharing.calls_function(user) or not value.shape.is_fully_defined()):
        _warn(user, value, _FIRST_ONLY)
        return None
    towers.notices.unknown_shapes(rows, value)
    towers.notices.mixing(rows, value)
    parts = towers.parts(value, rows)
    for note in parts.notes:
        tf.logging.warning('%s', note)
    if parts.doubts or has_rows:
        # A variance of the batch, say: batch normalization's are known to be averages.
        others = any(not shard_values.in_batch_norm(name) for name, _ in parts.mixed)
        if scalar or has_rows or parts.lost or parts.by_count or others:
            _warn(user, value, _AVERAGED)
        return _averaged(value, rows)
    return parts


def _averaged(value: tf.Tensor, rows: Rows) -> losses.Parts:
    """Returns what the average over the towers follows from: that of the statistic itself.

    A moving average moves by a share of its difference to the statistic, and the average of linear
    functions of something is that of its average.
    """
    tail = set()
    while value.op.type in _LINEAR:
        dependent = [t for t in value.op.inputs if t.op.name in rows.dependents]
        if len(dependent) != 1:
            break
        tail.add(value.op.name)
        [value] = dependent
    return losses.Parts([losses.Leaf(value, losses.MEAN)], tail, [])


def _warn(user: tf.Operation, value: tf.Tensor, how: str) -> None:
    what = '%r (%s) happens once a step, with %r %s. %s'
    tf.logging.warning(what, user.name, user.type, value.name, how, _REMEDIES[how])
