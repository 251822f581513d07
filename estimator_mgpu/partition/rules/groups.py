"""Rules for a `tf.reshape` that puts examples into groups, or makes examples of groups again.

Ghost batch normalization does so. With `virtual_batch_size=8`, `tf.layers.batch_normalization`
computes of `x`, which is [batch, 5],

    groups = tf.reshape(x, [8, -1, 5])
    mean, variance = tf.nn.moments(groups, 0, keepdims=True)
    x = tf.reshape((groups - mean) / tf.sqrt(variance), [-1, 5])

There are always 8 groups, and the reshape fails if the size of the batch isn't a multiple of 8. So
each of 4 towers has a quarter of the examples, which is exactly 2 groups. Groups follow each other,
so the first tower has the first two. The moments are over dimension 0: they combine one example of
each group, and are reduced over towers.

The rows of the input are examples, and those of the output are groups: they are different row
spaces. The notation of rules can't say that, so these rules are functions of the placements, as
those for selections are.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import Placement, Shard
from estimator_mgpu.partition.plan import LOCAL, Decision, LocalShape, OpPlan
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import Groups, GroupSize, RowSpace, Size, product


def decide(op: tf.Operation, placements: Sequence[Placement], sizes: Sizes) -> Decision | None:
    """How a `Reshape` from or to groups is sharded; None if it's neither.

    Args:
      op: the op.
      placements: of its inputs.
      sizes: of tensors.
    """
    tensor, shape = op.inputs
    shard = placements[0]
    before = sizes.dims(tensor)
    after = sizes.entries(shape)
    if not isinstance(shard, Shard) or shard.axis > 0 or not before or not after:
        return None
    is_row_an_entry = before[0] == Size(1, (shard.rows,))
    if not is_row_an_entry:
        return None

    if isinstance(shard.rows, Groups):
        decision = _from_groups(shard.rows, before, after)
        if decision is not None:
            return decision
    return _to_groups(shard.rows, before, after, sizes)


def _to_groups(
    rows: RowSpace, before: Sequence[Size], after: Sequence[Size], sizes: Sizes
) -> Decision | None:
    """Decides a reshape such as that from [batch, 5] to [8, -1, 5]; None if it's another one.

    The dimensions after the rows, here 5, have to follow each group's rows, too. Only then does the
    op fail if 8 groups can't have equally many rows. A reshape from [batch, 4] to [8, -1] may not:
    with 10 examples, each of its 8 rows has 5 numbers, which are one example and a quarter.

    Args:
      rows: those that are put into groups.
      before: the input's dimensions.
      after: those that the op is asked for.
      sizes: of tensors.
    """
    if len(after) < 2:
        return None
    count = after[0].static
    if count is None or count == rows.static:  # If there are as many, the rows stay what they are.
        return None
    if not product(after[2:]).same_as(product(before[1:])):
        return None
    groups = sizes.groups(rows, count)
    if groups is None:
        return None

    group_size = _size_of(groups) if after[1] == Size(-1) else after[1]
    return _decision(groups, [group_size, *after[2:]])


def _from_groups(groups: Groups, before: Sequence[Size], after: Sequence[Size]) -> Decision | None:
    """Decides a reshape from [8, batch / 8, 5] to [-1, 5] or [batch, 5]; None for others.

    Args:
      groups: the input's rows.
      before: the input's dimensions.
      after: those that the op is asked for.
    """
    if len(before) < 2 or before[1] != _size_of(groups):
        return None
    has_all_rows = after[0] == Size(-1) or after[0].same_as(Size(1, (groups.origin,)))
    has_same_entries = product(after[1:]).same_as(product(before[2:]))
    return _decision(groups.origin, after[1:]) if has_all_rows and has_same_entries else None


def _size_of(groups: Groups) -> Size:
    """How many rows a group has: a number, if the graph knows."""
    total = groups.origin.static
    return Size(1, (GroupSize(groups),)) if total is None else Size(total // groups.count)


def _decision(rows: RowSpace, others: Sequence[Size]) -> Decision:
    """A `Reshape` of each tower's shard.

    Where the user wrote -1, the plan has the dimension itself: so a tower's op fails if its groups
    don't have the size that all groups have.

    Args:
      rows: the output's rows, of which each tower has its own.
      others: the output's other dimensions.
    """
    dims = [Size(1, (rows,)), *others]
    return Decision(OpPlan((LOCAL, LocalShape(tuple(dims), 0, rows))), [Shard(0, rows)], [dims])
