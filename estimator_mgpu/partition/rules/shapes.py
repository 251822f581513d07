"""Ops that arrange entries anew: reshape, transpose, slice, pad, tile, split, join, fill.

Where the rows go is worked out from the sizes. A tower has other sizes than the global batch, so
these ops are given a tower's version of their shapes (`SizesOf`).

Some put several blocks of all rows one after the other, as `tf.concat([x, y], 0)` does, or take
blocks apart: see `Shard.in_blocks`. On a tower they do so with blocks of its rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import FULL, Constant, Label, SizesOf
from estimator_mgpu.partition.rules.notation import (
    NotSharded,
    Rule,
    Signature,
    along_axes,
    axes_of,
    rank,
    require,
    table,
    word,
)
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import (
    ONE,
    RowSpace,
    SelectedRows,
    Size,
    UnknownSize,
    per_row,
    product,
)
from estimator_mgpu.tf_internals.node_defs import slice_masks

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
    """`Reshape`: a dimension keeps its rows if as many entries precede it in input and output.

    Entries are in row-major order. From [batch, 6] to [batch, 2, 3], an example is the same
    contiguous piece of 6 entries in both, and so it is in [2 * batch, 3], with 2 rows for each
    example. From time-major [5, batch, 4] to [5, 4 * batch], 5 comes before both dimensions.

    From [5, batch, 4] to [5 * batch, 4], nothing precedes the dimension in the output, but as many
    entries follow it, 4, in both: there, the examples are in 5 blocks.

    If it's known only when the step runs whether sizes are equal, they aren't taken to be.
    """
    before = require(sizes.dims(op.inputs[0]))
    after = _new_dims(op, before, sizes)

    input_labels: list[Label] = [None] * len(before)
    output_labels: list[Label] = [None] * len(after)
    in_blocks: dict[Label, bool] = {}
    pairs = [
        (i, j)
        for i in _shardable_axes(before)
        for j in _shardable_axes(after)
        if _may_have_same_rows(before[i], after[j])
    ]
    for i, j in pairs:
        if product(before[:i]).same_as(product(after[:j])):
            input_labels[i] = i
            output_labels[j] = i
            if not before[i].same_as(after[j]):  # Else any order is kept, as of blocks.
                in_blocks[i] = False
    for i, j in pairs:
        is_free = input_labels[i] is None and output_labels[j] is None
        has_rows = before[i].rows or after[j].rows
        as_many_after = product(before[i + 1 :]).same_as(product(after[j + 1 :]))
        if is_free and has_rows and as_many_after:
            input_labels[i] = i
            output_labels[j] = i
            in_blocks[i] = True
    return Signature(
        [tuple(input_labels), _new_shape(after, output_labels)],
        [tuple(output_labels)],
        dims=[after],
        in_blocks=in_blocks,
    )


def _new_shape(after: Sequence[Size], labels: Sequence[Label]) -> SizesOf | Constant:
    """The shape that a `Reshape` on a tower is given, for these dimensions.

    The rows of a selection can only be sharded along the dimension that has them, so -1 stands for
    them: how many a tower has needn't be computed.
    """
    unknown = [size for size in after if size.symbols]
    if len(unknown) == 1 and isinstance(unknown[0].rows, SelectedRows) and Size(0) not in after:
        return Constant(tuple(-1 if size.symbols else size.number for size in after))
    return SizesOf(tuple(labels))


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
    return with_rows or [axis for axis, size in enumerate(dims) if size != ONE]


def _may_have_same_rows(size: Size, other: Size) -> bool:
    """Whether two dimensions may have the same rows, with as many entries for each row or others.

    For example, batch and 2 * batch have. Two numbers may: propagation compares them with that of
    the rows. But of batch and an unknown size, or two of these, nobody knows.
    """
    rows = size.rows or other.rows
    if rows:
        return per_row(size, rows) is not None and per_row(other, rows) is not None
    if size.same_as(other):
        return True
    return size.static is not None and other.static is not None


# Slices.


def _strided_slice(op: tf.Operation, sizes: Sizes) -> Signature:
    """`StridedSlice`: along the dimensions of which all entries are taken, or whole blocks."""
    return _slice_of(op, require(sizes.dims(op.inputs[0])), sizes)


def _strided_slice_grad(op: tf.Operation, sizes: Sizes) -> Signature:
    """`StridedSliceGrad`: its first input is the shape of what was sliced."""
    dims = require(sizes.entries(op.inputs[0]))
    forward = _slice_of(op, dims, sizes, sizes.dims(op.inputs[4]))
    sliced, *begin_end_stride = forward.inputs
    assert isinstance(sliced, tuple)
    return Signature(
        [SizesOf(sliced), *begin_end_stride, *forward.outputs],
        [sliced],
        dims=[dims],
        in_blocks=forward.in_blocks,
    )


def _slice_of(
    op: tf.Operation,
    dims: Sequence[Size],
    sizes: Sizes,
    dims_of_gradient: Sequence[Size] | None = None,
) -> Signature:
    """The signature of a strided slice: `x[:, 1:3]` can be sharded along dimension 0, not 1.

    An op's inputs 1 to 3 have the begin, the end and the stride of each index of `x[i, ..., j]`.
    Bits of its masks say which indices are something else: an ellipsis, `tf.newaxis`, a number (it
    "shrinks" the dimension away), or a slice without a begin or an end.

    Args:
      op: the slice, or its gradient.
      dims: of what is sliced.
      dims_of_gradient: of a gradient, those of the slice.
    """
    begin = require(sizes.entries(op.inputs[1]))
    end = require(sizes.entries(op.inputs[2]))
    stride = require(sizes.entries(op.inputs[3]))

    masks = slice_masks(op)

    def is_set(mask: str, position: int) -> bool:
        return bool(masks[mask] >> position & 1)

    positions = range(len(begin))
    ellipses = [i for i in positions if is_set('ellipsis', i)]
    new_axes = [i for i in positions if is_set('new_axis', i) and i not in ellipses]
    indexed = len(begin) - len(ellipses) - len(new_axes)  # dimensions that have an index

    input_labels: list[Label] = []
    output_labels: list[Label] = []
    # Of the entries of `begin` and `end`: the dimension whose size, or part, they are.
    begin_labels: list[Label] = []
    end_labels: list[Label] = []
    in_blocks: dict[Label, bool] = {}  # dimensions of which blocks are taken
    output_sizes: dict[int, Size] = {}  # where the labels don't tell them, by the output's axis
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
            first = Size(0) if is_set('begin', i) else begin[i]
            last = dims[axis] if is_set('end', i) else end[i]
            rows = dims[axis].rows
            if rows is None and dims_of_gradient is not None:
                rows = dims_of_gradient[len(output_labels)].rows
            blocks = _size_of_blocks(first, last, dims[axis], rows)
            if stride[i] == ONE and first == Size(0) and last.same_as(dims[axis]):
                label = axis
            elif stride[i] == ONE and blocks is not None:
                label = axis
                in_blocks[label] = True
                output_sizes[len(output_labels)] = blocks
            elif stride[i] == Size(-1) and is_set('begin', i) and is_set('end', i):
                output_sizes[len(output_labels)] = dims[axis]  # Reversed: as many entries.
            elif (
                stride[i] == ONE
                and axis == len(output_labels) == 0
                and _is_of_rows(dims[0])
                and op.type == 'StridedSlice'
            ):
                output_sizes[0] = _size_of_range(dims[0], first, last, op.outputs[0], sizes)
            input_labels.append(label)
            output_labels.append(label)
        # A begin that is masked isn't looked at, and 0 is 0 on each tower.
        has_begin = label in in_blocks and not is_set('begin', i) and begin[i] != Size(0)
        begin_labels.append(label if has_begin else None)
        end_labels.append(None if is_set('end', i) else label)

    rest = range(len(input_labels), len(dims))
    output_labels += rest
    sizes_of = [SizesOf(tuple(labels)) for labels in (begin_labels, end_labels)]
    return Signature(
        [(*input_labels, *rest), *sizes_of, FULL],
        [tuple(output_labels)],
        dims=[[output_sizes.get(axis) for axis in range(len(output_labels))]],
        in_blocks=in_blocks,
    )


def _is_of_rows(size: Size) -> bool:
    """Whether a dimension has an entry for each row of a row space."""
    return size.rows is not None and size == size.rows.size


def _size_of_range(dim: Size, first: Size, last: Size, tensor: tf.Tensor, sizes: Sizes) -> Size:
    """The size of a slice of rows, from the first one to before the last one: see `_size_of_part`.

    As in Python, numbers below 0 are counted from the end, and there may be fewer rows.
    """
    return _size_of_part((dim.rows, first, dim if last.same_as(dim) else last), tensor, sizes)


def _size_of_part(part: tuple[Hashable, ...], tensor: tf.Tensor, sizes: Sizes) -> Size:
    """The size of a part of the rows, such as `x[:8]`, which begins a row space of its own.

    What else takes the same part, as `labels[:8]`, has the same rows.

    Args:
      part: says which part it is. Of equal parts, the rows are the same.
    """
    # Its number isn't static even if the graph knows it: it may be smaller than that of devices.
    return sizes.same_for(('part', *part), RowSpace(tensor.name, None)).size


def _size_of_blocks(begin: Size, end: Size, dim: Size, rows: RowSpace | None) -> Size | None:
    """The size of a slice of a dimension, if it takes whole blocks of rows; None if it doesn't.

    For example, it's batch for the slices [:batch] and [batch:] of 2 * batch.
    """
    if rows is None:
        return None
    counts = [_block_count(size, rows) for size in (begin, end, dim)]
    first, last, count = counts
    if first is None or last is None or count is None or not first < last <= count:
        return None
    return Size(last - first, (rows,))


def _block_count(size: Size, rows: RowSpace) -> int | None:
    """How many blocks of all rows a size is, or begins after; None if that isn't known."""
    if size == Size(0):
        return 0
    count = per_row(size, rows)
    if count is None or count.symbols or count.number < 0:
        return None
    return count.number


