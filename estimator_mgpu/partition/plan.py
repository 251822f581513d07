"""The plan, as data: which ops run on every tower, and in which form these take their inputs."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import Placement
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import RowSpace, Size, per_row

# Forms in which a tower's copy of an op takes an input.


class Form(enum.Enum):
    """Forms that need no more than their name."""

    LOCAL = "what the tower's own copy of the input's op makes"
    FULL = 'the full value: gathered or reduced, if towers make it'
    FULL_ON_FIRST = 'the full value on the first tower, and zeros on the others: for a partial sum'


LOCAL, FULL, FULL_ON_FIRST = Form


class Slice(NamedTuple):
    """The tower's shard of a full value."""

    axis: int
    rows: RowSpace
    factor: Size  # how many entries an example has along the axis
    in_blocks: bool = False  # whether these are in blocks, as in `Shard`


class LocalShape(NamedTuple):
    """A shape, such as [batch, 5], of which an entry is replaced by the size of the tower's shard.

    On a tower with 3 examples, it's [3, 5].
    """

    entries: tuple[Size, ...]  # of the full shape
    position: int  # of the entry that is replaced
    rows: RowSpace


def local_shape_of(
    entries: Sequence[Size] | None, position: int, rows: RowSpace
) -> LocalShape | None:
    """The local shape for a full shape; None if it isn't known what the entry is on a tower.

    Args:
      entries: of the full shape, such as [batch, 5]; None if they are unknown.
      position: of the entry that towers replace. It has to be a multiple of the number of rows.
    """
    if entries is None or position >= len(entries):
        return None
    entry = entries[position]
    if entry == Size(-1) or per_row(entry, rows) is None:
        return None
    return LocalShape(tuple(entries), position, rows)


def local_shape_by_rows(entries: Sequence[Size] | None, rows: RowSpace) -> LocalShape | None:
    """The local shape by the first entry; None if other entries depend on the number of rows."""
    if entries is None or any(rows in size.symbols for size in entries[1:]):
        return None
    return local_shape_of(entries, 0, rows)


class SparseRows(NamedTuple):
    """The tower's rows of a sparse tensor: the indices of its entries there, or their values.

    Of the indices, column 0 says in which row an entry is; a tower counts from its own first row.
    """

    indices: str  # the name of the tensor with the indices
    rows: RowSpace
    factor: Size  # how many rows of the sparse tensor an example has


class RaggedRows(NamedTuple):
    """The tower's rows of a ragged tensor: values, row splits, or where each row begins or ends."""

    values: str  # the name of the tensor with the values
    splits: str  # and of that with the row splits
    rows: RowSpace
    # Of a row's two row splits, 0 is where it begins, and 1 where it ends. None for all row splits,
    # or for values.
    offset: int | None = None


class Constant(NamedTuple):
    """Known integers in place of the input: a vector, or a scalar."""

    numbers: tuple[int, ...]
    scalar: bool = False  # if so, there is one number


class Reduced(NamedTuple):
    """The towers' partial results in a joint loop, reduced there, in each step."""

    reduce: str  # as in `Partial`
    rows: RowSpace


class Padding(NamedTuple):
    """Zeros behind the output of a tower's copy, which ends with its last example with an entry."""

    rows: RowSpace  # those of the output with the zeros: `RowsToLast`, or all of the batch's
    entries: str  # the name of the row space of the entries
    indices: str  # and of a tensor that says in which rows they are: their indices, or a vector


class LocalRange(NamedTuple):
    """The numbers from 0 on, one for each entry that the tower's rows have."""

    rows: RowSpace
    factor: Size  # how many entries a row has


class CountedFromFirst(NamedTuple):
    """A tower's part of `IndicesOfRows`, with rows that are counted from the tower's first one.

    If a tower's first row is 3, it is given [[0, 0], [1, 2]] in place of [[3, 0], [4, 2]].
    """

    indices: Form | Slice  # the form in which the tower has them, counted from the batch's first
    rows: RowSpace
    factor: Size  # how many of the numbered rows an example has


class FullSizes(NamedTuple):
    """Sizes in a v1 loop for the global batch, where a tower has its own: a vector, or a scalar."""

    entries: tuple[Size, ...]


class VariableValue(NamedTuple):
    """The value of a variable in place of the variable, for a loop or a call that only reads it."""

    dtype: tf.DType


