"""Splitting a nest of tensors by rows, and joining rows again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import nests, private


class Shards(NamedTuple):
    """A batch, divided over the towers.

    Attributes:
      features: one nest of features a tower, its rows in the batch's order.
      labels: the same for labels.
      rows: one int64 scalar a tower: how many rows of the batch it holds. It is 0 where the batch
        has fewer rows than there are towers; such a tower's nest holds the batch's first row, so
        that it has something to compute on, and nothing it computes may count.
      total: int64 scalar, the rows of the whole batch.
      static_rows: the rows of each shard where they're known, equal and several, else None.
    """

    features: list[Any]
    labels: list[Any]
    rows: list[tf.Tensor]
    total: tf.Tensor
    static_rows: int | None


def split(features: Any, labels: Any, towers: int, broadcast: Sequence[str] = ()) -> Shards:
    """Splits features and labels by rows into one shard a tower.

    The shards' sizes differ by at most one, the larger ones first: 5 rows over 3 towers are rows
    0-1, 2-3 and 4.

    Args:
      features: any nest of dense tensors, `SparseTensor`s and `RaggedTensor`s, with rows along
        dimension 0. Scalars, and what isn't a tensor (None, str, numbers), go whole to every tower.
      labels: the same, or None.
      towers: how many shards to make.
      broadcast: names of features (their key, or keys joined by `/`) that go whole to every tower.

    Returns:
      `Shards`.

    Raises:
      TypeError: if something in the nest can't be split.
      ValueError: if rows differ in number, a rank is unknown, a name in `broadcast` isn't there
        or nothing in the batch has rows.
    """
    batch = {'features': features, 'labels': labels}
    leaves = dict(nests.with_paths(batch))
    whole = nests.broadcast_paths(leaves, broadcast)
    sharded = {}
    for path, leaf in leaves.items():
        leaf = None if path in whole else nests.as_tensor(path, leaf)
        if leaf is None:
            continue
        if leaf.shape.rank is None:
            raise ValueError(
                f'{nests.title(path)} has an unknown rank, so it cannot be told whether it has '
                'rows. Give it a shape in the input_fn, say tensor.set_shape([None, 3]), or name '
                'it in replicate(broadcast=[...]) if it goes whole to every tower.'
            )
        if leaf.shape.rank > 0:
            sharded[path] = leaf
    if not sharded:
        given = ', '.join(nests.describe(path, leaf) for path, leaf in leaves.items())
        raise ValueError(
            'There is nothing to divide over the towers: no feature and no label has rows along '
            f'dimension 0. Given: {given}. Let the input_fn give batches, say by dataset.batch().'
        )
    static = _static_rows(sharded)
    bounds = _Bounds(sharded, static, towers)
    parts = {path: bounds.slices(leaf) for path, leaf in sharded.items()}
    own = [
        tf.nest.pack_sequence_as(
            batch, [parts[p][i] if p in parts else x for p, x in leaves.items()]
        )
        for i in range(towers)
    ]
    return Shards(
        [nest['features'] for nest in own],
        [nest['labels'] for nest in own],
        bounds.rows,
        bounds.total,
        bounds.static_rows,
    )


def join(parts: Sequence[Any], rows: Sequence[tf.Tensor]) -> Any:
    """Joins the towers' rows in input order: the inverse of `split` for one tensor.

    Args:
      parts: one dense, sparse or ragged tensor a tower.
      rows: one scalar a tower, as `Shards.rows`; a tower with 0 rows adds nothing.

    Returns:
      One tensor of the same kind with all rows.
    """
    parts = [_keep(part, count) for part, count in zip(parts, rows)]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts, expand_nonconcat_dim=True)
    return tf.concat(parts, 0)


class _Bounds:
    """Where each shard begins and ends; Python numbers where they're static and even."""

    def __init__(self, sharded: dict[tuple[Any, ...], Any], static: int | None, towers: int):
        self.static_rows = None
        # With one row a shard, sizes of 1 would no longer tell rows from what was reduced.
        if static is not None and static % towers == 0 and static > towers:
            size = self.static_rows = static // towers
            self.rows = [tf.constant(size, tf.int64)] * towers
            self.total = tf.constant(static, tf.int64)
            self._scalars = [(i * size, size) for i in range(towers)]
            return
        self.total = _checked_rows(sharded)
        more = tf.range(towers, dtype=tf.int64) < self.total % towers
        rows = self.total // towers + tf.cast(more, tf.int64)
        # A tower without rows computes on the batch's first row, for nothing.
        starts = tf.where(rows > 0, tf.cumsum(rows, exclusive=True), tf.zeros_like(rows))
        sizes = tf.maximum(rows, 1)
        self.rows = tf.unstack(rows)
        self._scalars = list(zip(tf.unstack(starts), tf.unstack(sizes)))
        self._vectors = list(zip(tf.split(starts, towers), tf.split(starts + sizes, towers)))
        self._strides = tf.constant([1], tf.int64)

    def slices(self, leaf: Any) -> list[Any]:
        if not isinstance(leaf, tf.Tensor):
            return [_slice(leaf, start, size) for start, size in self._scalars]
        if self.static_rows is not None:
            return tf.split(_without_numbers(leaf), len(self.rows))
        leaf = _without_static_rows(leaf)
        return [tf.strided_slice(leaf, *ends, self._strides) for ends in self._vectors]


