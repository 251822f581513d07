r"""Which devices exchange slices of a value with each other, so that messages are few.

A device that sends each other one a slice sends n - 1 messages. In a grid, devices exchange slices
in its rows, and then in its columns. Each sends as many bytes, in fewer messages:

    gradients, in rows:       0 <-> 2     0 and 1 add up the first half of two devices' gradients,
                              1 <-> 3     2 and 3 the second half
    then in columns:          0     2     0 adds up the first quarter of all, 1 the second one,
                              |     |     2 the third, and 3 the last
                              1     3

    a value:                  the same backwards

A column may be a grid itself. The more levels, the fewer messages; but more of them follow
each other. Several machines are rows of a grid, too: each sends and receives an entry only once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

Position = tuple[int, ...]
"""Where a device is in a grid: its column, its column in the grid which that one is, and so on."""


class Grid:
    """Devices in a grid.

    Attributes:
      levels: how many coordinates say where a device is on its machine; one more says on which.
      columns: how many there are on a machine, how many each of these has, and so on.

    Args:
      machines: the devices of each.
      levels: of the devices of a machine. With 1, each exchanges slices with all others there.
    """

    def __init__(self, machines: Sequence[Sequence[str]], levels: int):
        self.levels = levels
        width = max(map(len, machines))
        self.columns = _factors(width, levels)
        self._sizes = [*self.columns, len(machines)]
        self._positions: dict[str, list[Position]] = {}
        self._devices: dict[Position, str] = {}
        for row, devices in enumerate(machines):
            for number in range(width):
                # A device of a machine with fewer ones may have several positions.
                device = devices[number % len(devices)]
                position = _digits(number * len(machines) + row, self._sizes)
                self._positions.setdefault(device, []).append(position)
                self._devices[position] = device

    def positions(self, device: str) -> Sequence[Position]:
        """The positions of a device: one if all machines have equally many."""
        return self._positions[device]

    def device(self, position: Position) -> str:
        """The device at a position."""
        return self._devices[position]

    def messages(self, positions: Collection[Position]) -> int:
        """How many messages it takes to add up slices, or to send them to all, at some positions.

        Those aren't counted that go between a slice's device and the owner: one for each slice.
        """
        count = 0
        devices = math.prod(self._sizes)
        for level, size in enumerate(self._sizes, 1):
            columns = len({position[:level] for position in positions})
            count += columns * (devices - devices // size)
            devices //= size
        return count


def most_levels(machines: Sequence[Sequence[str]]) -> int:
    """How many levels a grid can have: one for each prime factor of a machine's devices."""
    return max(1, len(_primes(max(map(len, machines)))))


def _digits(number: int, sizes: Sequence[int]) -> Position:
    """The digits of a number, of which each has so many values; the last one changes fastest."""
    digits = []
    for size in reversed(sizes):
        number, digit = divmod(number, size)
        digits.append(digit)
    return tuple(reversed(digits))


def _factors(number: int, count: int) -> list[int]:
    """Splits a number into so many factors, which are as equal as possible."""
    factors = [1] * count
    for prime in reversed(_primes(number)):
        factors[factors.index(min(factors))] *= prime
    return factors


def _primes(number: int) -> list[int]:
    """The prime factors of a number, the smallest first."""
    for prime in range(2, math.isqrt(number) + 1):
        if number % prime == 0:
            return [prime, *_primes(number // prime)]
    return [number] if number > 1 else []
