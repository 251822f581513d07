"""Rows that are combined with other rows of their shard, or taken by their place in it."""

from __future__ import annotations

import re
from collections.abc import Iterable

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.bodies import Body, passes_on
from estimator_mgpu.places import SIZES, Places, dimensions
from estimator_mgpu.products import is_product, product_label
from estimator_mgpu.rounds import carrying, is_one_row, loops, of_one_row
from estimator_mgpu.rows import ELEMENTWISE, Rows
from estimator_mgpu.walks import walk

# Ops that mix what is along a dimension: the last one, or the one that an input, by number, or an
# attribute, by name, says.
_MIXES = {
    **dict.fromkeys(['Softmax', 'LogSoftmax', 'TopK', 'TopKV2', 'NthElement'], -1),
    **dict.fromkeys(['FFT', 'IFFT', 'RFFT', 'IRFFT'], -1),
    **{'Roll': 2, 'Cumsum': 1, 'Cumprod': 1, 'CumulativeLogsumexp': 1, 'ReverseV2': 1},
    **{'ReverseSequence': 'seq_dim', 'GatherV2': 2, 'Split': 0, 'SplitV': 2, 'Unpack': 'axis'},
}
COMPARES = frozenset(
    ['Equal', 'NotEqual', 'Less', 'LessEqual', 'Greater', 'GreaterEqual', 'LogicalAnd', 'LogicalOr']
)
# Ops that may pair entries of their inputs with one another, by broadcasting.
_PAIRS = COMPARES | frozenset(
    ['Add', 'AddV2', 'Sub', 'Mul', 'RealDiv', 'DivNoNan', 'SquaredDifference', 'Maximum', 'Minimum']
    + ['SelectV2']
)
_BRANCHES = frozenset(['If', 'StatelessIf', 'Case', 'StatelessCase'])
# Ops that give the same for each row, or draw it, if what they're given has none.
_MAKES = re.compile('Fill|BroadcastTo|(Zeros|Ones)Like|.*(Random|Truncated)')
# What goes by the shape of its input only.
_OF_SHAPES = SIZES | {'ZerosLike', 'OnesLike'}
# Ops that go over all dimensions but the first one.
_WINDOWS = re.compile('(DepthwiseConv|Conv|MaxPool|AvgPool)[1-3]?[dD]?(Native)?$')
# Ops that mix what is along the last two dimensions.
_MATRICES = re.compile(
    'I?R?FFT2D$|Svd$|Qr$|Lu$|Cholesky$|SelfAdjointEig|Eig$|Matrix(Inverse|Determinant|Solve|Triang'
    '|Exponential|Logarithm|SquareRoot)|LogMatrixDeterminant'
)
# Through which numbers stay running ones; the difference of two of them is a length.
_AS_NUMBERS = frozenset(
    ['Identity', 'Cast', 'Reshape', 'ExpandDims', 'Squeeze', 'StridedSlice', 'Slice', 'Tile']
    + ['Add', 'AddV2', 'Mul', 'Pack']
)
# Through which indices go on to be those of a feature.
_AS_GIVEN = frozenset(
    ['Identity', 'Cast', 'Reshape', 'Squeeze', 'ExpandDims', 'StridedSlice', 'FloorMod', 'Minimum']
)


def of_rows(body: Body, certain: bool = False) -> list[tf.Operation]:
    """Lists the ops that give a row what comes from others: sorted, shifted, in pairs.

    Args:
      body: ops of a tower.
      certain: whether to leave out those that may give each row what is its own.
    """
    rows, items = body.rows, of_one_row(body)
    found = [
        op
        for op in body.ops
        if (_mixes(op, rows) or items and _meets_one_row(op, rows, items))
        and not (certain and _may_be_own(op, rows))
        and not (is_one_row(op, rows) and loops(op, body))
    ]
    return found + [op for op in carrying(body) if op not in found]


def before(op: tf.Operation, rows: Places) -> list[tf.Operation]:
    """Lists what an op combines, which isn't the one row of which it only takes the shape."""
    given = rows.dependent_inputs(op)
    row = given[0].op if op.type in _OF_SHAPES and given else None
    if row is not None and row.type == 'StridedSlice' and row.get_attr('shrink_axis_mask') & 1:
        given = rows.dependent_inputs(row)
    return [t.op for t in given]


