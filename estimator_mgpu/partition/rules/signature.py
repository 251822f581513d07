"""How a rule is written: labels for the dimensions of an op's inputs and outputs.

A rule is a function (op, sizes) -> `Signature`, or None where this op can't be divided. As in an
einsum, dimensions with one label go together: whatever has the rows along one of them has them
along all. A label that no output has is reduced over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.sizes import Size, Sizes

Label = Optional[Hashable]
"""None is for a dimension along which nothing can be divided."""


class Entries(NamedTuple):
    """An integer operand whose entries are sizes: of which dimensions, by label."""

    labels: tuple[Label, ...]


class Fixed(NamedTuple):
    """An integer operand that towers are given as known numbers."""

    numbers: tuple[int, ...]


class Part(NamedTuple):
    """An operand that is what the tower's own op made, whatever that comes to as a whole."""


Operand = Union[tuple[Label, ...], Entries, Fixed, Part]
WHOLE: tuple[Label, ...] = ()
"""An operand that has no dimension that could be divided, or is of any rank but whole."""


class Signature(NamedTuple):
    """What an op does along which dimensions.

    Attributes:
      inputs: one operand for each of the op's inputs.
      outputs: the labels of each output's dimensions.
      reduce: how towers' outputs without the label are reduced (as `Partial.reduce`); None if they
        are the same on all towers.
      dims: outputs' dimensions where they aren't those of the inputs with the same label.
      attrs: attributes that towers' ops have otherwise.
    """

    inputs: Sequence[Operand]
    outputs: Sequence[tuple[Label, ...]]
    reduce: str | None = None
    dims: Sequence[list[Size]] | None = None
    attrs: dict[str, Any] = {}


Rule = Callable[[tf.Operation, Sizes], Optional[Signature]]


def labels(tensor: tf.Tensor, sizes: Sizes, prefix: str = '') -> tuple[Label, ...]:
    """One label for each dimension, counted from the first.

    Raises:
      UnknownRank: if the rank is unknown.
    """
    return tuple(f'{prefix}{i}' for i in range(rank(tensor, sizes)))


class UnknownRank(Exception):
    """A tensor has dimensions that a rule would have to know."""


def rank(tensor: tf.Tensor, sizes: Sizes) -> int:
    """The number of dimensions.

    Raises:
      UnknownRank: if it's unknown.
    """
    dims = sizes.dims(tensor)
    if dims is None:
        raise UnknownRank(tensor.name)
    return len(dims)


def axis(op: tf.Operation, index: int, sizes: Sizes, of_rank: int) -> int | None:
    """The dimension that an input names, from 0; None if it's known only when the step runs."""
    numbers = sizes.numbers(op.inputs[index])
    return None if not numbers or not of_rank else numbers[0] % of_rank


def without(labelled: Sequence[Label], axes: Sequence[int]) -> tuple[Label, ...]:
    """The same labels, but none at some dimensions, along which nothing can be divided then."""
    return tuple(None if i in axes else label for i, label in enumerate(labelled))
