"""`replicate(input='machine')`: each machine reads its own part of each batch.

In: the user's input_fn. Out: one whose batches are the parts of all machines, joined. A machine may
have fewer batches than others: then its parts have no examples, until no machine has any left.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches import batch
from estimator_mgpu.devices import CHIEF, host_of, machine_of
from estimator_mgpu.tf_internals import private

_SCOPE = 'machine_input'


def read(call: Callable[..., Any], input_fn: Any, devices: Sequence[str]) -> Callable[[], Any]:
    """Returns an input_fn whose batches are those of several machines, one after another.

    A machine that has no examples left adds none. When no machine has any, the data ends.

    Args:
      call: calls an input_fn as Estimator does.
      input_fn: returns the dataset of one machine, by its argument `input_context`.
      devices: the devices that train. Each machine that has one of them reads a part.
    """
    machines = list(dict.fromkeys(map(machine_of, devices)))

    def global_batches() -> Any:
        parts = []
        flags = []  # whether each machine has examples left
        for index, machine in enumerate(machines):
            part, has_more = _next_part(call, input_fn, machine, index, len(machines))
            parts.append(part)
            flags.append(has_more)

        with tf.device(host_of(CHIEF)), tf.name_scope(_SCOPE):
            data_is_there = _fails_without_data(flags)
            waiting = []
            for machine, part in zip(machines, parts):
                with tf.control_dependencies([data_is_there]), tf.device(host_of(machine)):
                    part = tf.nest.map_structure(tf.identity, part, expand_composites=True)
                waiting.append(part)
            return tf.nest.map_structure(_concatenated, *waiting)

    return global_batches


def _next_part(
    call: Callable[..., Any], input_fn: Any, machine: str, index: int, count: int
) -> tuple[Any, tf.Tensor]:
    """Returns one machine's part of the batch, and whether that machine has examples left.

    It's the machine with this index, of so many.
    """
    context = tf.distribute.InputContext(count, index, count)
    # The first machine's ops have the names that they have on one device.
    with tf.device(host_of(machine)), tf.name_scope(_SCOPE if index else None):
        dataset = call(in_context(input_fn, context))
    with tf.device(host_of(machine)), tf.name_scope(_SCOPE):
        return _iterator(_endless(dataset)).get_next()


def _fails_without_data(flags: Sequence[tf.Tensor]) -> tf.Tensor:
    """A tensor that raises OutOfRangeError, as at the end of data, if none of the flags is set."""
    empty = _iterator(tf.data.Dataset.range(0))
    any_has_more = tf.reduce_any(tf.stack(flags))
    # One op, also in v1 mode: a `Merge` runs once either branch is there, so waits for neither.
    return private.cond(any_has_more, lambda: tf.constant(0, tf.int64), empty.get_next)


def in_context(input_fn: Any, context: tf.distribute.InputContext | None = None) -> Any:
    """Gives an input_fn the context of its machine, by default of the only one."""
    if 'input_context' not in inspect.signature(input_fn).parameters:
        raise ValueError(
            "input='machine' needs an input_fn with an argument input_context=None, by which each "
            'machine reads its own part: dataset.shard(input_context.num_input_pipelines, '
            "input_context.input_pipeline_id). With input='chief' the chief reads all."
        )
    return functools.partial(input_fn, input_context=context or tf.distribute.InputContext())


def _endless(dataset: Any) -> Any:
    """The elements of a dataset, and after them elements without examples, without end.

    Each comes with a bool: whether it's from the dataset.
    """
    if not isinstance(dataset, tf.compat.v2.data.Dataset):
        raise TypeError(
            "input='machine' needs an input_fn that returns a tf.data.Dataset, and this one gives "
            f"{dataset!r}. With input='chief' any tensors will do."
        )
    without_examples = tf.nest.map_structure(_empty, dataset.element_spec)
    from_tensors = tf.data.Dataset.from_tensors
    padding = tf.data.Dataset.zip((from_tensors(without_examples), from_tensors(False))).repeat()
    elements = tf.data.Dataset.zip((dataset, from_tensors(True).repeat()))
    return elements.concatenate(padding)


def _iterator(dataset: Any) -> Any:
    """An iterator that starts anew in each session.

    A one-shot iterator would do that, too, but it takes a seed from the graph, and so changes the
    seeds of ops that are made later.
    """
    iterator = tf.data.make_initializable_iterator(dataset)
    tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
    return iterator


def _empty(spec: Any) -> Any:
    """A value of a spec, without examples: a tensor of shape [0, 3] for one of shape [None, 3]."""
    is_tensor = isinstance(spec, (tf.RaggedTensorSpec, tf.SparseTensorSpec, tf.TensorSpec))
    has_rank = is_tensor and spec.shape.rank is not None

    if has_rank and isinstance(spec, tf.RaggedTensorSpec):
        inner_shape = tuple(spec.shape.as_list()[spec.ragged_rank + 1 :])
        return tf.ragged.constant(
            [], spec.dtype, spec.ragged_rank, inner_shape, row_splits_dtype=spec.row_splits_dtype
        )

    if has_rank and isinstance(spec, tf.SparseTensorSpec):
        sizes = [size or 0 for size in spec.shape.as_list()[1:]]
        return tf.sparse.from_dense(tf.zeros([0, *sizes], spec.dtype))

    if not has_rank or not spec.shape.rank or None in spec.shape[1:]:
        raise ValueError(
            "input='machine' needs batches of tensors whose dimensions are known but for the rows, "
            f'and the dataset gives {spec}. Use batch(), or padded_batch(padded_shapes=...), or '
            "input='chief'."
        )
    return tf.zeros([0, *spec.shape.as_list()[1:]], spec.dtype)


def _concatenated(*parts: Any) -> Any:
    """One leaf of the global batch: the examples of all machines, in their order."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return _concatenated_sparse(parts)
    joined = tf.concat(parts, 0)
    batch.record_parts(joined, parts)
    return joined


def _concatenated_sparse(parts: Sequence[tf.SparseTensor]) -> tf.SparseTensor:
    """The entries of all machines, with rows that each machine counts over the global batch.

    So indices are the concatenation of what machines have, as values are. Along other dimensions,
    the result is as large as the largest part.
    """
    sizes = tf.stack([part.dense_shape for part in parts])  # a row for each machine
    rows_before = tf.cumsum(sizes[:, :1], exclusive=True)
    offsets = tf.pad(rows_before, [[0, 0], [0, parts[0].shape.rank - 1]])
    indices = []
    for part, offset in zip(parts, tf.unstack(offsets)):
        with tf.device(part.indices.device):
            indices.append(part.indices + offset)

    rows = tf.reduce_sum(sizes[:, :1], 0)
    dense_shape = tf.concat([rows, tf.reduce_max(sizes[:, 1:], 0)], 0)
    values = [part.values for part in parts]
    joined = tf.SparseTensor(_concatenated(*indices), _concatenated(*values), dense_shape)
    static = zip(*(part.shape.as_list()[1:] for part in parts))
    joined.set_shape([None, *(None if None in widths else max(widths) for widths in static)])
    return joined
