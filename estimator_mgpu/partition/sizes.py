"""Symbolic sizes: products of numbers, of the number of examples and of unknown dimensions.

An example is 4 * batch * T. With them, each tower can have its own version of a shape, and two
sizes count as equal only if they are the same expression, not if their values are equal by chance.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Union


class UnknownSize(Exception):
    """A size that isn't known before the step runs, or that no product expresses."""


@dataclasses.dataclass(frozen=True, eq=False)
class RowSpace:
    """What the rows of a tensor are: examples of the batch, or what a mask left.

    Tensors of different row spaces are never combined as if their rows were the same.
    """

    # `batch`, or the tensor with which the row space starts: rows are its dimension 0.
    name: str
    static: int | None  # how many rows there are, if the graph knows

    @functools.cached_property
    def size(self) -> Size:
        """The number of rows that all towers have together."""
        return Size.of(self)

    @property
    def is_of_tensor(self) -> bool:
        """Whether it starts with a tensor, unlike the batch's."""
        return ':' in self.name

    @property
    def is_ordered(self) -> bool:
        """Whether no row needs a number that tells its place.

        Each tower's rows follow each other in the full value, or are put in order as they are
        merged, as ids are.
        """
        return True


@dataclasses.dataclass(frozen=True, eq=False)
class SelectedRows(RowSpace):
    """The rows that `tf.dynamic_partition` or a mask selects from others; entries of examples.

    Each tower has those that it picks of its own rows, so only the step tells how many. Those of
    all towers, in order, are the selection from the global batch.
    """

    origin: RowSpace  # the batch's, or whichever is shared out equally: whose rows are selected
    # The rows that these are some of, if nobody knows in which order those are.
    picked_from: SelectedRows | None = None

    @property
    def is_ordered(self) -> bool:
        return self.picked_from is None


@dataclasses.dataclass(frozen=True, eq=False)
class Entries(SelectedRows):
    """The entries of a sparse tensor of the batch, in any order.

    Each tower has those of its examples, in the same order. They start with the indices, which say
    in which row each entry is.
    """

    @property
    def is_ordered(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True, eq=False)
class DenseEntries(SelectedRows):
    """The entries that a sparse tensor has of a dense one: all but those of one value, such as -1.

    Ids and weights are paired entry by entry, though each tensor leaves out its own padding. So
    they have two row spaces, and only the step tells that they are as many.
    """


@dataclasses.dataclass(frozen=True, eq=False)
class RowsToLast(SelectedRows):
    """The examples up to the last one that has an entry: sums of entries by their rows end there.

    They start with what the entries start with. A tower has those of its examples that are among
    them: all of its examples, if a later tower has an entry.
    """

    # The names of the row spaces of all entries whose sums end there; the first is `name`.
    summed: tuple[str, ...] = ()

    @classmethod
    def of(cls, entries: Sequence[str], origin: RowSpace) -> RowsToLast:
        """The rows to which entries with row spaces of these names are summed."""
        return cls(entries[0], None, origin, summed=tuple(entries))

    @functools.cached_property
    def behind(self) -> RowsBehind:
        """The other examples, which come behind these."""
        return RowsBehind(self.name, None, self.origin)


@dataclasses.dataclass(frozen=True, eq=False)
class RowsBehind(SelectedRows):
    """The examples behind the last one that has an entry."""


@dataclasses.dataclass(frozen=True, eq=False)
class UniqueRows(SelectedRows):
    """Different ids, such as those that are looked up in a table.

    Each tower has a set of its own ids, and several towers may have the same id. The union of their
    sets is that of the global batch: its ids are in the order in which they come first. They are
    `picked_from` entries if these are in any order.
    """

    is_sorted: bool = False  # whether they are in ascending order instead

    @property
    def is_ordered(self) -> bool:
        return True

    def are_in(self, name: str) -> bool:
        """Whether a tensor has the ids themselves, rather than something that belongs to them.

        Parts and entries have the names of tensors that may have anything that belongs to ids.
        """
        return type(self) is UniqueRows and name == self.name


@dataclasses.dataclass(frozen=True, eq=False)
class PartOfIds(UniqueRows):
    """Those of different ids that are in one part, as those whose rows are in one part of a table.

    A tensor of their name has one row for each of them: not necessarily the ids. They are
    `picked_from` all ids.
    """

    @property
    def whole(self) -> UniqueRows:
        """The ids of all parts."""
        assert isinstance(self.picked_from, UniqueRows)
        return self.picked_from


@dataclasses.dataclass(frozen=True, eq=False)
class EntriesOfIds(UniqueRows):
    """What a mask picks of a tensor with a row for each id: of an id, nothing or several entries.

    So those of towers can't be put together by id: ops that run once are given what the user's own
    op picks of all.
    """


def origin_of(rows: RowSpace) -> RowSpace:
    """Of selected rows, those that they were selected from, in the end; of others, themselves."""
    return rows.origin if isinstance(rows, SelectedRows) else rows


# The symbols are data classes, as tuples of different kinds could be equal.


@dataclasses.dataclass(frozen=True)
class Splits:
    """One more than the rows: the number of row splits that a ragged tensor has."""

    rows: RowSpace


