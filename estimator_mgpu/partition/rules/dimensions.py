"""Rules that take more than a text: where an op's dimensions go is worked out."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import WHOLE, Entries, Label, Numbers
from estimator_mgpu.partition.symbols import ONE, Size, per_row, product
from .signature import Operand, Rule, Signature, letters, rank
from .sizes import Sizes


def axes(op: tf.Operation, named: int | str, sizes: Sizes, count: int) -> list[int] | None:
    """The dimensions that an input or an attribute names, from 0; None if the graph can't tell."""
    numbers = sizes.numbers(op.inputs[named]) if isinstance(named, int) else op.get_attr(named)
    numbers = [numbers] if isinstance(numbers, int) else numbers
    return None if numbers is None else sorted({n % count for n in numbers if count})


def along(named: int | str, text: str) -> Rule:
    """A rule by which dimensions are whole that an input or an attribute names.

    In the text `all` is a word for what has them, and `left` one for what has all others.
    """
    at, word = next((i, w) for i, w in enumerate(text.split()) if w.strip('+') in ('all', 'left'))

    def rule(op: tf.Operation, sizes: Sizes) -> str | None:
        count = rank(op.inputs[at], sizes) + word.startswith('left')
        if (gone := axes(op, named, sizes, count)) is None:
            return None
        row = letters(count, gone)
        return text.replace('all', row).replace('left', row.replace('_', '') or '*')

    return rule


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


