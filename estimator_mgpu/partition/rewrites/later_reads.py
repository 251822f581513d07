"""Reference variables that are read after a write have a read of their own there.

The value of a reference variable lies in the variable's memory, and all ops use one read of it. On
the variable's device an op that runs after the write finds there what was written. Another device
was sent the value before:

    w --> read ---+---> MatMul - - -> write to w - - -+
                  |                                   v
                  +--------------------------------> MatMul        on another device: too old

With a read after the write, the new value is sent:

    w --> read -------> MatMul - - -> write to w
    |                                      |
    |                                      v
    +------------------------------------> read ---> MatMul

In: the graph, and the order in which it touches state. Out: reads in place of operands.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.tf_internals import graphs, op_types, private, tracebacks


def read_after_writes(graph: tf.Graph, order: Order) -> bool:
    """Gives reads of their own to ops that read reference variables after a write.

    Ops in loops and branches of TensorFlow 1 keep the reads that they have.

    Args:
      graph: the graph that the model_fn has built.
      order: of the graph.

    Returns:
      Whether the graph was changed.
    """
    reads: dict[tuple[str, frozenset[tf.Operation]], tf.Tensor] = {}
    for op in order.late_readers():
        if order.liveness.frame(op) or order.liveness.may_be_dead(op):
            continue
        for index, tensor in enumerate(op.inputs):
            reference = _reference_behind(tensor)
            if reference is None:
                continue
            writes = _writes_before(op, tensor, order)
            if not writes:
                continue
            key = reference.name, frozenset(writes)
            if key not in reads:
                reads[key] = _read(reference, writes)
            private.set_input(op, index, reads[key])
    return bool(reads)


def _reference_behind(tensor: tf.Tensor) -> tf.Tensor | None:
    """The reference variable whose value a tensor is; None for other tensors."""
    is_read = False
    while tensor.op.type == op_types.IDENTITY:
        tensor = tensor.op.inputs[0]
        is_read = True
    is_reference = is_read and graphs.is_reference_variable(tensor) and not tensor.op.inputs
    return tensor if is_reference else None


def _writes_before(op: tf.Operation, tensor: tf.Tensor, order: Order) -> list[tf.Operation]:
    """The writes to a variable after which an op, or what it takes the variable into, reads it."""
    readers = [op]
    if op.type in op_types.ENTER:  # Ops in the loop read when they run.
        readers += op.outputs[0].consumers()
    writes: dict[tf.Operation, None] = {}
    for reader in readers:
        before = order.needs_in_order(reader) & order.writes_to(order.variables_behind(tensor))
        writes.update(dict.fromkeys(order.ops_for(before, reader)))
    return list(writes)


def _read(reference: tf.Tensor, writes: list[tf.Operation]) -> tf.Tensor:
    """A read of a variable, on its device, that comes after writes to it."""
    graph = reference.graph
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(None):
        with graph.colocate_with(reference.op, ignore_existing=True):
            with tf.control_dependencies(writes), tracebacks.made_for(reference.op):
                return tf.identity(reference, f'{reference.op.name}/later_read')
