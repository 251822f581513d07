"""Copies of forward ops, which wait for gradients at barriers.

    kept ---> barrier ---> copy ---> copy ---> gradient
                ^
                |
      gradient of the next segment

In: ops, what is kept of their operands, and the gradients to wait for. Out: the copy of each op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.partition.rewrites.recomputation.kept_activations import Forward, Use
from estimator_mgpu.tf_internals import function_calls, graphs, private
from estimator_mgpu.tf_internals.upstream import upstream_bits


def ops_to_copy(uses: Sequence[Use], forward: Forward) -> list[tf.Operation]:
    """The ops that compute operands from what is kept."""
    found: dict[tf.Operation, None] = {}
    stack = [use.operand.op for use in uses]
    while stack:
        op = stack.pop()
        if op not in found:
            found[op] = None
            stack += [operand.op for operand in op.inputs if not forward.is_kept(operand)]
    return sorted(found, key=private.creation_index)


def add_copies(
    graph: tf.Graph,
    originals: Sequence[tf.Operation],
    forward: Forward,
    gradients: dict[int, list[tf.Operation]],
) -> dict[tf.Operation, tf.Operation]:
    """Adds copies of ops, and lets those that use no other copies wait for gradients.

    Args:
      graph: to which they are added.
      originals: the ops, with all that they need and that isn't kept.
      forward: tells what is kept.
      gradients: for which the copies of each segment wait, by its number.

    Returns:
      The copy of each op.
    """
    scope = graph.unique_name('recompute')
    graph_def = tf.GraphDef(versions=graph.graph_def_versions)
    used: dict[str, tf.Tensor] = {}  # what exists already, by name
    for op, operands in _operands_behind_barriers(originals, forward, gradients, scope).items():
        node = graph_def.node.add()
        node.CopyFrom(op.node_def)
        node.name = f'{scope}/{op.name}'
        node.attr.pop('_class', None)
        del node.input[:]
        for operand in operands:
            if forward.is_kept(operand):
                node.input.append(operand.name)
                used[operand.name] = operand
            else:
                node.input.append(f'{scope}/{operand.name}')
    with graph.as_default(), tf.control_dependencies(None), tf.device(None):
        tf.import_graph_def(graph_def, used, name='')

    copies = {}
    for op in originals:
        copy = graph.get_operation_by_name(f'{scope}/{op.name}')
        for output, output_of_copy in zip(op.outputs, copy.outputs):
            output_of_copy.set_shape(output.shape)  # The model_fn may have set it.
        function_calls.let_wait(copy, op.control_inputs)
        copies[op] = copy
    return copies


def _operands_behind_barriers(
    originals: Sequence[tf.Operation],
    forward: Forward,
    gradients: dict[int, list[tf.Operation]],
    scope: str,
) -> dict[tf.Operation, list[tf.Tensor]]:
    """The operands of each op; for a copy that uses no other copies, one of them is a barrier.

    The barrier does nothing but wait. If the copies had control inputs, TensorFlow's graph
    optimizers wouldn't fuse them as they fuse the originals, and results would be rounded in
    another way.
    """
    operands_of: dict[tf.Operation, list[tf.Tensor]] = {}
    barriers: dict[tuple[int, str], tf.Tensor] = {}  # by segment, and what they let through
    for op in originals:
        operands = list(op.inputs)
        operands_of[op] = operands
        if not all(map(forward.is_kept, operands)):
            continue  # It waits for another copy.

        # A forward op has an operand that depends on the batch.
        position = next(i for i, operand in enumerate(operands) if forward.is_of_batch(operand))
        segment = forward.segment(op)
        key = (segment, operands[position].name)
        if key not in barriers:
            name = f'{scope}/barrier_{segment}'
            barriers[key] = _barrier(operands[position], gradients[segment], name)
        operands[position] = barriers[key]
    return operands_of


def _barrier(tensor: tf.Tensor, gradients: Sequence[tf.Operation], name: str) -> tf.Tensor:
    """A tensor that is there when gradients are.

    It isn't an Identity, as those that wait are bypassed.
    """
    with tensor.graph.as_default(), tf.name_scope(None), tf.device(tensor.device):
        with tf.control_dependencies(None), tf.control_dependencies(gradients):
            if tensor.shape.rank is None:
                return tf.stop_gradient(tensor, name)
            any_sizes = tf.TensorShape([None] * tensor.shape.rank)
            return tf.raw_ops.EnsureShape(input=tensor, shape=any_sizes, name=name)


def let_writes_wait(
    graph: tf.Graph, copies: dict[tf.Operation, tf.Operation], order: Order
) -> None:
    """Lets writes to reference variables wait for the copies that read these, as for the ops."""
    readers = [op for op in order.late_readers() if op in copies]
    if not readers:
        return

    bits = {copies[op]: 1 << index for index, op in enumerate(readers)}
    upstream = upstream_bits(graphs.topological_order(graph.get_operations()), bits)
    waits = defaultdict[tf.Operation, list[tf.Operation]](list)
    for op in readers:
        for write in order.writes_after(op):
            if not upstream[write] & bits[copies[op]]:
                waits[write].append(copies[op])
    for write, before in waits.items():
        function_calls.let_wait(write, before)
