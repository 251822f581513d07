"""Ops that only arrange entries anew."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules.signature import (
    WHOLE,
    Entries,
    Fixed,
    Label,
    Operand,
    Rule,
    Signature,
    axis,
    labels,
    rank,
    without,
)
from estimator_mgpu.partition.sizes import ONE, Size, Sizes, product


def reshape(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """A dimension keeps its rows if what comes before it has as many entries as before.

    Entries are in row-major order: where the products of the dimensions before are equal, and both
    dimensions are a multiple of the rows, each row is the same contiguous block in both.
    """
    before = sizes.dims(op.inputs[0])
    after = _reshaped(op, sizes, before) if before is not None else None
    if before is None or after is None:
        return None
    own: list[Label] = [None] * len(before)
    new: list[Label] = [None] * len(after)
    for i in _beginnings(before):
        if before[i].rows is None and before[i].static is None:
            continue
        for j in _beginnings(after):
            if product(before[:i]).same_as(product(after[:j])):
                own[i] = new[j] = f'{i}'
    return Signature([tuple(own), Entries(tuple(new))], [tuple(new)], dims=[after])


def _beginnings(dims: Sequence[Size]) -> list[int]:
    """Where something may begin: each dimension but those of size 1."""
    return [i for i, size in enumerate(dims) if size != ONE]


def _reshaped(op: tf.Operation, sizes: Sizes, before: Sequence[Size]) -> list[Size] | None:
    """The dimensions after a reshape; -1 is what is left."""
    after = sizes.entries(op.inputs[1])
    if after is None:
        return None
    free = [i for i, size in enumerate(after) if size == Size(-1)]
    for i in free:
        left = product(before).over(product([size for k, size in enumerate(after) if k != i]))
        after[i] = left or sizes.unknown(op.outputs[0], i)
    known = op.outputs[0].shape.as_list() if op.outputs[0].shape.rank is not None else after
    return [
        Size(d) if isinstance(d, int) and size.rows is None else size
        for d, size in zip(known, after)
    ]


def transpose(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Dimensions change places."""
    order = sizes.numbers(op.inputs[1])
    if order is None:
        return None
    own = labels(op.inputs[0], sizes)
    known: Operand = WHOLE if op.inputs[1].op.type == 'Const' else Fixed(tuple(order))
    return Signature([own, known], [tuple(own[i] for i in order)])


