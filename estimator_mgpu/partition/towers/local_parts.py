"""Which part of a full value a tower takes: its shard, or its rows of a sparse or ragged tensor.

In: a tensor of which one device has the full value, and the form in which a tower needs it. Out:
the name of what the tower gets. It's cut on the device that has the full value, so that only the
part is sent; if machines have read parts of the value, each cuts its own, and the tower joins what
it gets. If an op would fail as two tensors don't have equally many rows, their parts fail.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches.batch import if_same, parts_of
from estimator_mgpu.devices import host_of
from estimator_mgpu.partition.nodes.node_builder import Number
from estimator_mgpu.partition.plan import CountedFromFirst, RaggedRows, Slice, SparseRows
from estimator_mgpu.partition.rules.selections import before_arrangement
from estimator_mgpu.partition.sizes import (
    ONE,
    DenseEntries,
    Entries,
    RowSpace,
    SelectedRows,
    may_be_paired,
)
from estimator_mgpu.partition.tower import Tower
from estimator_mgpu.partition.towers import (
    bits,
    ragged_features,
    reduce_and_gather,
    sparse_features,
)
from estimator_mgpu.partition.towers.row_spaces import LocalAndFull
from estimator_mgpu.partition.towers.shards import Extent

_OTHER_ENTRIES = (
    'two dense tensors whose entries are used one by one, as those of ids and their weights are, '
    'must have the same number of entries that a mask such as `x != -1` or `tf.sparse.from_dense` '
    'keeps. Give tensors of which as many are kept. Feature columns leave out ids of -1 and '
    'weights of 0: give a weight other than 0 for each id, and 0 for each -1. '
    'The numbers of entries of'
)


class LocalParts:
    """Takes towers' parts of full values.

    Args:
      values: those of which parts are taken.
    """

    def __init__(self, values: LocalAndFull):
        self._graph = values.division.graph
        self._plan = values.division.plan
        self._origins = values.origins
        self._towers = values.towers
        self._nodes = values.nodes
        self._shards = values.shards
        self._values = values
        self._titles = values.division.batch.titles_of_entries()
        self._dense_titles = values.division.batch.titles_of_dense()
        self._ragged = values.division.batch.ragged_by_values()
        # Values of sparse tensors that fail if they are too many, or too few, by their names.
        self._as_many: dict[str, str] = {}

    def slice(self, tensor: tf.Tensor, need: Slice, tower: Tower) -> str:
        """A tower's slice of a full value, taken on the device that has the full value."""
        shards = self._shards.of(need.rows)
        device = self._origins.device_of_full(tensor)
        full = self._sure_of_rows(tensor, need, device)
        if isinstance(need.rows, SelectedRows) and not need.rows.is_ordered:
            places = self._places(need.rows, tower)
            return self._nodes.take(full, places, device, need.axis)
        if need.in_blocks:
            dims = list(self._plan.sizes.dims(tensor) or [])
            dims[need.axis] = need.factor * need.rows.size
            return shards.slice_of_blocks(full, need.axis, dims, tower, device)
        if need.axis == 0 and self._waits_as_bits(tensor):
            packed = bits.pack(self._nodes, full, tensor, device)
            rows = shards.slice(packed, 0, need.factor, tower, device)
            return bits.unpack(self._nodes, rows, tensor, tower.device)
        return shards.slice(full, need.axis, need.factor, tower, device)

    def _places(self, rows: SelectedRows, tower: Tower) -> str:
        """For each of a tower's rows, its place in the full value, if rows may be in any order."""
        if isinstance(rows, Entries):
            return self._positions_of_entries(rows, tower)
        host = self._nodes.host
        order = self.order_of_entries(rows, host)
        ranks = self._nodes.add('InvertPermutation', [order], host)
        ranks = self._nodes.cast(ranks, tf.int64, host)
        return self._shards.of(rows).slice(ranks, 0, ONE, tower, host)

    def order_of_entries(self, rows: SelectedRows, device: str) -> str:
        """How the joined rows of all towers are put in order: an argsort of their `numbers`."""
        numbers = [self.numbers(rows, tower) for tower in self._towers]
        origin = self._shards.of(rows.origin)
        joined = reduce_and_gather.gather_selection(origin, numbers, 0, device)
        return self._nodes.argsort(joined, device)

    def numbers(self, rows: SelectedRows, tower: Tower) -> str:
        """For each of a tower's rows, a number that grows along the full value."""
        if isinstance(rows, Entries):
            return self._positions_of_entries(rows, tower)
        assert rows.picked_from is not None
        numbers = self.numbers(rows.picked_from, tower)
        picked = self._graph.get_tensor_by_name(rows.name)
        local = self._values.local(picked, tower)
        vector = self._nodes.add('Reshape', [local, [-1]], tower.device)
        return self._nodes.take(numbers, vector, tower.device)

    def of_feature(self, tensor: tf.Tensor, need: SparseRows | RaggedRows, tower: Tower) -> str:
        """A tower's part of a sparse or ragged tensor: of its indices or row splits, or values."""
        if isinstance(need, RaggedRows):
            return self._of_ragged(tensor, need, tower)

        indices = self._graph.get_tensor_by_name(need.indices)
        pairs = [(tensor, indices)]
        if len(parts_of(tensor)) == len(parts_of(indices)):  # Otherwise one device has made one.
            pairs = list(zip(parts_of(tensor), parts_of(indices)))
        pieces = [self._of_sparse(part, others, tensor, need, tower) for part, others in pairs]
        return self._nodes.concat(pieces, 0, tower.device)

    def _of_ragged(self, tensor: tf.Tensor, need: RaggedRows, tower: Tower) -> str:
        """A tower's part of a ragged tensor: its rows' values, or row splits, or some of these."""
        shards = self._shards.of(need.rows)
        parts = parts_of(self._ragged[need.values])
        extents = shards.extents_in_parts(parts, tower)
        if tensor.name != need.splits and need.offset is None:
            values = [self._values_of_rows(*pair) for pair in zip(parts, extents)]
            return self._nodes.concat(values, 0, tower.device)

        row_splits = []
        for part, extent in zip(parts, extents):
            bounds, device = self._bounds_of_rows(part)
            splits = ragged_features.row_splits(shards, bounds, extent, device)
            row_splits.append((self._nodes.cast(splits, tensor.dtype.base_dtype, device), device))
        host = host_of(tower.device)
        splits = ragged_features.join(self._nodes, row_splits, host)
        if need.offset is None:
            return splits
        return ragged_features.of_each_row(self._nodes, splits, need.offset, host)

    def _values_of_rows(self, ragged: tf.RaggedTensor, extent: Extent) -> str:
        """The values of the rows of an extent."""
        bounds, device = self._bounds_of_rows(ragged)
        positions = ragged_features.positions(self._nodes, bounds, extent, device)
        full = self._values.full(ragged.values)
        return self._nodes.take(full, positions, self._origins.device_of_full(ragged.values))

    def _of_sparse(
        self,
        part: tf.Tensor,
        indices: tf.Tensor,
        tensor: tf.Tensor,
        need: SparseRows,
        tower: Tower,
    ) -> str:
        """What a tower takes of a part of a sparse tensor: of its indices, or values.

        Args:
          part: what a machine has read of the tensor, or the tensor.
          indices: what the same machine has read of the indices, or all.
        """
        positions = self._positions_in(indices, need, tower)
        device = self._origins.device_of_full(part)
        full = self._values.full(part)
        if tensor.name in self._plan.at_others_entries:
            titles = f'{self._titles[need.indices]}, {self._titles[tensor.name]}'
            full = self._as_many_values(part, indices, titles)
        taken = self._nodes.take(full, positions, device)
        if tensor.name != need.indices:
            return taken
        shards = self._shards.of(need.rows)
        columns = tensor.shape.as_list()[1]
        return sparse_features.count_from_first(shards, taken, columns, need.factor, tower, device)

    def _positions_of_entries(self, rows: Entries, tower: Tower) -> str:
        """Which entries are a tower's: their positions among all, a vector."""
        need = self._plan.entries[rows.name]
        assert isinstance(need, SparseRows)
        first, *others = parts_of(self._graph.get_tensor_by_name(need.indices))
        pieces = [self._positions_in(first, need, tower)]
        counts = []  # of the entries of the parts before
        before = first
        for part in others:
            shape = self._nodes.add('Shape', [before.name], before.device, out_type=tf.int64)
            counts.append(self._nodes.add('Gather', [shape, 0], before.device))
            offset = self._nodes.sum(counts, self._nodes.host)
            positions = self._positions_in(part, need, tower)
            pieces.append(self._nodes.add('AddV2', [positions, offset], part.device))
            before = part
        return self._nodes.concat(pieces, 0, tower.device)

    def _positions_in(self, indices: tf.Tensor, need: SparseRows, tower: Tower) -> str:
        """Which entries are a tower's, by the indices of all, or of a part: positions in these."""
        shards = self._shards.of(need.rows)
        device = self._origins.device_of_full(indices)
        return sparse_features.positions(
            shards, self._values.full(indices), need.factor, tower, device
        )

    def _bounds_of_rows(self, ragged: tf.RaggedTensor) -> tuple[str, str]:
        """Where the rows of a ragged tensor begin and end among its values; and the device."""
        device = self._origins.device_of_full(ragged.row_splits)
        bounds = ragged_features.bounds(
            self._nodes,
            self._values.full(ragged.row_splits),
            self._values.full(ragged.values),
            self._origins.device_of_full(ragged.values),
            device,
        )
        return bounds, device

    def counted_from_first(
        self,
        tensor: tf.Tensor,
        indices: str,
        need: CountedFromFirst,
        tower: Tower,
        device: str,
    ) -> str:
        """A tower's indices, each of which begins with its row, counted from the tower's first.

        Args:
          tensor: the user's.
          indices: what the tower has of it, counted from the first row of all.
        """
        shards = self._shards.of(need.rows)
        dims = self._plan.sizes.dims(tensor) or []
        columns = dims[-1].static if len(dims) > 1 else 1
        assert columns is not None, 'the rule knows how long an index is'
        return sparse_features.count_from_first(
            shards, indices, columns, need.factor, tower, device
        )

    def _waits_as_bits(self, tensor: tf.Tensor) -> bool:
        """Whether a full value waits for its turns as bits: a mask that isn't the batch's."""
        has_turns = self._towers[-1].turn > 0
        return has_turns and tensor.name not in self._origins.sources and bits.can_be_packed(tensor)

    def _sure_of_rows(self, tensor: tf.Tensor, need: Slice, device: str) -> str:
        """The full value of which towers take slices, which has to have all rows, and no more.

        A rule may rely on it, as its op fails otherwise. But towers would leave out rows that are
        too many, and none of their ops would fail.
        """
        full = self._values.full(tensor)
        dims = self._plan.sizes.dims(tensor)
        rows = need.factor * need.rows.size
        if dims and dims[need.axis].same_as(rows):
            return full
        count = self._shards.of(need.rows).size_value(rows, None, tf.int64)
        if dims and may_be_paired(dims[need.axis], need.rows):
            others = self._title_of_dense(need.rows)
            titles = f'{self._title_of_dense(dims[need.axis].rows)}, {others}'
            return self._if_as_many_entries(full, need.axis, count, titles, device)
        # A split into `count` rows and none fails if there are more or fewer. Grappler would remove
        # one into a single part.
        parts = self._nodes.tensor([count, 0], tf.int64)
        return self._nodes.add('SplitV', [full, parts, need.axis], device, num_split=2)

    def _title_of_dense(self, rows: RowSpace | None) -> str:
        """What a message calls the dense tensor with some of whose entries a row space begins."""
        assert isinstance(rows, DenseEntries)
        mask = before_arrangement(self._graph.get_tensor_by_name(rows.name).op.inputs[0])
        dense = before_arrangement(mask.op.inputs[0])
        return self._dense_titles.get(dense.name, dense.name)

    def _if_as_many_entries(
        self, full: str, axis: int, others: Number, titles: str, device: str
    ) -> str:
        """A full value, which fails unless it has as many entries as others have.

        Args:
          axis: the dimension along which the entries are.
          others: how many others there are, int64.
          titles: what the message calls the tensors, this one first.
        """
        nodes = self._nodes
        shape = nodes.add('Shape', [full], device, out_type=tf.int64)
        count = nodes.add('Gather', [shape, axis], nodes.host)
        counts = nodes.tensor([count, others], tf.int64)
        message = nodes.const(f'{_OTHER_ENTRIES} {titles} are', tf.string, nodes.host)
        same = nodes.add('Equal', [count, nodes.scalar(others, tf.int64)], nodes.host)
        check = nodes.add('Assert', [same, message, counts], nodes.host, summarize=2)
        waits = f'^{check.partition(":")[0]}'
        return nodes.add('Identity', [full, waits], device)

    def _as_many_values(self, values: tf.Tensor, indices: tf.Tensor, titles: str) -> str:
        """Values that are used with the entries of another sparse tensor, one by one.

        They fail unless there are as many of both. Towers would leave out values that are too many,
        and none of their ops would fail. If machines have read parts, each has as many of both.
        """
        if values.name not in self._as_many:
            message = (
                'two sparse tensors that are used entry by entry, as ids and their weights are, '
                'must have the same number of entries: let the input_fn give one weight for each '
                f'id, in the order of the ids. The numbers of entries of {titles} are'
            )
            with self._nodes.at_once(self._origins.device_of_full(values), values.op):
                counts = tf.stack([tf.shape(indices)[0], tf.size(values)])
                self._as_many[values.name] = if_same(counts, message, values).name
        return self._as_many[values.name]
