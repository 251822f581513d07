"""The dimensions that the rule for an op names, along which it is to be tried.

In: a `Call`. Out: a `Dimension` for each letter of the rule: which dimension of which inputs it is,
and which inputs hold its size as an entry of a shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from estimator_mgpu.custom_ops.op_calls import Call, may_be_sizes
from estimator_mgpu.custom_ops.register_rule import is_registered
from estimator_mgpu.partition.plan import Label, SizesOf
from estimator_mgpu.partition.rules import RULES
from estimator_mgpu.partition.rules.notation import (
    NotSharded,
    OtherRanks,
    Signature,
    failure,
    labels_of,
    signature_of,
)
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import RowSpace, Size


class Dimension(NamedTuple):
    """What a rule says is one dimension: that of each input that has the same label."""

    call: Call
    axes: Mapping[int, int]  # by the inputs that have the dimension, which of theirs it is
    positions: Mapping[int, int]  # by the inputs that are shapes, which entry is its size
    size: int  # how many entries the inputs have along it, but for those that have one
    tried: int  # how many it's tried with: as many, or some if all inputs have one

    def input_with(self, index: int, count: int) -> np.ndarray:
        """An input with `count` entries: its first ones, or its only one, repeated."""
        axis = self.axes[index]
        value = self.call.values[index]
        if value.shape[axis] == 1:
            value = np.repeat(value, count, axis)
        return value.take(range(count), axis)

    def entries_with(self, index: int, count: Any) -> list[Any]:
        """The entries of a shape for `count` entries along the dimension, an int or a tensor.

        The entry may be a multiple: if a dimension of size 4 stands in the shape as 8, it's twice
        `count`.
        """
        entries = np.ravel(self.call.values[index]).tolist()
        position = self.positions[index]
        factor, rest = divmod(entries[position], self.size)
        if factor > 0 and rest == 0:
            entries[position] = count * factor
        return entries

    def shape_with(self, index: int, count: int) -> np.ndarray:
        """The shape with these entries, as the op is given it."""
        value = self.call.values[index]
        return np.reshape(self.entries_with(index, count), value.shape).astype(value.dtype)

    def complaint(self) -> str:
        """Says that the rule is wrong along the dimension, and what to write instead."""
        if self.axes:
            index, axis = next(iter(self.axes.items()))
            place = f'dimension {axis}'
        else:
            index, position = next(iter(self.positions.items()))
            place = f'entry {position}'
        op = self.call.op
        shape = list(self.call.values[index].shape)
        return (
            f'The rule for {_rule_in_words(op.type)} is wrong along {place} of input {index} of '
            f'{op.name!r}, {op.inputs[index].name!r} of shape {shape}: '
            "write '_' for a dimension that each device needs whole, and '*' for such an input."
        )


class _Place(NamedTuple):
    """A dimension of an input; or an entry of one that is a shape, which says how large one is."""

    operand: int  # the index of the input
    at: int  # which dimension, or which entry
    is_entry: bool


def dimensions_of(call: Call, towers: int) -> Iterator[Dimension]:
    """Yields the dimensions that the op's rule names, each once.

    The rule is asked about each dimension of each input in turn, as if the examples were along it:
    what it says may depend on where they are.

    Args:
      towers: how many shards there are to be.

    Raises:
      AssertionError: if the rule has one letter for dimensions that differ, or, for a rule of a
        user's, if it's for other ranks.
    """
    seen = set()
    for place in _places(call):
        for hides_ones in (True, False):
            for signature in _signatures(call, place, hides_ones, towers):
                label = _label_at(place, signature)
                if label is None or _has_several_blocks(call, signature, label):
                    continue  # If there are blocks, only the function as a whole is tried.

                dimension = _dimension(call, signature, label, towers)
                key = tuple(dimension.axes.items()), tuple(dimension.positions.items())
                if dimension.size > 0 and key not in seen:
                    seen.add(key)
                    yield dimension


def _places(call: Call) -> Iterator[_Place]:
    for index, value in enumerate(call.values):
        if value is None:
            continue
        for axis in range(value.ndim):
            yield _Place(index, axis, is_entry=False)
        if may_be_sizes(value):
            for position in range(value.size):
                yield _Place(index, position, is_entry=True)


def _signatures(call: Call, place: _Place, hides_ones: bool, towers: int) -> list[Signature]:
    """What the op's rule says if the examples are along a place; [] if it isn't sharded then.

    Args:
      place: if it is an entry of a shape, there are as many examples.
      hides_ones: sizes of 1 are given as unknown, so that the rule keeps the label of what the op
        would broadcast.
      towers: how many examples there are where the op has one entry.
    """
    op = call.op
    try:
        signature = signature_of(RULES[op.type], op, _sizes(call, place, hides_ones, towers))
    except OtherRanks as error:
        if is_registered(op.type):
            raise AssertionError(
                f"The rule for {_rule_in_words(op.type)} doesn't fit {op.name!r}: {error}. Write "
                "'...' for any number of dimensions that each device needs whole, a capital for "
                'any number of others, or register a function that returns a rule for each rank, '
                'and None for ranks with which the op cannot be sharded.'
            ) from error
        return []
    except NotSharded:
        return []
    except Exception as error:
        raise failure(op, error) from error
    return [signature] if signature.otherwise is None else [signature, signature.otherwise]


def _sizes(call: Call, place: _Place, hides_ones: bool, towers: int) -> Sizes:
    """The sizes of the op's inputs, as propagation would know them; arguments as above."""
    sizes = Sizes()
    for tensor, value in zip(call.op.inputs, call.values):
        if value is None:
            continue
        dims = []
        for axis, count in enumerate(value.shape):
            is_hidden = count == 1 and hides_ones
            dims.append(sizes.unknown_dim(tensor, axis) if is_hidden else Size(count))
        entries = []
        if may_be_sizes(value):
            entries = [Size(number) for number in np.ravel(value).tolist()]

        if tensor is call.op.inputs[place.operand]:
            count = entries[place.at].number if place.is_entry else value.shape[place.at]
            rows = RowSpace('batch', count if count > 1 else towers)
            sharded = entries if place.is_entry else dims
            sharded[place.at] = rows.size

        sizes.set_dims(tensor, dims)
        if entries:
            sizes.set_entries(tensor, entries)
    return sizes


