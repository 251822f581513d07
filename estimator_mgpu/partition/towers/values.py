"""What each tower has of a tensor, and the value of the tensor for the global batch.

In: a plan, the towers, and where full values come from. Out: names of tensors. A full value is made
when it's first asked for: gathered, reduced, or taken from the first tower if all have the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches.batch import if_same, parts_of
from estimator_mgpu.devices import host_of
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.messages.packing import Pack
from estimator_mgpu.partition.messages.slices import Slices
from estimator_mgpu.partition.nodes.node_builder import Frames, NodeBuilder, Number
from estimator_mgpu.partition.placements import MOMENTS, Partial, Positions, Shard
from estimator_mgpu.partition.plan import (
    CountedFromFirst,
    LoopFrame,
    RaggedRows,
    Reduced,
    Slice,
    SparseRows,
)
from estimator_mgpu.partition.rules.selections import before_arrangement
from estimator_mgpu.partition.sizes import (
    ONE,
    DenseEntries,
    Dim,
    Entries,
    Largest,
    LongestRow,
    RowsBehind,
    RowSpace,
    RowsToLast,
    SelectedRows,
    Splits,
    UniqueRows,
    full_size,
    may_be_paired,
    per_row,
    product,
)
from estimator_mgpu.partition.tower import Tower
from estimator_mgpu.partition.towers import (
    bits,
    ragged_features,
    reduce_and_gather,
    sparse_features,
    unique_ids,
)
from estimator_mgpu.partition.towers.origins import Origins
from estimator_mgpu.partition.towers.shards import EqualShards, SelectionShards, Shards
from estimator_mgpu.partition.towers.sums_of_entries import SumsOfEntries
from estimator_mgpu.tf_internals import op_types

_OTHER_ENTRIES = (
    'two dense tensors whose entries are used one by one, as those of ids and their weights are, '
    'must have the same number of entries that a mask such as `x != -1` or `tf.sparse.from_dense` '
    'keeps. Give tensors of which as many are kept. Feature columns leave out ids of -1 and '
    'weights of 0: give a weight other than 0 for each id, and 0 for each -1. '
    'The numbers of entries of'
)


class Values:
    """Local and full values, by the names of their tensors.

    Args:
      packs: by the names of tensors that share a message with others.
      packs_of_ops: by the names of small partial sums that are reduced with others of their op.
      slices: which sums are made in slices.
    """

    def __init__(
        self,
        division: Division,
        origins: Origins,
        packs: Mapping[str, Pack],
        packs_of_ops: Mapping[str, Pack],
        slices: Slices,
        towers: Sequence[Tower],
        nodes: NodeBuilder,
    ):
        plan = division.plan
        self.origins = origins
        self._graph = division.graph
        self._plan = plan
        self._towers = towers
        self._nodes = nodes
        self._order = division.order
        self._packs = packs
        self._packs_of_ops = packs_of_ops
        self._slices = slices
        self.batch_shards: Shards = EqualShards(
            plan.rows, division.total, towers, nodes, self._symbol_value
        )
        self._shards: dict[RowSpace, Shards] = {plan.rows: self.batch_shards}

        self.full_values: dict[str, str] = {}
        """The full values that were made from local ones so far, by the names of the tensors."""
        # By the names of ops, what is put behind the rows of their copies.
        self._paddings = {
            name: op_plan.padding for name, op_plan in plan.ops.items() if op_plan.padding
        }
        self._titles = division.batch.titles_of_entries()
        self._dense_titles = division.batch.titles_of_dense()
        self._sums_of_entries = SumsOfEntries(
            self._graph, nodes, self.batch_shards, self._titles, origins.device_of_full
        )
        # Values of sparse tensors that fail if they are too many, or too few, by their names.
        self._as_many: dict[str, str] = {}

    def copy_name(self, op_name: str, tower: Tower) -> str:
        """The name of a tower's copy of an op."""
        return self._nodes.names.copy(op_name, tower.number)

    def copy_names(self, op: tf.Operation, towers: Sequence[Tower]) -> list[str]:
        """The names of towers' copies of an op."""
        return [self.copy_name(op.name, tower) for tower in towers]

    def name_of_result(self, op: tf.Operation) -> str:
        """The name of an identity that gives what one of the user's ops computes."""
        return self._nodes.names.added(op.name, f'result_{op.name.rpartition("/")[2]}')

    def frame_name(self, frame: str, is_joint: bool, tower: Tower) -> str:
        """The name of the frame of a tower's copy of a v1 loop, whose frame has a name.

        Each tower's loop has a frame of its own, unless all make each step together.
        """
        if is_joint:
            return f'{self._nodes.scope}/all_towers/{frame}'
        return self.copy_name(frame, tower)

    def local_in_loop(self, tensor: tf.Tensor, tower: Tower, loops: Sequence[LoopFrame]) -> str:
        """What a tower has of a tensor in v1 loops, so that what is added of it is there, too."""
        local = self.local(tensor, tower)
        self._nodes.place_in_frames(local, self.frames(loops, tower))
        return local

    def frames(self, loops: Sequence[LoopFrame], tower: Tower) -> Frames:
        """The frames of a tower's copies of v1 loops."""
        return tuple(
            (self.frame_name(loop.name, loop.is_joint, tower), loop.parallel_iterations)
            for loop in loops
        )

    def local(self, tensor: tf.Tensor, tower: Tower) -> str:
        """What a tower has of a tensor: an output of its copy of an op, or a shard of the batch."""
        if tensor.name not in self.origins.sources:
            op_name = tensor.op.name
            copy = f'{self.copy_name(op_name, tower)}:{tensor.value_index}'
            if op_name not in self._paddings:
                return copy
            rank = len(self._plan.sizes.dims(tensor) or [])
            return self._sums_of_entries.padded(copy, rank, self._paddings[op_name], tower)
        parts = parts_of(tensor)
        if len(parts) > 1:
            return self.batch_shards.join_parts(parts, tower)
        if tensor.name in self._plan.entries:
            return self.part_of_feature(tensor, self._plan.entries[tensor.name], tower)
        return self.slice(tensor, Slice(0, self._plan.rows, ONE), tower)

    def slice(self, tensor: tf.Tensor, need: Slice, tower: Tower) -> str:
        """A tower's slice of a full value, taken on the device that has the full value."""
        shards = self.shards_of(need.rows)
        device = self.origins.device_of_full(tensor)
        full = self._sure_of_rows(tensor, need, device)
        if isinstance(need.rows, SelectedRows) and not need.rows.is_ordered:
            places = self._places(need.rows, tower)
            return self._nodes.take(full, places, device, need.axis)
        if need.in_blocks:
            dims = list(self._plan.sizes.dims(tensor) or [])
            dims[need.axis] = need.factor * full_size(need.rows)
            return shards.slice_of_blocks(full, need.axis, dims, tower, device)
        if need.axis == 0 and self._waits_as_bits(tensor):
            packed = bits.pack(self._nodes, full, tensor, device)
            rows = shards.slice(packed, 0, need.factor, tower, device)
            return bits.unpack(self._nodes, rows, tensor, tower.device)
        return shards.slice(full, need.axis, need.factor, tower, device)

    def _sure_of_rows(self, tensor: tf.Tensor, need: Slice, device: str) -> str:
        """The full value of which towers take slices, which has to have all rows, and no more.

        A rule may rely on it, as its op fails otherwise. But towers would leave out rows that are
        too many, and none of their ops would fail.
        """
        full = self.full(tensor)
        dims = self._plan.sizes.dims(tensor)
        rows = need.factor * full_size(need.rows)
        if dims and dims[need.axis].same_as(rows):
            return full
        count = self.shards_of(need.rows).size_value(rows, None, tf.int64)
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
          full: the value.
          axis: the dimension along which the entries are.
          others: how many others there are, int64.
          titles: what the message calls the tensors, this one first.
          device: that of the full value.
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

    def _waits_as_bits(self, tensor: tf.Tensor) -> bool:
        """Whether a full value waits for its turns as bits: a mask that isn't the batch's."""
        has_turns = self._towers[-1].turn > 0
        return has_turns and tensor.name not in self.origins.sources and bits.can_be_packed(tensor)

    def part_of_feature(
        self, tensor: tf.Tensor, need: SparseRows | RaggedRows, tower: Tower
    ) -> str:
        """A tower's part of a sparse or ragged tensor: of its indices or row splits, or values."""
        if isinstance(need, RaggedRows) and tensor.name == need.splits:
            return self._row_splits(need, tower)
        positions = self._positions_of_entries(need, tower)
        device = self.origins.device_of_full(tensor)
        full = self.full(tensor)
        if isinstance(need, SparseRows) and tensor.name in self._plan.at_others_entries:
            full = self._as_many_values(tensor, need.indices)
        taken = self._nodes.take(full, positions, device)
        if isinstance(need, RaggedRows) or tensor.name != need.indices:
            return taken
        shards = self.shards_of(need.rows)
        columns = tensor.shape.as_list()[1]
        return sparse_features.count_from_first(shards, taken, columns, need.factor, tower, device)

    def _as_many_values(self, values: tf.Tensor, indices_name: str) -> str:
        """Values that are used with the entries of another sparse tensor, one by one.

        They fail unless there are as many of both. Towers would leave out values that are too many,
        and none of their ops would fail.
        """
        if values.name not in self._as_many:
            indices = self._graph.get_tensor_by_name(indices_name)
            message = (
                'two sparse tensors that are used entry by entry, as ids and their weights are, '
                'must have the same number of entries: let the input_fn give one weight for each '
                'id, in the order of the ids. The numbers of entries of '
                f'{self._titles[indices_name]}, {self._titles[values.name]} are'
            )
            with self._nodes.at_once(self.origins.device_of_full(values), values.op):
                counts = [tf.shape(indices)[0], tf.size(values)]
                self._as_many[values.name] = if_same(counts, message, values).name
        return self._as_many[values.name]

    def _positions_of_entries(self, need: SparseRows | RaggedRows, tower: Tower) -> str:
        """Which entries, or values, are a tower's: their positions among all, a vector."""
        shards = self.shards_of(need.rows)
        if isinstance(need, RaggedRows):
            bounds, device = self._bounds_of_rows(need)
            return ragged_features.positions(shards, bounds, tower, device)
        indices = self._graph.get_tensor_by_name(need.indices)
        device = self.origins.device_of_full(indices)
        return sparse_features.positions(shards, self.full(indices), need.factor, tower, device)

    def _row_splits(self, need: RaggedRows, tower: Tower) -> str:
        """The row splits of a tower's rows."""
        bounds, device = self._bounds_of_rows(need)
        dtype = self._graph.get_tensor_by_name(need.splits).dtype
        splits = ragged_features.row_splits(self.shards_of(need.rows), bounds, tower, device)
        return self._nodes.cast(splits, dtype, device)

    def _bounds_of_rows(self, need: RaggedRows) -> tuple[str, str]:
        """Where the rows of a ragged tensor begin and end among its values; and the device."""
        values = self._graph.get_tensor_by_name(need.values)
        splits = self._graph.get_tensor_by_name(need.splits)
        device = self.origins.device_of_full(splits)
        bounds = ragged_features.bounds(
            self._nodes,
            self.full(splits),
            self.full(values),
            self.origins.device_of_full(values),
            device,
        )
        return bounds, device

    def _places(self, rows: SelectedRows, tower: Tower) -> str:
        """For each of a tower's rows, its place in the full value, if rows may be in any order."""
        if isinstance(rows, Entries):
            return self._positions_of_entries(self._plan.entries[rows.name], tower)
        host = self._nodes.host
        order = self._order_of_entries(rows, host)
        ranks = self._nodes.add('InvertPermutation', [order], host)
        ranks = self._nodes.cast(ranks, tf.int64, host)
        return self.shards_of(rows).slice(ranks, 0, ONE, tower, host)

    def _order_of_entries(self, rows: SelectedRows, device: str) -> str:
        """How the joined rows of all towers are put in order: an argsort of their `_numbers`."""
        numbers = [self._numbers(rows, tower) for tower in self._towers]
        origin = self.shards_of(rows.origin)
        joined = reduce_and_gather.gather_selection(origin, numbers, 0, device)
        return self._nodes.argsort(joined, device)

    def _numbers(self, rows: SelectedRows, tower: Tower) -> str:
        """For each of a tower's rows, a number that grows along the full value."""
        if isinstance(rows, Entries):
            return self._positions_of_entries(self._plan.entries[rows.name], tower)
        assert rows.picked_from is not None
        numbers = self._numbers(rows.picked_from, tower)
        picked = self._graph.get_tensor_by_name(rows.name)
        local = self.local(picked, tower)
        vector = self._nodes.add('Reshape', [local, [-1]], tower.device)
        return self._nodes.take(numbers, vector, tower.device)

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
        shards = self.shards_of(need.rows)
        dims = self._plan.sizes.dims(tensor) or []
        columns = dims[-1].static if len(dims) > 1 else 1
        assert columns is not None, 'the rule knows how long an index is'
        return sparse_features.count_from_first(
            shards, indices, columns, need.factor, tower, device
        )

    def reduced(self, tensor: tf.Tensor, need: Reduced, loops: Sequence[LoopFrame]) -> str:
        """The reduced value of towers' partial results in joint loops, on the first device."""
        values = [self.local_in_loop(tensor, tower, loops) for tower in self._towers]
        shards = self.shards_of(need.rows)
        return reduce_and_gather.reduce(shards, values, need.reduce, self._towers[0].device)

    def full(self, tensor: tf.Tensor) -> str:
        """The value for the global batch: the user's op's, or made from what towers have."""
        if self.origins.is_made_from_local(tensor) and tensor.name not in self.full_values:
            with self._nodes.serving(tensor.op, is_for_many=tensor.name in self._packs):
                self.full_values.update(self._make_full(tensor))
        return self.full_values.get(tensor.name, tensor.name)

    def shards_of(self, rows: RowSpace) -> Shards:
        """The shards of a row space: the batch's, or one of a tensor."""
        if isinstance(rows, SelectedRows) and rows not in self._shards:
            self._shards[rows] = self._shards_of_selection(rows)
        if rows not in self._shards:
            total = self._count_rows(rows) if rows.static is None else None
            self._shards[rows] = EqualShards(
                rows, total, self._towers, self._nodes, self._symbol_value
            )
        return self._shards[rows]

    def _count_rows(self, rows: RowSpace) -> tf.Tensor:
        """How many rows the tensor has with which a row space starts."""
        tensor = self._graph.get_tensor_by_name(rows.name)
        with self._nodes.at_once(self.origins.device_of_full(tensor), tensor.op):
            return tf.shape(tensor)[0]

    def _shards_of_selection(self, rows: SelectedRows) -> Shards:
        """The shards of a selection, of which each tower has the rows that it has picked."""
        selection = self._graph.get_tensor_by_name(rows.name)
        sizes: list[Number]
        if isinstance(rows, RowsToLast):
            sizes = [self._sums_of_entries.size(rows.name, tower) for tower in self._towers]
        elif isinstance(rows, RowsBehind):
            sizes = [self._sums_of_entries.size_behind(rows.name, tower) for tower in self._towers]
        else:
            first_dim = Dim(selection.name, 0)
            sizes = [self._symbol_value(first_dim, tower, tf.int32) for tower in self._towers]
        origin = self.shards_of(rows.origin)
        shards = SelectionShards(rows, sizes, origin, self._symbol_value)
        if isinstance(rows, UniqueRows):
            shards.total = self._count_ids(selection)
        return shards

    def _count_ids(self, ids: tf.Tensor) -> str:
        """How many different ids all towers have together."""
        full = self.full(ids)
        device = self.origins.device_of_full(ids)
        shape = self._nodes.add('Shape', [full], device, out_type=tf.int32)
        return self._nodes.add('Gather', [shape, 0], host_of(device))

    def _make_full(self, tensor: tf.Tensor) -> dict[str, str]:
        """Makes a full value from local ones; returns it by name, with others of its pack."""
        name = tensor.name
        if self.origins.is_size_of_local(tensor):
            size = self._make_size(tensor)
            if self._order.liveness.may_be_dead(tensor.op):
                size = self._dead_as(tensor, size)
            return {name: size}

        placement = self._plan.placements[name]
        if not isinstance(placement, (Shard, Partial)):
            return {name: self.local(tensor, self._towers[0])}  # It's the same on all towers.

        rows = placement.rows
        device = self.origins.device_of_full(tensor)
        if name in self._packs:
            return self._reduce_pack(self._packs[name], self.shards_of(rows), device)

        values = [self.local(tensor, tower) for tower in self._towers]
        if isinstance(rows, UniqueRows):
            return self._make_full_of_ids(tensor, placement, values, device)
        if isinstance(placement, Partial):
            return {name: self.reduced_on(tensor, device)}
        if isinstance(rows, SelectedRows) and not placement.in_blocks:
            # They are joined as they are, so it needn't be known how many each tower has picked.
            origin = self.shards_of(rows.origin)
            gathered = reduce_and_gather.gather_selection(origin, values, placement.axis, device)
            if not rows.is_ordered:
                order = self._order_of_entries(rows, device)
                gathered = self._nodes.take(gathered, order, device, placement.axis)
            return {name: gathered}

        dims = self._plan.sizes.dims(tensor) or []
        in_blocks = placement.in_blocks
        gather = reduce_and_gather.gather_blocks if in_blocks else reduce_and_gather.gather
        return {name: gather(self.shards_of(rows), values, placement.axis, dims, device)}

    def reduced_on(self, tensor: tf.Tensor, device: str, is_for_all: bool = False) -> str:
        """The value of which towers have partial results, reduced on a device.

        Args:
          tensor: the user's.
          is_for_all: whether all devices reduce it, each for itself: then not in slices.
        """
        placement = self._plan.placements[tensor.name]
        assert isinstance(placement, Partial)
        if placement.reduce == MOMENTS:
            return self._reduce_moments(tensor, placement.rows, device)
        shards = self.shards_of(placement.rows)
        if tensor.name in self._packs_of_ops:
            pack = self._packs_of_ops[tensor.name]
            return self._reduce_pack(pack, shards, device)[tensor.name]
        values = [self.local(tensor, tower) for tower in self._towers]
        is_known = tensor.shape.is_fully_defined()
        if placement.reduce == 'sum' and is_known and not is_for_all:
            parts = self._slices.of_sum(bytes_of(tensor), device, tensor.shape.num_elements())
            if parts:
                return reduce_and_gather.sum_in_slices(
                    shards, values, self._slices, parts, tensor.shape.as_list(), device
                )
        return reduce_and_gather.reduce(shards, values, placement.reduce, device)

    def _make_full_of_ids(
        self, tensor: tf.Tensor, placement: Shard | Partial, values: Sequence[str], device: str
    ) -> dict[str, str]:
        """The full value of what belongs to different ids: sums by id, or one value of each id."""
        rows = placement.rows
        assert isinstance(rows, UniqueRows)
        origin = self.shards_of(rows.origin)
        ids = self._graph.get_tensor_by_name(rows.name)
        merged = unique_ids.merge(
            origin,
            [self.local(ids, tower) for tower in self._towers],
            rows.is_sorted,
            self._first_entries(rows, ids),
            self.origins.device_of_full(ids),
        )
        if tensor.name == rows.name:
            return {tensor.name: merged.ids}
        combine = unique_ids.add_up if isinstance(placement, Partial) else unique_ids.take_first
        return {tensor.name: combine(origin, merged, values, device)}

    def _first_entries(self, rows: UniqueRows, ids: tf.Tensor) -> list[str]:
        """For each tower, with which entry of the batch each of its different ids comes first.

        [] if entries are in the order of the rows: then those of a tower come before the next's.
        """
        if rows.picked_from is None:
            return []
        _, places = ids.op.outputs
        firsts = []
        for tower in self._towers:
            local = self.local(ids, tower)
            count = self._nodes.add('Size', [local], tower.device, out_type=tf.int32)
            inputs = [self._numbers(rows.picked_from, tower), self.local(places, tower), count]
            firsts.append(self._nodes.add('UnsortedSegmentMin', inputs, tower.device))
        return firsts

    def _reduce_moments(self, tensor: tf.Tensor, rows: RowSpace, device: str) -> str:
        """The mean or the variance of the batch's channels, made from those of the shards.

        Both are made by the same nodes, which are added only once.
        """
        op = tensor.op
        mean, variance = op.outputs[op_types.MOMENT_OUTPUTS]
        means = [self.local(mean, tower) for tower in self._towers]
        variances = [self.local(variance, tower) for tower in self._towers]

        # How many entries a channel of an example has.
        first, *others = self._plan.sizes.dims(op.inputs[0]) or []
        factor = per_row(first, rows)
        assert factor is not None, 'it is sharded along dimension 0'
        channels_first = op.get_attr('data_format').startswith(b'NC')
        factor *= product(others[1:] if channels_first else others[:-1])

        shards = self.shards_of(rows)
        full_mean, full_variance = reduce_and_gather.reduce_moments(
            shards, means, variances, factor, device
        )
        return full_mean if tensor.value_index == mean.value_index else full_variance

    def _make_size(self, tensor: tf.Tensor) -> str:
        """The value of a tensor that says how large the global batch is, as of `tf.shape(x)`."""
        dtype = tensor.dtype.base_dtype
        entries = self._plan.sizes.entries(tensor) or []
        values = [self.batch_shards.size_value(size, None, dtype) for size in entries]
        return self._nodes.tensor(values if tensor.shape.rank else values[0], dtype)

    def _dead_as(self, tensor: tf.Tensor, size: str) -> str:
        """A size that is dead if the op that asked for it is: in a branch that isn't taken.

        Else what follows would run and draw random numbers, and would draw others in the next step
        than on one device.
        """
        tower = self._towers[0]
        operand = next(o for o in tensor.op.inputs if o.name in self._plan.placements)
        local = self.local(operand, tower)
        asked = self._nodes.add('Shape', [local], tower.device, out_type=tf.int32)
        is_alive = f'^{asked.partition(":")[0]}'
        return self._nodes.add('Identity', [size, is_alive], self._nodes.host)

    def _reduce_pack(self, pack: Pack, shards: Shards, device: str) -> dict[str, str]:
        """Sums the partial sums of all tensors of a pack, as vectors."""
        vectors = []
        for tower in self._towers:
            values = [self.local(tensor, tower) for tensor in pack.tensors]
            vectors.append(pack.join(values, self._nodes, tower.device))
        total = reduce_and_gather.reduce(shards, vectors, 'sum', device)
        return pack.split(total, self._nodes, device)

    def _symbol_value(self, symbol: Any, tower: Tower | None, dtype: tf.DType) -> Number:
        """The value of a symbol: a number of rows or splits, a dimension, or a tensor's entry."""
        if isinstance(symbol, RowSpace):
            return self.shards_of(symbol).total_as(dtype)
        if isinstance(symbol, Splits):
            return self.shards_of(symbol.rows).total_as(dtype, more=1)

        tensor = self._graph.get_tensor_by_name(symbol.tensor)
        if isinstance(symbol, LongestRow):
            return self._longest_row(tensor, dtype)
        if isinstance(symbol, Largest):
            return self._largest_entry(tensor, symbol.position, dtype)
        with self._nodes.for_many():
            host = self._nodes.host
            if isinstance(symbol, Dim):
                vector = self._shape(tensor, tower, dtype)
                index = symbol.axis
                if tower is not None:  # It's asked for on the tower's machine.
                    host = host_of(tower.device)
            else:
                vector = self._as_vector(tensor, dtype)
                index = symbol.position
            return self._nodes.add('Gather', [vector, index], host)

    def _largest_entry(self, tensor: tf.Tensor, position: int, dtype: tf.DType) -> str:
        """The largest of the entries that towers have at a position of a vector."""
        entries = []
        with self._nodes.for_many():
            for tower in self._towers:
                local = self.local(tensor, tower)
                entries.append(self._nodes.add('Gather', [local, position], tower.device))
            return self._largest(entries, dtype)

    def _longest_row(self, tensor: tf.Tensor, dtype: tf.DType) -> str:
        """How many values the longest row has, of row splits, or of what towers have of rows."""
        nodes = self._nodes
        placement = self._plan.placements.get(tensor.name)
        with nodes.for_many():
            host = nodes.host
            if not isinstance(placement, Positions):
                device = self.origins.device_of_full(tensor)
                longest = ragged_features.longest(nodes, self.full(tensor), device)
                return nodes.cast(longest, dtype, host)
            shards = self.shards_of(placement.rows)
            of_towers = [nodes.scalar(0, tf.int64)]  # Selected rows may be none.
            for tower in self._towers:
                _, count = shards.extent(placement.factor, tower, tensor.dtype)
                rows = self.local(tensor, tower)
                count = nodes.scalar(count, tensor.dtype)
                on_host = host_of(tower.device)
                of_towers.append(ragged_features.most_in_a_row(nodes, rows, count, on_host))
            return self._largest(of_towers, dtype)

    def _largest(self, scalars: Sequence[str], dtype: tf.DType) -> str:
        """The largest of some scalars, in another type than theirs."""
        host = self._nodes.host
        vector = self._nodes.add('Pack', scalars, host)
        largest = self._nodes.add('Max', [vector, 0], host)
        return self._nodes.cast(largest, dtype, host)

    def _as_vector(self, tensor: tf.Tensor, dtype: tf.DType) -> str:
        """The entries of a tensor, as a vector."""
        host = self._nodes.host
        vector = self._nodes.add('Reshape', [self.full(tensor), [-1]], host)
        return self._nodes.cast(vector, dtype, host)

    def _shape(self, tensor: tf.Tensor, tower: Tower | None, dtype: tf.DType) -> str:
        """The shape of what a tower has of a tensor, or of the full value if towers have none."""
        is_source = tensor.name in self.origins.sources and tensor.name not in self._plan.entries
        if tensor.name in self._plan.placements and not is_source:
            tower = tower or self._towers[0]
            value = self.local(tensor, tower)
            device = tower.device
        else:
            value = self.full(tensor)
            device = self.origins.device_of_full(tensor)
        return self._nodes.add('Shape', [value], device, out_type=dtype)
