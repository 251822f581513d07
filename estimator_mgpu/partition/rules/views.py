"""Ops that arrange entries anew, by sizes: reshapes, slices, pads, tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import WHOLE, Entries, Label
from estimator_mgpu.partition.symbols import ONE, Size, per_row, product
from .signature import Rule, Signature, labels, without
from .sizes import Sizes


def reshape(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """A dimension keeps its rows if what comes before it has as many entries as before.

    Entries are in row-major order: where the products of the dimensions before are equal, and both
    dimensions are a multiple of the rows, each row is the same contiguous block in both. Where it's
    only known when the step runs whether they are, nothing is divided along them.
    """
    before, told = sizes.dims(op.inputs[0]), sizes.entries(op.inputs[1])
    if before is None or told is None:
        return None
    after = _reshaped(op, sizes, before, told)
    own: list[Label] = [None] * len(before)
    new: list[Label] = [None] * len(after)
    has_rows = [any(size.rows for size in dims) for dims in (before, after)]
    for i, size in enumerate(before):
        for j in range(len(after)):  # Of size 1, a dimension begins nothing.
            begin = ONE not in (size, after[j]) and _go_together(size, after[j], has_rows)
            if begin and product(before[:i]).same_as(product(after[:j])):
                own[i] = new[j] = f'{i}'
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


def _reshaped(
    op: tf.Operation, sizes: Sizes, before: Sequence[Size], after: list[Size]
) -> list[Size]:
    """The dimensions after a reshape, of what it's told; -1 is what is left."""
    for i, size in enumerate(after):
        if size == Size(-1):
            left = product(before).over(product(after[:i] + after[i + 1 :]))
            after[i] = left or sizes.unknown(op.outputs[0], i)
    known = sizes.static_dims(op.outputs[0], len(after))
    return [size if d.symbols or size.rows else d for d, size in zip(known, after)]


def strided_slice(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Along the dimensions that are taken whole; and its gradient, by the sizes of what was sliced.

    Both have begins, ends and strides as their second to fourth inputs. NumPy, given dimensions of
    2, 3, 4, ..., tells which of them come out where; what isn't taken whole is of size 1.
    """
    backward = op.type == 'StridedSliceGrad'
    dims = sizes.entries(op.inputs[0]) if backward else sizes.dims(op.inputs[0])
    count = op.inputs[1].shape.num_elements()
    if dims is None or count is None:
        return None
    begin, end, stride = (sizes.entries(t) for t in list(op.inputs)[1:4])
    index: list[Any] = []
    ends: list[int | None] = []  # which dimension's size each end is
    new = op.get_attr('ellipsis_mask') | op.get_attr('new_axis_mask')
    named = [i for i in range(count) if not new >> i & 1]
    for i in range(count):
        past = op.get_attr('ellipsis_mask') & ((1 << i) - 1)
        at = len(dims) - sum(k >= i for k in named) if past else sum(k < i for k in named)
        ends.append(None if i not in named or _has(op, 'end', i) else at)
        if i not in named:
            index.append(... if _has(op, 'ellipsis', i) else None)
        elif _has(op, 'shrink_axis', i):
            index.append(0)
        else:
            from_0 = _has(op, 'begin', i) or (begin is not None and begin[i] == Size(0))
            to_end = _has(op, 'end', i) or (end is not None and end[i].same_as(dims[at]))
            each = stride is not None and stride[i] == ONE
            index.append(slice(None) if from_0 and to_end and each else slice(1))
    left = np.broadcast_to(0, range(2, len(dims) + 2))[tuple(index)].shape
    own = tuple(f'{size}' if size in left else None for size in range(2, len(dims) + 2))
    made = tuple(f'{size}' if size > 1 else None for size in left)
    if backward:
        return Signature([Entries(own), WHOLE, WHOLE, WHOLE, made], [own])
    known = Entries(tuple(None if at is None else own[at] for at in ends))
    return Signature([own, WHOLE, known, WHOLE], [made])


def _has(op: tf.Operation, mask: str, i: int) -> bool:
    return bool(op.get_attr(f'{mask}_mask') >> i & 1)


def slice_(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`Slice`: along the dimensions that are taken from the first to the last entry."""
    dims = sizes.dims(op.inputs[0])
    begin, size = sizes.entries(op.inputs[1]), sizes.entries(op.inputs[2])
    if dims is None or begin is None or size is None:
        return None
    whole = [b == Size(0) and (s == Size(-1) or s.same_as(d)) for b, s, d in zip(begin, size, dims)]
    own = tuple(f'{i}' if taken else None for i, taken in enumerate(whole))
    return Signature([own, WHOLE, Entries(own)], [own])


def pad(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`Pad` and `MirrorPad`: along the dimensions that nothing is added to."""
    if (numbers := sizes.numbers(op.inputs[1])) is None:
        return None
    own = without(labels(op.inputs[0], sizes), [i // 2 for i, n in enumerate(numbers) if n])
    return Signature([own] + [WHOLE] * (len(op.inputs) - 1), [own])


def tile(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Along the dimensions that aren't repeated; and rows made of what is there once."""
    dims, multiples = sizes.dims(op.inputs[0]), sizes.entries(op.inputs[1])
    if dims is None or multiples is None:
        return None
    kept = tuple(f'{i}' if n == ONE else None for i, n in enumerate(multiples))
    made = tuple(f'{i}' if d == ONE != n else None for i, (d, n) in enumerate(zip(dims, multiples)))
    new = tuple(one or other for one, other in zip(kept, made))
    after = [d * n for d, n in zip(dims, multiples)]
    return Signature([kept, Entries(made)], [new], dims=[after])


RULES: dict[str, Rule] = {
    'Reshape': reshape,
    'StridedSlice StridedSliceGrad': strided_slice,
    'Slice': slice_,
    'Pad PadV2 MirrorPad MirrorPadGrad': pad,
    'Tile': tile,
}
