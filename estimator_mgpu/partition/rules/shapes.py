"""Ops that arrange entries anew: reshape, transpose, slice, pad, tile, split, join, fill.

Where the rows go is worked out from the sizes. A tower has other sizes than the global batch, so
these ops are given a tower's version of their shapes (`SizesOf`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import FULL, Constant, Label, SizesOf
from estimator_mgpu.partition.rules.axes import along_axes, axes_of
from estimator_mgpu.partition.rules.notation import (
    NotSharded,
    Rule,
    Signature,
    rank,
    require,
    table,
    word,
)
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import ONE, Size, per_row, product

# Dimensions of size 1, and their order.


def _squeeze(op: tf.Operation, sizes: Sizes) -> Signature:
    """`Squeeze`: dimensions of size 1 go.

    Towers are told which: if none is named, a tower with 1 example would lose the batch dimension.
    """
    axes = range(rank(op.inputs[0], sizes))
    squeezed = axes_of(op, 'squeeze_dims', sizes, len(axes))
    if not squeezed:
        lengths = [size.static for size in require(sizes.dims(op.inputs[0]))]
        squeezed = [axis for axis, length in enumerate(lengths) if length == 1]
        if not squeezed or None in lengths:
            raise NotSharded

    labels = tuple(None if axis in squeezed else axis for axis in axes)
    output = tuple(axis for axis in axes if axis not in squeezed)
    return Signature([labels], [output], attrs={'squeeze_dims': squeezed})


def _transpose(op: tf.Operation, sizes: Sizes) -> Signature:
    """`Transpose`: with the permutation [1, 0], inputs (0, 1) and output (1, 0)."""
    axes = range(rank(op.inputs[0], sizes))
    permutation = require(sizes.numbers(op.inputs[1]))
    output = tuple(axes[axis] for axis in permutation)
    return Signature([tuple(axes), Constant(tuple(permutation))], [output])


# Reshape.


def _reshape(op: tf.Operation, sizes: Sizes) -> Signature:
    """`Reshape`: a dimension keeps its rows if as many entries come before it as before.

    Entries are in row-major order. From [batch, 6] to [batch, 2, 3], an example is the same
    contiguous block of 6 entries in both, and so it is in [2 * batch, 3], with 2 rows for each
    example. From time-major [5, batch, 4] to [5, 4 * batch], 5 comes before both dimensions. But
    from [5, batch] to [5 * batch], nothing comes before the second one: each tower's entries would
    be spread all over it.

    If it's known only when the step runs whether sizes are equal, they aren't taken to be.
    """
    before = require(sizes.dims(op.inputs[0]))
    after = _new_dims(op, before, sizes)

    input_labels: list[Label] = [None] * len(before)
    output_labels: list[Label] = [None] * len(after)
    for i in _shardable_axes(before):
        for j in _shardable_axes(after):
            as_many_before = product(before[:i]).same_as(product(after[:j]))
            if as_many_before and _may_have_same_rows(before[i], after[j]):
                input_labels[i] = i
                output_labels[j] = i
    return Signature(
        [tuple(input_labels), SizesOf(tuple(output_labels))], [tuple(output_labels)], dims=[after]
    )


def _new_dims(op: tf.Operation, before: Sequence[Size], sizes: Sizes) -> list[Size]:
    """The dimensions after a `Reshape`: [2 * batch, 3] for [batch, 6] and the shape [-1, 3]."""
    after = require(sizes.entries(op.inputs[1]))
    if Size(-1) in after:
        axis = after.index(Size(-1))
        others = product(after) * Size(-1)
        left = product(before).over(others)
        after[axis] = left or sizes.unknown_dim(op.outputs[0], axis)

    # What TensorFlow knows as a number is that number, but rows stay rows.
    static = sizes.static_dims(op.outputs[0], len(after))
    return [
        size if static_size.symbols or size.rows else static_size
        for static_size, size in zip(static, after)
    ]


def _shardable_axes(dims: Sequence[Size]) -> list[int]:
    """The axes along which a tensor of these dimensions may be sharded.

    If some dimensions are multiples of the number of rows, as in [batch, 6], these only.
    """
    with_rows = [axis for axis, size in enumerate(dims) if size.rows]
    if with_rows:
        return with_rows
    return [axis for axis, size in enumerate(dims) if size != ONE]


def _may_have_same_rows(size: Size, other: Size) -> bool:
    """Whether two dimensions may have the same rows, with as many entries for each row or others.

    batch and 2 * batch have. So may any two numbers: propagation compares them with the number of
    rows. But of batch and an unknown size, or two of these, nobody knows.
    """
    rows = size.rows or other.rows
    if rows:
        return per_row(size, rows) is not None and per_row(other, rows) is not None
    if size.same_as(other):
        return True
    return size.static is not None and other.static is not None


# Slices.


class _SliceLabels(NamedTuple):
    """The labels of a strided slice: `x[:, 1:3]` can be sharded along dimension 0, not 1."""

    input: tuple[Label, ...]
    output: tuple[Label, ...]
    end: tuple[Label, ...]  # of the entries of the input `end`: the dimension whose size it is


def _strided_slice(op: tf.Operation, sizes: Sizes) -> Signature:
    """`StridedSlice`: along the dimensions of which all entries are taken."""
    dims = require(sizes.dims(op.inputs[0]))
    labels = _slice_labels(op, dims, sizes)
    return Signature([labels.input, FULL, SizesOf(labels.end), FULL], [labels.output])


def _strided_slice_grad(op: tf.Operation, sizes: Sizes) -> Signature:
    """`StridedSliceGrad`: its first input is the shape of what was sliced."""
    dims = require(sizes.entries(op.inputs[0]))
    labels = _slice_labels(op, dims, sizes)
    return Signature([SizesOf(labels.input), FULL, FULL, FULL, labels.output], [labels.input])


def _slice_labels(op: tf.Operation, dims: Sequence[Size], sizes: Sizes) -> _SliceLabels:
    """The labels of a slice of a tensor with these dimensions.

    An op's inputs 1 to 3 have the begin, the end and the stride of each index of `x[i, ..., j]`.
    Bits of its masks say which indices are something else: an ellipsis, `tf.newaxis`, a number (it
    "shrinks" the dimension away), or a slice without a begin or an end.
    """
    begin = require(sizes.entries(op.inputs[1]))
    end = require(sizes.entries(op.inputs[2]))
    stride = require(sizes.entries(op.inputs[3]))

    def is_set(mask: str, position: int) -> bool:
        return bool(op.get_attr(f'{mask}_mask') >> position & 1)

    positions = range(len(begin))
    ellipses = [i for i in positions if is_set('ellipsis', i)]
    new_axes = [i for i in positions if is_set('new_axis', i) and i not in ellipses]
    indexed = len(begin) - len(ellipses) - len(new_axes)  # dimensions that have an index

    input_labels: list[Label] = []
    output_labels: list[Label] = []
    end_labels: list[Label] = []
    for i in positions:
        axis = len(input_labels)  # the dimension that the index is for
        label: Label = None
        if i in ellipses:  # It takes all of the dimensions that have no index.
            skipped = range(axis, axis + len(dims) - indexed)
            input_labels += skipped
            output_labels += skipped
        elif i in new_axes:
            output_labels.append(None)
        elif is_set('shrink_axis', i):
            input_labels.append(None)
        else:
            from_start = is_set('begin', i) or begin[i] == Size(0)
            to_end = is_set('end', i) or end[i].same_as(dims[axis])
            if from_start and to_end and stride[i] == ONE:
                label = axis
            input_labels.append(label)
            output_labels.append(label)
        # Without an end, the entry of `end` means nothing.
        end_labels.append(None if is_set('end', i) else label)

    rest = range(len(input_labels), len(dims))
    return _SliceLabels((*input_labels, *rest), (*output_labels, *rest), tuple(end_labels))


def _slice(op: tf.Operation, sizes: Sizes) -> Signature:
    """`Slice`: along the dimensions of which all entries are taken; -1 is all that are left."""
    begin = require(sizes.entries(op.inputs[1]))
    size = require(sizes.entries(op.inputs[2]))
    dims = require(sizes.dims(op.inputs[0]))

    labels: list[Label] = []
    for axis, dim in enumerate(dims):
        from_start = begin[axis] == Size(0)
        to_end = size[axis] == Size(-1) or size[axis].same_as(dim)
        labels.append(axis if from_start and to_end else None)
    return Signature([tuple(labels), FULL, SizesOf(tuple(labels))], [tuple(labels)])


# Padding and repetition.


def _pad(op: tf.Operation, sizes: Sizes) -> str:
    """`Pad` and the like: with paddings [[0, 0], [1, 2]], 'a_ *+ -> a_'."""
    paddings = require(sizes.numbers(op.inputs[1]))  # two numbers a dimension
    padded = [position // 2 for position, number in enumerate(paddings) if number]
    dims = word(rank(op.inputs[0], sizes), padded)
    return f'{dims} *+ -> {dims}'


def _tile(op: tf.Operation, sizes: Sizes) -> Signature:
    """`Tile`: along dimensions that aren't repeated, and those that only have one entry to repeat.

    For [batch, 1] and the multiples [1, 3], a tower repeats the columns of its shard. For [1, 2]
    and [batch, 1], each tower repeats the row for each of its examples. But for [batch, 2] and
    [3, 1], the output isn't in the order of the examples.
    """
    dims = require(sizes.dims(op.inputs[0]))
    multiples = require(sizes.entries(op.inputs[1]))

    input_labels: list[Label] = []
    multiple_labels: list[Label] = []
    output_labels: list[Label] = []
    for axis, (size, multiple) in enumerate(zip(dims, multiples)):
        is_kept = multiple == ONE
        is_made = size == ONE and not is_kept
        input_labels.append(axis if is_kept else None)
        multiple_labels.append(axis if is_made else None)
        output_labels.append(axis if is_kept or is_made else None)
    return Signature(
        [tuple(input_labels), SizesOf(tuple(multiple_labels))],
        [tuple(output_labels)],
        dims=[[size * multiple for size, multiple in zip(dims, multiples)]],
    )


# Order.


def _reverse_sequence(op: tf.Operation, sizes: Sizes) -> str:
    """`ReverseSequence`: each sequence by its own length, such as 'a_ a -> a_'."""
    dims = word(rank(op.inputs[0], sizes), [op.get_attr('seq_dim')])
    return f'{dims} {dims[op.get_attr("batch_dim")]} -> {dims}'


_RULES: dict[str, Rule] = {
    'BroadcastTo': 'S #S -> S',
    'ConcatV2': along_axes(-1, 'all+ * -> all'),
    'ConjugateTranspose Transpose': _transpose,
    'ExpandDims': along_axes(1, 'left * -> all'),
    'Fill': '#S * -> S',
    'MirrorPad MirrorPadGrad Pad PadV2': _pad,
    'Pack': along_axes('axis', 'left+ -> all'),
    'Reshape': _reshape,
    'ReverseSequence': _reverse_sequence,
    'ReverseV2': along_axes(1, 'all * -> all'),
    'Roll': along_axes(2, 'all * * -> all+'),
    'Slice': _slice,
    'Split': along_axes(0, '* all -> all+'),
    'SplitV': along_axes(2, 'all * * -> all+'),
    'Squeeze': _squeeze,
    'StridedSlice': _strided_slice,
    'StridedSliceGrad': _strided_slice_grad,
    'Tile': _tile,
    'Unpack': along_axes('axis', 'all -> left+'),
}
RULES = table(_RULES)
