"""Rules for a `tf.reshape` that puts examples into groups, or makes examples of groups again.

Ghost batch normalization does so. With `virtual_batch_size=8`, `tf.layers.batch_normalization` of
`x`, which is [batch, 5], is

    groups = tf.reshape(x, [8, -1, 5])
    mean, variance = tf.nn.moments(groups, 0, keepdims=True)
    x = tf.reshape((groups - mean) / tf.sqrt(variance), [-1, 5])

There are always 8 groups, and the reshape fails if the size of the batch isn't a multiple of 8. So
each of 4 towers has a quarter of the examples, and these are exactly 2 groups: the first tower has
the first two, as groups follow each other. The moments are over dimension 0, so they combine one
example of each group, and are reduced over towers.

The input and the output have different row spaces. The notation of rules has no words for that, so
these rules are functions of the placements, as those for parts are.
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
    """From [batch, 5] to [8, -1, 5]: what follows the rows, here 5, also follows the groups' rows.

    So the op fails if the rows can't be divided into as many groups of one size. From [batch, 4] to
    [8, -1] it may not: 10 examples become [8, 5], with one example and a quarter in each row.
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
    """From [8, batch / 8, 5] to [-1, 5], or to [batch, 5]."""
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
    """A `Reshape` of a tower's shard to the tower's rows of a row space, and other dimensions.

    Where the user has left a dimension to the op, by -1, it's written out: so a tower's op fails if
    its groups haven't the size that all groups have.
    """
    dims = [Size(1, (rows,)), *others]
    return Decision(OpPlan((LOCAL, LocalShape(tuple(dims), 0, rows))), [Shard(0, rows)], [dims])
