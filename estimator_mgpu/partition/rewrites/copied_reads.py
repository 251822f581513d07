"""Some ops that read reference variables are given a copy of the variable.

The value of a reference variable lies in the variable's own memory, so whoever uses it reads `w`
when it runs, and has to come before the write to `w`. With a copy, only the copy has to:

    w --> product - - -> write to w        w --> copy of w - - -> write to w
                                                    |
                                                    +-----> product, at any time

That is worth an op in two cases: where nobody uses the product, so that a step needn't compute it;
and where it's small, so that each device can compute its own, as `towers.everywhere` lets it.

For the first case, `tf.gradients` computes the gradient of a product with respect to both factors.
In a first layer, the one with respect to the features is read by nobody:

    matmul(gradient, w)  -->  entry of a tuple, without users

Whoever fetches it relies on its coming before the write. So each step would compute the largest
product of some models for nothing: of `mlp` and `wide` in `samples/benchmark.py --legacy`, it would
take 1.2 times as long. With a copy of `w`, it runs only if somebody fetches it.

In: the graph, and the order in which it touches state. Out: copies in place of operands; the order
knows that writes come after them.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.once_devices import device_of
from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.tf_internals import graphs, private, tracebacks


def copy_for_idle_reads(graph: tf.Graph, identities: Container[tf.Operation], order: Order) -> None:
    """Gives copies of variables to the ops that read them and whose results nobody uses.

    Args:
      graph: the graph that the model_fn has built.
      identities: the identities that are going to be bypassed.
      order: of the graph. What gets a copy no longer counts as a read.
    """
    copy_for_reads(
        graph, order, lambda op: bool(order.writes_after(op)) and _is_idle(op, identities)
    )


def copy_for_reads(
    graph: tf.Graph, order: Order, is_worth_it: Callable[[tf.Operation], bool]
) -> None:
    """Gives copies of variables to ops that read them, unless a write comes between copy and op.

    Args:
      graph: the graph that the model_fn has built.
      order: of the graph. What gets a copy no longer counts as a read.
      is_worth_it: which ops are to get copies.
    """
    copies: dict[str, tf.Tensor] = {}
    for op in order.late_readers():
        operands = [tensor for tensor in op.inputs if order.variables_behind(tensor)]
        writes = order.writes_after(op)
        ops = [op, *writes, *(tensor.op for tensor in operands)]
        if not order.is_quiet(op) or not all(map(order.liveness.always_runs, ops)):
            continue
        if not is_worth_it(op) or not all(_can_be_copied(t, op, order) for t in operands):
            continue

        for index, tensor in enumerate(op.inputs):
            if order.variables_behind(tensor):
                if tensor.name not in copies:
                    copies[tensor.name] = _copy(graph, tensor)
                private.set_input(op, index, copies[tensor.name])
        order.read_instead(op, [copies[tensor.name].op for tensor in operands])
        for write in writes:
            graphs.set_control_inputs(write, [b for b in write.control_inputs if b is not op])


def _is_idle(op: tf.Operation, identities: Container[tf.Operation]) -> bool:
    """Whether what follows from an op ends in identities, entries of tuples, without users."""
    stack = [op]
    seen = {op}  # Loops of TensorFlow 1 are cycles.
    while stack:
        last = stack.pop()
        users = {user for output in last.outputs for user in output.consumers()}
        if not users and last not in identities:
            return False
        stack += users - seen
        seen |= users
    return True


def _can_be_copied(tensor: tf.Tensor, op: tf.Operation, order: Order) -> bool:
    """Whether an op that reads a variable by a tensor reads what is there when the tensor is."""
    is_write_between = order.must_come_before(op) & ~order.upstream(tensor.op)
    needs_reference = any(operand.is_ref for operand in op.op_def.input_arg)  # as `RefSwitch` does
    return tensor.dtype.is_floating and not is_write_between and not needs_reference


def _copy(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor:
    """A copy in other memory, on the same device."""
    with graph.as_default(), tf.control_dependencies(None), tf.name_scope(None):
        colocated = graph.colocate_with(tensor.op, ignore_existing=True)
        with colocated, tracebacks.made_for(tensor.op):
            copy = tf.raw_ops.DeepCopy(x=tensor, name=f'{tensor.op.name}/copy')
    device = device_of(tensor.op)
    if device:  # Ops may have been placed before.
        private.set_device(copy.op, device)
    return copy
