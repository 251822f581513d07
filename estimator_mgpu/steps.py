"""What is known of a graph's steps, for hooks, reports, errors, and advice on memory.

In: the `Step` that `replicate()` records in the graph that it has built. Out: the same, to whoever
has the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.tower import static_extents

_STEP = '_estimator_mgpu_step'  # An attribute of the graph.


class Step(NamedTuple):
    """What is known of a step."""

    examples: int | tf.Tensor | None  # In the global batch, as `Batch` counts: an int if static.
    loss: tf.Tensor | None
    devices: list[str]  # One for each chain of towers; none if the model_fn isn't replicated.
    plan: Any = None  # How its graph was divided, a `Plan`; None if it wasn't.
    schedule: Any = None  # Which ops run in turns, a `Schedule`; None without micro-batches.
    recomputation: Any = None  # What is computed twice, a `Recomputation`; None if not asked for.
    names: Any = None  # Of the ops that were added, `Names`; None if it wasn't divided.
    unknown: Sequence[str] = ()  # Features and labels of unknown rank, which aren't sharded.
    has_arrays: bool = False  # NumPy's, among features and labels; they aren't sharded.
    nothing_is_sharded: bool = False  # Although it was to be: there is no plan, then.
    facts: Any = None  # What has to stay true of its graph, `Facts`; None if it isn't checked.
    tower_devices: Sequence[str] = ()  # Of each tower; a device has one for each micro-batch.
    open_pairs: Sequence[Any] = ()  # Reads and writes whose order was left open, as `OpenPair`s.

    @property
    def leaves_out_microbatches(self) -> bool:
        """Whether each device has one micro-batch, as more would save too little."""
        return self.schedule is not None and not self.schedule.is_worth_it

    @property
    def microbatches(self) -> int:
        """How many micro-batches each device runs, one after another."""
        if self.schedule is None or self.leaves_out_microbatches:
            return 1
        return self.schedule.turns

    @property
    def most_microbatches(self) -> int | None:
        """How many micro-batches a device can have; None if the batch size isn't static."""
        if not isinstance(self.examples, int):
            return None
        return self.examples // len(self.devices)

    @property
    def examples_per_device(self) -> list[int] | None:
        """How many examples each device gets, in order; None if the batch size isn't static."""
        if not isinstance(self.examples, int):
            return None
        return [count for _, count in static_extents(self.examples, len(self.devices), turns=1)]


def record(step: Step) -> None:
    """Records a step in the default graph, in place of any that was recorded before."""
    setattr(tf.get_default_graph(), _STEP, step)


def of_graph(graph: tf.Graph) -> Step:
    """Returns the step that was recorded in a graph.

    If there is none, as no model_fn in it is replicated, the Estimator's loss is known.
    """
    if hasattr(graph, _STEP):
        return getattr(graph, _STEP)

    losses = graph.get_collection(tf.GraphKeys.LOSSES)
    loss = losses[-1] if losses else None  # Estimator adds that of the EstimatorSpec.
    return Step(None, loss, [])