@dataclasses.dataclass(frozen=True)
class Dim:
    """A dimension that is known only when the step runs."""

    tensor: str
    axis: int


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of an integer tensor that is known only when the step runs."""

    tensor: str
    position: int


@dataclasses.dataclass(frozen=True)
class Largest(Entry):
    """The largest one of the entries that towers have there, each of its own."""


@dataclasses.dataclass(frozen=True)
class LongestRow:
    """How many values the longest row of a ragged tensor has."""

    tensor: str  # the row splits, or what says in which row each value is


Symbol = Union[RowSpace, Splits, Dim, Entry, LongestRow]


@dataclasses.dataclass(frozen=True)
class Size:
    """A number times symbols: `Size(4, (batch, T))` is 4 * batch * T, and `Size(7)` is 7.

    Arithmetic raises `UnknownSize` if its result isn't such a product: batch + 1 isn't.
    """

    number: int  # the integer factor
    symbols: tuple[Symbol, ...] = ()  # the other factors, in a fixed order

    @classmethod
    def of(cls, symbol: Symbol) -> Size:
        """The size that a symbol stands for."""
        return cls(1, (symbol,))

    def __mul__(self, other: Size) -> Size:
        symbols = self.symbols or other.symbols
        if self.symbols and other.symbols:
            symbols = tuple(sorted(self.symbols + other.symbols, key=repr))
        return Size(self.number * other.number, symbols)

    def __add__(self, other: Size) -> Size:
        if self.symbols == other.symbols:
            number = self.number + other.number
            return Size(number, self.symbols if number else ())
        if self.number == 0:
            return other
        if other.number == 0:
            return self
        if self.number == 1 and len(self.symbols) == 1 and other == Size(-1):
            [symbol] = self.symbols
            if isinstance(symbol, Splits):
                return symbol.rows.size
        # All rows less those up to the last one with an entry, as where rows are padded.
        if other.number == -1 and isinstance(other.rows, RowsToLast):
            to_last = other.rows
            if len(other.symbols) == 1 and self.same_as(to_last.origin.size):
                return to_last.behind.size
        raise UnknownSize(f'{self} + {other} is not a product')

    def __floordiv__(self, other: Size) -> Size:
        quotient = self.over(other)
        if quotient is not None:
            return quotient
        dividend = self.as_integer()
        divisor = other.as_integer()
        if divisor == 0:
            raise UnknownSize(f'{self} // 0')
        return Size(dividend // divisor)

    def __mod__(self, other: Size) -> Size:
        dividend = self.as_integer()
        divisor = other.as_integer()
        if divisor == 0:
            raise UnknownSize(f'{self} % 0')
        return Size(dividend % divisor)

    def __ge__(self, other: Size) -> bool:
        return self == other or self.as_integer() >= other.as_integer()

    def as_integer(self) -> int:
        """The number of a size without symbols; raises UnknownSize if it has any.

        Even of symbols that have a static value: a tower has another number of examples.
        """
        if self.symbols:
            raise UnknownSize(f'{self} depends on {self.symbols}')
        return self.number

    @property
    def rows(self) -> RowSpace | None:
        """The row space whose number of rows is a factor, if any."""
        for symbol in self.symbols:
            if isinstance(symbol, RowSpace):
                return symbol
        return None

    @property
    def static(self) -> int | None:
        """The number that it is for the global batch, if the graph knows."""
        value = self.number
        for symbol in self.symbols:
            if not isinstance(symbol, RowSpace) or symbol.static is None:
                return None
            value *= symbol.static
        return value

    def over(self, other: Size) -> Size | None:
        """The quotient, if it's known to be an integer: 6 * batch over 2 is 3 * batch."""
        remaining = list(self.symbols)
        has_symbols = True
        for symbol in other.symbols:
            if symbol in remaining:
                remaining.remove(symbol)
            else:
                has_symbols = False
        if has_symbols and other.number and self.number % other.number == 0:
            return Size(self.number // other.number, tuple(remaining))

        dividend = self.static
        divisor = other.static
        if dividend and divisor and dividend % divisor == 0:
            return Size(dividend // divisor)
        return None

    def same_as(self, other: Size) -> bool | None:
        """Whether both are one number; None if that isn't known before the step runs."""
        if self == other:
            return True
        if self.static is None or other.static is None:
            return None
        return self.static == other.static


@functools.lru_cache(maxsize=1 << 12)
def known(number: int) -> Size:
    """A size that is a number: most are small, and the same over and over."""
    return Size(number)


ONE = known(1)


def product(sizes: Sequence[Size]) -> Size:
    """The product of sizes."""
    return math.prod(sizes, start=ONE)


def may_be_paired(size: Size, rows: RowSpace) -> bool:
    """Whether a size is the number of another dense tensor's entries of the same rows.

    An op may pair these with `rows`; the step fails unless they are as many.
    """
    others = size.rows
    if not isinstance(rows, DenseEntries) or not isinstance(others, DenseEntries):
        return False
    return others is not rows and others.origin is rows.origin and size == others.size


def per_row(size: Size, rows: RowSpace) -> Size | None:
    """How many entries each row has in a dimension: 4 of 4 * batch; None if they aren't as many."""
    quotient = size.over(rows.size)
    if quotient is None or rows in quotient.symbols:
        return None
    return quotient
