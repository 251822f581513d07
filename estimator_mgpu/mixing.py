"""Rows that are combined with other rows of their shard, or with values of all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu import counts, divisors, private
from estimator_mgpu.bodies import Body
from estimator_mgpu.divisors import QUOTIENTS
from estimator_mgpu.places import ARRAYS, BATCH_NORMS, CALLS, FLOW, Places, dimensions, is_product
from estimator_mgpu.rows import ELEMENTWISE, Rows
from estimator_mgpu.walks import walk

# Ops that mix what is along a dimension: the last one, or the one that an input, by number, or an
# attribute, by name, says.
_MIXES = {
    **dict.fromkeys(['Softmax', 'LogSoftmax', 'TopK', 'TopKV2', 'NthElement'], -1),
    **{'Roll': 2, 'Cumsum': 1, 'Cumprod': 1, 'CumulativeLogsumexp': 1, 'ReverseV2': 1},
    **{'ReverseSequence': 'seq_dim', 'GatherV2': 2, 'Split': 0, 'SplitV': 2, 'Unpack': 'axis'},
}
_COMPARES = frozenset(
    ['Equal', 'NotEqual', 'Less', 'LessEqual', 'Greater', 'GreaterEqual', 'LogicalAnd', 'LogicalOr']
)
# Ops that may pair entries of their inputs with one another, by broadcasting.
_PAIRS = _COMPARES | frozenset(
    ['Add', 'AddV2', 'Sub', 'Mul', 'RealDiv', 'DivNoNan', 'SquaredDifference', 'Maximum', 'Minimum']
    + ['SelectV2']
)
# Through which rows go on to what is chosen by them, or compared.
_CHOOSES = _COMPARES | {'LogicalNot', 'Where', 'GatherV2'}
_BRANCHES = frozenset(['If', 'StatelessIf', 'Case', 'StatelessCase'])
# Ops that go over all dimensions but the first one.
_WINDOWS = re.compile('(DepthwiseConv|Conv|MaxPool|AvgPool)[1-3]?[dD]?(Native)?$')
# Through which indices go on to be those of a feature.
_AS_GIVEN = frozenset(
    ['Identity', 'Cast', 'Reshape', 'Squeeze', 'ExpandDims', 'StridedSlice', 'FloorMod', 'Minimum']
)
# The scopes of tf.nn.moments and tf.nn.batch_normalization.
_OF_BATCH_NORM = re.compile('(^|/)(moments|batchnorm)(_[0-9]+)?/')
# Lists of tensors, which have a place where what is added may have one or not.
_LISTS = re.compile('Tensor(List|Array)')


def of_rows(body: Body, certain: bool = False) -> list[tf.Operation]:
    """Lists the ops that give a row what comes from others: sorted, shifted, in pairs.

    Args:
      body: ops of a tower.
      certain: whether to leave out those that may give each row what is its own.
    """
    rows, items = body.rows, _of_one_row(body)
    found = [
        op
        for op in body.ops
        if (_mixes(op, rows) or items and _meets_one_row(op, rows, items))
        and not (certain and _may_be_own(op, rows))
        and not (_is_one_row(op, rows) and _loops(op, body))
    ]
    return found + [op for op in _carrying(body) if op not in found]


def of_values(body: Body) -> list[tuple[tf.Operation, tf.Tensor]]:
    """Lists the ops that combine rows with values of all rows of their shard, and these."""
    rows, items = body.rows, _of_one_row(body)
    found = []
    for op in body.ops:
        inputs = rows.dependent_inputs(op)
        if op.type in BATCH_NORMS and op.get_attr('is_training') and inputs:
            found.append((op, op.outputs[1]))
        elif _passes_on(op) or not (op.name in items or any(map(rows.has, op.outputs))):
            continue
        elif any(rows.has(t) or t.op.name in items for t in inputs):
            others = [t for t in inputs if t.op.name not in items and _is_of_shard(t, rows)]
            found += [(op, value) for value in others[:1]]
    return found


def _passes_on(op: tf.Operation) -> bool:
    """Whether an op combines nothing itself."""
    if op.type in CALLS:
        return bool(private.function_graphs(op))
    return op.type in FLOW or _LISTS.match(op.type) is not None


def _of_one_row(body: Body) -> set[str]:
    """Returns the names of the ops that depend on the one row that a round of a loop takes."""

    def onward(op: tf.Operation) -> list[tf.Operation]:
        ends = op.type == 'Exit' or op.type in ARRAYS
        return [] if ends else [user for t in op.outputs for user in t.consumers()]

    start = [op for op in body.ops if _is_one_row(op, body.rows) and _loops(op, body)]
    found: set[str] = set()
    while start:
        found |= {op.name for op in walk(start, onward)}
        rounds = zip(body.carried[0].graph.inputs, body.carried) if body.carried else ()
        start = [a.op for a, b in rounds if b.op.name in found and a.op.name not in found]
    return found


def _loops(op: tf.Operation, body: Body) -> bool:
    return body.loops or private.in_loop(op)


def is_batch_norm(op: tf.Operation) -> bool:
    """Whether an op is one of those that TensorFlow's batch normalization consists of."""
    return op.type in BATCH_NORMS or _OF_BATCH_NORM.search(op.name) is not None


