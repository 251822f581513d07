"""Adds the ops by which devices in a grid exchange slices of a value.

In: what each tower has of a sum, or the value that one device has, as vectors; and their slices, in
the order of the devices' positions. Out: the sum of each slice on its device; or the value on
another device.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from estimator_mgpu.partition.messages.grid import Position
from estimator_mgpu.partition.messages.slices import Part, Slices
from estimator_mgpu.partition.nodes.node_builder import NodeBuilder


class Vector(NamedTuple):
    """The entries of some slices, one after the other, on a device of the grid."""

    name: str
    device: str
    position: Position


def add_up(
    nodes: NodeBuilder,
    slices: Slices,
    parts: Sequence[Part],
    vectors: Sequence[Vector],
    level: int = 0,
) -> list[str]:
    """Adds up vectors, each slice on its device; returns the names of the sums.

    Args:
      slices: has the grid.
      parts: the slices. The first `level` coordinates of their positions are the same.
      vectors: what is added up, with positions that have these coordinates, too.
      level: how many coordinates.
    """
    if level == len(parts[0].position):
        [total] = vectors
        return [total.name]

    columns = _columns(parts, level)
    pieces = defaultdict[Position, list[str]](list)
    for vector in vectors:
        for column, piece in zip(columns, _split(nodes, columns, vector)):
            pieces[_in_column(column, vector.position, level)].append(piece)

    sums = []
    for column in columns:
        totals = []
        for position in dict.fromkeys(_in_column(column, v.position, level) for v in vectors):
            device = slices.grid.device(position)
            added = nodes.sum(pieces[position], device)
            totals.append(Vector(added, device, position))
        sums += add_up(nodes, slices, column, totals, level + 1)
    return sums


class Handed:
    """A value that its owner sends in slices, which devices hand on.

    Args:
      slices: has the grid.
      value: what the owner has.
    """

    def __init__(self, nodes: NodeBuilder, slices: Slices, parts: Sequence[Part], value: Vector):
        self._nodes = nodes
        self._slices = slices
        self._parts = parts

        # What the owner has sent, by the position of a device, and by how many of its coordinates
        # the slices share: all for one slice, all but one for those of a column. The owner sends a
        # column to each device of its machine, which sends a slice to its like on each other
        # machine.
        self._sent: dict[tuple[Position, int], str] = {}
        self._owner = value.position
        level = slices.grid.levels - 1
        columns = _columns(parts, level)
        for column, piece in zip(columns, _split(nodes, columns, value)):
            position = _in_column(column, value.position, level)
            of_column = self._send(piece, value.device, position)
            slices_of_column = _split(nodes, [[part] for part in column], of_column)
            for part, value_of_slice in zip(column, slices_of_column):
                sent = self._send(value_of_slice, of_column.device, part.position)
                self._sent[part.position, len(part.position)] = sent.name
            self._sent[position, level + 1] = of_column.name

    def on(self, device: str) -> str:
        """The value on a device, as a vector."""
        return self._gather(self._parts, 0, self._slices.position(device), device)

    def _send(self, value: str, device: str, position: Position) -> Vector:
        """Sends a value from a device to the one at a position."""
        target = self._slices.grid.device(position)
        if target != device:
            value = self._nodes.add('Identity', [value], target)
        return Vector(value, target, position)

    def _gather(self, parts: Sequence[Part], level: int, position: Position, device: str) -> str:
        """Puts slices together on a device; `level` coordinates are those of its position."""
        if (position, level) in self._sent:
            return self._sent[position, level]
        pieces = []
        for column in _columns(parts, level):
            source = _in_column(column, position, level)
            if source == self._owner and (source, level + 1) not in self._sent:
                # It sends enough. What it would hand on comes from where it has sent it.
                pieces += self._sent_by_owner(column)
            else:
                target = self._slices.grid.device(source)
                pieces.append(self._gather(column, level + 1, source, target))
        if len(pieces) == 1:
            return self._nodes.add('Identity', pieces, device)
        return self._nodes.concat(pieces, 0, device)

    def _sent_by_owner(self, parts: Sequence[Part]) -> list[str]:
        """What the owner has sent of slices to devices of its machine, and what it has kept."""
        levels = self._slices.grid.levels
        columns = _columns(parts, levels - 1)
        return [
            self._sent[_in_column(column, self._owner, levels - 1), levels] for column in columns
        ]


def _columns(parts: Sequence[Part], level: int) -> list[list[Part]]:
    """Slices in groups, by one more than so many coordinates of their positions."""
    groups = itertools.groupby(parts, key=lambda part: part.position[: level + 1])
    return [list(group) for _, group in groups]


def _in_column(column: Sequence[Part], position: Position, level: int) -> Position:
    """A position in another column, in the same row."""
    return (*column[0].position[: level + 1], *position[level + 1 :])


def _split(nodes: NodeBuilder, columns: Sequence[Sequence[Part]], vector: Vector) -> list[str]:
    """Splits a vector into the entries of each column."""
    sizes = [sum(part.entries for part in column) for column in columns]
    return nodes.split(vector.name, sizes, vector.device)
