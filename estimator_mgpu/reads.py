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


def keep(towers: Towers) -> None:
    """Makes writes of tower 0 wait for the other towers' reads, where they wait for tower 0's."""
    # What comes after the reduction waits for all towers anyway.
    after = _after(towers.reduced) | towers.copies.names()
    for name, readers in _readers(towers).items():
        handles = towers.graph.get_operation_by_name(name).outputs
        for write in [op for handle in handles for op in handle.consumers()]:
            if write.name in after or not towers.copies.writes_for_all(write):
                continue
            before = _ancestors(write)
            for reader in readers:
                if reader.name in before and reader is not write:
                    private.add_control_inputs(write, _ends(reader, towers))
    _copy_shared_reads(towers, after)


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


def _copy_shared_reads(towers: Towers, after: set[str]) -> None:
    users: dict[str, tuple[tf.Tensor, set[tf.Operation]]] = {}
    for tower in towers.copies.towers:
        for op in tower.ops.values():
            for read in op.inputs:
                if _is_ref_read(read):
                    users.setdefault(read.name, (read, set()))[1].add(op)
    for read, ops in users.values():
        writes = [
            op
            for op in read.op.inputs[0].consumers()
            if sharing.is_write(op) and op.name not in after and read.op.name in _ancestors(op)
        ]
        if writes:
            _replace(read, ops, writes, towers)


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


def _after(tensors: list[tf.Tensor]) -> set[str]:
    """Returns the names of the ops that wait for tensors."""
    found: set[str] = set()
    waiting = [t.op for t in tensors]
    while waiting:
        for op in private.followers(waiting.pop()):
            if op.name not in found:
                found.add(op.name)
                waiting.append(op)
    return found


def _ancestors(op: tf.Operation) -> set[str]:
    """Returns the names of the ops that an op waits for."""
    found: set[str] = set()
    waiting = [op]
    while waiting:
        op = waiting.pop()
        for other in [*(t.op for t in op.inputs), *op.control_inputs]:
            if other.name not in found:
                found.add(other.name)
                waiting.append(other)
    return found
