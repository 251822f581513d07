"""Rules that take more than a text: where an op's dimensions go is worked out."""

from __future__ import annotations

import itertools
import string
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import FULL, Constant, Label, SizesOf
from estimator_mgpu.partition.rules.notation import Rule, Signature, letters, rank, require
from estimator_mgpu.partition.sizes import ONE, Size, per_row, product

if TYPE_CHECKING:
    from estimator_mgpu.partition.size_inference import Sizes


def axes(op: tf.Operation, named: int | str, sizes: Sizes, count: int) -> list[int]:
    """The dimensions that an input or an attribute names, from 0."""
    given = sizes.numbers(op.inputs[named]) if isinstance(named, int) else op.get_attr(named)
    return sorted({n % count for n in np.ravel(require(given)).tolist() if count})


def along(named: int | str, text: str) -> Rule:
    """A rule by which dimensions are whole that an input or an attribute names.

    In the text `all` is a word for what has them, and `left` one for what has all others.
    """
    at, word = next((i, w) for i, w in enumerate(text.split()) if w.strip('+') in ('all', 'left'))

    def rule(op: tf.Operation, sizes: Sizes) -> str:
        count = rank(op.inputs[at], sizes) + word.startswith('left')
        row = letters(count, axes(op, named, sizes, count))
        return text.replace('all', row).replace('left', row.replace('_', '') or '*')

    return rule


