"""Why several devices may give other numbers than one: what a graph shows of it."""

from __future__ import annotations

import re

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.functions import Library
from estimator_mgpu.places import BATCH_NORMS, dimensions, is_product
from estimator_mgpu.rows import Rows
from estimator_mgpu.towers import Towers
from estimator_mgpu.walks import walk

_RANDOM = re.compile(r'Random|Multinomial|TruncatedNormal|StatefulUniform|StatefulStandard|RngRead')
# Ops that mix what is along a dimension: the last one, or the one that an input, by number, or an
# attribute, by name, says.
_MIXES = {
    **dict.fromkeys(['Softmax', 'LogSoftmax', 'TopK', 'TopKV2', 'NthElement'], -1),
    **{'Roll': 2, 'Cumsum': 1, 'Cumprod': 1, 'CumulativeLogsumexp': 1, 'ReverseV2': 1},
    **{'ReverseSequence': 'seq_dim', 'GatherV2': 2, 'Split': 0, 'SplitV': 2, 'Unpack': 'axis'},
}
# Ops that may pair entries of their inputs with one another, by broadcasting.
_PAIRS = frozenset(
    ['Add', 'AddV2', 'Sub', 'Mul', 'RealDiv', 'DivNoNan', 'SquaredDifference', 'Maximum', 'Minimum']
    + ['Equal', 'NotEqual', 'Less', 'LessEqual', 'Greater', 'GreaterEqual', 'SelectV2']
    + ['LogicalAnd', 'LogicalOr']
)


def likely_causes(graph: tf.Graph, roots: list[tf.Operation], towers: Towers | None) -> list[str]:
    """Returns a sentence for each thing in a model that may differ between devices.

    Args:
      graph: the graph of the model.
      roots: the ops that were run; what they depend on is looked at.
      towers: the towers, if the model was replicated.
    """
    copies = set() if towers is None else towers.copies.names()
    needed = {op.name for op in walk(roots, without=copies)}
    # The user's, the earliest first.
    ops = [op for op in graph.get_operations() if op.name in needed]
    ops = [op for op in ops if not op.name.startswith('replicate/')]
    causes = []
    drawn = _first_random(ops, Library(graph), set() if towers is None else towers.dependents())
    if drawn is not None:
        causes.append(
            f'Random numbers, such as those of dropout, are others on each device: {drawn}. '
            'Compare without them.'
        )
    mixed = None if towers is None else _first_mixed(ops, towers)
    if mixed is not None:
        causes.append(
            f'Rows are combined with a value of all rows of a shard, as batch normalization does: '
            f'{mixed.name!r} ({mixed.type}). Each device has its own shard.'
        )
    others = [] if towers is None else _with_other_rows(ops, towers.rows())
    if others:
        causes.append(
            'Rows are combined with other rows of their shard, or put in their place, by '
            f'{", ".join(f"{op.name!r} ({op.type})" for op in others[:3])}. '
            'Each device has its own shard.'
        )
    return causes


def _first_random(ops: list[tf.Operation], library: Library, dependents: set[str]) -> str | None:
    for op in ops:
        stateless = op.type.startswith('Stateless')  # the same for all, but of a shard's size
        if _RANDOM.search(op.type) and (op.name in dependents or not stateless):
            return f'{op.name!r} ({op.type})'
        for inner in library.nodes(op.node_def):
            if _RANDOM.search(inner.op) and not inner.op.startswith('Stateless'):
                return f'{inner.name!r} ({inner.op}) in {op.name!r}'
    return None


def _first_mixed(ops: list[tf.Operation], towers: Towers) -> tf.Operation | None:
    rows = towers.rows()
    for op in ops:
        inputs = rows.dependent_inputs(op)
        if op.type in BATCH_NORMS and op.get_attr('is_training') and inputs:
            return op
        with_rows = [t for t in inputs if rows.has(t)]
        others = [t for t in inputs if not rows.has(t) and t.dtype.is_floating]
        if with_rows and others and any(map(rows.has, op.outputs)):
            return op
    return None


def _with_other_rows(ops: list[tf.Operation], rows: Rows) -> list[tf.Operation]:
    """Lists the ops that give a row what comes from others: sorted, shifted, in pairs."""
    return [op for op in ops if _mixes(op, rows)]


def _mixes(op: tf.Operation, rows: Rows) -> bool:
    axes = {i: rows.axis(t) for i, t in enumerate(op.inputs) if rows.has(t) and t.shape.rank}
    if not axes:
        return False
    given = op.inputs[min(axes)]
    if is_product(op, given):
        return len({rows.product_axis(op, i) for i in axes}) > 1
    if op.type in _PAIRS:  # Dimensions are matched from the last one on.
        return len({axis - op.inputs[i].shape.rank for i, axis in axes.items()}) > 1
    if op.type == 'StridedSlice':
        return axes.get(0) == 0 and _cuts(op)
    if op.type == 'GatherV2' and (0 not in axes or _is_of_rows(op.inputs[1])):
        return False
    by = _MIXES.get(op.type)
    if by == -1:
        return axes[min(axes)] == given.shape.rank - 1
    if isinstance(by, str):
        return axes[min(axes)] == op.get_attr(by) % given.shape.rank
    return by is not None and axes[min(axes)] in dimensions(op.inputs[by], given)


def _cuts(op: tf.Operation) -> bool:
    """Whether a slice takes some of what is along the first dimension, by position."""
    if (op.get_attr('new_axis_mask') | op.get_attr('ellipsis_mask')) & 1:
        return False
    strides = private.constant_value(op.inputs[3])
    whole = op.get_attr('begin_mask') & op.get_attr('end_mask') & 1
    return not whole or strides is None or strides[0] != 1


def _is_of_rows(indices: tf.Tensor) -> bool:
    """Whether indices are of the rows that have something, or of each row's place among others."""
    op = indices.op
    while op.type in ('Identity', 'Reshape', 'Squeeze', 'Cast'):
        op = op.inputs[0].op
    return op.type in ('Where', 'Unique', 'UniqueV2')
