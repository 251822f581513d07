"""What a batch is: a nest of tensors, most of which have one entry for each example.

In: features and labels as an input_fn gives them. Out: a `Batch`, which says what can be sharded,
and how many examples there are.

If the graph knows that a batch has fewer examples than devices, `partition.divide.divide()` shards
nothing, and the log says so (`reports.start_of_training`). If only a step knows, the batch is
sharded, and some towers have no example: see `partition.towers.shards`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import HOST, machine_of
from estimator_mgpu.tf_internals import private, tracebacks

TENSORS = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)  # what may have examples
# What to do about a feature or a label of unknown rank.
RANK_REMEDY = 'give it a shape in the input_fn or the model_fn, say by tensor.set_shape([None, 3])'
_PARTS = '_estimator_mgpu_parts'  # An attribute of the graph.
Path = tuple[Any, ...]  # the keys that lead to a leaf of a nest, 'features' or 'labels' first


class Batch(NamedTuple):
    """What can be sharded of a batch.

    Attributes:
      sources: the dense tensors, each once.
      static: how many examples there are, if the graph knows it of each leaf.
      leaves: all that has examples: dense, sparse and ragged tensors.
      unknown: tensors of unknown rank. They may be scalars, so they aren't sharded.
      has_arrays: whether there are NumPy arrays, which the model_fn turns into constants.
    """

    sources: list[tf.Tensor]
    static: int | None
    leaves: dict[Path, Any]
    unknown: dict[Path, Any]
    has_arrays: bool = False

    @property
    def unsharded(self) -> list[Any]:
        """The leaves that aren't sharded themselves, but whose results may be.

        These are sparse and ragged tensors, whose dense counterparts have an example a row, and
        tensors of unknown rank.
        """
        composite = (tf.SparseTensor, tf.RaggedTensor)
        leaves = [leaf for leaf in self.leaves.values() if isinstance(leaf, composite)]
        return [*leaves, *self.unknown.values()]

    @property
    def unknown_titles(self) -> list[str]:
        """What messages call the leaves of unknown rank."""
        return [title(path) for path in self.unknown]

    def titles_of_entries(self) -> dict[str, str]:
        """What messages call the sparse leaves, by the names of their indices and values."""
        titles: dict[str, str] = {}
        for path, leaf in self.leaves.items():
            if isinstance(leaf, tf.SparseTensor):
                for part in (leaf.indices, leaf.values):
                    titles.setdefault(part.name, title(path))
        return titles

    def titles_of_dense(self) -> dict[str, str]:
        """What messages call the dense leaves, by their names."""
        titles: dict[str, str] = {}
        for path, leaf in self.leaves.items():
            if isinstance(leaf, tf.Tensor):
                titles.setdefault(leaf.name, title(path))
        return titles

    def ragged_by_values(self) -> dict[str, tf.RaggedTensor]:
        """The leaves with one ragged dimension, by the names of their values: the first ones."""
        ragged: dict[str, tf.RaggedTensor] = {}
        for leaf in self.leaves.values():
            if isinstance(leaf, tf.RaggedTensor) and isinstance(leaf.values, tf.Tensor):
                ragged.setdefault(leaf.values.name, leaf)
        return ragged

    def total(self) -> tf.Tensor:
        """The number of examples, an int32 scalar. A step fails if the leaves differ in it.

        If no op uses a leaf, it doesn't count: on one device, a step doesn't get it.
        """
        in_use = {path: leaf for path, leaf in self.leaves.items() if _is_used(leaf)}
        leaves = in_use or self.leaves
        first = tf.nest.flatten(list(leaves.values()), expand_composites=True)[0]
        with tracebacks.made_for(first.op):
            return _total(leaves)


def _is_used(leaf: Any) -> bool:
    """Whether any op uses a leaf, or a part of a sparse or ragged one."""
    parts = tf.nest.flatten(leaf, expand_composites=True)
    return any(part.consumers() for part in parts)


def _total(leaves: dict[Path, Any]) -> tf.Tensor:
    """The number of examples of leaves, with an assertion that all have the same.

    If machines have read parts, all leaves of a machine need the same number: a tower takes the
    same rows of each.
    """
    in_parts = {path: parts_of(leaf) for path, leaf in leaves.items() if len(parts_of(leaf)) > 1}
    if not in_parts:
        return _total_of_machine(leaves)

    totals = []
    for parts in zip(*in_parts.values()):
        device = _components(parts)[0].device
        with tf.device(device):
            of_machine = dict(zip(in_parts, parts))
            totals.append(_total_of_machine(of_machine, machine_of(device)))
    total = tf.add_n(totals)

    # Of sparse tensors, machines have read the entries: rows are counted of all together.
    others = {path: leaf for path, leaf in leaves.items() if path not in in_parts}
    if not others:
        return total
    numbers = [tf.cast(number_of_rows(leaf), tf.int32) for leaf in others.values()]
    return _if_as_many([next(iter(in_parts)), *others], tf.stack([total, *numbers]), total)


def _total_of_machine(leaves: dict[Path, Any], machine: str = '') -> tf.Tensor:
    """The number of examples that a machine has read; if it's one of several, messages name it."""
    first = next(iter(leaves.values()))
    # Of one machine, what the graph knows has been compared.
    is_static = not machine and all(static_rows(leaf) is not None for leaf in leaves.values())
    if len(leaves) == 1 or is_static:
        return tf.cast(number_of_rows(first), tf.int32)

    paths, numbers = _rows_of_each(leaves)
    # For each slice of examples that is added, TensorFlow looks through all that its ends are
    # computed from. So that this isn't thousands of leaves, one of them is measured by itself.
    return tf.cast(_if_as_many(paths, numbers, number_of_rows(first), machine), tf.int32)


