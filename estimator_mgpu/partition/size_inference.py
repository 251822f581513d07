"""What is known of sizes before the step runs: dimensions, and integers computed from them.

Comes in: the graph, and what propagation says of the dimensions of sharded tensors. Comes out:
symbolic sizes (`sizes.py`). For example, if `x` has the shape [batch, 3, 5], then
`tf.stack([tf.shape(x)[0], 15])` has the entries [batch, 15], and a tower's version of it can be
made from these. What cannot be worked out becomes a symbol of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow.compat.v1 as tf
from numpy import ndarray

from estimator_mgpu.partition.placements import Shard
from estimator_mgpu.partition.sizes import (
    ONE,
    Dim,
    EntriesOfIds,
    Entry,
    PartOfIds,
    RowSpace,
    SelectedRows,
    Size,
    Splits,
    UniqueRows,
    UnknownSize,
    known,
    origin_of,
    per_row,
)
from estimator_mgpu.partition.value_functions import (
    LARGEST,
    LARGEST_COMPUTED,
    SPLITS_OF_STRINGS,
    VALUE_FUNCTIONS,
    to_sizes,
)
from estimator_mgpu.tf_internals import op_types, private
from estimator_mgpu.tf_internals.node_defs import slice_masks

T = TypeVar('T')

_RANDOM = ('RandomStandardNormal', 'RandomUniform', 'RandomUniformInt', 'TruncatedNormal')
_STATELESS = ('StatelessRandomNormalV2', 'StatelessRandomUniformV2', 'StatelessTruncatedNormalV2')
# By type of op, which input is the shape of the output.
_SHAPE_INPUTS = {
    'Empty': 0,
    'ScatterNd': 2,
    'SparseToDense': 1,
    'Fill': 0,
    **dict.fromkeys(_RANDOM, 0),
    **dict.fromkeys(_STATELESS, 0),
}
_RANGES = {dtype: range(dtype.min, dtype.max + 1) for dtype in (tf.int32, tf.int64)}


class Sizes:
    """The symbolic dimensions of tensors, and the symbolic entries of integer tensors.

    They are inferred from the graph when they are asked for, or set. All are those of full values,
    not of a tower's.

    Args:
      scope: tells the tensors of a function from those of the same name elsewhere.
    """

    def __init__(self, scope: str = '') -> None:
        self._scope = scope
        self._dims: dict[str, list[Size]] = {}
        self._values: dict[str, ndarray | None] = {}  # arrays of `Size`
        self._row_spaces: dict[Hashable, Any] = {}  # of selections, by what is the same for them

    def set_dims(self, tensor: tf.Tensor, dims: Sequence[Size] | None) -> None:
        """Sets the dimensions of a tensor; None leaves them as they are."""
        if dims is not None:
            self._dims[tensor.name] = list(dims)

    def set_entries(self, tensor: tf.Tensor, entries: Sequence[Size]) -> None:
        """Sets the entries of an integer scalar or vector."""
        shape = -1 if tensor.shape.rank or len(entries) != 1 else ()
        self._values[tensor.name] = np.array(entries, object).reshape(shape)

    def dims(self, tensor: tf.Tensor) -> list[Size] | None:
        """The dimensions of a tensor; None if its rank is unknown."""
        dims = self._dims.get(tensor.name)
        if dims is None and tensor.shape.rank is not None:
            dims = self._dims[tensor.name] = self._infer_dims(tensor)
        return dims

    def rank(self, tensor: tf.Tensor) -> int:
        """The number of dimensions; 0 if it's unknown."""
        return len(self.dims(tensor) or [])

    def static_dims(self, tensor: tf.Tensor, rank: int = 0) -> list[Size]:
        """The dimensions as TensorFlow knows them, and a symbol for each that it doesn't know.

        Args:
          rank: the number of dimensions, if TensorFlow doesn't know it either.
        """
        if tensor.shape.rank is None:
            return [self.unknown_dim(tensor, axis) for axis in range(rank)]
        return [
            self.unknown_dim(tensor, axis) if length is None else known(length)
            for axis, length in enumerate(tensor.shape.as_list())
        ]

    def dims_of_shard(self, tensor: tf.Tensor, shard: Shard, factor: Size, rank: int) -> list[Size]:
        """The dimensions of the full value of a sharded tensor.

        Args:
          shard: the tensor's placement.
          factor: how many entries each row has along the axis of the shard.
          rank: the number of dimensions, if TensorFlow doesn't know it.
        """
        dims = self.static_dims(tensor, rank)
        dims[shard.axis] = factor * shard.rows.size
        return dims

    def start_row_space(self, tensor: tf.Tensor) -> None:
        """Starts a row space with dimension 0 of a tensor, unless it's known what rows these are.

        It isn't if the size is a number of the graph's, or a product; nor if it's another tensor's
        row space. That it's as large as a dimension of another tensor doesn't tell.

        So what is computed from `tf.boolean_mask(x, mask)` can be sharded by the entries that are
        left. Integers start none: they are indices, as those of `tf.where`, or sizes.
        """
        if not tensor.dtype.is_floating:
            return
        dims = self.dims(tensor)
        if dims and dims[0].number == 1 and [type(one) for one in dims[0].symbols] == [Dim]:
            rows = RowSpace(tensor.name, None)
            self.set_dims(tensor, [rows.size, *dims[1:]])

    def selections(
        self,
        key: Hashable,
        outputs: Sequence[tf.Tensor],
        rows: RowSpace,
        kind: type[SelectedRows] = SelectedRows,
        is_partition: bool = False,
    ) -> tuple[SelectedRows, ...]:
        """The row spaces of the selections that are made of rows.

        Args:
          key: what says how many entries of each row are in which selection. Selections of which
            the same says it are the same.
          outputs: tensors with the entries, one for each selection.
          rows: what the selections are made of.
          kind: which row spaces they are, unless they are made of different ids.
          is_partition: whether each row is in one selection, so that different ids are in parts.
        """
        more: dict[str, Any] = {}
        if is_partition and isinstance(rows, UniqueRows) and not isinstance(rows, EntriesOfIds):
            kind = PartOfIds
            more = {'picked_from': rows, 'is_sorted': rows.is_sorted}
        elif isinstance(rows, UniqueRows):
            kind = EntriesOfIds
        elif isinstance(rows, SelectedRows) and not rows.is_ordered:
            more = {'picked_from': rows}
        made = [kind(selection.name, None, origin_of(rows), **more) for selection in outputs]
        return self.same_for((key, rows), tuple(made))

    def selection_of(self, key: Hashable, rows: RowSpace) -> SelectedRows | None:
        """The selection, the only one of its op, of which a key says how many entries rows have."""
        found = self._row_spaces.get((key, rows), [])
        return found[0] if len(found) == 1 else None

    def same_for(self, key: Hashable, rows: T) -> T:
        """Row spaces that are the same wherever the key is: those that were given first."""
        return self._row_spaces.setdefault(key, rows)

    def unknown_dim(self, tensor: tf.Tensor, axis: int) -> Size:
        """The symbol for a dimension that is known only when the step runs."""
        return Size.of(Dim(f'{self._scope}{tensor.name}', axis))

    def per_row(self, tensor: tf.Tensor, axis: int, rows: RowSpace) -> Size | None:
        """How many entries each row has in a dimension; None if they aren't known to be as many."""
        dims = self.dims(tensor)
        return None if dims is None else per_row(dims[axis], rows)

    def entries(self, tensor: tf.Tensor) -> list[Size] | None:
        """The entries of an integer tensor, flat; None if not even their number is known."""
        value = self._value(tensor)
        return None if value is None else list(value.flat)

    def numbers(self, tensor: tf.Tensor) -> list[int] | None:
        """The entries of an integer tensor, if no one of them depends on the batch or the step."""
        entries = self.entries(tensor)
        if entries is None or any(entry.symbols for entry in entries):
            return None
        return [entry.number for entry in entries]

    def _infer_dims(self, tensor: tf.Tensor) -> list[Size]:
        """The dimensions of a tensor of known rank."""
        dims = self.static_dims(tensor)
        if tensor.shape.is_fully_defined():
            return dims
        shape: Sequence[Size | None] | None = None
        if tensor.op.type in _SHAPE_INPUTS:
            shape = self.entries(tensor.op.inputs[_SHAPE_INPUTS[tensor.op.type]])
        elif tensor.op.type in _SHAPE_FUNCTIONS and tensor.value_index == 0:
            shape = _SHAPE_FUNCTIONS[tensor.op.type](self, tensor.op)
        if shape is None:
            return dims
        told = [size if size and dim.symbols else dim for dim, size in zip(dims, shape)]
        return [*told, *dims[len(told) :]]

    def _value(self, tensor: tf.Tensor) -> ndarray | None:
        """An array of the entries, in the tensor's shape; None if even the shape is unknown."""
        name = tensor.name
        if name not in self._values:
            self._values[name] = None  # for a loop, which leads here again
            if tensor.dtype.base_dtype in _RANGES:
                self._values[name] = self._infer_value(tensor)
        return self._values[name]

    def _infer_value(self, tensor: tf.Tensor) -> ndarray | None:
        try:
            return self._compute_value(tensor)
        except UnknownSize:
            return self._symbols(tensor)

    def _compute_value(self, tensor: tf.Tensor) -> ndarray:
        """The value as the tensor's op computes it; raises UnknownSize if that can't be told."""
        op = tensor.op
        if op.type == op_types.CONST:
            return _constant(tensor)
        inputs: list[Any]
        if op.type in op_types.SHAPE_QUERIES:
            inputs = [self.dims(op.inputs[tensor.value_index])]
        elif op.type in op_types.SWITCH:
            inputs = [self._value(op.inputs[0])]  # Whichever output it goes to.
        elif op.type in SPLITS_OF_STRINGS:
            inputs = [self.dims(op.inputs[0])]
        elif op.type == 'SparseReshape':
            inputs = [self._value(operand) for operand in op.inputs[1:]]
        elif op.type in VALUE_FUNCTIONS and op.inputs:
            inputs = [self._value(operand) for operand in op.inputs]
        else:
            raise UnknownSize(f'{op.type} computes no sizes')
        if any(operand is None for operand in inputs):
            raise UnknownSize(f'an input of {op.name} is unknown')

        value = np.array(VALUE_FUNCTIONS[op.type](tensor, *inputs), object)
        if value.size > LARGEST_COMPUTED:
            raise UnknownSize(f'{tensor.name} is too large')
        legal = _RANGES[tensor.dtype.base_dtype]
        for position, entry in enumerate(value.ravel().tolist()):
            if entry is None:
                value.flat[position] = self._symbol(tensor, position)
            elif not _is_in(legal, entry):
                raise UnknownSize(f'{tensor.name} overflows')
        return value

    def _symbols(self, tensor: tf.Tensor) -> ndarray | None:
        """A symbol for each entry of a small tensor; None if it may be a large one."""
        count = tensor.shape.num_elements()
        if count is None or count > LARGEST:
            return None
        entries = [self._symbol(tensor, position) for position in range(count)]
        return np.array(entries, object).reshape(tensor.shape)

    def _symbol(self, tensor: tf.Tensor, position: int) -> Size:
        """The symbol for an entry that is known only when the step runs."""
        return Size.of(Entry(f'{self._scope}{tensor.name}', position))


