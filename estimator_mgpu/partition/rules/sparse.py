"""Ops that make something dense of sparse tensors: each tower is given the entries of its rows.

Towers have these already, or take them of full values (`EntriesOf`). For what gives sparse tensors,
see `entries`.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.plan import FULL, EntriesOf, Label, SizesOf
from estimator_mgpu.partition.rules.notation import NotSharded, Rule, Signature, require, table
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import ONE


def _entries(op: tf.Operation, indices: int) -> EntriesOf:
    """The operand for the indices of a sparse tensor, and for its values."""
    shape = op.inputs[indices].shape
    if shape.rank != 2 or shape.as_list()[1] is None:
        raise NotSharded(f'the number of dimensions of {op.name} is unknown')
    return EntriesOf('n', indices)


def _ctc_loss(op: tf.Operation, sizes: Sizes) -> Signature:
    """`CTCLoss`: [time, n, classes], the labels' indices and values, and lengths n."""
    dims = require(sizes.dims(op.inputs[0]))
    labels = _entries(op, 1)
    logits = (None, 'n', None)
    return Signature([logits, labels, labels, ('n',)], [('n',), logits], dims=[[dims[1]], dims])


def _to_dense(op: tf.Operation, sizes: Sizes) -> Signature:
    """`SparseToDense`: indices, the shape, values and a default."""
    entries = _entries(op, 0)
    dims = require(sizes.entries(op.inputs[1]))
    if op.inputs[2].shape.rank != 1:
        raise NotSharded  # one value for all entries
    labels = ('n', *[None] * (len(dims) - 1))
    return Signature([entries, SizesOf(labels), entries, FULL], [labels], dims=[dims])


def _reduction(op: tf.Operation, sizes: Sizes) -> Signature:
    """`SparseReduceSum` and the like, of each row: indices, values, the shape, and the axes."""
    entries = _entries(op, 0)
    dims = require(sizes.entries(op.inputs[2]))
    axes = {axis % len(dims) for axis in require(sizes.numbers(op.inputs[3]))}
    if not axes or 0 in axes:
        raise NotSharded  # Without axes, it's all of them.
    output_dims = list(dims)
    for axis in sorted(axes, reverse=True):
        output_dims[axis : axis + 1] = [ONE] if op.get_attr('keep_dims') else []
    shape = SizesOf(('n', *[None] * (len(dims) - 1)))
    output = ('n', *[None] * (len(output_dims) - 1))
    return Signature([entries, entries, shape, FULL], [output], dims=[output_dims])


def _sparse_matmul(op: tf.Operation, sizes: Sizes) -> Signature:
    """`SparseTensorDenseMatMul`: by rows of the sparse matrix, and by columns of the dense one.

    If the sparse matrix is transposed, its rows are what is summed over.
    """
    entries = _entries(op, 0)
    sparse_shape = SizesOf(('n', None))
    if op.get_attr('adjoint_a'):
        dense: tuple[Label, ...] = ('n', 'm')
        product: tuple[Label, ...] = (None, 'm')
    else:
        dense = (None, 'm')
        product = ('n', 'm')
    if op.get_attr('adjoint_b'):
        dense = dense[::-1]
    return Signature([entries, entries, sparse_shape, dense], [product], reduce='sum')


_RULES: dict[str, Rule] = {
    'CTCLoss CTCLossV2': _ctc_loss,
    'SparseReduceMax SparseReduceSum': _reduction,
    'SparseTensorDenseMatMul': _sparse_matmul,
    'SparseToDense': _to_dense,
}
RULES = table(_RULES)