def reshape(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """A dimension keeps its rows if what comes before it has as many entries as before.

    Entries are in row-major order: where the products of the dimensions before are equal, and both
    dimensions are a multiple of the rows, each row is the same contiguous block in both. Where it's
    only known when the step runs whether they are, nothing is divided along them.
    """
    before, after = sizes.dims(op.inputs[0]), sizes.entries(op.inputs[1])
    if before is None or after is None:
        return None
    if Size(-1) in after:  # is what is left
        at, left = after.index(Size(-1)), product(before).over(product(after) * Size(-1))
        after[at] = left or sizes.unknown(op.outputs[0], at)
    static = sizes.static_dims(op.outputs[0], len(after))
    after = [size if d.symbols or size.rows else d for d, size in zip(static, after)]
    own: list[Label] = [None] * len(before)
    new: list[Label] = [None] * len(after)
    has_rows = [any(size.rows for size in dims) for dims in (before, after)]
    for (i, a), (j, b) in itertools.product(enumerate(before), enumerate(after)):
        # Of size 1, a dimension begins nothing.
        begin = ONE not in (a, b) and _go_together(a, b, has_rows)
        if begin and product(before[:i]).same_as(product(after[:j])):
            own[i] = new[j] = i
    return Signature([tuple(own), Entries(tuple(new))], [tuple(new)], dims=[after])


def _go_together(a: Size, b: Size, told: Sequence[bool]) -> bool:
    """Whether dimensions are one, or multiples of the same rows; numbers are compared with rows.

    Not so those of a tensor of which the graph has `told` which dimensions have rows.
    """
    rows = a.rows or b.rows
    if rows is None:
        return a.same_as(b) or None not in (a.static, b.static)
    if (told[0] and not a.rows) or (told[1] and not b.rows):
        return False
    return per_row(a, rows) is not None and per_row(b, rows) is not None


def strided_slice(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Along the dimensions that are taken whole; and its gradient, by the sizes of what was sliced.

    Both have begins, ends and strides as their second to fourth inputs. NumPy, given dimensions of
    2, 3, 4, ..., tells which of them come out where; what isn't taken whole is of size 1.
    """
    backward = op.type == 'StridedSliceGrad'
    dims = sizes.entries(op.inputs[0]) if backward else sizes.dims(op.inputs[0])
    begin, end, stride = (sizes.entries(t) for t in list(op.inputs)[1:4])
    if dims is None or begin is None or end is None or stride is None:
        return None

    def has(mask: str, i: int) -> bool:
        return bool(op.get_attr(f'{mask}_mask') >> i & 1)

    index: list[Any] = [... if has('ellipsis', i) else None for i in range(len(begin))]
    named = [i for i, at in enumerate(index) if at is None and not has('new_axis', i)]
    past = index.index(...) if ... in index else len(index)
    axes = {i: n + (i > past) * (len(dims) - len(named)) for n, i in enumerate(named)}
    for i, axis in axes.items():
        from_0 = has('begin', i) or begin[i] == Size(0)
        to_end = has('end', i) or end[i].same_as(dims[axis])
        whole = from_0 and to_end and stride[i] == ONE
        index[i] = 0 if has('shrink_axis', i) else slice(None) if whole else slice(1)
    left = np.broadcast_to(0, range(2, len(dims) + 2))[tuple(index)].shape
    own = tuple(size if size in left else None for size in range(2, len(dims) + 2))
    made = tuple(size if size > 1 else None for size in left)
    if backward:
        return Signature([Entries(own), WHOLE, WHOLE, WHOLE, made], [own])
    ends = [own[axes[i]] if i in axes and not has('end', i) else None for i in range(len(end))]
    return Signature([own, WHOLE, Entries(tuple(ends)), WHOLE], [made])


def slice_(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`Slice`: along the dimensions that are taken from the first to the last entry."""
    dims = sizes.dims(op.inputs[0])
    begin, size = sizes.entries(op.inputs[1]), sizes.entries(op.inputs[2])
    if dims is None or begin is None or size is None:
        return None
    whole = [b == Size(0) and (s == Size(-1) or s.same_as(d)) for b, s, d in zip(begin, size, dims)]
    own = tuple(i if taken else None for i, taken in enumerate(whole))
    return Signature([own, WHOLE, Entries(own)], [own])


def pad(op: tf.Operation, sizes: Sizes) -> str | None:
    """`Pad` and `MirrorPad`: along the dimensions that nothing is added to."""
    if (numbers := sizes.numbers(op.inputs[1])) is None:
        return None
    row = letters(rank(op.inputs[0], sizes), [i // 2 for i, n in enumerate(numbers) if n])
    return f'{row} *+ -> {row}'


def tile(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Along the dimensions that aren't repeated; and rows made of what is there once."""
    dims, multiples = sizes.dims(op.inputs[0]), sizes.entries(op.inputs[1])
    if dims is None or multiples is None:
        return None
    given = list(enumerate(zip(dims, multiples)))
    kept = tuple(i if n == ONE else None for i, (_, n) in given)
    made = tuple(i if d == ONE != n else None for i, (d, n) in given)
    new = tuple(i if ONE in (d, n) else None for i, (d, n) in given)
    return Signature([kept, Entries(made)], [new], dims=[[d * n for d, n in zip(dims, multiples)]])


def matmul(op: tf.Operation, sizes: Sizes) -> str:
    """Products of matrices, which attributes transpose."""
    a, b = ('transpose_a', 'transpose_b') if op.type == 'MatMul' else ('adj_x', 'adj_y')
    one, two = 'km' if op.get_attr(a) else 'mk', 'nk' if op.get_attr(b) else 'kn'
    return f'S{one} S{two} -> Smn (sum)'


def einsum(op: tf.Operation, sizes: Sizes) -> str | None:
    """`Einsum`: by its equation, whose ellipsis is matched from the last too."""
    equation = op.get_attr('equation').decode().replace(' ', '').replace('...', '.')
    terms = equation.replace('->', ',').split(',')
    if any(term.count(c) > 1 for term in terms for c in term):
        return None  # A diagonal.
    named = zip(sorted(set(equation) - set('.,->')), string.ascii_lowercase)
    letters = {'.': 'S', **dict(named)}
    *given, made = (''.join(letters[c] for c in term) or '*' for term in terms)
    return f'{" ".join(given)} -> {made} (sum)'


def select(op: tf.Operation, sizes: Sizes) -> str:
    """The older `Select`: its condition is a scalar, as large as the rest, or one for each row."""
    return 'n nS nS -> nS' if rank(op.inputs[0], sizes) == 1 else 'S S S -> S'


def unseeded(op: tf.Operation, sizes: Sizes) -> str | None:
    """Random numbers without a seed: others are drawn once, all in the order of one device."""
    return None if op.get_attr('seed') or op.get_attr('seed2') else '#S -> S'


def each(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`IdentityN`, of which custom gradients are made: whatever has rows keeps them."""
    if any(t.dtype.base_dtype in (tf.resource, tf.variant) for t in op.inputs):
        return None
    shapes = [sizes.dims(t) for t in op.inputs]
    rows = [[size.rows for size in shape or []] for shape in shapes]
    own = [tuple(r if r not in of[:i] else None for i, r in enumerate(of)) for of in rows]
    return Signature(own, own, dims=shapes)