def _constant(tensor: tf.Tensor) -> ndarray:
    value = private.constant_value(tensor)
    if value.size > LARGEST:
        raise UnknownSize(f'{tensor.name} is too large')
    return to_sizes(value)


def _is_in(legal: range, size: Size) -> bool:
    """Whether a size can be computed in a type of that range, without overflow."""
    static = size.static
    number = size.number if static is None else static
    return legal.start <= number < legal.stop


def counts_from_0(op: tf.Operation, sizes: Sizes) -> bool:
    """Whether an op gives the numbers from 0 on."""
    if op.type != 'Range':
        return False
    start, _, delta = op.inputs
    return sizes.entries(start) == [Size(0)] and sizes.entries(delta) == [ONE]


# Shape functions: the first dimensions of an op's output, where its inputs tell them.


def _shape_of_range(sizes: Sizes, op: tf.Operation) -> Sequence[Size | None] | None:
    """From 0 on, `limit` numbers."""
    return sizes.entries(op.inputs[1]) if counts_from_0(op, sizes) else None


def _shape_of_segments(sizes: Sizes, op: tf.Operation) -> Sequence[Size | None] | None:
    """The number of segments, and what the data has behind the dimensions that the ids have."""
    data, ids, count = op.inputs
    number = sizes.entries(count)
    dims = sizes.dims(data)
    if number is None or dims is None or ids.shape.rank is None:
        return None
    return [*number, *dims[ids.shape.rank :]]


