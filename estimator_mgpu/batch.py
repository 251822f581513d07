"""What a batch is: a nest of tensors, most of which have one entry for each example.

In: features and labels as an input_fn gives them. Out: a `Batch`, which says what can be sharded,
and how many examples there are.

If the graph knows that a batch has fewer examples than devices, `partition.divide.divide()` shards
nothing, and the log says so (`explain.log_sharding`). If only a step knows, the batch is sharded,
and some towers have no example: see `partition.towers.shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import private

TENSORS = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)  # what may have examples
# What to do about a feature or a label of unknown rank.
RANK_REMEDY = 'give it a shape in the input_fn or the model_fn, say by tensor.set_shape([None, 3])'
_PARTS = '_estimator_mgpu_parts'  # An attribute of the graph.
Path = tuple[Any, ...]  # the keys that lead to a leaf of a nest, 'features' or 'labels' first


class Batch(NamedTuple):
    """What can be sharded of a batch."""

    sources: list[tf.Tensor]  # The dense tensors, each once.
    static: int | None  # How many examples there are, if the graph knows.
    leaves: dict[Path, Any]  # All with examples, sparse and ragged ones, too.
    # Tensors of unknown rank. They may be scalars, so they aren't sharded.
    unknown: dict[Path, Any]

    @property
    def unknown_titles(self) -> list[str]:
        """What messages call the leaves of unknown rank."""
        return [_title(path) for path in self.unknown]

    def total(self) -> tf.Tensor:
        """The number of examples, an int32 scalar; a step fails if leaves differ in it."""
        counts = {path: rows_of(leaf) for path, leaf in self.leaves.items()}
        first, *others = counts.values()
        if others and None in map(static_rows, self.leaves.values()):
            rows = tf.stack(list(counts.values()))
            # This text is in the graph.
            message = (
                'features and labels must have the same number of examples along dimension 0, but '
                'for those that are replicated: scalars, and what replicate(broadcast=[...]) '
                f'names. The numbers of examples of {", ".join(map(_title, counts))} are'
            )
            same = tf.reduce_all(tf.equal(rows, first))
            with tf.control_dependencies([tf.Assert(same, [message, rows], summarize=100)]):
                first = tf.identity(first)
        return tf.cast(first, tf.int32)


def record_parts(tensor: tf.Tensor, parts: Sequence[tf.Tensor]) -> None:
    """Notes that a tensor is the concatenation of others, which machines have read."""
    setattr(tensor.graph, _PARTS, {**getattr(tensor.graph, _PARTS, {}), tensor.name: parts})


def parts_of(tensor: tf.Tensor) -> Sequence[tf.Tensor]:
    """Returns the parts of a tensor that machines have read; or the tensor, if one read it all."""
    return getattr(tensor.graph, _PARTS, {}).get(tensor.name, [tensor])


def leaves_of(features: Any, labels: Any, broadcast: Sequence[str]) -> dict[Path, Any]:
    """Returns the leaves of a batch, but for the features that `broadcast` names."""
    leaves = dict(private.flatten_with_paths({'features': features, 'labels': labels}))
    whole = _broadcast_paths(leaves, broadcast)
    return {path: leaf for path, leaf in leaves.items() if path not in whole}


def look_at(features: Any, labels: Any, broadcast: Sequence[str] = ()) -> Batch:
    """Finds what can be sharded in a batch, and adds no op to the graph.

    Examples are along dimension 0. Not sharded are scalars, what isn't a tensor (None, str,
    numbers), and the features that `broadcast` names: by their last key, or by their first keys
    joined by `/`.
    """
    leaves = leaves_of(features, labels, broadcast)
    found = {path: leaf for path, leaf in leaves.items() if _may_have_rows(path, leaf)}
    arrays = any(isinstance(leaf, np.ndarray) for leaf in leaves.values())
    if not (found or arrays or broadcast):
        shapes = {p: getattr(leaf, 'shape', type(leaf).__name__) for p, leaf in leaves.items()}
        given = ', '.join(f'{_title(path)} ({shape})' for path, shape in shapes.items())
        raise ValueError(
            'There is nothing to shard over the towers: no feature and no label has examples along '
            f'dimension 0. Given: {given}. Let the input_fn give batches, say by dataset.batch().'
        )
    return batch_of(found)


def batch_of(leaves: dict[Path, Any]) -> Batch:
    """A batch of leaves that may have examples, by what the graph knows of their shapes now."""
    unknown = {path: leaf for path, leaf in leaves.items() if _rank(leaf) is None}
    found = {path: leaf for path, leaf in leaves.items() if _rank(leaf)}
    known = {path: rows for path, leaf in found.items() if (rows := static_rows(leaf)) is not None}
    if len(set(known.values())) > 1:
        sizes = ', '.join(f'{_title(path)} has {rows}' for path, rows in known.items())
        raise ValueError(
            f'The numbers of examples along dimension 0 differ: {sizes}. Each needs one entry an '
            "example: let the input_fn give batches, by dataset.batch() say. What isn't per "
            'example (a vocabulary) is a scalar or named in replicate(broadcast=[...]), to go to '
            'every tower.'
        )
    sources = {leaf.name: leaf for leaf in found.values() if isinstance(leaf, tf.Tensor)}
    static = {static_rows(t) for t in sources.values()}
    rows = static.pop() if len(static) == 1 else None
    return Batch(list(sources.values()), rows, found, unknown)


def examples_of(leaves: dict[Path, Any]) -> int | tf.Tensor | None:
    """Returns how many examples an unsharded batch has: those of its labels, if it has any."""
    for _, leaf in sorted(leaves.items(), key=lambda item: item[0][0], reverse=True):
        if isinstance(leaf, TENSORS) and _rank(leaf):
            if (static := static_rows(leaf)) is not None:
                return static
            with tf.control_dependencies(None), tf.name_scope('batch/'), tf.device('/device:CPU:0'):
                return rows_of(leaf)
    return None


def rows_of(leaf: Any) -> tf.Tensor:
    """Returns the size of dimension 0 of a dense, sparse or ragged tensor: an int64 scalar."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(tf.int64)
    counts = []
    for part in parts_of(leaf) if isinstance(leaf, tf.Tensor) else [leaf]:
        with tf.device(part.device if isinstance(part, tf.Tensor) else ''):
            counts.append(tf.shape(part, out_type=tf.int64)[0])
    return tf.add_n(counts)


