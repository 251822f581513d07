"""What each tower has of a tensor, and the value of the tensor for the global batch.

In: a plan, the towers, and where full values come from. Out: names of tensors. A full value is made
when it's first asked for: gathered, reduced, or taken from the first tower if all have the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches.batch import parts_of
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.messages.packing import Pack
from estimator_mgpu.partition.messages.slices import Slices
from estimator_mgpu.partition.nodes.node_builder import Frames, NodeBuilder, output_of
from estimator_mgpu.partition.placements import MOMENTS, Partial, Shard
from estimator_mgpu.partition.plan import LoopFrame, Reduced, Slice
from estimator_mgpu.partition.sizes import (
    ONE,
    PartOfIds,
    RowSpace,
    SelectedRows,
    UniqueRows,
    per_row,
    product,
)
from estimator_mgpu.partition.tower import Tower
from estimator_mgpu.partition.towers import reduce_and_gather, unique_ids
from estimator_mgpu.partition.towers.local_parts import LocalParts
from estimator_mgpu.partition.towers.origins import Origins
from estimator_mgpu.partition.towers.row_spaces import ShardsOfRows
from estimator_mgpu.partition.towers.shards import Shards
from estimator_mgpu.partition.towers.unique_ids import MergedIds
from estimator_mgpu.tf_internals import op_types


class Values:
    """Local and full values, by the names of their tensors.

    Args:
      packs_of_ops: by the names of small partial sums that are reduced with others of their op.

    Attributes:
      division: the graph and its plan.
      origins: tells which full values are made from local ones.
      towers: those that have local values.
      nodes: where nodes are added.
      packs: by the names of tensors that share a message with others.
      slices: which full values, and which sums, are sent in slices.
      shards: which rows towers have, and the values of sizes.
      local_parts: what towers take of full values.
      full_values: the full values that were made from local ones so far, by the names of tensors.
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
        self.division = division
        self.origins = origins
        self.towers = towers
        self.nodes = nodes
        self._plan = division.plan
        self.packs = packs
        self._packs_of_ops = packs_of_ops
        self.slices = slices
        self.shards = ShardsOfRows(self)
        self.local_parts = LocalParts(self)
        self.full_values: dict[str, str] = {}

    def local(self, tensor: tf.Tensor, tower: Tower) -> str:
        """What a tower has of a tensor: an output of its copy of an op, or a shard of the batch."""
        if tensor.name not in self.origins.sources:
            op_name = tensor.op.name
            copy = f'{self.nodes.names.copy(op_name, tower.number)}:{tensor.value_index}'
            op_plan = self._plan.ops.get(op_name)
            if op_plan is None or op_plan.padding is None:
                return copy
            rank = len(self._plan.sizes.dims(tensor) or [])
            return self.shards.sums_of_entries.padded(copy, rank, op_plan.padding, tower)
        if tensor.name in self._plan.entries:
            return self.local_parts.of_feature(tensor, self._plan.entries[tensor.name], tower)
        parts = parts_of(tensor)
        if len(parts) > 1:
            return self.shards.of_batch.join_parts(parts, tower)
        return self.local_parts.slice(tensor, Slice(0, self._plan.rows, ONE), tower)

    def local_in_loop(self, tensor: tf.Tensor, tower: Tower, loops: Sequence[LoopFrame]) -> str:
        """What a tower has of a tensor in v1 loops, so that what is added of it is there, too."""
        local = self.local(tensor, tower)
        self.nodes.place_in_frames(local, self.frames(loops, tower))
        return local

    def frames(self, loops: Sequence[LoopFrame], tower: Tower) -> Frames:
        """The frames of a tower's copies of v1 loops."""
        names = [self.nodes.names.frame(loop.name, tower.number, loop.is_joint) for loop in loops]
        return tuple((name, loop.parallel_iterations) for name, loop in zip(names, loops))

    def reduced(self, tensor: tf.Tensor, need: Reduced, loops: Sequence[LoopFrame]) -> str:
        """The reduced value of towers' partial results in joint loops, on the first device."""
        values = [self.local_in_loop(tensor, tower, loops) for tower in self.towers]
        shards = self.shards.of(need.rows)
        return reduce_and_gather.reduce(shards, values, need.reduce, self.towers[0].device)

    def full(self, tensor: tf.Tensor) -> str:
        """The value for the global batch: the user's op's, or made from what towers have."""
        if self.origins.is_made_from_local(tensor) and tensor.name not in self.full_values:
            with self.nodes.serving(tensor.op, is_for_many=tensor.name in self.packs):
                self.full_values.update(self._make_full(tensor))
        return self.full_values.get(tensor.name, tensor.name)

    def _make_full(self, tensor: tf.Tensor) -> dict[str, str]:
        """Makes a full value from local ones; returns it by name, with others of its pack."""
        name = tensor.name
        if self.origins.is_size_of_local(tensor):
            size = self.shards.size(tensor)
            if self.division.order.liveness.may_be_dead(tensor.op):
                size = self._dead_as(tensor, size)
            return {name: size}

        placement = self._plan.placements[name]
        if not isinstance(placement, (Shard, Partial)):
            return {name: self.local(tensor, self.towers[0])}  # It's the same on all towers.

        rows = placement.rows
        device = self.origins.device_of_full(tensor)
        if name in self.packs:
            return self._reduce_pack(self.packs[name], self.shards.of(rows), device)

        values = [self.local(tensor, tower) for tower in self.towers]
        if isinstance(rows, UniqueRows):
            return self._make_full_of_ids(tensor, placement, values, device)
        if isinstance(placement, Partial):
            return {name: self.reduced_on(tensor, device)}
        if isinstance(rows, SelectedRows) and not placement.in_blocks:
            # They are joined as they are, so it needn't be known how many each tower has picked.
            origin = self.shards.of(rows.origin)
            gathered = reduce_and_gather.gather_selection(origin, values, placement.axis, device)
            if not rows.is_ordered:
                order = self.local_parts.order_of_entries(rows, device)
                gathered = self.nodes.take(gathered, order, device, placement.axis)
            return {name: gathered}

        dims = self._plan.sizes.dims(tensor) or []
        in_blocks = placement.in_blocks
        gather = reduce_and_gather.gather_blocks if in_blocks else reduce_and_gather.gather
        return {name: gather(self.shards.of(rows), values, placement.axis, dims, device)}

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
        shards = self.shards.of(placement.rows)
        if tensor.name in self._packs_of_ops:
            pack = self._packs_of_ops[tensor.name]
            return self._reduce_pack(pack, shards, device)[tensor.name]
        values = [self.local(tensor, tower) for tower in self.towers]
        is_known = tensor.shape.is_fully_defined()
        if placement.reduce == 'sum' and is_known and not is_for_all:
            parts = self.slices.of_sum(bytes_of(tensor), device, tensor.shape.num_elements())
            if parts:
                return reduce_and_gather.sum_in_slices(
                    shards, values, self.slices, parts, tensor.shape.as_list(), device
                )
        return reduce_and_gather.reduce(shards, values, placement.reduce, device)

    def _reduce_pack(self, pack: Pack, shards: Shards, device: str) -> dict[str, str]:
        """Sums the partial sums of all tensors of a pack, as vectors."""
        vectors = []
        for tower in self.towers:
            values = [self.local(tensor, tower) for tensor in pack.tensors]
            vectors.append(pack.join(values, self.nodes, tower.device))
        total = reduce_and_gather.reduce(shards, vectors, 'sum', device)
        return pack.split(total, self.nodes, device)

    def _reduce_moments(self, tensor: tf.Tensor, rows: RowSpace, device: str) -> str:
        """The mean or the variance of the batch's channels, made from those of the shards.

        Both are made by the same nodes, which are added only once.
        """
        op = tensor.op
        mean, variance = op.outputs[op_types.MOMENT_OUTPUTS]
        means = [self.local(mean, tower) for tower in self.towers]
        variances = [self.local(variance, tower) for tower in self.towers]

        # How many entries a channel of an example has.
        first, *others = self._plan.sizes.dims(op.inputs[0]) or []
        factor = per_row(first, rows)
        assert factor is not None, 'it is sharded along dimension 0'
        channels_first = op.get_attr('data_format').startswith(b'NC')
        factor *= product(others[1:] if channels_first else others[:-1])

        shards = self.shards.of(rows)
        full_mean, full_variance = reduce_and_gather.reduce_moments(
            shards, means, variances, factor, device
        )
        return full_mean if tensor.value_index == mean.value_index else full_variance

    def _make_full_of_ids(
        self, tensor: tf.Tensor, placement: Shard | Partial, values: Sequence[str], device: str
    ) -> dict[str, str]:
        """The full value of what belongs to different ids: sums by id, or one value of each id."""
        rows = placement.rows
        assert isinstance(rows, UniqueRows)
        merged = self.merged_ids(rows)
        if rows.are_in(tensor.name):
            return {tensor.name: merged.ids}
        combine = unique_ids.add_up if isinstance(placement, Partial) else unique_ids.take_one
        return {tensor.name: combine(self.shards.of(rows.origin), merged, values, device)}

    def merged_ids(self, rows: UniqueRows) -> MergedIds:
        """The different ids of all towers; of a part, those that belong to it."""
        all_ids = rows
        while isinstance(all_ids, PartOfIds):
            all_ids = all_ids.whole
        ids = self.division.graph.get_tensor_by_name(all_ids.name)
        ids_of_towers, firsts = [], []
        for tower in self.towers:
            ids_of_towers.append(self._of_part(rows, self.local(ids, tower), tower))
            # If entries are in the order of the rows, those of a tower come before the next's.
            if all_ids.picked_from is not None:
                first = self._first_entries(ids, all_ids.picked_from, tower)
                firsts.append(self._of_part(rows, first, tower))
        origin = self.shards.of(rows.origin)
        device = self.origins.device_of_ids(rows)
        return unique_ids.merge(origin, ids_of_towers, rows.is_sorted, firsts, device)

    def _of_part(self, rows: UniqueRows, values: str, tower: Tower) -> str:
        """Of what a tower has for each of its different ids, what belongs to those of a part.

        It's picked as the user's `tf.dynamic_partition` picks it.
        """
        if not isinstance(rows, PartOfIds):
            return values
        values = self._of_part(rows.whole, values, tower)
        part = self.division.graph.get_tensor_by_name(rows.name)
        inputs = [values, self.local(part.op.inputs[1], tower)]
        count = part.op.get_attr('num_partitions')
        first_part = self.nodes.add('DynamicPartition', inputs, tower.device, num_partitions=count)
        return output_of(first_part, part.value_index)

    def _first_entries(self, ids: tf.Tensor, entries: SelectedRows, tower: Tower) -> str:
        """With which entry of the batch each of a tower's different ids comes first."""
        _, places = ids.op.outputs
        count = self.nodes.add('Size', [self.local(ids, tower)], tower.device, out_type=tf.int32)
        inputs = [self.local_parts.numbers(entries, tower), self.local(places, tower), count]
        return self.nodes.add('UnsortedSegmentMin', inputs, tower.device)

    def _dead_as(self, tensor: tf.Tensor, size: str) -> str:
        """A size that is dead if the op that asked for it is: in a branch that isn't taken.

        Else what follows would run and draw random numbers, and would draw others in the next step
        than on one device.
        """
        tower = self.towers[0]
        operand = next(o for o in tensor.op.inputs if o.name in self._plan.placements)
        local = self.local(operand, tower)
        asked = self.nodes.add('Shape', [local], tower.device, out_type=tf.int32)
        is_alive = f'^{asked.partition(":")[0]}'
        return self.nodes.add('Identity', [size, is_alive], self.nodes.host)
