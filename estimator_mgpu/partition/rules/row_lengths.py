"""Tells from the graph what says how many entries each row has.

`row_splits[1:] - row_splits[:-1]` are the lengths of a ragged tensor's rows, and
`tf.sequence_mask(lengths)` has as many true entries in each row. So what `tf.where` finds in such a
mask has as many entries in each row as the ragged tensor has, and both can be used together: that's
how the number of its row is made for each value of a ragged tensor.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules.row_indices import behind_casts, column_of
from estimator_mgpu.partition.size_inference import Sizes, counts_from_0
from estimator_mgpu.partition.sizes import Size, Splits
from estimator_mgpu.tf_internals.node_defs import slice_masks

# The first entries of keys.
_ROW_SPLITS = 'row splits'
_INDICES = 'indices'
_LENGTHS = 'lengths'


def of_splits(splits: tf.Tensor) -> tuple[str, str]:
    """What says how many values each row of the batch's ragged tensor has."""
    return _ROW_SPLITS, behind_casts(splits).name


def of_indices(indices: tf.Tensor) -> tuple[str, str]:
    """What says how many entries each row of a sparse tensor has."""
    return _INDICES, indices.name


def is_count(op: tf.Operation) -> bool:
    """Whether an op is a `DenseBincount` that counts each number as often as it's there."""
    if op.type != 'DenseBincount' or op.get_attr('binary_output'):
        return False
    return op.inputs[2].shape.num_elements() == 0  # the weights


def limited(count: tf.Tensor, sizes: Sizes) -> tf.Tensor:
    """The `n` of `minimum(n, maximum(n, x))`, as `tf.math.bincount` has it; or the count itself."""
    if count.op.type != 'Minimum':
        return count
    n, at_least = count.op.inputs
    if at_least.op.type != 'Maximum' or sizes.entries(n) is None:
        return count
    return n if sizes.entries(at_least.op.inputs[0]) == sizes.entries(n) else count


def of_sequence_mask(mask: tf.Tensor, sizes: Sizes) -> tuple[str, str] | None:
    """What says how many true entries each row of a mask has; None if it's no sequence mask.

    Args:
      mask: `range(max(0, max(lengths))) < lengths[:, None]`, say.
    """
    if mask.op.type != 'Less':
        return None
    # Row splits and indices count what is there, and so casts to int32 keep them. Lengths that a
    # model makes up may be any numbers: -2 ** 33 + 2, as int32, is 2.
    key = _of_mask(mask, sizes, may_narrow=True)
    if key is not None and key[0] == _LENGTHS:
        return _of_mask(mask, sizes, may_narrow=False)
    return key


def _of_mask(mask: tf.Tensor, sizes: Sizes, may_narrow: bool) -> tuple[str, str] | None:
    """The same; `may_narrow` as in `behind_casts`."""
    places, lengths = mask.op.inputs
    lengths = behind_casts(lengths, may_narrow)
    if not counts_from_0(places.op, sizes) or lengths.op.type != 'ExpandDims':
        return None
    axis = sizes.numbers(lengths.op.inputs[1])
    if axis not in ([-1], [sizes.rank(lengths) - 1]):
        return None

    limit = behind_casts(places.op.inputs[1], may_narrow)
    if limit.op.type != 'Maximum' or sizes.entries(limit.op.inputs[0]) != [Size(0)]:
        return None
    longest = behind_casts(limit.op.inputs[1], may_narrow)
    if longest.op.type != 'Max':
        return None
    of, axes = longest.op.inputs
    is_of_all = sizes.numbers(axes) == list(range(sizes.rank(of)))
    key = _of_lengths(lengths.op.inputs[0], sizes, may_narrow)
    return key if is_of_all and _of_lengths(of, sizes, may_narrow) == key else None


def _of_lengths(lengths: tf.Tensor, sizes: Sizes, may_narrow: bool) -> tuple[str, str]:
    """What says how long rows are: row splits, indices, or the tensor with the lengths."""
    lengths = _behind_reshapes(lengths, sizes, may_narrow)
    splits = splits_before(lengths.op, sizes, may_narrow)
    if splits is not None:
        summed = _lengths_before_sum(splits, sizes)
        if summed is not None:
            return _of_lengths(summed, sizes, may_narrow)
        return of_splits(splits) if _is_of_batch(splits, sizes) else (_LENGTHS, splits.name)
    if is_count(lengths.op):
        rows = _behind_reshapes(lengths.op.inputs[0], sizes, may_narrow=True)
        if rows.op.type == 'StridedSlice' and column_of(rows.op, sizes) == 0:
            return of_indices(rows.op.inputs[0])
    return _LENGTHS, lengths.name


def splits_before(op: tf.Operation, sizes: Sizes, may_narrow: bool = True) -> tf.Tensor | None:
    """The row splits of which an op gives the lengths, as `splits[1:] - splits[:-1]`; or None."""
    if op.type != 'Sub':
        return None
    ends, starts = (behind_casts(operand, may_narrow) for operand in op.inputs)
    if not _is_slice(ends, 'begin', 1, sizes) or not _is_slice(starts, 'end', -1, sizes):
        return None
    splits = behind_casts(ends.op.inputs[0], may_narrow)
    return splits if splits is behind_casts(starts.op.inputs[0], may_narrow) else None


def _is_of_batch(splits: tf.Tensor, sizes: Sizes) -> bool:
    """Whether row splits are those of the batch's ragged tensor."""
    dims = sizes.dims(splits)
    symbols = dims[0].symbols if dims else ()
    key = of_splits(splits)
    return any(isinstance(s, Splits) and sizes.selection_of(key, s.rows) for s in symbols)


def _lengths_before_sum(splits: tf.Tensor, sizes: Sizes) -> tf.Tensor | None:
    """The lengths of which row splits are made, by `concat([[0], cumsum(lengths)], 0)`; or None."""
    if splits.op.type != 'ConcatV2' or len(splits.op.inputs) != 3:
        return None
    zero, ends, _ = splits.op.inputs
    if sizes.entries(zero) != [Size(0)] or ends.op.type != 'Cumsum':
        return None
    is_plain = not (ends.op.get_attr('exclusive') or ends.op.get_attr('reverse'))
    return ends.op.inputs[0] if is_plain and sizes.rank(ends) == 1 else None


def _behind_reshapes(tensor: tf.Tensor, sizes: Sizes, may_narrow: bool) -> tf.Tensor:
    """What a tensor was before casts, and before what leaves its shape as it is."""
    tensor = behind_casts(tensor, may_narrow)
    while tensor.op.type in ('BroadcastTo', 'Reshape') and _keeps_dims(tensor.op, sizes):
        tensor = behind_casts(tensor.op.inputs[0], may_narrow)
    return tensor


def _keeps_dims(op: tf.Operation, sizes: Sizes) -> bool:
    dims = sizes.dims(op.inputs[0])
    return dims is not None and dims == sizes.dims(op.outputs[0])


def _is_slice(tensor: tf.Tensor, end: str, number: int, sizes: Sizes) -> bool:
    """Whether a tensor is `x[1:]` or `x[:-1]` of a vector: cut by a number at one end."""
    op = tensor.op
    if op.type != 'StridedSlice' or sizes.rank(op.inputs[0]) != 1:
        return False
    other_end = 'end' if end == 'begin' else 'begin'
    masks = slice_masks(op)
    cuts_one_end = masks == {**dict.fromkeys(masks, 0), other_end: 1}
    cut = op.inputs[1 if end == 'begin' else 2]
    return cuts_one_end and sizes.numbers(cut) == [number] and sizes.numbers(op.inputs[3]) == [1]