Need = Union[
    Form,
    Slice,
    LocalShape,
    LocalRange,
    FullSizes,
    SparseRows,
    RaggedRows,
    CountedFromFirst,
    Constant,
    Reduced,
    VariableValue,
]


OF_SIZES = (LocalShape, Constant, FullSizes)
"""The forms of sizes and other known integers, which copies have without the input."""


# What a rule says of an operand's dimensions.

# Dimensions with the same label have the same size, or size 1 and are broadcast. None is the label
# of a dimension along which an op cannot be sharded.
Label = Optional[Hashable]


class SizesOf(NamedTuple):
    """Says that an operand is a vector of sizes: each entry is the size of a labelled dimension."""

    labels: tuple[Label, ...]


class EntriesOf(NamedTuple):
    """Says that an operand has the entries of a sparse tensor: their indices, or their values."""

    label: Label  # of the sparse tensor's dimension 0
    indices: int  # which input of the op has the indices


class IndicesOfRows(NamedTuple):
    """Says that an operand has indices, each of which begins with the number of its own row.

    Such are [[0, 3], [1, 5]], or a vector of nothing but these numbers, [0, 0, 1, 1]. The first
    label is that of these rows. The tensor from which the indices take something, or in which they
    put it, has a dimension with the same label.
    """

    labels: tuple[Label, ...]
    total: Size  # how many rows that tensor has


# What propagation decides.


class OpPlan(NamedTuple):
    """An op that runs on every tower, in the graph or in a function that the towers call."""

    # The form of each input. Of a constant in a function, whose value is sharded: the Slice.
    needs: tuple[Need, ...] = ()
    # Attributes that are other ones than the op's. A shape may be a LocalShape.
    attrs: dict[str, Any] = {}
    # The plans of the functions that it calls, in the order of `function_calls.called_functions`.
    # Each is a dict of the ops that run on every tower, by name.
    functions: Sequence[dict[str, OpPlan]] = ()
    # Of an `Enter` or a `LoopCond`: whether all towers make each step of the loop together.
    is_joint: bool = False
    # What is put behind the rows of the only output.
    padding: Padding | None = None


Sharded = Mapping[tf.Operation, OpPlan]
"""The ops that run on every tower, with their plans."""


class Decision(NamedTuple):
    """How an op runs on every tower, and what follows for its outputs."""

    plan: OpPlan
    placements: Sequence[Placement | None]  # None for an output that no op uses on a tower
    dims: Sequence[list[Size] | None] = ()  # of each output's full value; None if unknown
    # The placements, from now on, of TensorArrays and stacks that the op uses, with their handles.
    lists: Sequence[tuple[tf.Tensor, Placement]] = ()
    # Of the tensors in a v1 loop, by name.
    in_loop: Mapping[str, Placement] = {}


class LoopFrame(NamedTuple):
    """A v1 loop that towers have copies of."""

    name: str  # of the frame of the user's loop
    parallel_iterations: int  # how many steps may be under way
    is_joint: bool  # whether all towers make each step together: their copies are in one frame


class Plan(NamedTuple):
    """How a graph is sharded."""

    rows: RowSpace  # the batch's
    sources: Sequence[tf.Tensor]  # dense tensors of the batch, with the examples along dimension 0
    # Ops that depend on the batch, each after those it depends on. Of a v1 loop, these are `Enter`
    # and `Exit`.
    order: Sequence[tf.Operation]
    ops: dict[str, OpPlan]  # ops that run on every tower, by name
    placements: dict[str, Placement]  # of the tensors that towers make, by name
    # Other ops that depend on the batch, by name: why they run once, and the bytes that are
    # gathered for them.
    once: dict[str, tuple[str, int]]
    sizes: Sizes
    # Ops in `order` in whose place others are used, by name. They stay for whoever fetches them.
    unused: Set[str] = frozenset()
    # By the names of the ops that are in v1 loops, the loops around them, the outermost first. They
    # can use only what is there.
    frames: Mapping[str, tuple[LoopFrame, ...]] = {}
    # What towers have of the indices and values of the batch's sparse tensors, and of the values of
    # its ragged ones, by name.
    entries: Mapping[str, SparseRows | RaggedRows] = {}
    # The names of those values that towers have where the entries of another sparse tensor are.
    at_others_entries: Set[str] = frozenset()
    # Of the tensors that towers make in v1 loops, by name. None of them is gathered.
    in_loops: Mapping[str, Placement] = {}
