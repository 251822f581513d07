"""What a batch is: a nest of tensors, most of which have one row an example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu import nests


class Batch(NamedTuple):
    """What there is to divide of a batch.

    Attributes:
      sources: the dense tensors that have one row an example, along dimension 0.
      static: how many rows there are, if the graph knows; else None.
      leaves: all that has rows, sparse and ragged tensors too, by path.
    """

    sources: list[tf.Tensor]
    static: int | None
    leaves: dict[tuple[Any, ...], Any]

    def total(self) -> tf.Tensor:
        """How many rows there are, an int32 scalar; fails in a step in which they differ."""
        counts = {path: rows_of(leaf) for path, leaf in self.leaves.items()}
        first = rows_of(self.sources[0]) if self.sources else next(iter(counts.values()))
        if len(counts) > 1 and not all(_static_rows(leaf) for leaf in self.leaves.values()):
            rows = tf.stack(list(counts.values()))
            message = (
                'features and labels must have the same number of rows along dimension 0, but for '
                'those that go whole to every tower: scalars, and what replicate(broadcast=[...]) '
                f'names. The rows of {", ".join(nests.title(path) for path in counts)} are'
            )
            same = tf.reduce_all(tf.equal(rows, first))
            with tf.control_dependencies([tf.Assert(same, [message, rows], summarize=100)]):
                first = tf.identity(first)
        return tf.cast(first, tf.int32)


def look_at(features: Any, labels: Any, broadcast: Sequence[str] = ()) -> Batch:
    """Finds what has rows in a batch, and adds no op to the graph.

    Args:
      features: any nest of dense tensors, `SparseTensor`s and `RaggedTensor`s, with rows along
        dimension 0. Scalars, and what isn't a tensor (None, str, numbers), have none.
      labels: the same, or None.
      broadcast: names of features (their key, or keys joined by `/`) that have none either.

    Returns:
      The `Batch`.

    Raises:
      TypeError: if something in the nest can't be divided.
      ValueError: if rows differ in number, a rank is unknown, a name in `broadcast` isn't there
        or nothing in the batch has rows.
    """
    batch = {'features': features, 'labels': labels}
    leaves = dict(nests.with_paths(batch))
    whole = nests.broadcast_paths(leaves, broadcast)
    found = {}
    for path, leaf in leaves.items():
        if path in whole or not nests.has_rows(path, leaf):
            continue
        if leaf.shape.rank is None:
            raise ValueError(
                f'{nests.title(path)} has an unknown rank, so it cannot be told whether it has '
                'rows. Give it a shape in the input_fn, say tensor.set_shape([None, 3]), or name '
                'it in replicate(broadcast=[...]) if it goes whole to every tower.'
            )
        if leaf.shape.rank > 0:
            found[path] = leaf
    if not found and not any(isinstance(leaf, np.ndarray) for leaf in leaves.values()):
        given = ', '.join(nests.describe(path, leaf) for path, leaf in leaves.items())
        raise ValueError(
            'There is nothing to divide over the towers: no feature and no label has rows along '
            f'dimension 0. Given: {given}. Let the input_fn give batches, say by dataset.batch().'
        )
    known = {path: _static_rows(leaf) for path, leaf in found.items()}
    known = {path: rows for path, rows in known.items() if rows is not None}
    if len(set(known.values())) > 1:
        sizes = ', '.join(f'{nests.title(path)} has {rows}' for path, rows in known.items())
        raise ValueError(
            f'The rows along dimension 0 differ in number: {sizes}. Every feature and label needs '
            'one row an example: let the input_fn give batches, by dataset.batch() say. What '
            "isn't per example (a vocabulary) is either a scalar or named in "
            'replicate(broadcast=[...]), to go whole to every tower.'
        )
    sources = [leaf for leaf in found.values() if isinstance(leaf, tf.Tensor)]
    sources = list({t.name: t for t in sources}.values())
    static = [_static_rows(t) for t in sources]
    return Batch(sources, static[0] if static and None not in static else None, found)


def rows_of(leaf: Any) -> tf.Tensor:
    """Returns how many rows a dense, sparse or ragged tensor has: an int64 scalar."""
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(tf.int64)
    return tf.shape(leaf, out_type=tf.int64)[0]


def _static_rows(leaf: Any) -> int | None:
    return leaf.shape.as_list()[0]
