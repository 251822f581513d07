"""TensorLists and Optionals: where loops and branches keep what their gradients need."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition import plan
from estimator_mgpu.partition.placements import REPLICATE, Kept, Placement, Shard
from estimator_mgpu.partition.plan import FULL, LOCAL, Decision, OpPlan
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import RowSpace
from estimator_mgpu.tf_internals.op_types import EMPTY_LISTS

_PUT = ('TensorListSetItem', 'TensorListPushBack', 'OptionalFromValue')
_POP = ('TensorListPopBack', 'OptionalGetValue')
_GET = ('TensorListGetItem', 'TensorListStack', *_POP)


def made_empty(op: tf.Operation) -> OpPlan:
    """How each tower makes an empty list of its own."""
    return OpPlan(tuple(any_shape(t) if i == 0 else FULL for i, t in enumerate(op.inputs)))


def any_shape(tensor: tf.Tensor) -> plan.Constant:
    """In place of an element_shape: elements of any size, and of any rank if that isn't known."""
    known = tensor.shape.num_elements() if tensor.shape.rank == 1 else None
    return plan.Constant((-1,), scalar=True) if known is None else plan.Constant((-1,) * known)


def rule(op: tf.Operation, has: list[Placement], rows: RowSpace, sizes: Sizes) -> Decision | None:
    """What an op with lists comes to; None if it has to run once."""
    first, n = has[0] if has else REPLICATE, len(has)
    if op.type in ('Identity', 'ZerosLike', 'AddN', 'AddV2', 'Add'):
        return Decision(OpPlan((LOCAL,) * n), [first]) if {*has} == {first} else None
    if op.type == 'TensorListFromTensor' and isinstance(first, Shard) and first.axis > 0:
        made = _list_of(op.inputs[0], first, sizes, unstacked=1)
        return Decision(OpPlan((LOCAL, any_shape(op.inputs[1]))), [made]) if made else None
    if op.type in _PUT:
        return _put(op, has, rows, sizes)
    if not isinstance(first, Kept):
        return None
    planned, element = OpPlan((LOCAL, FULL)[:n]), first.element
    gives = [first] if op.type == 'TensorListPopBack' else []  # The list that is left.
    if op.type in EMPTY_LISTS:
        return Decision(planned, [None])
    if not isinstance(element, Shard):
        if element == REPLICATE and op.type in _POP:
            sizes.know_values(op.outputs[-1], first.sizes)
        return Decision(planned, [*gives, element]) if op.type in _POP else None
    said: dict[str, Placement] = {
        'TensorListLength': REPLICATE,
        'TensorListElementShape': Kept(REPLICATE),
        'TensorListResize': first,
    }
    if op.type not in _GET:
        return Decision(planned, [said[op.type]]) if op.type in said else None
    stacked = op.type == 'TensorListStack'
    own = Shard(element.axis + stacked, rows)
    # A tower's shape of elements, if that can be told; otherwise elements say their own.
    shapes = list(op.inputs)[max(1, n - 1) :]
    told = [sizes.local(t, element.axis, rows) or any_shape(t) for t in shapes]
    [factor], rank = first.sizes, first.rank + stacked
    dims = sizes.dims_of_rows(op.outputs[-1], own, factor, rank)
    needs = (LOCAL, *[FULL] * (n - 2), *told)
    return Decision(OpPlan(needs), [*gives, own], [*[None] * len(gives), dims])


def _put(op: tf.Operation, has: list[Placement], rows: RowSpace, sizes: Sizes) -> Decision | None:
    """An element is set or added, or becomes an Optional."""
    *before, item = has
    if before and op.type == 'OptionalFromValue':
        return None  # Several in one.
    first, element = before[0] if before else REPLICATE, op.inputs[len(before)]
    own = (LOCAL, *[FULL] * (len(before) - 1)) if before else ()
    entries = tuple(sizes.entries(element) or ())
    made: Kept | None = None
    if isinstance(item, Shard):
        made = _list_of(element, item, sizes)
    elif isinstance(item, Kept):
        made = Kept(item)
    elif item == REPLICATE and isinstance(first, Kept) and isinstance(first.element, Shard):
        need = plan.Slice(first.element.axis, rows, *first.sizes)
        return Decision(OpPlan((*own, need)), [first])
    elif item == REPLICATE and any(rows in entry.symbols for entry in entries):
        made = Kept(REPLICATE, entries)
    return Decision(OpPlan((*own, LOCAL)), [made]) if made and first in (REPLICATE, made) else None


def _list_of(tensor: tf.Tensor, own: Shard, sizes: Sizes, unstacked: int = 0) -> Kept | None:
    """A list of what towers have; None if it isn't known how many entries a row has."""
    factor = sizes.per_row(tensor, own.axis, own.rows)
    if factor is None or factor.static is None:
        return None
    rank = len(sizes.dims(tensor) or [])
    return Kept(own._replace(axis=own.axis - unstacked), (factor,), rank - unstacked)