def _slice(op: tf.Operation, sizes: Sizes) -> Signature:
    """`Slice`: along the dimensions of which all entries are taken, or whole blocks.

    A size of -1 takes all entries that are left.
    """
    begin = require(sizes.entries(op.inputs[1]))
    size = require(sizes.entries(op.inputs[2]))
    dims = require(sizes.dims(op.inputs[0]))

    labels: list[Label] = []
    begin_labels: list[Label] = []
    output_dims: list[Size | None] = []
    in_blocks: dict[Label, bool] = {}
    for axis, dim in enumerate(dims):
        end = _end(begin[axis], size[axis], dim)
        is_full = begin[axis] == Size(0) and end.same_as(dim)
        blocks = None if is_full else _size_of_blocks(begin[axis], end, dim, dim.rows)
        part = None
        if blocks is not None:
            in_blocks[axis] = True
        elif not is_full and axis == 0 and end != Size(-1) and _is_of_rows(dim):
            part = _size_of_range(dim, begin[0], end, op.outputs[0], sizes)
        labels.append(axis if axis in in_blocks or is_full else None)
        begin_labels.append(axis if axis in in_blocks and begin[axis] != Size(0) else None)
        output_dims.append(blocks or part)
    return Signature(
        [tuple(labels), SizesOf(tuple(begin_labels)), SizesOf(tuple(labels))],
        [tuple(labels)],
        dims=[output_dims],
        in_blocks=in_blocks,
    )