def expand_dims(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """A dimension of size 1 comes in."""
    own = labels(op.inputs[0], sizes)
    at = axis(op, 1, sizes, len(own) + 1)
    if at is None:
        return None
    return Signature([own, WHOLE], [own[:at] + (None,) + own[at:]])


def squeeze(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Dimensions of size 1 go; which ones is told to towers, where rows may be one."""
    own = labels(op.inputs[0], sizes)
    gone = [i % len(own) for i in op.get_attr('squeeze_dims')]
    dims = sizes.dims(op.inputs[0]) or []
    if not gone:
        gone = [i for i, size in enumerate(dims) if size.static == 1]
        if not gone or any(size.static is None for size in dims):
            return None
    kept = tuple(label for i, label in enumerate(own) if i not in gone)
    return Signature([without(own, gone)], [kept], attrs={'squeeze_dims': gone})


def pack(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Tensors become the entries of a new dimension."""
    own = labels(op.inputs[0], sizes)
    at = op.get_attr('axis') % (len(own) + 1)
    return Signature([own] * len(op.inputs), [own[:at] + (None,) + own[at:]])


def unpack(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """The entries of a dimension become tensors."""
    own = labels(op.inputs[0], sizes)
    at = op.get_attr('axis') % len(own)
    return Signature([without(own, [at])], [own[:at] + own[at + 1 :]] * len(op.outputs))


def concat(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """One after another along a dimension, which is whole."""
    *tensors, _ = op.inputs
    own = labels(op.outputs[0], sizes)
    along = axis(op, len(tensors), sizes, len(own))
    if along is None:
        return None
    row = without(own, [along])
    return Signature([row] * len(tensors) + [WHOLE], [row])


def split(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`Split` and `SplitV`: along a dimension, which is whole."""
    value, along = (1, 0) if op.type == 'Split' else (0, 2)
    own = labels(op.inputs[value], sizes)
    at = axis(op, along, sizes, len(own))
    if at is None:
        return None
    row = without(own, [at])
    inputs: list[Operand] = [WHOLE] * len(op.inputs)
    inputs[value] = row
    return Signature(inputs, [row] * len(op.outputs))


def _sliced(
    op: tf.Operation, sizes: Sizes, dims: Sequence[Size], at: int
) -> tuple[list[int | None], set[int]] | None:
    """What a strided slice makes of each dimension.

    Args:
      op: a StridedSlice, or its gradient.
      sizes: what is known of sizes.
      dims: of what is sliced.
      at: which input is the begin; end and strides come next.

    Returns:
      For each dimension of the result the one that it is of, or None for a new one; and which
      dimensions are whole.
    """
    begin, end, stride = (sizes.entries(t) for t in list(op.inputs)[at : at + 3])
    masks = {k: op.get_attr(f'{k}_mask') for k in ('begin', 'end', 'ellipsis', 'new_axis')}
    shrink = op.get_attr('shrink_axis_mask')
    n = op.inputs[at].shape.num_elements()
    if n is None:
        return None
    named = [i for i in range(n) if not (masks['ellipsis'] | masks['new_axis']) >> i & 1]
    result: list[int | None] = []
    full: set[int] = set()
    axis = 0

    def take(count: int) -> None:
        nonlocal axis
        for _ in range(count):
            full.add(axis)
            result.append(axis)
            axis += 1

    for i in range(n):
        if masks['ellipsis'] >> i & 1:
            take(len(dims) - len(named))
        elif masks['new_axis'] >> i & 1:
            result.append(None)
        elif shrink >> i & 1:
            axis += 1
        else:
            from_0 = masks['begin'] >> i & 1 or (begin is not None and begin[i] == Size(0))
            to_end = masks['end'] >> i & 1 or (end is not None and end[i].same_as(dims[axis]))
            if from_0 and to_end and stride is not None and stride[i] == ONE:
                full.add(axis)
            result.append(axis)
            axis += 1
    take(len(dims) - axis)
    return result, full


def strided_slice(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Along the dimensions that are taken whole."""
    dims = sizes.dims(op.inputs[0])
    found = _sliced(op, sizes, dims, 1) if dims is not None else None
    if dims is None or found is None:
        return None
    result, full = found
    own = without(labels(op.inputs[0], sizes), [i for i in range(len(dims)) if i not in full])
    new = tuple(None if i is None else own[i] for i in result)
    return Signature([own, WHOLE, Entries(_ends(op, own)), WHOLE], [new])


def _ends(op: tf.Operation, own: Sequence[Label]) -> tuple[Label, ...]:
    """The labels of the ends that are given as sizes; others are whole, or the last there is."""
    masks = {name: op.get_attr(f'{name}_mask') for name in ('end', 'ellipsis', 'new_axis')}
    if masks['ellipsis'] or masks['new_axis']:
        return ()
    n = op.inputs[2].shape.num_elements() or 0
    return tuple(None if masks['end'] >> i & 1 else own[i] for i in range(n))


def strided_slice_gradient(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """The gradient of a strided slice, by the sizes of what was sliced."""
    dims = sizes.entries(op.inputs[0])
    found = _sliced(op, sizes, dims, 1) if dims is not None else None
    if dims is None or found is None:
        return None
    result, full = found
    new = tuple(f'{i}' if i in full else None for i in range(len(dims)))
    gradient = tuple(None if i is None else new[i] for i in result)
    return Signature([Entries(new), WHOLE, WHOLE, WHOLE, gradient], [new])


def slice_(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`Slice`: along the dimensions that are taken from the first to the last entry."""
    dims = sizes.dims(op.inputs[0])
    begin, size = sizes.entries(op.inputs[1]), sizes.entries(op.inputs[2])
    if dims is None or begin is None or size is None:
        return None
    whole = [
        i
        for i, d in enumerate(dims)
        if begin[i] == Size(0) and (size[i] == Size(-1) or size[i].same_as(d))
    ]
    own = without(labels(op.inputs[0], sizes), [i for i in range(len(dims)) if i not in whole])
    return Signature([own, WHOLE, Entries(own)], [own])


def pad(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`Pad` and `MirrorPad`: along the dimensions that nothing is added to."""
    numbers = sizes.numbers(op.inputs[1])
    if numbers is None:
        return None
    padded = [i // 2 for i, n in enumerate(numbers) if n]
    own = without(labels(op.inputs[0], sizes), padded)
    return Signature([own] + [WHOLE] * (len(op.inputs) - 1), [own])


def tile(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Along the dimensions that aren't repeated; and rows made of what is there once."""
    dims = sizes.dims(op.inputs[0])
    multiples = sizes.entries(op.inputs[1])
    if dims is None or multiples is None:
        return None
    own: list[Label] = [None] * len(dims)
    entries: list[Label] = [None] * len(dims)
    new: list[Label] = [None] * len(dims)
    after = []
    for i, (d, multiple) in enumerate(zip(dims, multiples)):
        after.append(d * multiple)
        if multiple == ONE:
            own[i] = new[i] = f'{i}'
        elif d == ONE:
            entries[i] = new[i] = f'{i}'
    return Signature([tuple(own), Entries(tuple(entries))], [tuple(new)], dims=[after])


def matrix_diag(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """A matrix for each vector."""
    own = without(labels(op.inputs[0], sizes), [rank(op.inputs[0], sizes) - 1])
    inputs = [own] + [WHOLE] * (len(op.inputs) - 1)
    extra = rank(op.outputs[0], sizes) - len(own)
    return Signature(inputs, [own + (None,) * extra]) if extra == 1 else None


RULES: dict[str, Rule] = {
    'Reshape': reshape,
    'Transpose': transpose,
    'ConjugateTranspose': transpose,
    'ExpandDims': expand_dims,
    'Squeeze': squeeze,
    'Pack': pack,
    'Unpack': unpack,
    'ConcatV2': concat,
    'Split': split,
    'SplitV': split,
    'StridedSlice': strided_slice,
    'StridedSliceGrad': strided_slice_gradient,
    'Slice': slice_,
    **dict.fromkeys(['Pad', 'PadV2', 'MirrorPad', 'MirrorPadGrad'], pad),
    'Tile': tile,
    **dict.fromkeys(['MatrixDiag', 'MatrixDiagV2', 'MatrixDiagV3'], matrix_diag),
}
