"""Whether metrics may be updated shard after shard, as if each were a batch.

What's kept of a batch has to be the same then: a maximum so far, a sum, the rows themselves. What
happens once a batch, or follows from its values in any other way, isn't.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu import calls, losses, private, sharing
from estimator_mgpu.bodies import called
from estimator_mgpu.places import LOOPS
from estimator_mgpu.rows import SUMS, Rows
from estimator_mgpu.updates import Updates
from estimator_mgpu.walks import inputs, walk

TakeApart = Callable[[tf.Tensor, Rows], losses.Parts]

_ADDITIONS = frozenset(['AssignAddVariableOp', 'AssignAdd'])
_ASSIGNMENTS = frozenset(['AssignVariableOp', 'Assign'])
# Writes of rows, each to its place.
_BY_ROW = re.compile('Scatter|StridedSliceAssign|LookupTableInsert|Enqueue')
# What so far is the most or the least, and the reductions that go with it.
_EXTREMES = {'Maximum': 'Max', 'Minimum': 'Min', 'LogicalOr': 'Any', 'LogicalAnd': 'All'}


def unlike(writes: Sequence[tf.Operation], rows: Rows, take_apart: TakeApart) -> list[tf.Operation]:
    """Returns the writes that may not come to the same for shards as for the whole batch.

    Args:
      writes: what metrics' updates write, in tower 0.
      rows: which tensors have rows.
      take_apart: as `losses.take_apart`.
    """
    return [op for op in writes if not _is_alike(op, rows, take_apart)]


def _is_alike(write: tf.Operation, rows: Rows, take_apart: TakeApart) -> bool:
    if write.type in sharing.PYTHON_FUNCTIONS:
        return True  # They're told of, and most keep the rows they're given.
    if private.in_loop(write) or any(rows.depends(t.op) for t in private.branched_on(write)):
        return False
    if sharing.calls_function(write):
        return _calls_alike(write, rows, take_apart)
    *_, value = write.inputs
    if _BY_ROW.search(write.type):
        return any(map(rows.has, write.inputs)) and not _reads(value, write)
    if write.type in _ADDITIONS:
        return _is_sum(value, rows, take_apart)
    if write.type not in _ASSIGNMENTS:
        return False
    if private.constant_value(value) is not None:
        return True
    return _reads(value, write) and _follows(value, write, rows, take_apart)


def _calls_alike(call: tf.Operation, rows: Rows, take_apart: TakeApart) -> bool:
    functions = list(called(call, rows))
    found = len(functions) == len(private.function_graphs(call)) > 0
    if call.type in LOOPS or not found:
        return False
    if call.type.endswith(('If', 'Case')) and rows.depends(call.inputs[0].op):
        return False
    return all(
        _is_alike(op, known, take_apart)
        for graph, known in functions
        for op in graph.get_operations()
        if sharing.is_write_type(op.type) or (sharing.calls_function(op) and _takes_handle(op))
    )


def _takes_handle(op: tf.Operation) -> bool:
    return any(map(sharing.is_handle, op.inputs))


def _reads(value: tf.Tensor, write: tf.Operation) -> bool:
    """Whether a value comes from what was there before."""
    handles = sharing.shared_handles(write)
    return any(sharing.shared_handles(op) & handles for op in walk([value.op], inputs))


def _is_read(value: tf.Tensor, write: tf.Operation) -> bool:
    """Whether a value is what was there before, as it was."""
    handles = sharing.shared_handles(write)
    while value.op.type == 'Identity' and not sharing.shared_handles(value.op):
        value = value.op.inputs[0]
    return sharing.shared_handles(value.op) == handles


def _follows(value: tf.Tensor, write: tf.Operation, rows: Rows, take_apart: TakeApart) -> bool:
    """Whether what's assigned, which comes from what was there, goes by rows in any portions."""
    op = value.op
    if op.type == 'Identity':
        return _follows(op.inputs[0], write, rows, take_apart)
    own = rows.dependent_inputs(op)
    others = [t for t in op.inputs if not rows.depends(t.op)]
    if op.type in _EXTREMES:
        # An extreme of integers may be the whole batch's already.
        known = all(_is_read(t, write) or not _reads(t, write) for t in others)
        return known and all(_is_extreme(t, op.type, rows) for t in own)
    if op.type == 'ConcatV2':
        return any(map(rows.has, own)) and not rows.has(op.inputs[0])
    # What was there before, and a sum.
    added = op.type in SUMS and len(own) == len(others) == 1
    added = added and (op.type != 'Sub' or own[0].name == op.inputs[1].name)
    return added and _is_read(others[0], write) and _is_sum(own[0], rows, take_apart)


def _is_extreme(value: tf.Tensor, kind: str, rows: Rows) -> bool:
    op = value.op
    if op.type in ('Identity', kind):
        return all(_is_extreme(t, kind, rows) for t in rows.dependent_inputs(op))
    return op.type == _EXTREMES[kind] and rows.has(op.inputs[0]) and not rows.has(value)


def _is_sum(value: tf.Tensor, rows: Rows, take_apart: TakeApart) -> bool:
    if not rows.depends(value.op) or rows.has(value):
        return False
    parts = take_apart(value, rows)
    if parts.doubts or any(leaf.kind not in (losses.SUM, losses.SHAPE) for leaf in parts.leaves):
        return False
    axes = {leaf.tensor.name: leaf.axis for leaf in parts.leaves if leaf.kind == losses.SHAPE}

    def keeps(op: tf.Operation) -> bool:
        if op.type == 'StridedSlice':  # Of a shape, how many rows there are.
            begin, axis = private.constant_value(op.inputs[1]), axes.get(op.inputs[0].name)
            return begin is not None and begin.tolist() == [axis]
        return op.type in ('Pack', 'ConcatV2') or calls.keeps(losses.SUM, op, rows)

    return all(keeps(value.graph.get_operation_by_name(name)) for name in parts.tail)


def is_combined(
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


def check_not_by_position(name: str, updates: Updates, rows: Rows) -> None:
    """Checks that a metric doesn't add up batches row by row."""
    counts = [op for op in updates.writes if counts_batches(op)]
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


def counts_batches(write: tf.Operation) -> bool:
    """Whether a write adds 1 for a batch; where the rest is streamed, it still happens once."""
    if write.type not in _ADDITIONS or private.in_control_flow(write):
        return False
    value = private.constant_value(write.inputs[1])
    return value is not None and bool((value == 1).all())