def _end(begin: Size, size: Size, dim: Size) -> Size:
    """Where a slice ends; -1, which is no size, if that isn't a product of sizes."""
    if size == Size(-1):
        return dim
    try:
        return begin + size
    except UnknownSize:
        return Size(-1)


# Padding and repetition.


def _pad(op: tf.Operation, sizes: Sizes) -> str:
    """`Pad` and the like: with paddings [[0, 0], [1, 2]], 'a_ *+ -> a_'.

    A padding that is known only when the step runs counts as one.
    """
    paddings = require(sizes.entries(op.inputs[1]))  # two numbers a dimension
    padded = [position // 2 for position, number in enumerate(paddings) if number != Size(0)]
    dims = word(rank(op.inputs[0], sizes), padded)
    return f'{dims} *+ -> {dims}'


def _tile(op: tf.Operation, sizes: Sizes) -> Signature:
    """`Tile`: along dimensions that aren't repeated, and those that only have one entry to repeat.

    For [batch, 1] and the multiples [1, 3], a tower repeats the columns of its shard. For [1, 2]
    and [batch, 1], each tower repeats the row for each of its examples. For [batch, 2] and [3, 1],
    the output has the examples in 3 blocks.
    """
    dims = require(sizes.dims(op.inputs[0]))
    multiples = require(sizes.entries(op.inputs[1]))

    input_labels: list[Label] = []
    multiple_labels: list[Label] = []
    in_blocks: dict[Label, bool] = {}
    for axis, (size, multiple) in enumerate(zip(dims, multiples)):
        is_kept = multiple == ONE
        is_made = size == ONE and not is_kept
        input_labels.append(None if is_made else axis)
        multiple_labels.append(axis if is_made else None)
        if not is_kept and not is_made:
            in_blocks[axis] = True
    return Signature(
        [tuple(input_labels), SizesOf(tuple(multiple_labels))],
        [tuple(range(len(dims)))],
        dims=[[size * multiple for size, multiple in zip(dims, multiples)]],
        in_blocks=in_blocks,
    )


# Several tensors, and blocks of one.


def _concat(op: tf.Operation, sizes: Sizes) -> Signature:
    """`ConcatV2`: along other dimensions than its axis; along that, each input is a block or some.

    For [batch, 3] and [batch, 3], joined along axis 0, the output has the examples in 2 blocks.
    """
    inputs = op.inputs[:-1]
    count = rank(inputs[0], sizes)
    [axis] = axes_of(op, -1, sizes, count)
    labels: list[Label] = list(range(count))
    dims: list[Size | None] = [None] * count
    dims[axis] = _sum([require(sizes.dims(one))[axis] for one in inputs])
    if dims[axis] is None:
        labels[axis] = None
    return Signature(
        [*[tuple(labels)] * len(inputs), FULL], [tuple(labels)], dims=[dims], in_blocks={axis: True}
    )


def _sum(summands: Sequence[Size]) -> Size | None:
    """The sum of sizes; if one has rows, as a multiple of these. None if it's neither."""
    rows = next((size.rows for size in summands if size.rows), None)
    counts = [size if rows is None else per_row(size, rows) for size in summands]
    try:
        total = sum([require(count) for count in counts], Size(0))
    except (NotSharded, UnknownSize):
        return None
    return total if rows is None else total * rows.size


def _split(op: tf.Operation, sizes: Sizes) -> Signature:
    """`Split` into equal parts: as `ConcatV2`. A single part is all that was split."""
    dims = require(sizes.dims(op.inputs[1]))
    parts = op.get_attr('num_split')
    [axis] = axes_of(op, 0, sizes, len(dims))
    labels: list[Label] = list(range(len(dims)))
    part_size = dims[axis].over(Size(parts))
    part_sizes: list[Size | None] = [part_size] * parts
    splits_rows = parts > 1 and axis == 0 and _is_of_rows(dims[0])
    if part_size is None or splits_rows:
        labels[axis] = None
    if splits_rows:
        part_sizes = [
            _size_of_part((dims[0].rows, parts, number), output, sizes)
            for number, output in enumerate(op.outputs)
        ]
    return Signature(
        [FULL, tuple(labels)],
        [tuple(labels)] * parts,
        dims=[[size if i == axis else None for i in range(len(dims))] for size in part_sizes],
        in_blocks={axis: True} if parts > 1 else {},
    )


def _split_by_sizes(op: tf.Operation, sizes: Sizes) -> Signature:
    """`SplitV`: along other dimensions than its axis, but a single part along that as well."""
    labels: list[Label] = list(range(rank(op.inputs[0], sizes)))
    [axis] = axes_of(op, 2, sizes, len(labels))
    if op.get_attr('num_split') == 1:
        return Signature([tuple(labels), SizesOf((axis,)), FULL], [tuple(labels)])

    dims = require(sizes.dims(op.inputs[0]))
    parts = sizes.entries(op.inputs[1])
    if parts is None or Size(-1) in parts:
        parts = [sizes.static_dims(part, len(dims))[axis] for part in op.outputs]
    labels[axis] = None
    output_dims = [[*dims[:axis], part, *dims[axis + 1 :]] for part in parts]
    return Signature([tuple(labels), FULL, FULL], [tuple(labels)] * len(parts), dims=output_dims)


def _space_to_batch(op: tf.Operation, sizes: Sizes) -> Signature:
    """`SpaceToBatchND`, of dilated convolutions, and its inverse, `BatchToSpaceND`.

    It makes several images of one, in blocks: there's a block for each place of a pixel in a square
    of 2 x 2, say, with all images.
    """
    dims = require(sizes.dims(op.inputs[0]))
    block_shape = require(sizes.numbers(op.inputs[1]))
    block_count = product([Size(number) for number in block_shape])
    is_inverse = op.type == 'BatchToSpaceND'
    images = require(dims[0].over(block_count)) if is_inverse else dims[0] * block_count

    space = len(block_shape)  # how many dimensions are cut into squares, or joined of such
    labels = (0, *[None] * space, *range(space + 1, len(dims)))
    output_dims = [images, *[None] * (len(dims) - 1)]
    return Signature([labels, FULL, FULL], [labels], dims=[output_dims], in_blocks={0: True})


# Order.


def _reverse_sequence(op: tf.Operation, sizes: Sizes) -> str:
    """`ReverseSequence`: each sequence by its own length, such as 'a_ a -> a_'."""
    dims = word(rank(op.inputs[0], sizes), [op.get_attr('seq_dim')])
    return f'{dims} {dims[op.get_attr("batch_dim")]} -> {dims}'


_RULES: dict[str, Rule] = {
    'BatchToSpaceND SpaceToBatchND': _space_to_batch,
    'BroadcastTo': 'S #S -> S',
    'ConcatV2': _concat,
    'ConjugateTranspose Transpose': _transpose,
    'ExpandDims': along_axes(1, 'left * -> all'),
    'Empty': '#S -> S',  # whatever is there: nothing, or zeros
    'Fill': '#S * -> S',
    'MirrorPad MirrorPadGrad Pad PadV2': _pad,
    'Pack': along_axes('axis', 'left+ -> all'),
    'Reshape': _reshape,
    'ReverseSequence': _reverse_sequence,
    'ReverseV2': along_axes(1, 'all * -> all'),
    'Roll': along_axes(2, 'all * * -> all+'),
    'Slice': _slice,
    'Split': _split,
    'SplitV': _split_by_sizes,
    'Squeeze': _squeeze,
    'StridedSlice': _strided_slice,
    'StridedSliceGrad': _strided_slice_grad,
    'Tile': _tile,
    'Unpack': along_axes('axis', 'all -> left+'),
}
RULES = table(_RULES)