def static_rows(leaf: Any) -> int | None:
    """Returns the size of dimension 0, if the graph knows it."""
    return None if leaf.shape.rank is None else leaf.shape.as_list()[0]


def _rank(leaf: Any) -> int | None:
    """Returns how many dimensions it has, if the graph knows; a ragged tensor has 2 at least."""
    least = leaf.ragged_rank + 1 if isinstance(leaf, tf.RaggedTensor) else None
    return least if leaf.shape.rank is None else leaf.shape.rank


def _may_have_rows(path: Path, leaf: Any) -> bool:
    """Whether a leaf has examples, or may have, as its rank is unknown."""
    if isinstance(leaf, TENSORS):
        return _rank(leaf) != 0
    plain = (type(None), str, bytes, int, float, tf.DType)
    if isinstance(leaf, plain) or hasattr(leaf, '__array__'):
        return False  # A model_fn turns NumPy arrays and scalars into constants.
    raise TypeError(
        f'{_title(path)} is of {type(leaf).__name__}, which cannot be sharded over towers. Let the '
        'input_fn give dense, sparse and ragged tensors, in any nest of dicts, tuples and lists, '
        'or name it in replicate(broadcast=[...]).'
    )


def _broadcast_paths(leaves: dict[Path, Any], broadcast: Sequence[str]) -> set[Path]:
    """Returns the paths of the features that are named."""
    names: dict[str, set[Path]] = {}
    for path in leaves:
        if path[0] == 'features':
            keys = [str(key) for key in path[1:]]
            for name in [*keys[-1:], *('/'.join(keys[: i + 1]) for i in range(len(keys)))]:
                names.setdefault(name, set()).add(path)
    for name in broadcast:
        if name not in names:
            raise ValueError(
                f'broadcast names {name!r}, but there is no such feature. '
                f'The features are: {", ".join(sorted(names)) or "one tensor"}.'
            )
    return {path for name in broadcast for path in names[name]}


def _title(path: Path) -> str:
    """Returns what messages call a leaf."""
    kind, *keys = path
    return f'{kind[:-1]} {"/".join(map(str, keys))!r}' if keys else kind