def numbered(value: tf.Tensor, rows: Rows) -> list[tf.Operation]:
    """Lists the ops that number rows by their place in the shard, as part of a value."""

    def onward(op: tf.Operation) -> list[tf.Operation]:
        passing = op.type in ELEMENTWISE | {'Sum', 'Mean', 'StridedSlice', 'Tile'}
        return [t.op for t in rows.dependent_inputs(op)] if passing else []

    found = walk([value.op], onward)
    return [op for op in found if op.type == 'Range' and rows.is_row_count(op.inputs[1])]


def with_values(
    given: Sequence[tf.Tensor], averaged: bool, rows: Rows
) -> tuple[bool, tf.Tensor | None, list[divisors.Verdict]]:
    """Whether rows were divided by how many they are, and by which value they're mixed otherwise.

    Static rows, and counts of rows, divide exactly, if they do so once. What is said of constants
    that may be static rows comes third.

    Args:
      given: tensors with rows.
      averaged: whether they are divided by the number of rows later.
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
        if op.type == 'GatherV2' and _is_of_shard(op.inputs[0], rows):
            mixed = op.inputs[0]
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
                if divisor:
                    verdicts.append(divisors.judge_rows(op, rows))
                    once |= verdicts[-1].is_mean
            elif not counts.is_count(value, rows):
                once |= divisor
                if value.dtype.is_floating or value.dtype.is_bool and _goes_by_rows(value, rows):
                    mixed = value
            elif value.dtype.is_floating:
                growth = counts.growth(value, rows)
                if divisor and growth == 1 and not (once or averaged):
                    once = True
                elif growth != 0:
                    mixed = value
        divided |= once
        waiting += [(value, once) for value in op.inputs if rows.has(value)]
    return divided, mixed, verdicts


def _is_of_shard(value: tf.Tensor, rows: Places) -> bool:
    """Whether it's a value of all rows of a shard, other than how many they are."""
    if rows.has(value) or not rows.depends(value.op):
        return False
    return value.dtype.is_floating and not counts.is_count(value, rows)


def _meets_one_row(op: tf.Operation, rows: Places, items: set[str]) -> bool:
    """Whether an op combines all rows with the one of a round."""
    if _passes_on(op) or not any(map(rows.has, op.outputs)):
        return False
    own = [t for t in op.inputs if t.op.name in items and t.dtype.is_floating]
    return any(map(rows.has, op.inputs)) and any(not rows.has(t) for t in own)


def _carrying(body: Body) -> list[tf.Operation]:
    """Lists the ops that take one row a round, where that changes what a loop goes on with."""
    rounds = [op.inputs[0] for op in body.ops if op.type == 'NextIteration']
    ends = [t.op for t in [*body.carried, *rounds] if _is_number(t) and not body.rows.has(t)]

    def onward(op: tf.Operation) -> list[tf.Operation]:
        return [t.op for t in body.rows.dependent_inputs(op)]

    return [op for op in walk(ends, onward) if _is_one_row(op, body.rows)]


def _is_number(value: tf.Tensor) -> bool:
    """Whether it's a number, rather than a list of some or what goes for one in v1 loops."""
    op = value.op
    while op.type in ('Identity', 'Switch', 'Merge', 'Enter', 'Exit'):
        op = op.inputs[0].op
    return op.type not in ARRAYS and (value.dtype.is_floating or value.dtype.is_integer)


