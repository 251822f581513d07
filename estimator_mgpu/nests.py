"""The leaves of a nest: where they are, what they are called, which of a batch have rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

SPLITTABLE = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)


def has_rows(path: tuple[Any, ...], leaf: Any) -> bool:
    """Whether a leaf is a tensor, which may have rows, rather than something that has none.

    Raises:
      TypeError: if it's neither.
    """
    if isinstance(leaf, SPLITTABLE):
        return True
    if leaf is None or isinstance(leaf, (str, bytes, bool, int, float, tf.DType)):
        return False
    if hasattr(leaf, '__array__'):  # NumPy arrays and scalars, which a model_fn makes constants.
        return False
    raise TypeError(
        f'{title(path)} is of {type(leaf).__name__}, which cannot be divided over towers. Legal '
        'are dense, sparse and ragged tensors, in any nest of dicts, tuples and lists. Let the '
        'input_fn give one of these, or name it in replicate(broadcast=[...]).'
    )


def broadcast_paths(
    leaves: dict[tuple[Any, ...], Any], broadcast: Sequence[str]
) -> set[tuple[Any, ...]]:
    """Returns the paths of the features that are named to go whole to every tower.

    Args:
      leaves: the batch's leaves by path.
      broadcast: names of features: a path's last key, or its keys joined by `/`, all or the first.

    Raises:
      ValueError: if there's no feature of such a name.
    """
    found: set[tuple[Any, ...]] = set()
    names: dict[str, set[tuple[Any, ...]]] = {}
    for path in leaves:
        if path[0] == 'features':
            keys = [str(key) for key in path[1:]]
            for end in range(1, len(keys) + 1):
                names.setdefault('/'.join(keys[:end]), set()).add(path)
            names.setdefault(keys[-1] if keys else '', set()).add(path)
    for name in broadcast:
        if name not in names:
            raise ValueError(
                f'broadcast names {name!r}, but there is no such feature. '
                f'The features are: {", ".join(sorted(filter(None, names))) or "one tensor"}.'
            )
        found |= names[name]
    return found


def with_paths(nest: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Lists a nest's leaves in `tf.nest` order, each with the keys that lead to it."""
    if isinstance(nest, Mapping):
        items = sorted(nest.items())
    elif isinstance(nest, tuple) and hasattr(nest, '_fields'):
        items = list(zip(nest._fields, nest))
    elif isinstance(nest, (list, tuple)):
        items = list(enumerate(nest))
    else:
        return [(path, nest)]
    return [leaf for key, value in items for leaf in with_paths(value, (*path, key))]


def title(path: tuple[Any, ...]) -> str:
    """Returns what messages call a leaf."""
    kind, *keys = path
    kind = {'features': 'feature', 'labels': 'label'}[kind] if keys else kind
    return f'{kind} {"/".join(map(str, keys))!r}' if keys else kind


def describe(path: tuple[Any, ...], leaf: Any) -> str:
    """Returns what messages call a leaf, with its shape or type."""
    return f'{title(path)} ({getattr(leaf, "shape", type(leaf).__name__)})'


def flat_tensors(nest: Any) -> list[tf.Tensor]:
    """Lists a nest's tensors, the parts of composite ones included."""
    return [t for t in tf.nest.flatten(nest, expand_composites=True) if isinstance(t, tf.Tensor)]


def pack_tensors(nest: Any, tensors: Sequence[tf.Tensor]) -> Any:
    """Puts other tensors in the place of a nest's."""
    own = iter(tensors)
    flat = tf.nest.flatten(nest, expand_composites=True)
    flat = [next(own) if isinstance(t, tf.Tensor) else t for t in flat]
    return tf.nest.pack_sequence_as(nest, flat, expand_composites=True)
