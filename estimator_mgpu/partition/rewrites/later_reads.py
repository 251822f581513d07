"""Gives ops that use a reference variable after a write a read of their own there.

The value of a reference variable lies in the variable's memory, and all ops use one read of it. On
the variable's device an op that runs after the write finds there what was written. Another device
was sent the value before:

    w --> read ---+---> MatMul - - -> write to w - - -+
                  |                                   v
                  +--------------------------------> MatMul        on another device: too old

With a read after the write, the new value is sent. Whatever else lies in the variable's memory,
such as its reshaped value or the result of a branch of TensorFlow 1, is made again of the new read:

    w --> read -------> MatMul - - -> write to w
    |                                      |
    |                                      v
    +------------------------------------> read ---> MatMul

In: the graph, and the order in which it touches state. Out: reads in place of operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.order.accesses import sharing_memory
from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.tf_internals import graphs, op_types, private, tracebacks

_MADE_AGAIN = (*op_types.VIEWS, *op_types.SWITCH, *op_types.MERGE)
"""Ops whose output lies in the memory of an input, but for `IdentityN`."""


def read_after_writes(division: Division) -> None:
    """Gives reads of their own to ops that read reference variables after a write.

    Ops in loops of TensorFlow 1 keep the reads that their loop was given.
    """
    order = division.order
    reads: dict[frozenset[tf.Operation], _Reads] = {}
    replaced: list[tuple[tf.Operation, int, tf.Tensor]] = []
    for op in order.late_readers():
        if order.liveness.frame(op):
            continue
        for index, tensor in enumerate(op.inputs):
            if graphs.is_reference_variable(tensor):
                continue
            to_variable = order.writes_to(order.variables_behind(tensor))
            writes = order.ops_for(order.must_come_before(op) & to_variable, op)
            if not writes:
                continue
            after = reads.setdefault(frozenset(writes), _Reads(writes, order))
            read = after.again(tensor)
            if read is not tensor:
                replaced.append((op, index, read))
    # Not before all reads are made: each is made from what the order knows.
    for op, index, read in replaced:
        private.set_input(op, index, read)
    if replaced:
        division.order = Order(division.graph)


class _Reads:
    """Reads that wait for writes, and what is made of them.

    Args:
      writes: the ops to wait for.
    """

    def __init__(self, writes: Sequence[tf.Operation], order: Order):
        self._writes = writes
        self._order = order
        self._made: dict[str, tf.Tensor] = {}

    def again(self, tensor: tf.Tensor) -> tf.Tensor:
        """What a tensor would be if it was made after the writes; itself if that's the same."""
        if not self._order.variables_behind(tensor):
            return tensor
        if tensor.name not in self._made:
            self._made[tensor.name] = self._make(tensor)
        return self._made[tensor.name]

    def _make(self, tensor: tf.Tensor) -> tf.Tensor:
        op = tensor.op
        graph = op.graph
        name = f'{op.name}/later_read'
        is_one_of_many = op.type == op_types.IDENTITY_N
        with graph.as_default(), tf.name_scope(None), tracebacks.made_for(op):
            if graphs.is_reference_variable(tensor):
                [variable] = self._order.variables_behind(tensor)
                with tf.control_dependencies(None), tf.control_dependencies(self._writes):
                    with graph.colocate_with(variable, ignore_existing=True):
                        return tf.identity(tensor, name)

            if not (is_one_of_many or op.type in _MADE_AGAIN):
                return tensor
            operands = [op.inputs[tensor.value_index]] if is_one_of_many else sharing_memory(op)
            reads = [self.again(operand) for operand in operands]
            if all(read is operand for read, operand in zip(reads, operands)):
                return tensor
            with tf.control_dependencies(None), tf.control_dependencies(op.control_inputs):
                if is_one_of_many:
                    return tf.identity(reads[0], name)
                attrs = {key: value for key, value in op.node_def.attr.items() if key != '_class'}
                dtypes = [output.dtype for output in op.outputs]
                reads += op.inputs[len(reads) :]
                copy = graph.create_op(op.type, reads, dtypes, attrs=attrs, name=name)
                return copy.outputs[tensor.value_index]
