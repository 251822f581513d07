"""What is known of a graph's training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import batch, private

_STEP = '_estimator_mgpu_step'  # An attribute of the graph.


class Step(NamedTuple):
    """What is known of a training step."""

    examples: int | tf.Tensor | None
    """The rows of the whole batch: an int if they're static, else an int64 scalar."""
    loss: tf.Tensor | None
    devices: list[str]
    """One a tower; none if the model_fn isn't replicated."""

    @property
    def rows_per_tower(self) -> list[int] | None:
        """How many rows each tower gets, in order; None if the batch size isn't static."""
        if not isinstance(self.examples, int):
            return None
        size, more = divmod(self.examples, len(self.devices))
        return [size + (i < more) for i in range(len(self.devices))]


def record(examples: tf.Tensor | None, loss: tf.Tensor | None, devices: Sequence[str]) -> Step:
    """Leaves what there is to know of a step in the default graph, instead of what was there."""
    static = None if examples is None else private.constant_value(examples)
    step = Step(examples if static is None else int(static), loss, list(devices))
    setattr(tf.get_default_graph(), _STEP, step)
    return step


def of_graph(graph: tf.Graph) -> Step:
    """Returns what is known of a graph's steps; where none is replicated, an Estimator's loss."""
    losses = graph.get_collection(tf.GraphKeys.LOSSES) or [None]  # A spec's is the last.
    return getattr(graph, _STEP, Step(None, losses[-1], []))


def examples_of(features: Any, labels: Any, broadcast: Sequence[str] = ()) -> tf.Tensor | None:
    """Returns how many rows a batch has that isn't divided: an int64 scalar, or None."""
    if isinstance(features, Mapping):
        features = {name: value for name, value in features.items() if name not in broadcast}
    for leaf in tf.nest.flatten((labels, features)):
        if isinstance(leaf, batch.TENSORS) and leaf.shape.rank:
            with tf.control_dependencies(None), tf.name_scope(None), tf.name_scope('batch'):
                with tf.device('/device:CPU:0'):
                    return batch.rows_of(leaf)
    return None
