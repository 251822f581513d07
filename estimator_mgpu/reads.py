"""What towers read of variables that tower 0 writes before the gradients are reduced.

A moving average in the forward pass, or the vector of a spectral norm, is read, and then written
once for all towers. A write waits for what tower 0 reads before it, where one device's would; so
that the other towers find what tower 0 found, it has to wait for them as well.

A read of TensorFlow 1's variables isn't a copy, either: it changes as the variable is written.
Where all towers share one, they get a copy of it, which the write waits for.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu import private, sharing
from estimator_mgpu.importing import absolute_scope
from estimator_mgpu.towers import Towers
from estimator_mgpu.walks import Order, walk


def keep(towers: Towers) -> None:
    """Makes writes of tower 0 wait for the other towers' reads, where they wait for tower 0's."""
    # What comes after the reduction waits for all towers anyway.
    after = {op.name for op in walk([t.op for t in towers.reduced], private.followers)}
    after |= towers.copies.names()
    readers = _readers(towers)
    users = _users_of_ref_reads(towers)
    writes = {name: _writes(towers, name, after) for name in readers}
    ref_writes = {name: _ref_writes(read, after) for name, (read, _) in users.items()}
    ends = {op.name: op for found in (writes, ref_writes) for ops in found.values() for op in ops}
    order = Order(towers.graph, list(ends.values()))
    for name in readers:
        for write in writes[name]:
            for reader in readers[name]:
                if reader is not write and order.is_before(reader, write):
                    private.add_control_inputs(write, _ends(reader, towers))
    for name, (read, ops) in users.items():
        later = [write for write in ref_writes[name] if order.is_before(read.op, write)]
        if later:
            _replace(read, ops, later, towers)


def _readers(towers: Towers) -> dict[str, list[tf.Operation]]:
    """Returns tower 0's ops that have copies, by the names of the variables that they use."""
    found: dict[str, list[tf.Operation]] = {}
    for name in towers.copies.towers[0].ops:
        op = towers.graph.get_operation_by_name(name)
        for handle in sharing.shared_handles(op):
            found.setdefault(handle, []).append(op)
    return found


def _ends(reader: tf.Operation, towers: Towers) -> list[tf.Operation]:
    """Returns the copies of a read, or of the ends of the v1 loop that it's in."""
    ops = [reader]
    if private.in_control_flow(reader):
        ops = private.loop_ends(reader)
    return [
        tower.ops[op.name] for op in ops for tower in towers.copies.towers if op.name in tower.ops
    ]


def _writes(towers: Towers, name: str, after: set[str]) -> list[tf.Operation]:
    """Lists what writes once to the variable of that name, before the reduction."""
    handles = towers.graph.get_operation_by_name(name).outputs
    users = [op for handle in handles for op in handle.consumers()]
    return [op for op in users if op.name not in after and towers.copies.writes_for_all(op)]


def _ref_writes(read: tf.Tensor, after: set[str]) -> list[tf.Operation]:
    """Lists what writes, before the reduction, to the v1 variable that a read is of."""
    users = read.op.inputs[0].consumers()
    return [op for op in users if op.name not in after and sharing.is_write(op)]


def _users_of_ref_reads(towers: Towers) -> dict[str, tuple[tf.Tensor, set[tf.Operation]]]:
    """Returns reads of v1 variables, and the copies that use them, by the reads' names."""
    users: dict[str, tuple[tf.Tensor, set[tf.Operation]]] = {}
    for tower in towers.copies.towers:
        for op in tower.ops.values():
            for read in op.inputs:
                if _is_ref_read(read):
                    users.setdefault(read.name, (read, set()))[1].add(op)
    return users


def _is_ref_read(tensor: tf.Tensor) -> bool:
    return sharing.is_plain_read(tensor.op) and tensor.op.inputs[0].dtype != tf.resource


def _replace(
    read: tf.Tensor, users: set[tf.Operation], writes: list[tf.Operation], towers: Towers
) -> None:
    with absolute_scope(towers.graph, 'replicate'), tf.device(read.device):
        copy = tf.raw_ops.DeepCopy(x=read, name='read')
    for op in users:
        for i, tensor in enumerate(op.inputs):
            if tensor is read:
                private.set_input(op, i, copy)
    for write in writes:
        private.add_control_inputs(write, [copy.op])