def _shape_of_ragged(sizes: Sizes, op: tf.Operation) -> Sequence[Size | None] | None:
    """As many rows as the ragged tensor has, unless another number of rows is asked for."""
    shape = sizes.entries(op.inputs[0])
    if shape is None or shape[0] != Size(-1):
        return None
    partition = op.inputs[3]
    kind = op.get_attr('row_partition_types')[0]
    try:
        if kind == b'FIRST_DIM_SIZE':
            return sizes.entries(partition)
        splits = sizes.dims(partition)
        return [splits[0] + Size(-1)] if kind == b'ROW_SPLITS' and splits else None
    except UnknownSize:
        return None


def _shape_of_slice(sizes: Sizes, op: tf.Operation) -> Sequence[Size | None] | None:
    """Of a vector, `x[1:]` and `x[:-1]` have one entry less, as row splits less an end are rows."""
    dims = sizes.dims(op.inputs[0])
    begin, end, stride = (sizes.entries(operand) for operand in op.inputs[1:])
    masks = slice_masks(op)
    has_others = masks['ellipsis'] or masks['new_axis'] or masks['shrink_axis']
    if has_others or not dims or len(dims) != 1 or not begin or not end or stride != [ONE]:
        return None
    try:
        # How many entries are left out before and behind.
        before = 0 if masks['begin'] else begin[0].as_integer()
        behind = 0 if masks['end'] else -end[0].as_integer()
        takes_to_end = masks['end'] or behind > 0  # A negative end counts from the end.
        left = dims[0] + Size(-before - behind)
    except UnknownSize:
        return None
    return [left] if before >= 0 and takes_to_end and left.number >= 0 else None


