"""Ops that are told where: dimensions to reduce, go along, join or bring in; entries to take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import WHOLE, Label, Numbers
from .signature import Operand, Rule, Signature, by, labels, without
from .sizes import Sizes


def axes(op: tf.Operation, named: int | str, sizes: Sizes, rank: int) -> list[int] | None:
    """The dimensions that an input or an attribute names, from 0; None if the graph can't tell."""
    numbers = sizes.numbers(op.inputs[named]) if isinstance(named, int) else op.get_attr(named)
    numbers = [numbers] if isinstance(numbers, int) else numbers
    return None if numbers is None else sorted({n % rank for n in numbers if rank})


def reduction(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Over rows it gives a part of the result; over other dimensions it goes row by row."""
    own = labels(op.inputs[0], sizes)
    gone = axes(op, 1, sizes, len(own))
    if gone is None or (op.type == 'Mean' and not op.inputs[0].dtype.is_floating):
        return None  # A mean of integers is rounded.
    kept = without(own, gone) if op.get_attr('keep_dims') else _less(own, gone)
    return Signature([own, _known(op.inputs[1], gone)], [kept], reduce=op.type.lower())


def _known(tensor: tf.Tensor, numbers: Sequence[int]) -> Operand:
    """Known numbers where the graph computes them: with one row they would come out otherwise."""
    return WHOLE if tensor.op.type == 'Const' else Numbers(tuple(numbers))


def _less(labelled: Sequence[Label], gone: Sequence[int]) -> tuple[Label, ...]:
    """The labels of what is left."""
    return tuple(label for i, label in enumerate(labelled) if i not in gone)


def along(
    op: tf.Operation, sizes: Sizes, named: int | str, tensors: slice = slice(1), then: str = 'stay'
) -> Signature | None:
    """Named dimensions are whole; along all others it goes row by row.

    `named` is the input or the attribute that names them, `tensors` are the inputs that have them
    (others are whole), and `then` is whether they 'stay', 'go', or only 'come' with the output.
    """
    own, *others = (labels(t, sizes) for t in list(op.inputs)[tensors])
    at = axes(op, named, sizes, len(own) + (then == 'come'))
    if at is None or any(other != own for other in others):
        return None
    row = own if then == 'come' else without(own, at)
    made = _less(row, at) if then == 'go' else row
    if then == 'come':
        made = own[: at[0]] + (None,) + own[at[0] :]
    operands: list[Operand] = [WHOLE] * len(op.inputs)
    operands[tensors] = [row] * (1 + len(others))
    return Signature(operands, [made] * len(op.outputs))


def squeeze(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Dimensions of size 1 go; which ones is told to towers, where rows may be one."""
    own = labels(op.inputs[0], sizes)
    gone = axes(op, 'squeeze_dims', sizes, len(own))
    if not gone:
        static = [size.static for size in sizes.dims(op.inputs[0]) or []]
        gone = [i for i, size in enumerate(static) if size == 1]
        if not gone or None in static:
            return None
    return Signature([without(own, gone)], [_less(own, gone)], attrs={'squeeze_dims': gone})


def transpose(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Dimensions change places."""
    if (order := sizes.numbers(op.inputs[1])) is None:
        return None
    own = labels(op.inputs[0], sizes)
    return Signature([own, _known(op.inputs[1], order)], [tuple(own[i] for i in order)])


def reverse_sequence(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Each sequence by its own length."""
    row = without(labels(op.inputs[0], sizes), [op.get_attr('seq_dim')])
    return Signature([row, (row[op.get_attr('batch_dim')],)], [row])


def gather(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`GatherV2`: each index by itself; leading batch dimensions go together."""
    params = labels(op.inputs[0], sizes, 'p')
    named = axes(op, 2, sizes, len(params))
    if named is None:
        return None
    [at], batch = named, op.get_attr('batch_dims')
    indices = params[:batch] + labels(op.inputs[1], sizes, 'i')[batch:]
    own = without(params, [at])
    return Signature([own, indices, WHOLE], [own[:at] + indices[batch:] + own[at + 1 :]])


def segments(op: tf.Operation, sizes: Sizes) -> str | None:
    """Where the rows themselves tell how many segments there are, these are as large as they."""
    reduce = op.type[len('UnsortedSegment') :].lower()
    return None if sizes.numbers(op.inputs[2]) is None else f'I... I * -> * ({reduce})'


RULES: dict[str, Rule] = {
    'All Any Max Mean Min Prod Sum': reduction,
    'L2Loss': 'S -> * (sum)',
    'Cumsum Cumprod CumulativeLogsumexp ReverseV2': partial(along, named=1),
    'Roll': partial(along, named=2),
    'ReverseSequence': reverse_sequence,
    'ConcatV2': partial(along, named=-1, tensors=slice(-1)),
    'Split': partial(along, named=0, tensors=slice(1, 2)),
    'SplitV': partial(along, named=2),
    'ArgMax ArgMin': partial(along, named=1, then='go'),
    'Unpack': partial(along, named='axis', then='go'),
    'Pack': partial(along, named='axis', tensors=slice(None), then='come'),
    'ExpandDims': partial(along, named=1, then='come'),
    'OneHot': partial(along, named='axis', then='come'),
    'Squeeze': squeeze,
    'Transpose ConjugateTranspose': transpose,
    'Gather': '_P I -> IP',
    'GatherV2': gather,
    'ResourceGather': by('batch_dims', {0: '* I -> I...'}),
    'GatherNd ResourceGatherNd': '* I_ -> I...',
    'LookupTableFind LookupTableFindV2': '* S * -> S...',
    'UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum': segments,
}