def _slice(leaf: Any, start: Any, size: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        shape = leaf.dense_shape
        rest = leaf.shape[1:]
        first = tf.concat([tf.reshape(tf.cast(start, tf.int64), [1]), tf.zeros_like(shape[1:])], 0)
        extent = tf.concat([tf.reshape(tf.cast(size, tf.int64), [1]), shape[1:]], 0)
        part = tf.sparse.slice(leaf, first, extent)
        part.set_shape(tf.TensorShape([size if isinstance(size, int) else None]).concatenate(rest))
        return part
    part = leaf[start : start + size]
    if isinstance(leaf, tf.RaggedTensor):
        # Without what the slicing remembers of the whole batch, as copies replace the parts only,
        # and without static sizes, which differ between the towers.
        flat, *splits = [
            tf.placeholder_with_default(t, [None, *t.shape.as_list()[1:]])
            for t in (part.flat_values, *part.nested_row_splits)
        ]
        part = tf.RaggedTensor.from_nested_row_splits(flat, splits, validate=False)
    return part


def _keep(part: Any, rows: tf.Tensor) -> Any:
    """Drops the rows of a tower that has none of the batch's."""
    size = tf.where(rows > 0, rows_of(part), tf.zeros([], tf.int64))
    return _slice(part, tf.zeros([], tf.int64), size)


def _without_static_rows(leaf: tf.Tensor) -> tf.Tensor:
    """Hides a static row count, which would differ between the towers."""
    if _known_rows(leaf) is not None:
        return tf.placeholder_with_default(leaf, [None, *leaf.shape.as_list()[1:]])
    return leaf


def _without_numbers(leaf: tf.Tensor) -> tf.Tensor:
    """Hides a constant's, by which sizes, such as that of the longest row, would be a shard's."""
    if private.constant_value(leaf) is None:
        return leaf
    return tf.placeholder_with_default(leaf, leaf.shape)


def rows_of(leaf: Any) -> tf.Tensor:
    """Returns how many rows a dense, sparse or ragged tensor has: an int64 scalar."""
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(tf.int64)
    return tf.shape(leaf, out_type=tf.int64)[0]


def _known_rows(leaf: Any) -> int | None:
    return leaf.shape.as_list()[0]


def _checked_rows(sharded: dict[tuple[Any, ...], Any]) -> tf.Tensor:
    """Returns the batch's rows, asserted to be the same in every tensor when the step runs."""
    counts = {path: rows_of(leaf) for path, leaf in sharded.items()}
    total = next(iter(counts.values()))
    if len(counts) == 1 or all(_known_rows(leaf) is not None for leaf in sharded.values()):
        return total
    message = (
        'features and labels must have the same number of rows along dimension 0, but for those '
        'that go whole to every tower: scalars, and what replicate(broadcast=[...]) names. The '
        f'rows of {", ".join(nests.title(path) for path in counts)} are'
    )
    rows = tf.stack(list(counts.values()))
    check = tf.Assert(tf.reduce_all(tf.equal(rows, total)), [message, rows], summarize=100)
    with tf.control_dependencies([check]):
        return tf.identity(total)


def _static_rows(sharded: dict[tuple[Any, ...], Any]) -> int | None:
    known = {path: _known_rows(leaf) for path, leaf in sharded.items()}
    known = {path: rows for path, rows in known.items() if rows is not None}
    if len(set(known.values())) > 1:
        sizes = ', '.join(f'{nests.title(path)} has {rows}' for path, rows in known.items())
        raise ValueError(
            f'The rows along dimension 0 differ in number: {sizes}. Every feature and label needs '
            'one row an example: let the input_fn give batches, by dataset.batch() say. What '
            "isn't per example (a vocabulary) is either a scalar or named in "
            'replicate(broadcast=[...]), to go whole to every tower.'
        )
    return next(iter(known.values())) if len(known) == len(sharded) else None
