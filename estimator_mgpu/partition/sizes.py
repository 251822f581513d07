"""Symbolic sizes: products of numbers, rows and unknown dimensions, such as 4 * batch * T."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Union


@dataclasses.dataclass(frozen=True, eq=False)
class RowSpace:
    """A row space: says which rows a shard is of, and how many there are.

    Tensors of different row spaces are never combined row by row.
    """

    name: str  # `batch`, or the tensor that has them along dimension 0
    static: int | None  # how many rows there are, if the graph knows


class Dim(NamedTuple):
    """A dimension that is known only when the step runs."""

    tensor: str
    axis: int


class Entry(NamedTuple):
    """An entry of an integer tensor that is known only when the step runs."""

    tensor: str
    position: int


Symbol = Union[RowSpace, Dim, Entry]


@dataclasses.dataclass(frozen=True)
class Size:
    """A number times symbols; raises ValueError where what comes out can't be written as one."""

    number: int  # the integer factor
    symbols: tuple[Symbol, ...] = ()  # the other factors, in a fixed order

    def __mul__(self, other: Size) -> Size:
        symbols = tuple(sorted(self.symbols + other.symbols, key=repr))
        return Size(self.number * other.number, symbols)

    def __add__(self, other: Size) -> Size:
        if self.symbols == other.symbols:
            return Size(self.number + other.number, self.symbols)
        if self.number and other.number:
            raise ValueError(f'{self} + {other} is no product')
        return self if self.number else other

    def __floordiv__(self, other: Size) -> Size:
        return self.over(other) or Size(self.known // other.known)

    def __mod__(self, other: Size) -> Size:
        return Size(self.known % other.known)

    def __ge__(self, other: Size) -> bool:
        return self == other or self.known >= other.known

    @property
    def known(self) -> int:
        """The number that it is without symbols; fails if it has any."""
        if self.symbols:
            raise ValueError(f'{self} is no known number')
        return self.number

    @property
    def rows(self) -> RowSpace | None:
        """The row space that it's a multiple of, if any."""
        return next((s for s in self.symbols if isinstance(s, RowSpace)), None)

    @property
    def static(self) -> int | None:
        """The number that it is, if the graph knows."""
        known: list[Any] = [getattr(symbol, 'static', None) for symbol in self.symbols]
        return None if None in known else math.prod(known, start=self.number)

    def over(self, other: Size) -> Size | None:
        """The quotient, if it's known to be a whole number."""
        left = Counter(self.symbols)
        left.subtract(other.symbols)
        whole = other.number and self.number % other.number == 0
        if whole and min(left.values(), default=0) >= 0:
            return Size(self.number // other.number, tuple(left.elements()))
        one, by = self.static, other.static
        return Size(one // by) if one and by and one % by == 0 else None

    def same_as(self, other: Size) -> bool | None:
        """Whether both are one number; None if that can't be known before the step runs."""
        one, two = self.static, other.static
        return True if self == other else None if None in (one, two) else one == two


ONE = Size(1)


def product(sizes: Sequence[Size]) -> Size:
    """The product of sizes."""
    return math.prod(sizes, start=ONE)


def per_row(size: Size, rows: RowSpace) -> Size | None:
    """How many entries a row has in a dimension; None if it doesn't go by rows."""
    found = size.over(Size(1, (rows,)))
    return found if found is not None and rows not in found.symbols else None