def _if_as_many(
    paths: Sequence[Path], numbers: tf.Tensor, total: tf.Tensor, machine: str = ''
) -> tf.Tensor:
    """The number of examples, which fails unless all leaves have as many.

    Args:
      paths: of the leaves.
      numbers: how many each has.
      total: any of the numbers.
      machine: which one has them, if it's one of several.
    """
    everywhere, here = (' on each machine', f' on {machine}') if machine else ('', '')
    # This text is in the graph.
    message = (
        f'features and labels must have the same number of examples along dimension 0{everywhere}, '
        'but for those that are replicated: scalars, and what replicate(broadcast=[...]) '
        f'names. The numbers of examples of {", ".join(map(title, paths))}{here} are'
    )
    return if_same(numbers, message, total)


def if_same(numbers: tf.Tensor, message: str, value: tf.Tensor) -> tf.Tensor:
    """A value, which fails with a message unless all numbers of a vector are the same.

    Args:
      numbers: integers.
      message: what the error says before the numbers.
      value: any tensor.
    """
    same = tf.reduce_all(tf.equal(numbers, numbers[0]))
    # `tf.Assert` would make a branch, with functions of its own, for this one op.
    check = tf.raw_ops.Assert(condition=same, data=[message, numbers], summarize=100)
    with tf.control_dependencies([check]):
        return tf.identity(value)


def record_parts(leaf: Any, parts: Sequence[Any]) -> None:
    """Notes in the graph which parts of a leaf machines have read: joined, they are the leaf.

    What a ragged tensor consists of has parts, too. Row splits of each machine begin with 0, so
    joining them takes more than a concatenation.
    """
    components = _components(leaf)
    graph = components[0].graph
    if not hasattr(graph, _PARTS):
        setattr(graph, _PARTS, {})
    noted = getattr(graph, _PARTS)
    noted[_names(components)] = parts
    for component, *of_component in zip(components, *map(_components, parts)):
        noted[_names([component])] = of_component


def parts_of(leaf: Any) -> Sequence[Any]:
    """Returns the parts of a leaf that machines have read; or the leaf, if one read it all.

    Args:
      leaf: a leaf, a tensor of which it consists, or any other tensor.
    """
    components = _components(leaf)
    return getattr(components[0].graph, _PARTS, {}).get(_names(components), [leaf])


def _components(leaf: Any) -> list[tf.Tensor]:
    """The dense tensors of which a leaf consists, or several leaves."""
    if isinstance(leaf, tf.Tensor):  # Of most tensors of a graph it's asked which parts they have.
        return [leaf]
    return tf.nest.flatten(leaf, expand_composites=True)


def _names(tensors: Sequence[tf.Tensor]) -> tuple[str, ...]:
    return tuple(tensor.name for tensor in tensors)


