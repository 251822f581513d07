"""Shares values among devices, so that the busiest one has as little to do as possible.

In: how many bytes values have, and what each place, a device or a machine, has to do anyhow. Out:
how many bytes of each value a place adds up, or hands on to others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_SMALLEST_SLICE = 1 << 12  # bytes

Shares = dict[str, float]  # by place, how many bytes of a value it has


class Value(NamedTuple):
    """What is shared: so many bytes, and the place that sends them, or needs their sum."""

    size: float
    owner: str


def share(
    values: Mapping[str, Value],
    base: Mapping[str, float],
    columns: Sequence[int],
    is_sum: bool,
    handed: int = 0,
) -> dict[str, Shares]:
    """Shares values among the columns of a grid of places, and then in each among its places.

    Args:
      values: by name.
      base: by place, in the order of the grid, what it has to do anyhow, in bytes.
      columns: how many there are, how many of them a column has if it's a grid, and so on.
      is_sum: whether gradients are added up, or values handed on.
      handed: in larger grids that this one is a column of, how many other columns there are: a
        place hands on what it has to a place in each. The owner of a value has sent it there.

    Returns:
      The shares of each value.
    """
    places = list(base)
    if len(places) == 1:
        return {name: {places[0]: value.size} for name, value in values.items()}

    count, *columns_of_column = columns
    width = len(places) // count
    shares: dict[str, Shares] = {name: {} for name in values}
    grid = [
        _Column(places[first : first + width], base, is_sum, handed)
        for first in range(0, len(places), width)
    ]
    for column, sizes in zip(grid, _balance(values, grid)):
        parts = {name: values[name]._replace(size=size) for name, size in sizes.items()}
        loads = {place: column.load(place, parts.values()) for place in column.places}
        of_column = share(parts, loads, columns_of_column, is_sum, handed + count - 1)
        for name, of_value in of_column.items():
            shares[name].update(of_value)
    return shares


class _Column:
    """A column of a grid.

    Args:
      places: its own.
      base: what each place of the grid has to do anyhow.
      is_sum: as in `share`.
      handed: the same.
    """

    def __init__(self, places: Sequence[str], base: Mapping[str, float], is_sum: bool, handed: int):
        self.places = dict.fromkeys(places)
        self._base = base
        self._is_sum = is_sum
        self._handed = handed
        self._others = len(base) // len(places) - 1  # other columns
        self._row = {place: number % len(places) for number, place in enumerate(base)}
        self._mean = sum(base[place] for place in places) / len(places)
        # Two places that have the most to do anyhow: one of them may own a value.
        self._busiest = sorted(places, key=base.__getitem__)[-2:]

    def load(self, place: str, parts: Iterable[Value]) -> float:
        """What a place has to do, with what it exchanges in its row of what the column has.

        The owner of a value hands nothing on, and is handed nothing, as it has the value.
        """
        load = self._base[place]
        for part in parts:
            copies = self._others
            if not self._is_sum and part.owner in self._base:
                if part.owner == place:
                    continue
                if self._row[part.owner] == self._row[place] and part.owner not in self.places:
                    copies -= 1
            load += copies * part.size
        return load

    def cost(self, value: Value) -> float:
        """What a byte of a value adds to the mean load of the column's places.

        Each other place sends it to the one that adds it up, from where it's sent to the owner,
        unless that is the one. A place that hands it on sends it to all others but the owner.
        """
        copies = len(self._base) - 1
        if self._is_sum:
            copies -= value.owner in self.places
        elif value.owner in self._base:
            copies += self._handed - 1
        return copies / len(self.places)

    def room(
        self, value: Value, values: Mapping[str, Value], given: Mapping[str, float], level: float
    ) -> float:
        """How many more bytes of a value the column can take, if no load is to exceed a level.

        Args:
          value: one of the values.
          values: by name.
          given: what the column has of these.
          level: what its places may have to do, in their mean, and the busiest one in its row.
        """
        load = self._mean + sum(self.cost(values[name]) * size for name, size in given.items())
        cost = self.cost(value)
        room = (level - load) / cost if cost else math.inf
        if len(self.places) > 1:
            busiest = [p for p in self._busiest if self._is_sum or p != value.owner][-1]
            room = min(room, (level - self._base[busiest]) / self._others - sum(given.values()))
        return max(room, 0.0)


def _balance(values: Mapping[str, Value], grid: Sequence[_Column]) -> list[dict[str, float]]:
    """Gives each column bytes of values, by name, so that the highest load is as low as possible.

    Returns:
      For each column, the bytes of values.
    """
    low = 1.0
    high = 4.0
    sizes = _fill(values, grid, high)
    while sizes is None:
        low = high
        high *= 4
        sizes = _fill(values, grid, high)
    for _ in range(40):
        level = (low + high) / 2
        attempt = _fill(values, grid, level)
        if attempt is None:
            low = level
        else:
            sizes = attempt
            high = level
    return sizes


def _fill(
    values: Mapping[str, Value], grid: Sequence[_Column], level: float
) -> list[dict[str, float]] | None:
    """Gives each column as much as it can take up to a level; None if that isn't all.

    Owners' columns come first. What they leave goes to one column after the other, so that there
    are few slices.
    """
    given: list[dict[str, float]] = [{} for _ in grid]

    def give(name: str, size: float, number: int) -> float:
        """Gives a column what it can take of a value; returns what is left."""
        room = grid[number].room(values[name], values, given[number], level)
        part = min(size, room)
        if part < min(size, _SMALLEST_SLICE) or part == 0:
            return size
        given[number][name] = given[number].get(name, 0.0) + part
        return size - part

    left = {name: value.size for name, value in values.items()}
    for name, value in values.items():
        for number, column in enumerate(grid):
            if value.owner in column.places:
                left[name] = give(name, left[name], number)
    number = 0
    for name, size in left.items():
        while size > 0:
            if number == len(grid):
                return None
            size = give(name, size, number)
            if size > 0:
                number += 1
    return given
