"""What towers read of TensorFlow 1's variables that tower 0 writes.

A read of such a variable isn't a copy: it changes as the variable is written. Where tower 0 writes
what it has computed from a read (the vector of a spectral norm, say), the other towers, which have
the same read, would find there what was before or what comes after. So they get a copy of it, which
the write waits for.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu import private, sharing
from estimator_mgpu.importing import absolute_scope
from estimator_mgpu.towers import Towers


def keep(towers: Towers) -> None:
    """Gives the other towers copies of reads that writes of tower 0 depend on."""
    after = towers.copies.dependents(towers.reduced)
    own = towers.copies.names()
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
            if sharing.is_write(op) and op.name not in after | own and _depends(op, read.op)
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


def _depends(op: tf.Operation, on: tf.Operation) -> bool:
    """Whether an op waits for another."""
    waiting, seen = [op], set()
    while waiting:
        op = waiting.pop()
        if op is on:
            return True
        if op.name not in seen:
            seen.add(op.name)
            waiting += [t.op for t in op.inputs]
            waiting += op.control_inputs
    return False
