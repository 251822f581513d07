"""Where ops, and the bodies in them, make something of rows that several devices make otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import loops, mixing, shard_values
from estimator_mgpu.bodies import bodies
from estimator_mgpu.rows import Rows
from estimator_mgpu.sharing import PYTHON_FUNCTIONS


class Findings(NamedTuple):
    """The ops, as `'name' (type)` and where they are.

    Attributes:
      others: those that combine rows with other rows, or take them by their place.
      values: those that combine rows with values of all rows, and what these are.
      norms: likewise, if batch normalization consists of them.
      python: the calls of Python functions with rows.
      loops: those that give as many entries as their shard takes rounds.
      ends: those that may end before one device's would.
    """

    others: list[str]
    values: dict[str, str]
    norms: dict[str, str]
    python: list[str]
    loops: list[str]
    ends: list[str]


def find(ops: Sequence[tf.Operation], rows: Rows, certain: bool = False) -> Findings:
    """Looks for them.

    Args:
      ops: ops of tower 0.
      rows: which tensors have rows.
      certain: whether to leave out what may give each row what is its own.
    """
    found = Findings([], {}, {}, [], [], [])
    for body in bodies(ops, rows):
        found.others.extend(map(body.describe, mixing.of_rows(body, certain)))
        for op, value in shard_values.combined(body):
            kind = found.norms if shard_values.is_batch_norm(op) else found.values
            kind[body.describe(op)] = value.name + body.where
        found.loops.extend(map(body.describe, loops.collecting(body)))
        found.ends.extend(map(body.describe, loops.ending_early(body)))
        called = [op for op in body.ops if op.type in PYTHON_FUNCTIONS]
        found.python.extend(body.describe(op) for op in called if body.rows.dependent_inputs(op))
    return found
