"""How much work ops do, those within functions and loops included, and which of them run once.

A `While` with a network in its body may give one number. Its work is that of the body: the bytes
that the ops there give, and how many of them are matrix products or convolutions. How many steps a
loop takes, nobody knows before, so one step counts. Of branches, that with the most bytes counts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.placements import Partial
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private


class Once(NamedTuple):
    """An op that runs once, unsharded, although what it computes depends on the batch."""

    name: str
    why: str  # why it runs once; or why the op that computes its inputs does
    gathered: int  # bytes gathered for it in a step; ops that need the same tensor share them
    share: float  # its part of the output, in bytes, of all ops that depend on the batch: 0 to 1
    line: str  # of the model_fn, or of what it calls: 'model.py:12'; '' if that isn't known


class Work(NamedTuple):
    """How much work ops do."""

    bytes: int = 0  # of their output
    products: int = 0  # how many of them are matrix products or convolutions


Works = Mapping[tf.Operation, Work]


def works_of(plan: Plan) -> Works:
    """The work of each op that depends on the batch: of sharded ones, and of those that run once.

    The work of a v1 loop is that of one of the ops that give its results. What is computed of a
    variable alone, such as Adam's update of all rows of a table, is work of no batch, even if it
    comes after an update.
    """
    batch = [op for op in plan.order if op.name in plan.ops or op.name in plan.once]
    of_updated_variables = _of_updated_variables(plan, batch)
    works = {op: _work_of(op) for op in batch if op not in of_updated_variables}
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


def _of_updated_variables(plan: Plan, batch: Sequence[tf.Operation]) -> Set[tf.Operation]:
    """The ops that depend on the batch only because a variable was updated by it.

    An update of a reference variable gives the variable, so what reads it there seems to depend on
    the batch. A resource variable is read by its handle, which doesn't.
    """
    found: set[tf.Operation] = set()
    for op in batch:
        given = [i for i in op.inputs if i.op.name in plan.ops or i.op.name in plan.once]
        if given and all(graphs.is_reference_variable(i) or i.op in found for i in given):
            found.add(op)
    return found


def _work_of(op: tf.Operation) -> Work:
    """The work of one op."""
    functions = function_calls.function_graphs(op) if op.type in op_types.FUNCTION_CALLERS else []
    if not functions:
        is_product = op.type.startswith(op_types.PRODUCT_PREFIXES)
        # An update of a reference variable gives the variable, of which it may change a few rows.
        outputs = [output for output in op.outputs if not graphs.is_reference_variable(output)]
        return Work(sum(map(bytes_of, outputs)), int(is_product))
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


def ops_run_once(
    plan: Plan, works: Works, line: Callable[[tf.Operation], str] = lambda op: ''
) -> list[Once]:
    """The ops that run once, the costliest first.

    Args:
      works: the work of its ops.
      line: tells the line of the program that made an op.
    """
    total = sum(work.bytes for work in works.values()) or 1
    ops = []
    for op, work in works.items():
        if op.name in plan.once:
            why, gathered = plan.once[op.name]
            ops.append(Once(op.name, why, gathered, work.bytes / total, line(op)))
    return sorted(ops, key=lambda once: (-once.share, -once.gathered))


def by_scope(plan: Plan, works: Works) -> dict[str, dict[str, int]]:
    """Bytes of output by outermost scope and kind, in the model's order.

    Gradients count in the scope of the op whose gradients they are, and copies in that of the op.
    """
    scopes: dict[str, Counter[str]] = {}
    for op in sorted(works, key=private.creation_index):
        name = re.sub(r'^((gradients|recompute)(_\d+)?/)+', '', op.name)
        scope = name.partition('/')[0].removesuffix('_grad')
        sizes = scopes.setdefault(scope, Counter())
        if op.name in plan.once:
            sizes['once'] += works[op].bytes
            continue
        partial = [t for t in op.outputs if isinstance(plan.placements.get(t.name), Partial)]
        size = sum(map(bytes_of, partial))
        sizes['partial'] += size
        sizes['shard'] += max(works[op].bytes - size, 0)
    return {scope: dict(+sizes) for scope, sizes in scopes.items() if +sizes}