def _is_one_row(op: tf.Operation, rows: Places) -> bool:
    """Whether an op takes one of the rows, by a number that changes."""
    if op.type in ('TensorListGetItem', 'TensorArrayReadV3'):
        return any(rows.axis(t) == 0 for t in op.inputs)
    if op.type not in ('StridedSlice', 'GatherV2'):
        return False
    if private.constant_value(op.inputs[1]) is not None:
        return False
    taken = rows.has(op.inputs[0]) and not rows.has(op.inputs[1])
    return taken and not any(map(rows.has, op.outputs))


def _mixes(op: tf.Operation, rows: Places) -> bool:
    axes = {i: rows.axis(t) for i, t in enumerate(op.inputs) if rows.has(t) and t.shape.rank}
    if not axes:
        return False
    given = op.inputs[min(axes)]
    if is_product(op, given):
        return len({rows.product_axis(op, i) for i in axes}) > 1
    if op.type in _PAIRS:  # Dimensions are matched from the last one on.
        return len({axis - op.inputs[i].shape.rank for i, axis in axes.items()}) > 1
    if op.type in _BRANCHES:
        return any(map(rows.has, op.outputs)) and _goes_by_rows(op.inputs[0], rows)
    if op.type == 'Switch':  # A v1 branch; in a loop it ends it.
        return op.inputs[1].op.type != 'LoopCond' and _goes_by_rows(op.inputs[1], rows)
    if _WINDOWS.match(op.type):
        return axes.get(0, 0) != 0
    if op.type == 'RandomShuffle':
        return axes[0] == 0
    if op.type == 'StridedSlice':
        return axes.get(0) == 0 and _cuts(op, rows)
    if op.type == 'GatherV2' and (0 not in axes or _is_of_rows(op.inputs[1])):
        return False
    by = _MIXES.get(op.type)
    if by == -1:
        return axes[min(axes)] == given.shape.rank - 1
    if isinstance(by, str):
        return axes[min(axes)] == op.get_attr(by) % given.shape.rank
    return by is not None and axes[min(axes)] in dimensions(op.inputs[by], given)


def _goes_by_rows(value: tf.Tensor, rows: Places) -> bool:
    """Whether a value depends on the numbers in rows, rather than on how many rows there are.

    What goes by integers, such as the lengths of sequences, mostly saves work only.
    """

    def onward(op: tf.Operation) -> list[tf.Operation]:
        sizes = op.type in ('Shape', 'ShapeN', 'Size', 'Rank')
        return [] if sizes else [t.op for t in rows.dependent_inputs(op)]

    if not rows.depends(value.op):
        return False
    found = (t for op in walk([value.op], onward) for t in op.outputs)
    return any(rows.has(t) and t.dtype.is_floating for t in found)


def _cuts(op: tf.Operation, rows: Places) -> bool:
    """Whether a slice takes some of what is along the first dimension, by position."""
    given, *bounds = op.inputs
    if (op.get_attr('new_axis_mask') | op.get_attr('ellipsis_mask')) & 1 or rows.are_bounds(given):
        return False
    begin, _, stride = (private.constant_value(bound) for bound in bounds)
    if begin is not None and not begin.size:  # All of it, as by x[()].
        return False
    starts = op.get_attr('begin_mask') & 1 or begin is not None and begin[0] == 0
    last = bounds[1].op
    counted = last.type == 'Pack' and rows.is_row_count(last.inputs[0])
    ends = op.get_attr('end_mask') & 1 or counted
    return not (starts and ends and stride is not None and stride[0] == 1)


def _is_of_rows(indices: tf.Tensor) -> bool:
    """Whether indices are of the rows that have something, or of each row's place among others."""
    op = indices.op
    while op.type in ('Identity', 'Reshape', 'Squeeze', 'Cast'):
        op = op.inputs[0].op
    return op.type in ('Where', 'Unique', 'UniqueV2')


def _may_be_own(op: tf.Operation, rows: Places) -> bool:
    """Whether an op takes rows by indices that rows have, which may be their own."""
    return op.type == 'GatherV2' and rows.has(op.inputs[1]) and not _is_given(op.inputs[1], rows)


def _is_given(indices: tf.Tensor, rows: Places) -> bool:
    """Whether indices are what the input_fn gave for each row, rather than computed by place."""
    op = indices.op
    while op.type in _AS_GIVEN and rows.dependent_inputs(op):
        op = op.inputs[0].op
    of_sparse = any(t.name in rows.indices for t in op.outputs)
    return not (rows.dependent_inputs(op) or of_sparse or op.type == 'Placeholder')
