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

    Ops in loops and branches of TensorFlow 1 keep the reads that are handed to these.

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
            identities = _identities_of_reference(tensor)
            if not identities:
                continue
            to_variable = order.writes_to(order.variables_behind(tensor))
            writes = order.ops_for(order.needs_in_order(op) & to_variable, op)
            if not writes:
                continue
            # What an identity waits for runs, too.
            waits = [*writes, *(b for identity in identities for b in identity.control_inputs)]
            reference = identities[-1].inputs[0]
            key = reference.name, frozenset(waits)
            if key not in reads:
                reads[key] = _read(reference, list(dict.fromkeys(waits)))
            private.set_input(op, index, reads[key])
    return bool(reads)


def _identities_of_reference(tensor: tf.Tensor) -> list[tf.Operation]:
    """The identities, the last one first, by which a tensor is a reference variable's value."""
    identities: list[tf.Operation] = []
    while tensor.op.type == op_types.IDENTITY:
        identities.append(tensor.op)
        tensor = tensor.op.inputs[0]
    is_variable = graphs.is_reference_variable(tensor) and not tensor.op.inputs
    return identities if is_variable else []


def _read(reference: tf.Tensor, writes: list[tf.Operation]) -> tf.Tensor:
    """A read of a variable, on its device, that comes after writes to it."""
    graph = reference.graph
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(None):
        with graph.colocate_with(reference.op, ignore_existing=True):
            with tf.control_dependencies(writes), tracebacks.made_for(reference.op):
                return tf.identity(reference, f'{reference.op.name}/later_read')
