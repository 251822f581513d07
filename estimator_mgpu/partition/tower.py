"""Towers: a device and a turn each. A device's turns are its micro-batches.

In: the devices, and how many turns each has. Out: the towers, in the order of their examples: those
of the first device come first. With two devices and two turns, a batch of 100 examples goes to

    tower 0: device 0, turn 0, examples 0 to 24     tower 2: device 1, turn 0, examples 50 to 74
    tower 1: device 0, turn 1, examples 25 to 49    tower 3: device 1, turn 1, examples 75 to 99

So a device has the same examples as without micro-batches. If `devices=` lists a device twice, it
has two chains of towers, and runs both at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tower(NamedTuple):
    """A device and a turn.

    Attributes:
      number: its place among all towers, which is in the names of its ops.
      device: on which it runs.
      turn: how many towers of its chain run before it.
    """

    number: int
    device: str
    turn: int


Chain = Sequence[Tower]
"""Towers of one device that run one after the other."""


def towers_of(devices: Sequence[str], turns: int = 1) -> list[Tower]:
    """The towers of devices, with so many turns each."""
    towers: list[Tower] = []
    for device in devices:
        for turn in range(turns):
            towers.append(Tower(len(towers), device, turn))
    return towers


def chains_of(towers: Sequence[Tower]) -> list[Chain]:
    """The towers of each device; a device that is listed twice has two chains."""
    turns = max(tower.turn for tower in towers) + 1
    return [towers[first : first + turns] for first in range(0, len(towers), turns)]


def static_extents(total: int, devices: int, turns: int) -> list[tuple[int, int]]:
    """The extents of all towers: where each starts, and how many rows it has.

    Args:
      total: how many rows there are.
      devices: over how many devices they are divided.
      turns: how many towers each device has, one after the other.
    """
    extents: list[tuple[int, int]] = []
    for start, size in _divide_extent(0, total, devices):
        extents += _divide_extent(start, size, turns)
    return extents


def _divide_extent(start: int, size: int, count: int) -> list[tuple[int, int]]:
    """Divides an extent whose size is known into so many: the first ones get one row more."""
    each, larger = divmod(size, count)
    extents = []
    for index in range(count):
        size_of_one = each + (index < larger)
        extents.append((start, size_of_one))
        start += size_of_one
    return extents
