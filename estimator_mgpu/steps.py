"""What is known of a graph's training steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

_STEP = '_estimator_mgpu_step'  # An attribute of the graph.


def is_count(value: Any) -> bool:
    """Whether it's a positive integer, be it Python's or NumPy's."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 0


class Step(NamedTuple):
    """What is known of a training step."""

    examples: int | tf.Tensor | None  # In the global batch: an int if it's static.
    loss: tf.Tensor | None
    devices: list[str]  # One a tower; none if the model_fn isn't replicated.
    plan: Any = None  # How its graph was divided, a `Plan`; None if it wasn't.
    unknown: Sequence[str] = ()  # Features and labels of unknown rank, which aren't sharded.

    @property
    def examples_per_tower(self) -> list[int] | None:
        """How many examples each tower gets, in order; None if the batch size isn't static."""
        if not isinstance(self.examples, int):
            return None
        size, more = divmod(self.examples, len(self.devices))
        return [size + (i < more) for i in range(len(self.devices))]


def record(step: Step) -> None:
    """Leaves what there is to know of a step in the default graph, instead of what was there."""
    setattr(tf.get_default_graph(), _STEP, step)


def of_graph(graph: tf.Graph) -> Step:
    """Returns what is known of a graph's steps; where none is replicated, an Estimator's loss."""
    losses = graph.get_collection(tf.GraphKeys.LOSSES) or [None]  # A spec's is the last.
    return getattr(graph, _STEP, Step(None, losses[-1], []))
