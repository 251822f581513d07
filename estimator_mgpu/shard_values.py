"""Rows that are combined with values of all rows of their shard."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu import counts, divisors, powers, private
from estimator_mgpu.bodies import Body, called, is_of_shard, passes_on
from estimator_mgpu.divisors import QUOTIENTS
from estimator_mgpu.mixing import COMPARES, goes_by_rows
from estimator_mgpu.places import BATCH_NORMS, CALLS, LOOPS, Places, dimensions
from estimator_mgpu.rounds import of_one_row
from estimator_mgpu.rows import ELEMENTWISE, Rows
from estimator_mgpu.walks import walk

# Through which rows go on to what is chosen by them, or compared.
_CHOOSES = COMPARES | {'LogicalNot', 'Where', 'GatherV2', 'FloorDiv', 'FloorMod', 'TruncateDiv'}
# What integers go through.
_HANDING_ON = frozenset(
    ['StridedSlice', 'AsString', 'StringJoin', 'ArgMax', 'ArgMin', 'Sum', 'LookupTableFindV2']
    + ['Ceil', 'Floor', 'Round', 'Rint', 'Merge']
    + ['StringToHashBucketFast', 'StringToHashBucketStrong', 'StringToNumber']
)
_REDUCES = re.compile(
    '(Sum|Max|Min|Prod|Any|All|Mean|ArgMax|ArgMin|ReduceJoin)$|.*Bincount|.*SegmentSum'
)
# Which input is repeated, as many times as there are rows.
_REPEATS = {'Fill': 1, 'BroadcastTo': 0, 'Tile': 0}
# What rows are cut or padded by.
_CUTS = frozenset(['StridedSlice', 'Slice', 'Pad', 'PadV2'])
# The scopes of tf.nn.moments and tf.nn.batch_normalization.
_OF_BATCH_NORM = re.compile('(^|/)(moments|batchnorm)(_[0-9]+)?/')


def combined(body: Body) -> list[tuple[tf.Operation, tf.Tensor]]:
    """Lists the ops that combine rows with values of all rows of their shard, and these.

    So do loops that run as often as such a value says.
    """
    rows, items = body.rows, of_one_row(body)
    found = []
    for op in body.ops:
        inputs = rows.dependent_inputs(op)
        if op.type in BATCH_NORMS:
            if op.get_attr('is_training') and inputs and not _norms_each_row(op, rows):
                found.append((op, op.outputs[1]))
        elif passes_on(op) or not (op.name in items or any(map(rows.has, op.outputs))):
            continue
        elif any(rows.has(t) or t.op.name in items for t in inputs):
            others = [t for t in inputs if t.op.name not in items and _is_of_shard(t, rows)]
            if op.type in ELEMENTWISE | _CHOOSES | _CUTS:
                others += [t for t in inputs if not t.dtype.is_floating and _is_reduced(t, rows)]
            found += [(op, value) for value in others[:1]]
        elif op.type in _REPEATS:
            value = op.inputs[_REPEATS[op.type]]
            if _is_of_shard(value, rows) or _is_reduced(value, rows):
                found.append((op, value))
    ends = [op.inputs[0] for op in body.ops if op.type == 'LoopCond']
    for end in ends if body.condition is None else [body.condition]:
        found += _deciding(end, rows)
    return found


def _deciding(condition: tf.Tensor, rows: Places) -> list[tuple[tf.Operation, tf.Tensor]]:
    """Lists the comparisons of values of all rows that decide how often a loop runs."""
    ops = walk([condition.op], lambda op: [t.op for t in op.inputs if t.dtype.is_bool])
    return [(op, value) for op in ops for value in op.inputs if _is_of_shard(value, rows)]


def _norms_each_row(op: tf.Operation, rows: Places) -> bool:
    """Whether what it takes for channels are rows, as Keras has it for a layer normalization."""
    first = op.get_attr('data_format').startswith(b'NC')
    return first and rows.axis(op.inputs[0]) == 1


def is_batch_norm(op: tf.Operation) -> bool:
    """Whether an op is one of those that TensorFlow's batch normalization consists of."""
    return op.type in BATCH_NORMS or in_batch_norm(op.name)


def in_batch_norm(name: str) -> bool:
    """Whether an op's or a tensor's name is in a scope of TensorFlow's batch normalization."""
    return _OF_BATCH_NORM.search(name) is not None