def _shape_of_concat(sizes: Sizes, op: tf.Operation) -> Sequence[Size | None] | None:
    """Of n rows behind one more, and of a tensor that is filled up to n entries.

    The latter has n: m of its own, and n - m zeros.

    Feature columns fill up the lengths of sequences so. This looks at the ops, rather than adding
    sizes, as n - m isn't a product.
    """
    *values, axis = op.inputs
    if len(values) != 2 or sizes.numbers(axis) != [0]:
        return None
    x, filler = values
    dims = sizes.dims(x)
    behind = sizes.dims(filler) or []
    rows = behind[0].rows if behind else None
    if rows is not None and dims == [ONE] and behind == [rows.size]:
        return [Size.of(Splits(rows))]  # Such as a 0, and the ends of rows behind it.
    if filler.op.type != op_types.FILL or filler.op.inputs[0].op.type != 'Sub' or not dims:
        return None
    count, count_of_x = filler.op.inputs[0].op.inputs
    if sizes.entries(count_of_x) != dims:
        return None
    return sizes.entries(count)


def _shape_of_ragged_range(sizes: Sizes, op: tf.Operation) -> Sequence[Size | None] | None:
    """The row splits of a ragged tensor with a row for each start: `ragged[:, :5]` makes such."""
    starts = sizes.dims(op.inputs[0])
    rows = starts[0].rows if starts else None
    return [Size.of(Splits(rows))] if rows is not None and starts == [rows.size] else None


_SHAPE_FUNCTIONS: dict[str, Callable[[Sizes, tf.Operation], Sequence[Size | None] | None]] = {
    'ConcatV2': _shape_of_concat,
    'Cumsum': lambda sizes, op: sizes.dims(op.inputs[0]),
    'RaggedRange': _shape_of_ragged_range,
    'RaggedTensorToTensor': _shape_of_ragged,
    'Range': _shape_of_range,
    'StridedSlice': _shape_of_slice,
    **dict.fromkeys(op_types.UNSORTED_SEGMENTS, _shape_of_segments),
}
