"""Sums of entries, one for each example up to the last one that has an entry.

`tf.nn.embedding_lookup_sparse` makes such sums of a sparse tensor's entries, and
`tf.math.segment_sum` of whatever a mask picks, say. A tower's own end with its last example that
has an entry. If a later tower has one, too, the tower puts zeros behind its sums. For example, of
two towers with three examples each, the copies of the op give, and so the towers have:

    [a], [b, c]    =>    [a, 0, 0], [b, c]

If an op uses these sums with those of other entries, or with all examples, they are as many, or the
step fails. Gradients of rows are added up in `reduce_and_gather`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches.batch import if_same, parts_of
from estimator_mgpu.devices import host_of
from estimator_mgpu.partition.plan import Padding
from estimator_mgpu.partition.sizes import ONE, RowSpace, RowsToLast
from estimator_mgpu.partition.tower import Tower
from estimator_mgpu.partition.towers.shards import Shards


class SumsOfEntries:
    """How many sums towers have, and the zeros behind those of their own entries.

    Args:
      shards: those of the batch.
      titles: what messages call sparse tensors, by the names of their indices.
      indices: names of tensors that say in which rows entries are, by those of the entries' row
        spaces; others are named alike.
      device_of_full: the device of a full value.
    """

    def __init__(
        self,
        shards: Shards,
        titles: Mapping[str, str],
        indices: Mapping[str, str],
        device_of_full: Callable[[tf.Tensor], str],
    ) -> None:
        self._graph = shards.nodes.graph
        self._nodes = shards.nodes
        self._shards = shards
        self._titles = titles
        self._indices = indices
        self._device_of_full = device_of_full
        self._counts: dict[tuple[str, RowSpace | None], str] = {}

    def padded(self, copy: str, rank: int, padding: Padding, tower: Tower) -> str:
        """What a tower's copy of an op gives, with zeros behind it.

        Args:
          copy: the name of the copy's output.
          rank: how many dimensions it has.
          padding: how many sums there have to be.
        """
        nodes = self._nodes
        host = host_of(tower.device)
        size = self.size(padding.entries, tower, padding.rows)

        shape = nodes.add('Shape', [copy], tower.device, out_type=tf.int32)
        count = nodes.add('Gather', [shape, 0], host)
        zeros = nodes.add('Sub', [size, count], host)
        vector = nodes.tensor([0, zeros, *[0, 0] * (rank - 1)])
        paddings = nodes.add('Reshape', [vector, [rank, 2]], host)
        return nodes.add('Pad', [copy, paddings], tower.device)

    def size(self, entries: str, tower: Tower, rows: RowSpace | None = None) -> str:
        """How many of a tower's rows come up to the last one with an entry: an int32 scalar.

        Args:
          entries: the name of their row space.
          rows: the row space of the sums, of which there have to be as many; None for any number.
        """
        nodes = self._nodes
        start, size = self._shards.extent(ONE, tower)
        total = self._count(entries, rows)
        count = nodes.add('Sub', [total, start], nodes.host)
        count = nodes.add('Maximum', [count, 0], nodes.host)
        return nodes.add('Minimum', [count, size], nodes.host)

    def size_behind(self, entries: str, tower: Tower) -> str:
        """How many of a tower's rows come behind the last one with an entry: an int32 scalar."""
        size = self._shards.local_size(ONE, tower)
        return self._nodes.add('Sub', [size, self.size(entries, tower)], self._nodes.host)

    def _count(self, entries: str, rows: RowSpace | None) -> str:
        """How many rows come up to the last one with an entry, of all towers: an int32 scalar."""
        if isinstance(rows, RowsToLast) and rows.name == entries:
            rows = None
        key = entries, rows
        if key not in self._counts:
            indices = self._rows_of(entries)
            with self._nodes.at_once(self._device_of_full(indices), indices.op):
                count = _count_to_last(indices)
                if rows is not None:
                    count = self._if_as_many(count, indices, rows)
            self._counts[key] = count.name
        return self._counts[key]

    def _if_as_many(self, count: tf.Tensor, indices: tf.Tensor, rows: RowSpace) -> tf.Tensor:
        """The number of sums, which fails unless there are as many of those that they meet."""
        title = self._title(indices)
        remedy = (
            'Use tf.nn.safe_embedding_lookup_sparse in place of tf.nn.embedding_lookup_sparse, or '
            'tf.math.unsorted_segment_sum in place of tf.math.segment_sum.'
        )
        if isinstance(rows, RowsToLast):
            others = self._rows_of(rows.name)
            message = (
                f'the last example with an entry must be the same in {title} and '
                f'{self._title(others)}: sums of entries end with it, and those of both are '
                f'used together. {remedy} The numbers of sums are'
            )
            return if_same(tf.stack([count, _count_to_last(others)]), message, count)

        total = self._shards.total
        examples = self._graph.get_tensor_by_name(total) if isinstance(total, str) else total
        message = (
            f'the last example of a batch needs an entry in {title}, or the sums of entries end '
            'with the last one that has any, and are fewer than the examples with which they are '
            f'used. {remedy} The numbers of sums, examples are'
        )
        return if_same(tf.stack([count, examples]), message, count)

    def _rows_of(self, entries: str) -> tf.Tensor:
        """The tensor that says in which rows entries are."""
        return self._graph.get_tensor_by_name(self._indices.get(entries, entries))

    def _title(self, indices: tf.Tensor) -> str:
        """What a message calls entries: their sparse tensor of the batch, or an op."""
        return self._titles.get(indices.name, indices.op.name)


def _count_to_last(indices: tf.Tensor) -> tf.Tensor:
    """How many rows there are up to the last one with an entry: an int32 scalar."""
    parts = parts_of(indices)
    if len(parts) > 1:
        counts = []
        for part in parts:
            with tf.device(part.device):
                counts.append(_count_to_last(part))
        return tf.reduce_max(tf.stack(counts))

    rows = indices[:, 0] if indices.shape.rank == 2 else indices
    rows = tf.concat([rows, [-1]], 0)
    return tf.cast(tf.reduce_max(rows) + 1, tf.int32)
