"""`replicate(input='machine')`: each machine reads its own part of a batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import batch
from estimator_mgpu.devices import CHIEF, host_of, machine_of

_SCOPE = 'machine_input'


def read(call: Callable[..., Any], input_fn: Any, devices: Sequence[str]) -> Callable[[], Any]:
    """An input_fn that joins what `input_fn` gives on each machine of some devices to a batch.

    `call` calls an input_fn as Estimator does. A machine that has no rows left gives none; where no
    machine has any, input ends.
    """

    machines = list(dict.fromkeys(map(machine_of, devices)))

    def joined() -> Any:
        given = []
        for number, machine in enumerate(machines):
            context = tf.distribute.InputContext(len(machines), number, len(machines))
            # The first one's ops have the names that they have on one device.
            with tf.device(host_of(machine)), tf.name_scope(_SCOPE if number else None):
                dataset = call(in_context(input_fn, context))
            with tf.device(host_of(machine)), tf.name_scope(_SCOPE):
                given.append(_iterator(_endless(dataset)).get_next())
        with tf.device(host_of(CHIEF)), tf.name_scope(_SCOPE):
            ended = _iterator(tf.data.Dataset.range(0))
            more = tf.reduce_any(tf.stack([has_more for _, has_more in given]))
            # Where there is no more, OutOfRangeError is raised.
            some = tf.cond(more, lambda: tf.constant(0, tf.int64), ended.get_next)
            parts = []
            for machine, (part, _) in zip(machines, given):
                with tf.control_dependencies([some]), tf.device(host_of(machine)):
                    parts.append(tf.nest.map_structure(tf.identity, part, expand_composites=True))
            return tf.nest.map_structure(_join, *parts)

    return joined


def in_context(input_fn: Any, context: tf.distribute.InputContext | None = None) -> Any:
    """An input_fn that is given its machine's context, by default that of the only one."""
    if 'input_context' not in inspect.signature(input_fn).parameters:
        raise ValueError(
            "input='machine' needs an input_fn with an argument input_context=None, by which each "
            'machine reads its own part: dataset.shard(input_context.num_input_pipelines, '
            "input_context.input_pipeline_id). With input='chief' the chief reads all."
        )
    return functools.partial(input_fn, input_context=context or tf.distribute.InputContext())


def _endless(dataset: Any) -> Any:
    """A dataset's elements, and then those without rows, each with whether it's the dataset's."""
    if not isinstance(dataset, tf.compat.v2.data.Dataset):
        raise TypeError(
            "input='machine' needs an input_fn that returns a tf.data.Dataset, and this one gives "
            f"{dataset!r}. With input='chief' any tensors will do."
        )
    nothing = tf.nest.map_structure(_no_rows, dataset.element_spec)
    all_of, pair = tf.data.Dataset.from_tensors, tf.data.Dataset.zip
    after = pair((all_of(nothing), all_of(False))).repeat()
    return pair((dataset, all_of(True).repeat())).concatenate(after)


def _iterator(dataset: Any) -> Any:
    """An iterator that begins with each session, and takes no seed, as a one-shot iterator does."""
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator


def _no_rows(spec: Any) -> Any:
    """What a spec describes, without rows."""
    shaped = isinstance(spec, (tf.RaggedTensorSpec, tf.SparseTensorSpec, tf.TensorSpec))
    known = shaped and spec.shape.rank is not None
    if known and isinstance(spec, tf.RaggedTensorSpec):
        inner = tuple(spec.shape.as_list()[spec.ragged_rank + 1 :])
        return tf.ragged.constant([], spec.dtype, spec.ragged_rank, inner)
    if known and isinstance(spec, tf.SparseTensorSpec):
        sizes = [0, *(size or 0 for size in spec.shape.as_list()[1:])]
        return tf.sparse.from_dense(tf.zeros(sizes, spec.dtype))
    if not known or not spec.shape.rank or None in spec.shape[1:]:
        raise ValueError(
            "input='machine' needs batches of tensors whose dimensions are known but for the rows, "
            f'and the dataset gives {spec}. Use batch(), or padded_batch(padded_shapes=...), or '
            "input='chief'."
        )
    return tf.zeros([0, *spec.shape.as_list()[1:]], spec.dtype)


def _join(*leaves: Any) -> Any:
    """The machines' rows one after another."""
    if len(leaves) == 1:
        return leaves[0]
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.compat.v2.sparse.concat(0, list(leaves), True)
    joined = tf.concat(leaves, 0)
    if isinstance(joined, tf.Tensor):
        batch.record_parts(joined, leaves)
    return joined
