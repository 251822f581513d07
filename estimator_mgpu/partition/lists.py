"""TensorLists, of which TensorFlow 2's loops and their gradients are made: rules for their ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
    KEPT,
    REPLICATE,
    ListOf,
    OwnSizes,
    Placement,
    Rows,
    Shard,
    ShardList,
    SizeList,
)
from estimator_mgpu.partition.plan import OWN, WHOLE, Local, Need, Numbers, Slice
from estimator_mgpu.partition.sizes import Size, Sizes, per_row

MAKERS = ('EmptyTensorList', 'TensorListReserve')


def any_shape(tensor: tf.Tensor) -> Numbers:
    """In place of an element_shape: elements of any size, and of any rank if that isn't known."""
    known = tensor.shape.num_elements() if tensor.shape.rank == 1 else None
    return Numbers((-1,), scalar=True) if known is None else Numbers((-1,) * known)


class Made(NamedTuple):
    """What a list's op comes to in towers.

    Attributes:
      needs: what it's given.
      placements: of its outputs.
      elements: the dimensions of the output that is an element or a stack, if any.
      entries: the entries of the output that is a size, if any.
    """

    needs: tuple[Need, ...]
    placements: Sequence[Placement | None]
    elements: list[Size] | None = None
    entries: Sequence[Size] | None = None


def concerns(op: tf.Operation, placements: Sequence[Placement]) -> bool:
    """Whether an op makes, changes or reads a list."""
    return 'TensorList' in op.type or any(isinstance(p, KEPT) for p in placements)


def rule(
    op: tf.Operation, placements: Sequence[Placement], rows: Rows, sizes: Sizes
) -> Made | None:
    """What an op with lists comes to; None if it has to run once."""
    first = placements[0] if placements else REPLICATE
    n = len(placements)
    if op.type in ('Identity', 'ZerosLike') and n == 1:
        return Made((OWN,), [first])
    if op.type in ('AddN', 'AddV2', 'Add') and all(p == first for p in placements):
        return Made((OWN,) * n, [first])
    if op.type == 'TensorListFromTensor' and isinstance(first, Shard) and first.axis > 0:
        dims = sizes.dims(op.inputs[0]) or []
        factor = per_row(dims[first.axis], rows)
        if factor is None:
            return None
        made = ShardList(first.axis - 1, rows, factor, len(dims) - 1)
        return Made((OWN, any_shape(op.inputs[1])), [made])
    if op.type in ('TensorListSetItem', 'TensorListPushBack'):
        return _put(op, placements, rows, sizes)
    if op.type in MAKERS and isinstance(first, OwnSizes):
        return Made((OWN, WHOLE), [None])
    if isinstance(first, ListOf) and op.type == 'TensorListPopBack':
        return Made((OWN, WHOLE), [first, first.element])
    if isinstance(first, SizeList) and op.type == 'TensorListPopBack':
        return Made((OWN, WHOLE), [first, REPLICATE], entries=first.entries)
    if not isinstance(first, ShardList):
        return None
    if op.type == 'TensorListLength':
        return Made((OWN,), [REPLICATE])
    if op.type == 'TensorListElementShape':
        return Made((OWN,), [OwnSizes()])
    if op.type == 'TensorListResize':
        return Made((OWN, WHOLE), [first])
    if op.type in ('TensorListGetItem', 'TensorListPopBack', 'TensorListStack'):
        shape = n - 1
        stacked = op.type == 'TensorListStack'
        output = op.outputs[-1]
        own = Shard(first.axis + stacked, rows)
        dims = _dims(output, own.axis, first, stacked, sizes)
        given = [OWN, *[WHOLE] * (n - 2), _element_shape(op.inputs[shape], first, sizes)]
        lists = [first] if op.type == 'TensorListPopBack' else []
        return Made(tuple(given), [*lists, own], elements=dims)
    return None


def _put(
    op: tf.Operation, placements: Sequence[Placement], rows: Rows, sizes: Sizes
) -> Made | None:
    """An element is set or added."""
    first, item = placements[0], placements[-1]
    element = op.inputs[len(placements) - 1]
    made: Placement
    if isinstance(item, Shard):
        dims = sizes.dims(element) or []
        factor = per_row(dims[item.axis], rows)
        if factor is None:
            return None
        made = ShardList(item.axis, rows, factor, len(dims))
    elif item == REPLICATE and isinstance(first, ShardList):
        rest = [WHOLE] * (len(placements) - 2)
        return Made((OWN, *rest, Slice(first.axis, first.factor)), [first])
    elif isinstance(item, KEPT):
        made = ListOf(item)
    else:
        entries = sizes.entries(element) if item == REPLICATE else None
        if entries is None or not any(e.rows for e in entries):
            return None
        made = SizeList(tuple(entries))
    if first not in (REPLICATE, made):
        return None
    return Made((OWN, *[WHOLE] * (len(placements) - 2), OWN), [made])


def _element_shape(tensor: tf.Tensor, of: ShardList, sizes: Sizes) -> Need:
    """A tower's shape of elements, if that can be told; otherwise elements say their own."""
    entries = sizes.entries(tensor)
    if entries is None or len(entries) <= of.axis or entries[of.axis] == Size(-1):
        return any_shape(tensor)
    factor = per_row(entries[of.axis], of.rows)
    return any_shape(tensor) if factor is None else Local(tuple(entries), of.axis, factor)


def _dims(tensor: tf.Tensor, axis: int, of: ShardList, stacked: bool, sizes: Sizes) -> list[Size]:
    """The dimensions of an element, or of all."""
    known = tensor.shape.rank is not None
    static = tensor.shape.as_list() if known else [None] * (of.rank + stacked)
    dims = [sizes.unknown(tensor, i) if d is None else Size(d) for i, d in enumerate(static)]
    dims[axis] = of.factor * Size(1, (of.rows,))
    return dims