def near_reduction(
    given: Sequence[tf.Tensor], rows: Rows
) -> tuple[bool, tf.Tensor | None, list[divisors.Verdict]]:
    """Whether rows were divided by what may be how many they are, and which value they're mixed by.

    What is said of constants that may be static rows comes third. Numbers of rows themselves are no
    part of it: see `powers`.

    Args:
      given: tensors with rows.
      rows: which tensors have rows.
    """
    divided, mixed, seen = False, None, set()
    verdicts = []
    waiting = [(tensor, False) for tensor in given]
    while waiting:
        tensor, once = waiting.pop()  # Whether it has been divided.
        op = tensor.op
        if op.name in seen:
            continue
        looked_up = op.inputs[0] if op.type == 'GatherV2' else None
        if looked_up is not None and (
            _is_of_shard(looked_up, rows) or _is_reduced(looked_up, rows)
        ):
            mixed = looked_up
        if op.type not in ELEMENTWISE | _CHOOSES:
            if op.type in ('Sum', 'Mean') and rows.has(op.outputs[0]):
                waiting.append((op.inputs[0], once))  # Of what a row has.
            continue
        seen.add(op.name)
        if op.type == 'Softmax' and rows.is_last_axis(op.inputs[0]):
            divided, mixed = True, op.outputs[0]  # It adds up the rows of the shard.
        for value in op.inputs:
            if rows.has(value):
                continue
            divisor = op.type in QUOTIENTS and value is op.inputs[1]
            if value.op.name not in rows.dependents:
                if divisor or op.type == 'Mul':
                    verdicts.append(divisors.judge_rows(op, rows))
                    once |= verdicts[-1].is_mean
            elif not counts.is_count(value, rows):
                once |= divisor
                chosen = value.dtype.is_bool and goes_by_rows(value, rows)
                if value.dtype.is_floating or chosen or _is_reduced(value, rows):
                    mixed = value
        divided |= once
        waiting += [(value, once) for value in op.inputs if rows.has(value)]
    return divided, mixed, verdicts


def joined_with(given: Sequence[tf.Tensor], rows: Rows) -> tf.Tensor | None:
    """Returns what isn't of rows, but was put together with them, along their dimension.

    Integers may be places, as where rows begin, and aren't looked at.
    """

    def onward(op: tf.Operation) -> list[tf.Operation]:
        return [t.op for t in op.inputs if rows.has(t)]

    unjoined = _unjoined.setdefault(rows, set())
    seen = set()
    for op in walk([t.op for t in given], onward, unjoined):
        seen.add(op.name)
        numbers = any(rows.has(t) and t.dtype.is_floating for t in op.outputs)
        if not numbers or powers.in_gradient(op):
            continue
        if op.type == 'ConcatV2':
            *parts, axis = op.inputs
            others = [t for t in parts if not rows.has(t) and t.shape.num_elements() != 0]
            if others and rows.axis(op.outputs[0]) in dimensions(axis, op.outputs[0]):
                return others[0]
        elif op.type in ('Pad', 'PadV2', 'MirrorPad') and _pads_rows(op, rows):
            return op.outputs[0]
    unjoined.update(seen)
    return None


# The names of ops that have no such thing before them.
_unjoined: weakref.WeakKeyDictionary[Rows, set[str]] = weakref.WeakKeyDictionary()


def _pads_rows(op: tf.Operation, rows: Rows) -> bool:
    axis, paddings = rows.axis(op.inputs[0]), op.inputs[1]
    if axis is None:
        return False
    if paddings.op.type == 'Pack':
        own = private.constant_value(paddings.op.inputs[axis])
        return own is None or bool(own.any())
    value = private.constant_value(paddings)
    return value is not None and bool(value[axis].any())


def _is_of_shard(value: tf.Tensor, rows: Places) -> bool:
    """Whether it's a value of all rows of a shard, other than how many they are."""
    return value.dtype.is_floating and not rows.has(value) and is_of_shard(value, rows)


def _is_reduced(value: tf.Tensor, rows: Places) -> bool:
    """Whether integers, or the like, come from reductions over the numbers in rows.

    So do counts of what rows have. Sizes don't, nor does what says where rows are.
    """

    def onward(op: tf.Operation) -> list[tf.Operation]:
        passing = op.type in ELEMENTWISE | _CHOOSES | _HANDING_ON
        return [t.op for t in rows.dependent_inputs(op)] if passing else []

    if rows.has(value) or not rows.depends(value.op):
        return False
    return any(_reduces(op, rows) for op in walk([value.op], onward))


def _reduces(op: tf.Operation, rows: Places) -> bool:
    """Whether an op reduces rows, by itself or in a branch or a call."""
    if op.type in CALLS - LOOPS:
        inner = ((o, own) for graph, own in called(op, rows) for o in graph.get_operations())
        return any(_reduces(o, own) for o, own in inner)
    reduced = any(map(rows.has, op.inputs)) and not any(map(rows.has, op.outputs))
    return reduced and _REDUCES.match(op.type) is not None
