"""Reductions, and ops that go along some dimensions only."""

from __future__ import annotations

import functools

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules.signature import (
    WHOLE,
    Fixed,
    Label,
    Rule,
    Signature,
    axis,
    labels,
    rank,
    without,
)
from estimator_mgpu.partition.sizes import Sizes


def reduction(op: tf.Operation, sizes: Sizes, reduce: str) -> Signature | None:
    """Over rows it gives a part of the result; over other dimensions it goes row by row."""
    numbers = sizes.numbers(op.inputs[1])
    own = labels(op.inputs[0], sizes)
    if numbers is None or (reduce == 'mean' and not op.inputs[0].dtype.is_floating):
        return None  # A mean of integers is rounded.
    axes = sorted({a % len(own) for a in numbers}) if own else []
    kept = without(own, axes)
    if not op.get_attr('keep_dims'):
        kept = tuple(label for i, label in enumerate(own) if i not in axes)
    # Known numbers where the graph computes them: with one row they would come out otherwise.
    known = WHOLE if op.inputs[1].op.type == 'Const' else Fixed(tuple(axes))
    return Signature([own, known], [kept], reduce)


def of_all(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`L2Loss`: a sum over all entries."""
    return Signature([labels(op.inputs[0], sizes)], [()], 'sum')


def of_channels(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`BiasAddGrad`: a sum over all dimensions but the channels."""
    own = labels(op.inputs[0], sizes)
    channels = 1 if op.get_attr('data_format') == b'NCHW' else len(own) - 1
    return Signature([own], [(own[channels],)], 'sum')


def bias_add(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`BiasAdd`: row by row."""
    own = labels(op.inputs[0], sizes)
    channels = 1 if op.get_attr('data_format') == b'NCHW' else len(own) - 1
    return Signature([own, (own[channels],)], [own])


def along_last(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Softmax and top-k: each vector along the last dimension by itself."""
    own = labels(op.inputs[0], sizes)
    if not own:
        return None
    row = without(own, [len(own) - 1])
    return Signature([row] + [WHOLE] * (len(op.inputs) - 1), [row] * len(op.outputs))


def along_axis(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Cumulative sums and reversals: along the dimensions that an input names."""
    own = labels(op.inputs[0], sizes)
    numbers = sizes.numbers(op.inputs[1])
    if numbers is None or not own:
        return None
    row = without(own, [a % len(own) for a in numbers])
    return Signature([row, WHOLE], [row])


def arg_extreme(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`ArgMax`: which entry along a dimension that goes away."""
    own = labels(op.inputs[0], sizes)
    along = axis(op, 1, sizes, len(own))
    if along is None:
        return None
    row = without(own, [along])
    return Signature([row, WHOLE], [row[:along] + row[along + 1 :]])


def cross_entropy(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """A loss for each row, and the gradient of the logits."""
    inputs = [('row', None), ('row',) if rank(op.inputs[1], sizes) == 1 else ('row', None)]
    return Signature(inputs, [('row',), ('row', None)])


def in_top_k(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Whether a row's target is among its best."""
    inputs = [('row', None), ('row',), WHOLE]
    return Signature(inputs[: len(op.inputs)], [('row',)])


def reverse_sequence(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Each sequence by its own length."""
    own = labels(op.inputs[0], sizes)
    row = without(own, [op.get_attr('seq_dim')])
    return Signature([row, (row[op.get_attr('batch_dim')],)], [row])


def roll(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`Roll`: along the dimensions that its third input names."""
    own = labels(op.inputs[0], sizes)
    numbers = sizes.numbers(op.inputs[2])
    if numbers is None or not own:
        return None
    row = without(own, [a % len(own) for a in numbers])
    return Signature([row, WHOLE, WHOLE], [row])


def matrices(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Each matrix, in the last two dimensions, by itself; the others are broadcast."""
    lead = max(rank(t, sizes) for t in op.inputs) - 2
    inputs = [
        tuple(rank(t, sizes) - 2 - i for i in range(rank(t, sizes) - 2)) + (None, None)
        for t in op.inputs
    ]
    own = tuple(range(lead, 0, -1))
    return Signature(inputs, [own + (None,) * (rank(t, sizes) - lead) for t in op.outputs])


def matrix(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """The same, of the first input; the others are whole."""
    own = _leading(op.inputs[0], sizes)
    outputs = [own[:-2] + (None,) * (rank(t, sizes) - len(own) + 2) for t in op.outputs]
    return Signature([own] + [WHOLE] * (len(op.inputs) - 1), outputs)


def _leading(tensor: tf.Tensor, sizes: Sizes) -> tuple[Label, ...]:
    own = labels(tensor, sizes)
    return without(own, range(len(own) - 2, len(own)))


_REDUCTIONS = {
    'Sum': 'sum',
    'Mean': 'mean',
    'Max': 'max',
    'Min': 'min',
    'Prod': 'prod',
    'All': 'all',
    'Any': 'any',
}

_MATRICES = """
    Cholesky CholeskyGrad MatrixDeterminant MatrixDiagPart MatrixInverse MatrixSolve
    MatrixTriangularSolve SelfAdjointEigV2
"""

RULES: dict[str, Rule] = {
    **{name: functools.partial(reduction, reduce=how) for name, how in _REDUCTIONS.items()},
    'L2Loss': of_all,
    'BiasAddGrad': of_channels,
    'BiasAdd': bias_add,
    **dict.fromkeys(['Softmax', 'LogSoftmax', 'TopKV2'], along_last),
    **dict.fromkeys(['Cumsum', 'Cumprod', 'ReverseV2', 'CumulativeLogsumexp'], along_axis),
    **dict.fromkeys(['ArgMax', 'ArgMin'], arg_extreme),
    'SoftmaxCrossEntropyWithLogits': cross_entropy,
    'SparseSoftmaxCrossEntropyWithLogits': cross_entropy,
    'InTopKV2': in_top_k,
    'InTopK': in_top_k,
    'ReverseSequence': reverse_sequence,
    'Roll': roll,
    **dict.fromkeys(_MATRICES.split(), matrices),
    **dict.fromkeys(['MatrixBandPart', 'MatrixDiagPartV2', 'MatrixDiagPartV3'], matrix),
}