def leaves_of(features: Any, labels: Any, broadcast: Sequence[str]) -> dict[Path, Any]:
    """Returns the leaves of a batch, but for the features that `broadcast` names."""
    leaves = dict(private.flatten_with_paths({'features': features, 'labels': labels}))
    replicated = _broadcast_paths(leaves, broadcast)
    return {path: leaf for path, leaf in leaves.items() if path not in replicated}


def look_at(features: Any, labels: Any, broadcast: Sequence[str] = ()) -> Batch:
    """Finds what can be sharded of a batch, and adds no op to the graph.

    Examples are along dimension 0. What isn't sharded: scalars, what isn't a tensor (None, str,
    numbers), and the features that `broadcast` names.

    Args:
      features: as an input_fn gives them.
      labels: likewise.
      broadcast: names of features: their last key, or their first keys joined by `/`.
    """
    leaves = leaves_of(features, labels, broadcast)
    shardable = {path: leaf for path, leaf in leaves.items() if _may_have_examples(path, leaf)}
    has_arrays = any(isinstance(leaf, np.ndarray) for leaf in leaves.values())
    if not (shardable or has_arrays or broadcast):
        raise ValueError(
            'There is nothing to shard over the towers: no feature and no label has examples along '
            f'dimension 0. Given: {_with_shapes(leaves)}. Let the input_fn give batches, say by '
            'dataset.batch().'
        )
    return batch_of(shardable)._replace(has_arrays=has_arrays)


def _with_shapes(leaves: dict[Path, Any]) -> str:
    """Names leaves for a message, with the shape of each, or its type."""
    texts = []
    for path, leaf in leaves.items():
        shape = getattr(leaf, 'shape', type(leaf).__name__)
        texts.append(f'{title(path)} ({shape})')
    return ', '.join(texts)


def batch_of(leaves: dict[Path, Any]) -> Batch:
    """A batch of leaves that may have examples, by what the graph knows of their shapes now."""
    unknown = {path: leaf for path, leaf in leaves.items() if _rank(leaf) is None}
    with_examples = {path: leaf for path, leaf in leaves.items() if _rank(leaf)}
    differing = differing_sizes(with_examples)
    if differing:
        raise ValueError(
            f'The numbers of examples along dimension 0 differ: {differing}. Each needs one entry '
            "an example: let the input_fn give batches, by dataset.batch() say. What isn't per "
            'example (a vocabulary) is a scalar or named in replicate(broadcast=[...]), to go to '
            'every tower.'
        )

    # By name, as one tensor may be in several places.
    dense = [leaf for leaf in with_examples.values() if isinstance(leaf, tf.Tensor)]
    sources = {tensor.name: tensor for tensor in dense}
    # A sparse or ragged tensor may turn out to have another number of rows, which a step checks.
    sizes = {static_rows(leaf) for leaf in with_examples.values()}
    static = sizes.pop() if len(sizes) == 1 else None
    return Batch(list(sources.values()), static, with_examples, unknown)


def differing_sizes(leaves: dict[Path, Any]) -> str:
    """Says how many examples each leaf has, if they are known to differ; '' otherwise."""
    sizes = {path: static_rows(leaf) for path, leaf in leaves.items()}
    known = {path: size for path, size in sizes.items() if size is not None}
    if len(set(known.values())) < 2:
        return ''
    return ', '.join(f'{title(path)} has {size}' for path, size in known.items())


def examples_of(leaves: dict[Path, Any]) -> int | tf.Tensor | None:
    """Returns how many examples an unsharded batch has: those of its labels, if it has any.

    Returns:
      An int if the graph knows, and otherwise a scalar. None if no leaf has examples.
    """
    labels = [leaf for path, leaf in leaves.items() if path[0] == 'labels']
    features = [leaf for path, leaf in leaves.items() if path[0] == 'features']
    for leaf in [*labels, *features]:
        if not isinstance(leaf, TENSORS) or not _rank(leaf):
            continue
        static = static_rows(leaf)
        if static is not None:
            return static
        with tf.control_dependencies(None), tf.name_scope('batch/'), tf.device(HOST):
            return number_of_rows(leaf)
    return None


