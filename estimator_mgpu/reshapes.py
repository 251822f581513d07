"""Where the rows of a tensor are, before and after it is given another shape."""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import private


class Place(NamedTuple):
    """Where a tensor has rows.

    Attributes:
      axis: the dimension.
      outer: how many times all rows are there, one after another; None if that's not known.
      inner: how many entries in a row there are of each, as dimensions were put into one.
      plain: whether that follows from what ops do, rather than from sizes.
      groups: whether an entry is for rows that are alike, as of one id, rather than for a row.
    """

    axis: int
    outer: int | None = 1
    inner: int | None = 1
    plain: bool = True
    groups: bool = False

    def at(self, axis: int) -> Place:
        """Returns the place in a tensor that has the dimension elsewhere."""
        return self._replace(axis=axis)


class UnknownPlace(Exception):  # noqa: N818
    """What an op does to dimensions isn't known."""


def reshaped(op: tf.Operation, output: tf.Tensor, index: int, place: Place) -> Place | None:
    """Goes by how many entries there are before all rows, or in each: these stay the same."""
    given, sizes = op.inputs[0].shape.as_list(), output.shape.as_list()
    told = _entries(op.inputs[1])
    if told is not None and len(told) == len(sizes):
        sizes = [b if a is None else a for a, b in zip(sizes, told)]
    first = _at(given, sizes, place.axis, place.outer)
    if place.inner is None and place.outer is None:
        kept = reshaped(op, output, index, Place(place.axis))
        if kept is None or kept != Place(kept.axis):
            raise UnknownPlace
        return place.at(kept.axis)  # As one dimension, whatever is in it.
    last = _at(given[::-1], sizes[::-1], len(given) - 1 - place.axis, place.inner)
    last = None if last is None else (len(sizes) - 1 - last[0], last[1])
    if first is None:
        if last is None:
            raise UnknownPlace
        return place._replace(axis=last[0], outer=None, inner=last[1])
    if last is None:
        return place._replace(axis=first[0], outer=first[1], inner=None)
    if first[0] == last[0]:
        return place._replace(axis=first[0], outer=first[1], inner=last[1])
    # Rows go over several dimensions.
    if None not in sizes:
        return None
    return place._replace(axis=first[0], outer=first[1], inner=None, plain=False)


def _entries(shape: tf.Tensor) -> list[int | None] | None:
    """Returns what is known of a shape that was put together from other shapes."""
    op = shape.op
    value = private.constant_value(shape)
    if value is not None:
        return [None if entry < 0 else int(entry) for entry in value.flat]
    if op.type == 'Shape':
        return None if op.inputs[0].shape.rank is None else op.inputs[0].shape.as_list()
    if op.type == 'Pack':
        parts = [_entries(t) for t in op.inputs]
        return [None if part is None or len(part) != 1 else part[0] for part in parts]
    if op.type == 'ConcatV2':
        joined: list[int | None] = []
        for part in map(_entries, op.inputs[:-1]):
            if part is None:
                return None
            joined += part
        return joined
    if op.type == 'GatherV2':
        entries, places = _entries(op.inputs[0]), private.constant_value(op.inputs[1])
        return None if entries is None or places is None else [entries[i] for i in places.flat]
    if op.type == 'Prod':
        entries = _entries(op.inputs[0])
        return [None if entries is None else _product(entries)]
    return None


def _product(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return math.prod(known) if len(known) == len(sizes) else None


def _at(
    given: list[int | None], sizes: list[int | None], axis: int, times: int | None
) -> tuple[int, int] | None:
    """Where the dimension is that has `times` of what is before the rows, and how many of them."""
    outer = _product(given[:axis])
    if times is None or outer is None:
        return None
    before = times * outer
    for i, size in enumerate(sizes):
        if size is None:
            certain = before == 1 or None not in sizes[i + 1 :]
            return (i, before) if certain else None
        if before < size:
            return (i, before)
        if before % size:
            return None
        before //= size
    return None
