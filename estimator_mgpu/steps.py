"""What a graph tells hooks of each training step: its examples, its loss and its devices.

It's kept in graph collections, as tensors and strings, which a MetaGraph can hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import batch, private

_EXAMPLES, _LOSS, _DEVICES = (f'estimator_mgpu/{what}' for what in ('examples', 'loss', 'devices'))


class Step(NamedTuple):
    """What is known of a training step.

    Attributes:
      examples: the rows of the whole batch: an int if they're static, else an int64 scalar tensor;
        None if they aren't known.
      loss: scalar tensor, or None.
      devices: one device string a tower; empty if the model_fn isn't replicated.
    """

    examples: int | tf.Tensor | None
    loss: tf.Tensor | None
    devices: list[str]

    @property
    def rows_per_tower(self) -> list[int] | None:
        """How many rows each tower gets, in order; None if the batch size isn't static."""
        if not isinstance(self.examples, int):
            return None
        size, more = divmod(self.examples, len(self.devices))
        return [size + (i < more) for i in range(len(self.devices))]


def record(examples: tf.Tensor | None, loss: tf.Tensor | None, devices: Sequence[str]) -> Step:
    """Leaves what there is to know of a step in the default graph, instead of what was there."""
    graph = tf.get_default_graph()
    for name, values in ((_EXAMPLES, [examples]), (_LOSS, [loss]), (_DEVICES, devices)):
        graph.get_collection_ref(name)[:] = [value for value in values if value is not None]
    return of_graph(graph)


def of_graph(graph: tf.Graph) -> Step:
    """Returns what is known of the steps of a graph.

    Where no replicated model_fn was called, the loss is the last one in `tf.GraphKeys.LOSSES`; an
    Estimator adds that of its EstimatorSpec after all others.
    """
    [examples] = graph.get_collection(_EXAMPLES) or [None]
    losses = graph.get_collection(_LOSS) or graph.get_collection(tf.GraphKeys.LOSSES)
    static = None if examples is None else private.constant_value(examples)
    return Step(
        examples if static is None else int(static),
        losses[-1] if losses else None,
        [tf.compat.as_str(device) for device in graph.get_collection(_DEVICES)],
    )


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
