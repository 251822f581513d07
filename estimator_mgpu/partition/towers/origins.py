"""Where the full value of a tensor comes from: the user's op gives it, or it's made of local ones.

In: a plan, and the devices of towers. Out: for each of the user's tensors, who makes its full
value, and on which device. No node is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.batches.batch import parts_of
from estimator_mgpu.devices import host_of
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.once_devices import device_of
from estimator_mgpu.partition.placements import NotGatherable, Partial, Shard, rows_of
from estimator_mgpu.partition.plan import Plan, RaggedRows
from estimator_mgpu.partition.sizes import EntriesOfIds, UniqueRows
from estimator_mgpu.tf_internals import graphs, op_types
from estimator_mgpu.tf_internals.kernels import has_gpu_kernel, is_gpu


class Origins:
    """Tells which full values are made of what towers have."""

    def __init__(self, division: Division):
        plan = division.plan
        self._plan = plan
        self._full_value_devices = division.full_value_devices
        self._first = division.devices[0]
        self._host = host_of(self._first)
        self.sources = {*(tensor.name for tensor in plan.sources), *plan.entries}
        """The names of the batch's tensors."""
        ragged = [need for need in plan.entries.values() if isinstance(need, RaggedRows)]
        self._row_splits = {need.splits for need in ragged}
        # The ops that ask for the sizes of something that only towers have: of all that they ask
        # for, or of a part of it, as the rest may be on another device. Those that count the
        # examples measure what was read.
        ops_of_total = division.ops_of_total()
        queries_of_local = [
            op
            for op in graphs.ops_of_types(division.graph, op_types.SHAPE_QUERIES)
            if op not in ops_of_total
            and any(self._is_local(tensor) for tensor in op.inputs)
            and not all(self._is_read_by_one(tensor) for tensor in op.inputs)
        ]
        # Every user of every tensor asks, so the answers are found first: the tensors' names.
        give_shapes = graphs.ops_of_types(division.graph, op_types.SHAPE_OUTPUTS)
        self._sizes_of_local = {*_sizes(queries_of_local, plan), *_shape_outputs(give_shapes, plan)}
        sizes = self._sizes_of_local - plan.placements.keys()
        self._made_from_local = (sizes | _gatherable(plan)) - self.sources

    def _is_local(self, tensor: tf.Tensor) -> bool:
        """Whether towers have it, or machines have read parts of it, as of row splits."""
        return tensor.name in self._plan.placements or len(parts_of(tensor)) > 1

    def _is_read_by_one(self, tensor: tf.Tensor) -> bool:
        """Whether it's of the batch, and one machine has read all of it."""
        return tensor.name in self.sources and len(parts_of(tensor)) == 1

    def is_made_from_local(self, tensor: tf.Tensor) -> bool:
        """Whether the full value is another tensor than the output of the user's op."""
        return tensor.name in self._made_from_local

    def is_made_from_all(self, tensor: tf.Tensor) -> bool:
        """Whether the full value is gathered or reduced from what all towers have."""
        if tensor.name not in self._made_from_local:
            return False
        return isinstance(self._plan.placements.get(tensor.name), (Shard, Partial))

    def is_size_of_local(self, tensor: tf.Tensor) -> bool:
        """Whether an op asks for the size of something that only towers have.

        The plan knows the size by other means, so nothing is gathered for it.
        """
        return tensor.name in self._sizes_of_local

    def is_only_fetched(self, op: tf.Operation) -> bool:
        """Whether others are used in place of all outputs of one of the user's ops.

        `only_fetched` finds further ops that no step runs, by who uses them.
        """
        if op.name in self._plan.unused:
            return True
        if op.type == op_types.NO_OP:
            return op.name in self._plan.ops
        return bool(op.outputs) and all(map(self.is_made_from_local, op.outputs))

    def device_of_full(self, tensor: tf.Tensor) -> str:
        """The device of a full value, be it the user's op's or made from what towers have."""
        if self.is_made_from_local(tensor):
            return self._full_value_devices.get(tensor.name, self._first)
        return device_of(tensor.op) or (self._host if self._is_on_host(tensor) else '')

    def device_of_ids(self, rows: UniqueRows) -> str:
        """The device where the different ids of all towers are put together: of `once_devices`."""
        return self._full_value_devices.get(rows.name, self._first)

    def _is_on_host(self, tensor: tf.Tensor) -> bool:
        """Whether a value without a device is on the host: of the batch, or a text, say."""
        if tensor.name in self.sources or tensor.name in self._row_splits:
            return True
        return is_gpu(self._first) and not has_gpu_kernel(tensor.op.node_def)


def _sizes(queries: Sequence[tf.Operation], plan: Plan) -> Iterator[str]:
    """Names the outputs of ops that ask for sizes which the plan knows."""
    for op in queries:
        for operand, output in zip(op.inputs, op.outputs):
            if plan.sizes.dims(operand) is not None:
                yield output.name


def _shape_outputs(ops: Sequence[tf.Operation], plan: Plan) -> Iterator[str]:
    """Names the shapes among the outputs of ops that give sparse tensors, if they are sharded."""
    for op in ops:
        if op.name in plan.ops:
            yield op.outputs[op_types.SHAPE_OUTPUTS[op.type]].name


def _gatherable(plan: Plan) -> set[str]:
    """Names the tensors of which towers have local values that can be made a full one.

    A list can't be gathered: the user's op makes the full one, from full values.
    """
    return {
        name
        for name, placement in plan.placements.items()
        if not isinstance(placement, NotGatherable)
        and not isinstance(rows_of(placement), EntriesOfIds)
    }
