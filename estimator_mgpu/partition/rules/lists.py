"""TensorLists and Optionals: where loops and branches keep what their gradients need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition import plan
from estimator_mgpu.partition.plan import OWN, REPLICATE, WHOLE, Division, OpPlan, Placement, Shard
from estimator_mgpu.partition.symbols import Rows
from .kinds import EMPTY_LISTS

if TYPE_CHECKING:
    from .sizes import Sizes

_PUT = ('TensorListSetItem', 'TensorListPushBack', 'OptionalFromValue')
_POP = ('TensorListPopBack', 'OptionalGetValue')
_GET = ('TensorListGetItem', 'TensorListStack', *_POP)


def made_empty(op: tf.Operation) -> OpPlan:
    """How each tower makes an empty list of its own."""
    return OpPlan(tuple(any_shape(t) if i == 0 else WHOLE for i, t in enumerate(op.inputs)))


def any_shape(tensor: tf.Tensor) -> plan.Numbers:
    """In place of an element_shape: elements of any size, and of any rank if that isn't known."""
    known = tensor.shape.num_elements() if tensor.shape.rank == 1 else None
    return plan.Numbers((-1,), scalar=True) if known is None else plan.Numbers((-1,) * known)


def rule(op: tf.Operation, given: list[Placement], rows: Rows, sizes: Sizes) -> Division | None:
    """What an op with lists comes to; None if it has to run once."""
    first, n = given[0] if given else REPLICATE, len(given)
    if op.type in ('Identity', 'ZerosLike', 'AddN', 'AddV2', 'Add'):
        return Division(OpPlan((OWN,) * n), [first]) if {*given} == {first} else None
    if op.type == 'TensorListFromTensor' and isinstance(first, Shard) and first.axis > 0:
        factor = sizes.per_row(op.inputs[0], first.axis, rows)
        if factor is None or factor.static is None:
            return None
        made = plan.ShardList(first.axis - 1, rows, factor, len(sizes.dims(op.inputs[0]) or []) - 1)
        return Division(OpPlan((OWN, any_shape(op.inputs[1]))), [made])
    if op.type in _PUT:
        return _put(op, given, rows, sizes)
    planned = OpPlan((OWN, WHOLE)[:n])
    if op.type in EMPTY_LISTS and isinstance(first, plan.OwnSizes):
        return Division(planned, [None])
    gives = [first] if op.type == 'TensorListPopBack' else []  # The list that is left.
    if op.type in _POP and isinstance(first, plan.ListOf):
        return Division(planned, [*gives, first.element])
    if op.type in _POP and isinstance(first, plan.SizeList):
        sizes.know_values(op.outputs[-1], first.entries)
        return Division(planned, [*gives, REPLICATE])
    if not isinstance(first, plan.ShardList):
        return None
    said: dict[str, Placement] = {
        'TensorListLength': REPLICATE,
        'TensorListElementShape': plan.OwnSizes(),
        'TensorListResize': first,
    }
    if op.type not in _GET:
        return Division(planned, [said[op.type]]) if op.type in said else None
    own = Shard(first.axis + (op.type == 'TensorListStack'), rows)
    # A tower's shape of elements, if that can be told; otherwise elements say their own.
    shapes = list(op.inputs)[max(1, n - 1) :]
    told = [sizes.local(t, first.axis, first.rows) or any_shape(t) for t in shapes]
    rank = first.rank + own.axis - first.axis
    dims = [*[None] * len(gives), sizes.dims_of_rows(op.outputs[-1], own, first.factor, rank)]
    return Division(OpPlan((OWN, *[WHOLE] * (n - 2), *told)), [*gives, own], dims)


def _put(op: tf.Operation, given: list[Placement], rows: Rows, sizes: Sizes) -> Division | None:
    """An element is set or added, or becomes an Optional."""
    *before, item = given
    if before and op.type == 'OptionalFromValue':
        return None  # Several in one.
    first, element = before[0] if before else REPLICATE, op.inputs[len(before)]
    own: tuple[plan.Need, ...] = (OWN, *[WHOLE] * (len(before) - 1)) if before else ()
    made: Placement | None = None
    if isinstance(item, Shard):
        factor = sizes.per_row(element, item.axis, rows)
        if factor is not None and factor.static is not None:
            made = plan.ShardList(item.axis, rows, factor, len(sizes.dims(element) or []))
    elif item == REPLICATE and isinstance(first, plan.ShardList):
        return Division(OpPlan((*own, plan.Slice(first.axis, rows, first.factor))), [first])
    elif isinstance(item, plan.KEPT):
        made = plan.ListOf(item)
    elif item == REPLICATE and any(rows in e.symbols for e in sizes.entries(element) or []):
        made = plan.SizeList(tuple(sizes.entries(element) or []))
    return Division(OpPlan((*own, OWN)), [made]) if made and first in (REPLICATE, made) else None
