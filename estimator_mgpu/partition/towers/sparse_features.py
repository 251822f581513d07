"""Each tower's rows of a `SparseTensor`, whose indices and values are full values.

In: the names of the indices and of the values. Out: the names of those of the tower's rows. For
example, the second tower has the examples from 3 on:

    indices [[0, 1], [3, 0], [4, 2]]    =>    [[0, 0], [1, 2]]
    values  [a, b, c]                   =>    [b, c]
"""

from __future__ import annotations

from estimator_mgpu.partition.sizes import Size
from estimator_mgpu.partition.tower import Tower
from estimator_mgpu.partition.towers.shards import Shards


def positions(shards: Shards, indices: str, factor: Size, tower: Tower, device: str) -> str:
    """Which entries are in a tower's rows: their positions, a vector.

    What is in no row, and lets ops fail, counts as of the first or the last row: they fail still.

    Args:
      indices: those of all entries, a matrix.
      factor: how many rows an example has.
    """
    nodes = shards.nodes
    dtype = nodes.dtype(indices)
    start, size = shards.extent(factor, tower, dtype)
    first = nodes.scalar(start, dtype)
    count = nodes.scalar(size, dtype)
    end = nodes.add('AddV2', [first, count], nodes.host)

    # The first column: indices[:, 0].
    rows = nodes.add(
        'StridedSlice',
        [indices, [0, 0], [0, 1], [1, 1]],
        device,
        begin_mask=1,
        end_mask=1,
        shrink_axis_mask=2,
    )
    total = shards.size_value(factor * shards.rows.size, None, dtype)
    one = nodes.scalar(1, dtype)
    last = nodes.add('Sub', [nodes.scalar(total, dtype), one], nodes.host)
    rows = nodes.add('Maximum', [rows, nodes.scalar(0, dtype)], device)
    rows = nodes.add('Minimum', [rows, last], device)
    is_after_start = nodes.add('GreaterEqual', [rows, first], device)
    is_before_end = nodes.add('Less', [rows, end], device)
    is_own = nodes.add('LogicalAnd', [is_after_start, is_before_end], device)
    found = nodes.add('Where', [is_own], device)
    return nodes.add('Reshape', [found, [-1]], device)


def count_from_first(
    shards: Shards, indices: str, column_count: int, factor: Size, tower: Tower, device: str
) -> str:
    """The indices of a tower's entries, with rows counted from the tower's first one.

    Args:
      indices: as in the full value.
      column_count: how many dimensions the sparse tensor has.
      factor: how many rows an example has.
    """
    dtype = shards.nodes.dtype(indices)
    start, _ = shards.extent(factor, tower, dtype)
    if start == 0:
        return indices
    offset = shards.nodes.tensor([start, *[0] * (column_count - 1)], dtype)
    return shards.nodes.add('Sub', [indices, offset], device)