def _label_at(place: _Place, signature: Signature) -> Label:
    """The label that a signature has for a place; None if it has none."""
    by_input = _labels_of_shapes(signature) if place.is_entry else _labels(signature)
    labels = by_input[place.operand]
    return labels[place.at] if place.at < len(labels) else None


def _has_several_blocks(call: Call, signature: Signature, label: Label) -> bool:
    """Whether some inputs have more blocks of all examples than others: see `Shard.in_blocks`."""
    counts = {
        value.shape[labels.index(label)]
        for value, labels in zip(call.values, _labels(signature))
        if label in labels
    }
    return bool(signature.in_blocks.get(label)) and len(counts) > 1


def _labels(signature: Signature) -> list[tuple[Label, ...]]:
    """The labels of each input's dimensions."""
    return [labels_of(operand) for operand in signature.inputs]


def _labels_of_shapes(signature: Signature) -> list[tuple[Label, ...]]:
    """The labels of each input's entries, for inputs that are shapes."""
    return [operand.labels if isinstance(operand, SizesOf) else () for operand in signature.inputs]


def _dimension(call: Call, signature: Signature, label: Label, towers: int) -> Dimension:
    """All that has a label."""
    axes = _indices_of(label, _labels(signature))
    positions = _indices_of(label, _labels_of_shapes(signature))

    counts = [call.values[index].shape[axis] for index, axis in axes.items()]
    numbers = [int(np.ravel(call.values[index])[at]) for index, at in positions.items()]
    size = max(counts, default=1)
    if size == 1:
        size = max([*numbers, 1] if counts else numbers)
    dimension = Dimension(call, axes, positions, size, size if size > 1 else towers)

    differ = any(count not in (1, size) for count in counts)
    for number in numbers:
        # A shape may have a multiple of the size, or a part of it.
        if number > 0 and size > 0 and number % size and size % number:
            differ = True
    if differ:
        raise AssertionError(
            f'{dimension.complaint()} It has one letter for dimensions of inputs '
            f'{[*axes, *positions]}, which have {counts + numbers} entries.'
        )
    return dimension


def _indices_of(label: Label, labels: Sequence[tuple[Label, ...]]) -> dict[int, int]:
    """By the inputs that have a label: which of their labels it is."""
    return {index: own.index(label) for index, own in enumerate(labels) if label in own}


def _rule_in_words(op_type: str) -> str:
    """The type with its rule, if that's a text: "Cross, 'S S -> S'," for example."""
    rule = RULES[op_type]
    return f'{op_type}, {rule!r},' if isinstance(rule, str) else op_type