def numbered(value: tf.Tensor, rows: Rows) -> list[tf.Operation]:
    """Lists the ops that number rows by their place in the shard, as part of a value."""

    def onward(op: tf.Operation) -> list[tf.Operation]:
        passing = op.type in ELEMENTWISE | {'Sum', 'Mean', 'StridedSlice', 'Tile'}
        return [t.op for t in rows.dependent_inputs(op)] if passing else []

    def numbers(op: tf.Operation) -> bool:
        if op.type == 'Where' or op.type.startswith('Unique'):
            return rows.axis(op.inputs[0]) == 0
        return op.type == 'Range' and rows.is_row_count(op.inputs[1])

    return [op for op in walk([value.op], onward) if numbers(op)]


def _mixes(op: tf.Operation, rows: Places) -> bool:
    found = ((i, rows.axis(t)) for i, t in enumerate(op.inputs) if t.shape.rank)
    axes = {i: axis for i, axis in found if axis is not None}
    if not axes:
        return False
    given = op.inputs[min(axes)]
    if is_product(op, given):
        return len({product_label(op, i, axis) for i, axis in axes.items()}) > 1
    if op.type in _PAIRS:  # Dimensions are matched from the last one on.
        return len({axis - op.inputs[i].shape.rank for i, axis in axes.items()}) > 1
    if op.type in _BRANCHES:
        return any(map(rows.has, op.outputs)) and goes_by_rows(op.inputs[0], rows)
    if op.type == 'Switch':  # A v1 branch; in a loop it ends it.
        return op.inputs[1].op.type != 'LoopCond' and goes_by_rows(op.inputs[1], rows)
    if _WINDOWS.match(op.type):
        return axes.get(0, 0) != 0
    if op.type == 'Reshape':
        return rows.puts_elsewhere(op)
    if op.type == 'RandomShuffle':
        return axes[0] == 0
    if op.type.startswith('NonMaxSuppression'):
        return True
    if op.type.startswith('QuantizeAndDequantize'):
        return not op.get_attr('range_given') and 0 in axes
    if _MATRICES.match(op.type):
        from_last = axes[min(axes)] - given.shape.rank
        return from_last == -2 or from_last == -1 and 0 in axes  # Columns are solved for each.
    if op.type == 'StridedSlice':
        return axes.get(0) == 0 and cuts(op, rows) and not _is_second_half(op, rows)
    if op.type == 'GatherV2' and (0 not in axes or _is_of_rows(op.inputs[1])):
        return 0 in axes and _is_of_alike(given, rows)
    if op.type == 'GatherV2' and _goes_back(op, rows):
        return False
    if op.type == 'Split' and _undoes_concat(op, rows, len(op.outputs)):
        return False
    if op.type == 'Cumsum' and _gives_bounds(op, rows):
        return False
    by = _MIXES.get(op.type)
    if by == -1:
        return axes[min(axes)] == given.shape.rank - 1
    if isinstance(by, str):
        return axes[min(axes)] == op.get_attr(by) % given.shape.rank
    return by is not None and axes[min(axes)] in dimensions(op.inputs[by], given)


def _gives_bounds(op: tf.Operation, rows: Places) -> bool:
    """Whether what an op gives only goes on to say where rows begin and end."""
    users = op.outputs[0].consumers()
    waiting = [t for user in users for t in user.outputs if rows.are_bounds(t)]
    if len(waiting) < max(len(users), 1):
        return False
    for tensor in waiting:  # It grows as they are looked at.
        for user in tensor.consumers():
            if user.type == 'Cast' and user.outputs[0].dtype.is_floating:
                return False
            waiting += user.outputs if user.type in _AS_NUMBERS else []
    return True


def _is_second_half(op: tf.Operation, rows: Places) -> bool:
    """Whether a slice goes from the number of rows to the end of what two were put together of."""
    begin, stride = op.inputs[1].op, private.constant_value(op.inputs[3])
    counted = begin.type == 'Pack' and rows.is_row_count(begin.inputs[0])
    to_the_end = op.get_attr('end_mask') & 1 and stride is not None and stride[0] == 1
    return counted and bool(to_the_end) and _undoes_concat(op, rows, 2)


