"""What a sum over rows is divided by: the rows of a shard, those of the batch, or a number."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.rows import Rows

QUOTIENTS = frozenset(['RealDiv', 'Div', 'DivNoNan'])


class Verdict(NamedTuple):
    """What a quotient, or a product with a constant, is.

    Attributes:
      is_mean: whether it divides by the static rows of one shard, so that it's a mean over rows.
      doubt: why it may be otherwise, if the graph doesn't tell.
      note: what was taken from the graph, but not for certain.
    """

    is_mean: bool
    doubt: str = ''
    note: str = ''


def judge(op: tf.Operation, rows: Rows, towers: int) -> Verdict:
    """Tells whether a constant divisor is the static size of one shard.

    Args:
      op: a quotient or product of tower 0.
      rows: which tensors have rows, and how many there are.
      towers: how many shards there are.
    """
    if rows.static is None:
        return Verdict(False)
    numerator, value = _constant(op, rows)
    if value is None:
        return Verdict(False)
    summed = [r.inputs[0] for r in rows.reductions(numerator) if r.type != 'Mean']
    if not summed:
        return Verdict(False)
    of_shard = {rows.static, *(tensor.shape.num_elements() for tensor in summed)}
    of_batch = {size * towers for size in of_shard if size}
    divisor = _divisor(op, value, of_shard | of_batch)
    if divisor is None:
        return Verdict(False)
    literal = any(t.op.type == 'Const' for t in op.inputs)
    if op.type == 'DivNoNan' and not literal:
        # A mean of tf.losses or Keras, by what they counted themselves.
        return Verdict(divisor in of_shard or divisor not in of_batch)
    if divisor in of_shard and divisor not in of_batch and not _is_round(op, divisor):
        return Verdict(True, note=_taken_for_rows(f'{op.outputs[0].name!r} is', divisor))
    multiple = rows.static > 1 and divisor % rows.static == 0
    if divisor in of_shard or (multiple and divisor not in of_batch and op.type != 'Mul'):
        return Verdict(False, doubt=_may_be_rows(divisor))
    return Verdict(False)


def judge_rows(op: tf.Operation, rows: Rows) -> Verdict:
    """Tells the same of a quotient or product of rows that are to be summed."""
    if op.type not in ('Mul', *QUOTIENTS) or rows.static is None:
        return Verdict(False)
    numerator, value = _constant(op, rows)
    sizes = {rows.static, numerator.shape.num_elements()}
    divisor = None if value is None else _divisor(op, value, sizes)
    if divisor is None or divisor not in sizes:
        return Verdict(False)
    if _is_round(op, divisor):
        return Verdict(False, doubt=_may_be_rows(divisor))
    return Verdict(True, note=_taken_for_rows(f'What comes from {op.name!r} is', divisor))


def _taken_for_rows(what: str, divisor: float) -> str:
    return (
        f'{what} a sum over rows divided by {divisor:g}, which is taken for the static size of a '
        'shard, so that it is a mean over rows. If it is a number of its own, say '
        "replicate(loss_reduction='sum'). If it is the size of the batch, let the model_fn take "
        'tf.shape(features)[0], which is always clear.'
    )


def _may_be_rows(divisor: float) -> str:
    return (
        f'it is a sum divided by {divisor:g}, which may be the size of a shard, of the batch or '
        'neither. It is taken for a sum'
    )


def _is_round(op: tf.Operation, divisor: float) -> bool:
    """Whether somebody may have written this constant, rather than a size being it."""
    if op.type == 'Mul':  # 0.5 or 0.25 is a usual weight of a loss, 0.0833333 isn't
        return 1000 % divisor == 0
    return divisor in (2, 10, 100, 1000)


def _constant(op: tf.Operation, rows: Rows) -> tuple[tf.Tensor, np.ndarray | None]:
    """Returns what an op divides or multiplies, and by which constant, if by the same one."""
    left, right = op.inputs
    if op.type == 'Mul' and left.op.name not in rows.dependents:
        left, right = right, left
    if right.op.name in rows.dependents:
        return left, None
    value = private.constant_value(right)
    if value is None or not value.size or not value.flat[0] or (value != value.flat[0]).any():
        return left, None
    return left, value


def _divisor(op: tf.Operation, value: np.ndarray, sizes: Collection[int | None]) -> float | None:
    """Returns what a quotient divides by; for a product, of which size it has the reciprocal."""
    number = float(value.flat[0])
    if op.type != 'Mul':
        return number
    rounding = 1e-6 if value.itemsize > 2 else 2**-8
    found = (size for size in sizes if size and abs(number * size - 1) <= rounding)
    return next((size for size in found if size > 1), None)  # A factor of 1 is no quotient.