def number_of_rows(leaf: Any) -> tf.Tensor:
    """Returns the size of dimension 0 of a dense, sparse or ragged tensor: an int64 scalar."""
    # Each part is measured on the machine that has read it.
    sizes = [_first_size(part) for part in parts_of(leaf)]
    return tf.add_n(sizes) if len(sizes) > 1 else sizes[0]


def _rows_of_each(leaves: dict[Path, Any]) -> tuple[list[Path], tf.Tensor]:
    """Returns the paths of leaves, and their sizes of dimension 0, as a vector in that order.

    A few ops give those of all dense tensors of one type on one device, as there may be thousands.
    """
    alike = defaultdict[Any, dict[Path, Any]](dict)
    for path, leaf in leaves.items():
        is_dense = isinstance(leaf, tf.Tensor)
        alike[(leaf.dtype, leaf.device) if is_dense else path][path] = leaf
    paths = [path for group in alike.values() for path in group]
    return paths, tf.concat([_first_sizes(list(group.values())) for group in alike.values()], 0)


def _first_sizes(leaves: Sequence[Any]) -> tf.Tensor:
    """As `number_of_rows` of each: of one leaf, or of tensors of one type on one device."""
    if len(leaves) == 1:
        return tf.stack([_first_size(leaves[0])])
    ranks = [tensor.shape.rank for tensor in leaves]
    positions = np.cumsum([0, *ranks[:-1]])  # of the first sizes among all of the shapes'
    with tf.device(leaves[0].device or HOST):
        shapes = tf.shape_n(leaves, tf.int64)
        return tf.gather(tf.concat(shapes, 0), positions)


def _first_size(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        with tf.device(leaf.row_splits.device):
            return leaf.nrows(tf.int64)
    device = leaf.device if isinstance(leaf, tf.Tensor) else ''
    with tf.device(device or HOST):
        return tf.shape(leaf, out_type=tf.int64)[0]


def static_rows(leaf: Any) -> int | None:
    """Returns the size of dimension 0 of a tensor, if the graph knows it."""
    return None if leaf.shape.rank is None else leaf.shape.as_list()[0]


def _rank(leaf: Any) -> int | None:
    """Returns how many dimensions a tensor has, if the graph knows.

    That of a ragged tensor is always known to be 2 at least.
    """
    if leaf.shape.rank is None and isinstance(leaf, tf.RaggedTensor):
        return leaf.ragged_rank + 1
    return leaf.shape.rank


def _may_have_examples(path: Path, leaf: Any) -> bool:
    """Whether a leaf has examples, or may have, as its rank is unknown."""
    if isinstance(leaf, TENSORS):
        return _rank(leaf) != 0
    is_plain = isinstance(leaf, (type(None), str, bytes, int, float, tf.DType))
    is_numpy = hasattr(leaf, '__array__')  # A model_fn turns these into constants.
    if is_plain or is_numpy:
        return False
    raise TypeError(
        f'{title(path)} is of {type(leaf).__name__}, which cannot be sharded over towers. Let the '
        'input_fn give dense, sparse and ragged tensors, in any nest of dicts, tuples and lists, '
        'or name it in replicate(broadcast=[...]).'
    )


def _broadcast_paths(leaves: dict[Path, Any], broadcast: Sequence[str]) -> set[Path]:
    """Returns the paths of the features that `broadcast` names.

    For example, a feature in {'user': {'age': ...}} is named by 'user/age', by 'age', and with all
    of its neighbors by 'user'.
    """
    paths_by_name: dict[str, set[Path]] = {}
    for path in leaves:
        if path[0] != 'features':
            continue
        keys = [str(key) for key in path[1:]]
        names = ['/'.join(keys[:length]) for length in range(1, len(keys) + 1)]
        for name in [*names, *keys[-1:]]:
            paths_by_name.setdefault(name, set()).add(path)

    for name in broadcast:
        if name not in paths_by_name:
            raise ValueError(
                f'broadcast names {name!r}, but there is no such feature. '
                f'The features are: {", ".join(sorted(paths_by_name)) or "one tensor"}.'
            )
    return {path for name in broadcast for path in paths_by_name[name]}


def title(path: Path) -> str:
    """Returns what messages call a leaf: "feature 'user/age'", or 'labels' if that's one tensor."""
    kind, *keys = path
    return f'{kind[:-1]} {"/".join(map(str, keys))!r}' if keys else kind
