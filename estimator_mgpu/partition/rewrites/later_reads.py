"""Reference variables that are read after a write have a read of their own there.

The value of a reference variable lies in the variable's memory, and all ops use one read of it. On
the variable's device an op that runs after the write finds there what was written. Another device
was sent the value before:

    w --> read ---+---> MatMul - - -> write to w - - -+
                  |                                   v
                  +--------------------------------> MatMul        on another device: too old

With a read after the write, the new value is sent. The same goes for views of the variable, such as
a reshaped one:

    w --> read -------> MatMul - - -> write to w
    |                                      |
    |                                      v
    +------------------------------------> read ---> MatMul

In: the graph, and the order in which it touches state. Out: reads in place of operands.
"""

from __future__ import annotations

from collections.abc import Sequence

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
            reference, views = _views_of_reference(tensor)
            if reference is None:
                continue
            to_variable = order.writes_to(order.variables_behind(tensor))
            writes = order.ops_for(order.needs_in_order(op) & to_variable, op)
            if not writes:
                continue
            # What a view waits for runs, too.
            waits = dict.fromkeys([*writes, *(b for view in views for b in view.control_inputs)])
            key = tensor.name, frozenset(waits)
            if key not in reads:
                reads[key] = _read(reference, views, list(waits))
            private.set_input(op, index, reads[key])
    return bool(reads)


def _views_of_reference(
    tensor: tf.Tensor,
) -> tuple[tf.Tensor | None, list[tf.Operation]]:
    """The reference variable in whose memory a tensor lies, if any, and the ops on the way."""
    views: list[tf.Operation] = []
    while tensor.op.type in (*op_types.VIEWS, op_types.IDENTITY_N):
        views.insert(0, tensor.op)
        is_one_of_many = tensor.op.type == op_types.IDENTITY_N
        tensor = tensor.op.inputs[tensor.value_index if is_one_of_many else 0]
    is_variable = graphs.is_reference_variable(tensor) and not tensor.op.inputs
    return (tensor if views and is_variable else None), views


def _read(
    reference: tf.Tensor, views: Sequence[tf.Operation], waits: Sequence[tf.Operation]
) -> tf.Tensor:
    """A read of a variable, on its device, that waits for other ops.

    Args:
      reference: the variable.
      views: the ops that make a tensor of the variable, in order.
      waits: the ops to wait for.

    Returns:
      What the last of the views would give then.
    """
    graph = reference.graph
    name = f'{reference.op.name}/later_read'
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(None):
        with graph.colocate_with(reference.op, ignore_existing=True):
            with tf.control_dependencies(waits), tracebacks.made_for(reference.op):
                tensor = tf.identity(reference, name)
            for view in views:
                if view.type not in (op_types.IDENTITY, op_types.IDENTITY_N):
                    inputs = [tensor, *view.inputs[1:]]
                    attrs = {
                        key: value for key, value in view.node_def.attr.items() if key != '_class'
                    }
                    dtypes = [output.dtype for output in view.outputs]
                    with tracebacks.made_for(view):
                        copy = graph.create_op(view.type, inputs, dtypes, attrs=attrs, name=name)
                    [tensor] = copy.outputs
    return tensor