def _undoes_concat(op: tf.Operation, rows: Places, among: int) -> bool:
    """Whether equal parts are what as many were put together of, row by row."""
    parts, others = [], []
    at = next(rows.axis(t) for t in op.inputs if rows.has(t)) or 0

    def onward(op: tf.Operation) -> list[tf.Operation]:
        given = [t for t in op.inputs if rows.has(t)]
        axis = rows.axis(given[0]) if given else None
        known = axis is not None and all(t.shape.rank for t in given)
        if known and op.type == 'ConcatV2' and axis in dimensions(op.inputs[-1], given[0]):
            parts.append([t.shape.as_list()[rows.axis(t)] for t in given])
            return []
        times = private.constant_value(op.inputs[1]) if known and op.type == 'Tile' else None
        if times is not None and times[axis] > 1:
            parts.append([given[0].shape.as_list()[axis]] * times[axis])
            return []
        # What isn't given rows may have an entry for each of these, such as of a table, repeated.
        rank = op.outputs[0].shape.rank
        more = [t for t in rows.dependent_inputs(op) if not rows.has(t) and t.shape.rank == rank]
        if given or op.type in ELEMENTWISE | COMPARES:
            return [t.op for t in [*given, *more]]
        known = op.type == 'Tile' and rank is not None and rank > at
        repeated = known and op.inputs[0].shape.as_list()[at] == 1
        others.extend([] if repeated or _MAKES.match(op.type) else [op])
        return []

    for _ in walk([t.op for t in op.inputs if rows.has(t)], onward):
        pass
    equal = all(len(sizes) == among and len(set(sizes)) == 1 for sizes in parts)
    return bool(parts) and equal and not others


def goes_by_rows(value: tf.Tensor, rows: Places) -> bool:
    """Whether a value depends on the numbers in rows, rather than on how many rows there are.

    What goes by integers, such as the lengths of sequences, mostly saves work only.
    """

    def onward(op: tf.Operation) -> list[tf.Operation]:
        return [] if op.type in SIZES else [t.op for t in rows.dependent_inputs(op)]

    if not rows.depends(value.op):
        return False
    found = (t for op in walk([value.op], onward) for t in op.outputs)
    return any(rows.has(t) and t.dtype.is_floating for t in found)


def cuts(op: tf.Operation, rows: Places) -> bool:
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
    return re.match('Where$|Unique', _source(indices).op.type) is not None


def _source(value: tf.Tensor) -> tf.Tensor:
    while value.op.type in ('Identity', 'Reshape', 'Squeeze', 'Cast'):
        value = value.op.inputs[0]
    return value


def _is_of_alike(value: tf.Tensor, rows: Places) -> bool:
    """Whether it counts or reduces the rows of a shard that have the same id, for each id."""

    def onward(tensor: tf.Tensor) -> list[tf.Tensor]:
        own = [t for t in tensor.op.inputs if rows.are_groups(t)]
        return own or _entry_by_entry(tensor)

    found = list(walk([value], onward))
    return any(
        tensor.op.type.startswith('UniqueWithCounts') and tensor.value_index == 2
        for tensor in found
    ) or any(ids.op.type.startswith('Unique') for ids in _segment_ids(found))


def _goes_back(op: tf.Operation, rows: Places) -> bool:
    """Whether a gather gives what was reduced by segment to the entries of each.

    These are rows of a ragged tensor, if it isn't numbers in rows that say where they are.
    """
    ids = _source(op.inputs[1])
    reduced = walk(op.inputs[:1], _entry_by_entry)
    return not rows.has(ids) and any(ids is other for other in _segment_ids(reduced))


def _segment_ids(values: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    ops = [tensor.op for tensor in values]
    return [_source(op.inputs[1]) for op in ops if re.match('(Unsorted)?Segment', op.type)]


def _entry_by_entry(tensor: tf.Tensor) -> list[tf.Tensor]:
    return list(tensor.op.inputs) if tensor.op.type in ELEMENTWISE else []


def _may_be_own(op: tf.Operation, rows: Places) -> bool:
    """Whether an op takes rows by indices that rows have, which may be their own."""
    if op.type != 'GatherV2' or not rows.has(op.inputs[1]) or _is_given(op.inputs[1], rows):
        return False
    return not _is_of_alike(op.inputs[0], rows)


def _is_given(indices: tf.Tensor, rows: Places) -> bool:
    """Whether indices are what the input_fn gave for each row, rather than computed by place."""
    op = indices.op
    while op.type in _AS_GIVEN and rows.dependent_inputs(op):
        op = op.inputs[0].op
    of_sparse = any(t.name in rows.indices for t in op.outputs)
    return not (rows.dependent_inputs(op) or of_sparse or op.type == 'Placeholder')


def _meets_one_row(op: tf.Operation, rows: Places, items: set[str]) -> bool:
    """Whether an op combines all rows with the one of a round."""
    if passes_on(op) or not any(map(rows.has, op.outputs)):
        return False
    own = [t for t in op.inputs if t.op.name in items and t.dtype.is_floating]
    return any(map(rows.has, op.inputs)) and any(not rows.has(t) for t in own)
