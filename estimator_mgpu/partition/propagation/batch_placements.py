"""What towers have of the batch: the placements with which propagation begins.

Dense tensors are sharded along dimension 0. Of a sparse tensor, each tower has the entries of its
examples, and of a ragged one their values. If an earlier pass has found that rows of two sparse
tensors are used one by one, they have one row space.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Union

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import Positions, Shard
from estimator_mgpu.partition.plan import RaggedRows, SparseRows
from estimator_mgpu.partition.propagation.scope import ALL, Scope
from estimator_mgpu.partition.rules.entries import key_of_sums
from estimator_mgpu.partition.rules.row_lengths import of_splits
from estimator_mgpu.partition.sizes import ONE, Entries, RowsToLast, Size, Splits

Unsharded = Union[tf.Tensor, tf.SparseTensor, tf.RaggedTensor]


def place_batch(
    scope: Scope, sources: Sequence[tf.Tensor], unsharded: Sequence[Unsharded]
) -> tuple[dict[str, SparseRows | RaggedRows], Set[str]]:
    """Places the tensors of the batch in a scope.

    Args:
      sources: dense tensors of the batch.
      unsharded: its sparse and ragged tensors, and those that aren't sharded.

    Returns:
      `entries` and `at_others_entries`, as in `Plan`.
    """
    for tensor in sources:
        scope.placements[tensor.name] = Shard(0, scope.batch)
        dims = scope.sizes.dims(tensor) or []
        scope.sizes.set_dims(tensor, [scope.batch.size, *dims[1:]])
    entries: dict[str, SparseRows | RaggedRows] = {}
    for tensor in unsharded:
        # It isn't sharded itself, though what is made of it may be.
        for component in tf.nest.flatten(tensor, expand_composites=True):
            scope.reshardable.add(component.name)
        if isinstance(tensor, tf.SparseTensor):
            entries.update(_begin_entries(scope, tensor))
        if isinstance(tensor, tf.RaggedTensor):
            entries.update(_begin_ragged(scope, tensor))
    at_others_entries = _join_entries(scope, unsharded)
    entries.update(at_others_entries)
    _join_sums(scope)
    return entries, at_others_entries.keys()


def _begin_entries(scope: Scope, tensor: tf.SparseTensor) -> dict[str, SparseRows]:
    """Begins with a sparse tensor: each tower has the entries of its examples.

    Returns:
      By name, what towers take of its indices and values: nothing if the graph doesn't know how
      many dimensions it has.
    """
    indices = tensor.indices
    values = tensor.values
    shape = scope.sizes.entries(tensor.dense_shape)
    if shape:
        scope.sizes.set_entries(tensor.dense_shape, [scope.batch.size, *shape[1:]])
    columns = indices.shape.as_list()[1] if indices.shape.rank == 2 else None
    if not shape or columns != len(shape) or values.shape.rank != 1:
        return {}
    rows = Entries(indices.name, None, scope.batch)
    # Another sparse tensor may have the same indices.
    positions = scope.placements.get(indices.name, Positions(rows, scope.batch, ONE))
    if not isinstance(positions, Positions) or values.name in scope.placements:
        return {}
    scope.placements[indices.name] = positions
    scope.placements[values.name] = positions.shard
    scope.sizes.set_dims(indices, [positions.count, Size(columns)])
    scope.sizes.set_dims(values, [positions.count])
    need = SparseRows(indices.name, scope.batch, ONE)
    return {indices.name: need, values.name: need}


def _join_entries(scope: Scope, unsharded: Sequence[Unsharded]) -> dict[str, SparseRows]:
    """Lets towers have values, such as weights, where the entries of another sparse tensor are.

    An op that uses both one by one goes by their places: the indices of the values don't matter to
    it. It needs as many of both, or a single one, which isn't broadcast here: the step fails then.

    Returns:
      By name, what towers take of such values.
    """
    at_others_entries: dict[str, SparseRows] = {}
    for tensor in unsharded:
        if not isinstance(tensor, tf.SparseTensor):
            continue
        name = scope.same_entries.first(tensor.indices.name)
        if name != tensor.indices.name:
            positions = scope.placements[name]
            assert isinstance(positions, Positions)
            scope.placements[tensor.values.name] = positions.shard
            scope.sizes.set_dims(tensor.values, [positions.count])
            at_others_entries[tensor.values.name] = SparseRows(name, scope.batch, ONE)
    return at_others_entries


def _join_sums(scope: Scope) -> None:
    """Gives one row space to all sums of entries that are used together, example by example.

    It's the batch's, if one of them is used with examples, too.
    """
    for first, others in scope.same_sums.sets().items():
        names = others if first == ALL else [first, *others]
        rows = scope.batch if first == ALL else RowsToLast.of(names, scope.batch)
        for name in names:
            scope.sizes.same_for(key_of_sums(name), rows)


def _begin_ragged(scope: Scope, tensor: tf.RaggedTensor) -> dict[str, RaggedRows]:
    """Begins with a ragged tensor: each tower has the values of its examples.

    Returns:
      By name, what towers take of its values: nothing if values are ragged themselves, or if the
      graph doesn't know how many dimensions they have.
    """
    values = tensor.values
    splits = tensor.row_splits
    scope.sizes.set_dims(splits, [Size.of(Splits(scope.batch))])
    is_dense = isinstance(values, tf.Tensor) and values.shape.rank
    if not is_dense or values.name in scope.placements:
        return {}
    [rows] = scope.sizes.selections(of_splits(splits), [values], scope.batch)
    scope.placements[values.name] = Shard(0, rows)
    scope.sizes.set_dims(values, [rows.size, *scope.sizes.static_dims(values)[1:]])
    return {values.name: RaggedRows(values.name, splits.name, scope.batch)}
