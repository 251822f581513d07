"""How much work ops are, those within functions and loops included.

A `While` with a network in its body may give one number. Its work is that of the body: the bytes
that the ops there give, and how many of them are matrix products or convolutions. How many steps a
loop takes, nobody knows before, so one step counts. Of branches, that with the most bytes counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.tf_internals import function_calls, op_types


class Work(NamedTuple):
    """How much work ops are."""

    bytes: int = 0  # of their output
    products: int = 0  # how many of them are matrix products or convolutions


def works_of(plan: Plan) -> dict[tf.Operation, Work]:
    """The work of each op that depends on the batch: of sharded ones, and of those that run once.

    The work of a v1 loop is that of one of the ops that give its results.
    """
    works = {op: _work_of(op) for op in plan.order if op.name in plan.ops or op.name in plan.once}
    inside: dict[str, list[tf.Operation]] = defaultdict(list)  # by the names of outermost loops
    for name, frames in plan.frames.items():
        op = plan.order[0].graph.get_operation_by_name(name)
        if op not in works:
            inside[frames[0].name].append(op)
    for op in works:
        if op.type in op_types.EXIT and op.name in plan.frames:
            members = inside.pop(plan.frames[op.name][0].name, [])
            works[op] = _added([works[op], *map(_work_of, members)])
    return works


def _work_of(op: tf.Operation) -> Work:
    """The work of one op."""
    functions = function_calls.function_graphs(op) if op.type in op_types.FUNCTION_CALLERS else []
    if not functions:
        is_product = op.type.startswith(op_types.PRODUCT_PREFIXES)
        return Work(sum(map(bytes_of, op.outputs)), int(is_product))
    works = [_work_in(function) for function in functions]
    return max(works) if op.type in op_types.BRANCHES else _added(works)


def _work_in(function: Any) -> Work:
    """The work of the ops in a function: its arguments, constants and variables are none."""
    given = {argument.op for argument in function.inputs}
    return _added(
        _work_of(op)
        for op in function.get_operations()
        if op not in given and op.type not in (op_types.CONST, op_types.READ_VARIABLE)
    )


def _added(works: Iterable[Work]) -> Work:
    works = list(works)
    return Work(sum(work.bytes for work in works), sum(work.products for work in works))
