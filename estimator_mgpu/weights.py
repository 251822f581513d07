"""What each tower counts, in a mean or a sum of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import losses
from estimator_mgpu.copying import Copies
from estimator_mgpu.importing import absolute_scope
from estimator_mgpu.sharding import Shards


def of_shards(
    shards: Shards, units: Callable[[Any, Any], Any] | None = None
) -> dict[str, list[tf.Tensor]]:
    """Returns what each shard counts in a mean, in a sum, and in a mean over units of the batch.

    A mean over the batch is the sum of the shards' means, each times its share of the units that
    are averaged over (Chan, Golub and LeVeque, 1979, equation 1.2 for the mean).

    Args:
      shards: the batch.
      units: a function (features, labels) -> scalar that says how many units a shard has; without
        it, there's no mean over units.

    Returns:
      One float64 scalar a tower: for 'mean', its share of the rows; for 'sum', 1, or 0 for a shard
      without rows; and for 'units', its share of these. It's one tensor for all towers where
      static shapes say that these are the same.
    """
    towers = len(shards.rows)
    if shards.static_rows:  # The same for all towers.
        counts = tf.ones([], tf.float64)
        found = {
            'mean': [tf.constant(1 / towers, tf.float64)] * towers,
            'sum': [counts] * towers,
        }
    else:
        rows = tf.stack(shards.rows)
        counts = tf.cast(rows > 0, tf.float64)
        found = {'mean': _shares(tf.cast(rows, tf.float64)), 'sum': tf.unstack(counts)}
    if units is not None:
        given = [units(f, x) for f, x in zip(shards.features, shards.labels)]
        sizes = tf.stack([tf.cast(_scalar(size), tf.float64) for size in given])
        found['units'] = _shares(sizes * counts)
    return found


def _shares(sizes: tf.Tensor) -> list[tf.Tensor]:
    return tf.unstack(tf.div_no_nan(sizes, tf.reduce_sum(sizes)))


def _scalar(units: Any) -> tf.Tensor:
    units = tf.convert_to_tensor(units)
    if units.shape.rank != 0:
        raise ValueError(
            f'loss_weight returned a tensor of shape {units.shape}. It has to return a scalar: how '
            'many units the mean loss of these rows averages over, say tf.reduce_sum(mask).'
        )
    return units


class Weights:
    """The towers' weights, in the types that losses have.

    Args:
      graph: the graph the model is built in.
      copies: the towers; in what they copy, tower 0's weights are replaced by their own.
      given: for each kind of leaf, one float64 scalar a tower, as by `of_shards`.
    """

    def __init__(self, graph: tf.Graph, copies: Copies, given: dict[str, list[tf.Tensor]]):
        self._graph = graph
        self._copies = copies
        self._given = given
        self._cast: dict[tuple[Any, ...], list[tf.Tensor]] = {}

    def of_leaf(self, leaf: losses.Leaf, tower: int, dtype: tf.DType) -> tf.Tensor:
        """Returns what a tower's value of a leaf counts: a scalar or, for a shape, a vector."""
        if leaf.kind != losses.SHAPE:
            return self.of_kind(leaf.kind, tower, dtype)
        along = self.along(leaf, dtype)
        other = (1 - along) * self.of_kind(losses.MEAN, tower, dtype)
        return along * self.of_kind(losses.SUM, tower, dtype) + other

    def along(self, leaf: losses.Leaf, dtype: tf.DType) -> tf.Tensor:
        """Returns a vector that is 1 where a shape has the number of rows, and 0 elsewhere."""
        return tf.one_hot(leaf.axis, tf.size(leaf.tensor), dtype=dtype)

    def of_kind(self, kind: str, tower: int, dtype: tf.DType) -> tf.Tensor:
        """Returns what a tower counts in a 'mean', a 'sum' or 'units'; in copies, their own."""
        key = (kind, dtype)
        if key not in self._cast:
            even = self.are_even(kind)
            distinct = self._given[kind][:1] if even else self._given[kind]
            with absolute_scope(self._graph, 'replicate'), tf.device('/device:CPU:0'):
                # Identities, as a cast to the same type is the tensor itself.
                cast = [tf.cast(tf.identity(w), dtype) for w in distinct]
            if even:
                self._copies.share(cast)
                cast *= len(self._given[kind])
            else:
                self._copies.replace(cast[0], cast[1:])
            self._cast[key] = cast
        return self._cast[key][tower]

    def are_even(self, kind: str) -> bool:
        """Whether it's known that all towers count the same."""
        if kind == losses.SHAPE:
            return self.are_even(losses.SUM) and self.are_even(losses.MEAN)
        return all(w is self._given[kind][0] for w in self._given[kind])

    def counts(self, kind: str, dtype: tf.DType) -> list[tf.Tensor]:
        """Returns what each tower counts, as given."""
        return [tf.cast(weight, dtype) for weight in self._given[kind]]

    @property
    def guarded(self) -> bool:
        """Whether a tower that has rows may have no units, and a loss that isn't a number."""
        return losses.UNITS in self._given