def reduction(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Over rows it gives a part of the result; over other dimensions it goes row by row."""
    own = range(rank(op.inputs[0], sizes))
    gone = axes(op, 1, sizes, len(own))
    if op.type == 'Mean' and not op.inputs[0].dtype.is_floating:
        return None  # A mean of integers is rounded.
    kept = own if op.get_attr('keep_dims') else [i for i in own if i not in gone]
    made = tuple(None if i in gone else i for i in kept)
    # The numbers: where the graph computes these, with one row they would come out otherwise.
    return Signature([tuple(own), Constant(tuple(gone))], [made], reduce=op.type.lower())


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


def transpose(op: tf.Operation, sizes: Sizes) -> Signature:
    """Dimensions change places."""
    own, order = range(rank(op.inputs[0], sizes)), require(sizes.numbers(op.inputs[1]))
    made = tuple(own[i] for i in order)
    return Signature([tuple(own), Constant(tuple(order))], [made])


def ensure_shape(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Sharded along dimensions for which the shape asks nothing new; towers check the others.

    What has to be so of all rows is ensured once; what comes out has these rows.
    """
    dims, shape = require(sizes.dims(op.inputs[0])), tf.TensorShape(op.get_attr('shape'))
    if shape.rank != len(dims):
        return None
    ensured = shape.as_list()
    own = tuple(i if n in (None, dims[i].static) else None for i, n in enumerate(ensured))
    left = [n if label is None else None for n, label in zip(ensured, own)]
    made = [size if n is None or size.rows else Size(n) for n, size in zip(ensured, dims)]
    return Signature([own], [own], dims=[made], attrs={'shape': tf.TensorShape(left)})


def reverse_sequence(op: tf.Operation, sizes: Sizes) -> str:
    """Each sequence by its own length."""
    row = letters(rank(op.inputs[0], sizes), [op.get_attr('seq_dim')])
    return f'{row} {row[op.get_attr("batch_dim")]} -> {row}'


def gather(op: tf.Operation, sizes: Sizes) -> str:
    """`GatherV2`: each index by itself; leading batch dimensions go together."""
    [at] = axes(op, 2, sizes, rank(op.inputs[0], sizes))
    before = letters(at).strip('*')
    return f'{before}_P {before[: op.get_attr("batch_dims")]}I * -> {before}IP'


def segments(op: tf.Operation, sizes: Sizes) -> str:
    """Where the rows themselves tell how many segments there are, these are as large as they."""
    require(sizes.numbers(op.inputs[2]))
    return f'I... I * -> * ({op.type.removeprefix("UnsortedSegment").lower()})'


def reshape(op: tf.Operation, sizes: Sizes) -> Signature:
    """A dimension keeps its rows if what comes before it has as many entries as before.

    Entries are in row-major order: where the products of the dimensions before are equal, and both
    dimensions are a multiple of the rows, each row is the same contiguous block in both. Where it's
    only known when the step runs whether they are, nothing is divided along them.
    """
    before, after = require(sizes.dims(op.inputs[0])), require(sizes.entries(op.inputs[1]))
    if Size(-1) in after:  # is what is left
        at, left = after.index(Size(-1)), product(before).over(product(after) * Size(-1))
        after[at] = left or sizes.unknown_dim(op.outputs[0], at)
    static = sizes.static_dims(op.outputs[0], len(after))
    after = [size if d.symbols or size.rows else d for d, size in zip(static, after)]
    own: list[Label] = [None] * len(before)
    new: list[Label] = [None] * len(after)
    for (i, a), (j, b) in itertools.product(*map(enumerate, map(_begins, (before, after)))):
        begin = ONE not in (a, b) and _go_together(a, b)
        if begin and product(before[:i]).same_as(product(after[:j])):
            own[i] = new[j] = i
    return Signature([tuple(own), SizesOf(tuple(new))], [tuple(new)], dims=[after])


def _begins(dims: list[Size]) -> list[Size]:
    """Dimensions, but 1 for those without rows if others have any: then no rows begin there."""
    return [d if d.rows else ONE for d in dims] if any(d.rows for d in dims) else dims


def _go_together(a: Size, b: Size) -> bool:
    """Whether dimensions are one, or multiples of the same rows; numbers are compared with rows."""
    if rows := a.rows or b.rows:
        return per_row(a, rows) is not None and per_row(b, rows) is not None
    return a.same_as(b) or None not in (a.static, b.static)


def strided_slice(op: tf.Operation, sizes: Sizes) -> Signature:
    """Along the dimensions that are taken whole; and its gradient, by the sizes of what was sliced.

    Both have begins, ends and strides as their second to fourth inputs. NumPy, given dimensions of
    2, 3, 4, ..., tells which of them come out where; what isn't taken whole is of size 1.
    """
    backward = op.type == 'StridedSliceGrad'
    dims = require(sizes.entries(op.inputs[0]) if backward else sizes.dims(op.inputs[0]))
    begin, end, stride = (require(sizes.entries(t)) for t in list(op.inputs)[1:4])

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
        return Signature([SizesOf(own), FULL, FULL, FULL, made], [own])
    ends = [own[axes[i]] if i in axes and not has('end', i) else None for i in range(len(end))]
    return Signature([own, FULL, SizesOf(tuple(ends)), FULL], [made])


def slice_(op: tf.Operation, sizes: Sizes) -> Signature:
    """`Slice`: along the dimensions that are taken from the first to the last entry."""
    begin, size = (require(sizes.entries(t)) for t in list(op.inputs)[1:])
    dims = require(sizes.dims(op.inputs[0]))
    whole = [b == Size(0) and (s == Size(-1) or s.same_as(d)) for b, s, d in zip(begin, size, dims)]
    own = tuple(i if taken else None for i, taken in enumerate(whole))
    return Signature([own, FULL, SizesOf(own)], [own])


def pad(op: tf.Operation, sizes: Sizes) -> str:
    """`Pad` and `MirrorPad`: along the dimensions that nothing is added to."""
    numbers = require(sizes.numbers(op.inputs[1]))
    row = letters(rank(op.inputs[0], sizes), [i // 2 for i, n in enumerate(numbers) if n])
    return f'{row} *+ -> {row}'


def tile(op: tf.Operation, sizes: Sizes) -> Signature:
    """Along the dimensions that aren't repeated; and rows made of what is there once."""
    dims, multiples = require(sizes.dims(op.inputs[0])), require(sizes.entries(op.inputs[1]))
    given = list(enumerate(zip(dims, multiples)))
    kept = tuple(i if n == ONE else None for i, (_, n) in given)
    made = tuple(i if d == ONE != n else None for i, (d, n) in given)
    new = tuple(i if ONE in (d, n) else None for i, (d, n) in given)
    return Signature([kept, SizesOf(made)], [new], dims=[[d * n for d, n in zip(dims, multiples)]])


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
