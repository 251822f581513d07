"""The plan, as data: where a tensor's numbers are, what runs in towers, and what that is given."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import Placement

if TYPE_CHECKING:
    from estimator_mgpu.partition.size_inference import Sizes
    from estimator_mgpu.partition.sizes import RowSpace, Size


class Form(enum.Enum):
    """What needs no more than its name."""

    LOCAL = 'what the tower itself has'
    FULL = 'the whole value: gathered or reduced if the towers made it'
    FULL_ON_FIRST = (
        'the whole value on the first tower, and zeros on the others: what a sum begins with'
    )


class Slice(NamedTuple):
    """The tower's rows of what is whole, with so many entries a row along an axis."""

    axis: int
    rows: RowSpace
    factor: Size


class LocalShape(NamedTuple):
    """A whole shape, but for the entry at a position, which goes by rows: it's the tower's own."""

    entries: tuple[Size, ...]
    position: int
    rows: RowSpace


class Constant(NamedTuple):
    """Known integers: a vector, or the only one as a scalar."""

    numbers: tuple[int, ...]
    scalar: bool = False


class VariableValue(NamedTuple):
    """The value of a variable, of a type, in place of the variable, which is only read."""

    dtype: tf.DType


# Of a dimension, in a rule; None is for one along which nothing can be divided. Dimensions with the
# same label are as large, or of size 1 and repeated.
Label = Optional[Hashable]


class SizesOf(NamedTuple):
    """What a rule says of an operand whose entries are sizes: of which dimensions, by label."""

    labels: tuple[Label, ...]


Need = Union[Form, VariableValue, Slice, LocalShape, Constant]
LOCAL, FULL, FULL_ON_FIRST = Form


class OpPlan(NamedTuple):
    """An op that runs in towers, in the graph or in a function that they call."""

    needs: tuple[Need, ...] = ()  # for its inputs; in a function, for a constant's own value
    attrs: dict[str, Any] = {}  # attributes that it has otherwise there
    functions: Sequence[
        dict[str, OpPlan]
    ] = ()  # by name, for each that `function_calls.called` has


class Decision(NamedTuple):
    """How an op runs in towers, what these have of its outputs, and the outputs' dimensions."""

    plan: OpPlan
    placements: Sequence[Placement | None]  # None: nobody is given it
    dims: Sequence[list[Size] | None] = ()  # None: they aren't known


class Plan(NamedTuple):
    """How a graph is divided."""

    rows: RowSpace  # those of the batch
    sources: Sequence[tf.Tensor]  # dense tensors of the batch with rows along dimension 0
    order: Sequence[tf.Operation]  # ops that depend on the batch, each after those it depends on
    ops: dict[str, OpPlan]  # those that run in towers, by name
    placements: dict[str, Placement]  # by name, what towers have of the tensors that they make
    once: dict[str, tuple[str, int]]  # others given rows: why they run once, bytes gathered
    sizes: Sizes
