"""Loops that take the rows of a shard one by one."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.bodies import Body
from estimator_mgpu.places import ARRAYS, Places
from estimator_mgpu.walks import walk


def loops(op: tf.Operation, body: Body) -> bool:
    """Whether an op runs once a round."""
    return body.loops or private.in_loop(op)


def is_one_row(op: tf.Operation, rows: Places) -> bool:
    """Whether an op takes one of the rows, by a number that changes."""
    if op.type in ('TensorListGetItem', 'TensorArrayReadV3'):
        return any(rows.axis(t) == 0 for t in op.inputs)
    if op.type not in ('StridedSlice', 'GatherV2'):
        return False
    if private.constant_value(op.inputs[1]) is not None:
        return False
    taken = rows.has(op.inputs[0]) and not rows.has(op.inputs[1])
    return taken and not any(map(rows.has, op.outputs))


def of_one_row(body: Body) -> set[str]:
    """Returns the names of the ops that depend on the one row that a round of a loop takes."""

    def onward(op: tf.Operation) -> list[tf.Operation]:
        ends = op.type == 'Exit' or op.type in ARRAYS
        return [] if ends else [user for t in op.outputs for user in t.consumers()]

    start = [op for op in body.ops if is_one_row(op, body.rows) and loops(op, body)]
    found: set[str] = set()
    while start:
        found |= {op.name for op in walk(start, onward)}
        rounds = zip(body.carried[0].graph.inputs, body.carried) if body.carried else ()
        start = [a.op for a, b in rounds if b.op.name in found and a.op.name not in found]
    return found


def carrying(body: Body) -> list[tf.Operation]:
    """Lists the ops that take one row a round, where that changes what a loop goes on with."""
    rounds = [op.inputs[0] for op in body.ops if op.type == 'NextIteration']
    ends = [t.op for t in [*body.carried, *rounds] if _is_number(t) and not body.rows.has(t)]

    def onward(op: tf.Operation) -> list[tf.Operation]:
        return [t.op for t in body.rows.dependent_inputs(op)]

    return [op for op in walk(ends, onward) if is_one_row(op, body.rows)]


def _is_number(value: tf.Tensor) -> bool:
    """Whether it's a number, rather than a list of some or what goes for one in v1 loops."""
    op = value.op
    while op.type in ('Identity', 'Switch', 'Merge', 'Enter', 'Exit'):
        op = op.inputs[0].op
    return op.type not in ARRAYS and (value.dtype.is_floating or value.dtype.is_integer)
