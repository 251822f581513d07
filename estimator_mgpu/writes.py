"""What is written once a step, in tower 0, is the whole batch's where that can be.

A learning rate that depends on the loss, gradients divided by the size of the batch, a counter of
examples: such scalars come from tower 0's shard, and go where something is done once for all
towers. There, the whole batch's value takes their place.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from estimator_mgpu import losses, private, sharing
from estimator_mgpu.copying import absolute_scope
from estimator_mgpu.rows import Rows
from estimator_mgpu.towers import Towers

_QUOTIENTS = frozenset(['RealDiv', 'Div', 'DivNoNan', 'FloorDiv'])


def of_whole_batch(train_op: Any, towers: Towers) -> None:
    """Gives what `train_op` does with reduced gradients and variables the whole batch's scalars.

    Args:
      train_op: tower 0's, an operation or a tensor.
      towers: the towers.
    """
    train_op = train_op if isinstance(train_op, tf.Operation) else train_op.op
    rows = towers.rows()
    after = towers.copies.dependents(towers.reduced)
    wholes: dict[str, tf.Tensor | None] = {}
    for op in _ancestors(train_op, towers):
        write = sharing.is_write(op)
        if not write and op.name not in after:
            continue
        for i, value in enumerate(op.inputs):
            if sharing.is_handle(value) or value.op.name in after:
                continue
            if value.op.name not in rows.dependents:
                if write or (op.type in _QUOTIENTS and i == 1):
                    _check_static_rows(op, i, rows, towers)
                continue
            if value.name not in wholes:
                wholes[value.name] = _whole(value, rows, towers, op)
            whole = wholes[value.name]
            if whole is not None and not private.in_control_flow(op):
                private.set_input(op, i, whole)


def _check_static_rows(op: tf.Operation, index: int, rows: Rows, towers: Towers) -> None:
    """Makes a constant that is the static size of a shard that of the batch, or warns of it."""
    value = op.inputs[index]
    if rows.static is None or value.shape.num_elements() != 1:
        return
    constant = private.constant_value(value)
    if constant is None or float(constant.flat[0]) != rows.static:
        return
    if value.op.type == 'Const':
        logging.warning(
            '%r (%s) happens once a step, with the constant %d, which is also the number of rows '
            "of a shard. If it's meant to be that of the batch, take tf.shape(features)[0].",
            op.name,
            op.type,
            rows.static,
        )
        return
    # It was computed from constants: from the shape of a shard.
    with absolute_scope(towers.graph, 'replicate'), tf.device(value.device):
        total = tf.constant(constant * len(towers.devices), value.dtype)
    private.set_input(op, index, total)


def _whole(value: tf.Tensor, rows: Rows, towers: Towers, user: tf.Operation) -> tf.Tensor | None:
    """Returns the whole batch's value of a scalar; None, with a warning, if it can't be had."""
    if value.shape.num_elements() == 1:
        parts = losses.take_apart(value, rows, losses.AUTO, len(towers.devices))
        if parts.leaves and not parts.doubts:
            return towers.value(value, parts)
    elif not rows.has(value):
        return None  # A statistic of the shard, such as batch normalization's.
    logging.warning(
        '%r (%s) happens once a step, with %r of the first shard only: the other %d shards do not '
        'count for it.',
        user.name,
        user.type,
        value.name,
        len(towers.devices) - 1,
    )
    return None


def _ancestors(op: tf.Operation, towers: Towers) -> list[tf.Operation]:
    """Lists what an op depends on, itself included, up to what stands for the whole batch."""
    found = []
    waiting, seen = [op], set()
    while waiting:
        op = waiting.pop()
        if op.name in seen or towers.copies.is_boundary(op):
            continue
        seen.add(op.name)
        found.append(op)
        waiting += [t.op for t in op.inputs]
        waiting += op.control_inputs
    return found
