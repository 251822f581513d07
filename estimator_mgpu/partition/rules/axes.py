"""Ops that are told where: dimensions to reduce, go along, join or bring in; entries to take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import WHOLE, Numbers
from .signature import Operand, Rule, Signature, by, letters, rank
from .sizes import Sizes


def axes(op: tf.Operation, named: int | str, sizes: Sizes, count: int) -> list[int] | None:
    """The dimensions that an input or an attribute names, from 0; None if the graph can't tell."""
    numbers = sizes.numbers(op.inputs[named]) if isinstance(named, int) else op.get_attr(named)
    numbers = [numbers] if isinstance(numbers, int) else numbers
    return None if numbers is None else sorted({n % count for n in numbers if count})


def along(op: tf.Operation, sizes: Sizes, named: int | str, text: str) -> str | None:
    """Named dimensions are whole; along all others it goes row by row.

    `named` is the input or the attribute that names them. In the text `all` is a word for what has
    them, and `left` one for what has all others.
    """
    at, word = next((i, w) for i, w in enumerate(text.split()) if w.strip('+') in ('all', 'left'))
    count = rank(op.inputs[at], sizes) + word.startswith('left')
    if (gone := axes(op, named, sizes, count)) is None:
        return None
    row = letters(count, gone)
    return text.replace('all', row).replace('left', row.replace('_', '') or '*')


def reduction(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Over rows it gives a part of the result; over other dimensions it goes row by row."""
    own = range(rank(op.inputs[0], sizes))
    gone = axes(op, 1, sizes, len(own))
    if gone is None or (op.type == 'Mean' and not op.inputs[0].dtype.is_floating):
        return None  # A mean of integers is rounded.
    kept = own if op.get_attr('keep_dims') else [i for i in own if i not in gone]
    made = tuple(None if i in gone else i for i in kept)
    return Signature([tuple(own), _known(op.inputs[1], gone)], [made], reduce=op.type.lower())


def _known(tensor: tf.Tensor, numbers: Sequence[int]) -> Operand:
    """Known numbers where the graph computes them: with one row they would come out otherwise."""
    return WHOLE if tensor.op.type == 'Const' else Numbers(tuple(numbers))


def squeeze(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Dimensions of size 1 go; which ones is told to towers, where rows may be one."""
    own = range(rank(op.inputs[0], sizes))
    gone = axes(op, 'squeeze_dims', sizes, len(own))
    if not gone:
        static = [size.static for size in sizes.dims(op.inputs[0]) or []]
        gone = [i for i, size in enumerate(static) if size == 1]
        if not gone or None in static:
            return None
    row = tuple(None if i in gone else i for i in own)
    left = tuple(i for i in own if i not in gone)
    return Signature([row], [left], attrs={'squeeze_dims': gone})


def transpose(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Dimensions change places."""
    own, order = range(rank(op.inputs[0], sizes)), sizes.numbers(op.inputs[1])
    if order is None:
        return None
    made = tuple(own[i] for i in order)
    return Signature([tuple(own), _known(op.inputs[1], order)], [made])


def reverse_sequence(op: tf.Operation, sizes: Sizes) -> str:
    """Each sequence by its own length."""
    row = letters(rank(op.inputs[0], sizes), [op.get_attr('seq_dim')])
    return f'{row} {row[op.get_attr("batch_dim")]} -> {row}'


def gather(op: tf.Operation, sizes: Sizes) -> str | None:
    """`GatherV2`: each index by itself; leading batch dimensions go together."""
    if (at := axes(op, 2, sizes, rank(op.inputs[0], sizes))) is None:
        return None
    before = letters(at[0]).strip('*')
    return f'{before}_P {before[: op.get_attr("batch_dims")]}I * -> {before}IP'


def segments(op: tf.Operation, sizes: Sizes) -> str | None:
    """Where the rows themselves tell how many segments there are, these are as large as they."""
    reduce = op.type[len('UnsortedSegment') :].lower()
    return None if sizes.numbers(op.inputs[2]) is None else f'I... I * -> * ({reduce})'


RULES: dict[str, Rule] = {
    'All Any Max Mean Min Prod Sum': reduction,
    'L2Loss': 'S -> * (sum)',
    'Cumsum Cumprod CumulativeLogsumexp ReverseV2': partial(along, named=1, text='all * -> all'),
    'Roll': partial(along, named=2, text='all * * -> all'),
    'ReverseSequence': reverse_sequence,
    'ConcatV2': partial(along, named=-1, text='all+ * -> all'),
    'Split': partial(along, named=0, text='* all -> all+'),
    'SplitV': partial(along, named=2, text='all * * -> all+'),
    'ArgMax ArgMin': partial(along, named=1, text='all * -> left'),
    'Unpack': partial(along, named='axis', text='all -> left+'),
    'Pack': partial(along, named='axis', text='left+ -> all'),
    'ExpandDims': partial(along, named=1, text='left * -> all'),
    'OneHot': partial(along, named='axis', text='left * * * -> all'),
    'Squeeze': squeeze,
    'Transpose ConjugateTranspose': transpose,
    'Gather': '_P I -> IP',
    'GatherV2': gather,
    'ResourceGather': by('batch_dims', {0: '* I -> I...'}),
    'GatherNd ResourceGatherNd': '* I_ -> I...',
    'LookupTableFind LookupTableFindV2': '* S * -> S...',
    'UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum': segments,
}
