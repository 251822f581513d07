"""`ZerosLike` and `OnesLike` become fills, which need a tensor's shape and not its values.

For example, if a loss is `sum(losses) / sum(ones_like(losses))`, each tower's share of it would
wait for the losses of all towers, though only their number is needed:

    losses --> OnesLike        =>        losses --> Shape --> Fill
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private
from estimator_mgpu.tf_internals.liveness import Liveness
from estimator_mgpu.tf_internals.node_defs import const_def, node_def
from estimator_mgpu.tf_internals.tracebacks import Tracebacks

_NOT_FILLED = (tf.string, tf.resource, tf.variant)
_NAMES = ('shape', 'value', 'fill')  # of the nodes of a fill, below the op's


def replace_likes_by_fills(division: Division) -> None:
    """Replaces the outputs of `ZerosLike` and `OnesLike` by fills, but in v1 control flow.

    In a branch that isn't taken, a fill would give a value, as shapes are known there, too. A model
    may have thousands of these ops, so all fills are added at once.
    """
    graph = division.graph
    liveness = division.order.liveness
    likes = [op for op in division.model_ops() if _is_replaced(op, liveness)]
    if not likes:
        return

    nodes = tf.GraphDef(versions=graph.graph_def_versions)
    sources = {op.inputs[0].name: op.inputs[0] for op in likes}
    names: dict[tf.Operation, list[str]] = {}  # of the nodes of each fill, the fill itself last
    with tf.name_scope(None):
        for op in likes:
            names[op] = _add_fill(op, nodes)
    private.import_nodes(graph, nodes, sources)

    tracebacks = Tracebacks()
    redirections = graphs.Redirections()
    for op, names_of_fill in names.items():
        added = [graph.get_operation_by_name(name) for name in names_of_fill]
        for part in added:
            private.set_traceback(part, tracebacks.of(op))
            function_calls.let_wait(part, op.control_inputs)
        [filled] = added[-1].outputs
        redirections.add(op.outputs[0], filled)
        division.replaced[op.outputs[0].name] = filled
    redirections.make()


def _is_replaced(op: tf.Operation, liveness: Liveness) -> bool:
    """Whether an op is such a one, and its output is used and can be a fill."""
    if op.type not in op_types.ZEROS_ONES_LIKE:
        return False
    output = op.outputs[0]
    is_filled = output.dtype not in _NOT_FILLED and liveness.always_runs(op)
    return is_filled and bool(output.consumers())


def _add_fill(op: tf.Operation, nodes: tf.GraphDef) -> list[str]:
    """Adds the nodes of the fill for an op to a GraphDef; returns their names, the fill last."""
    operand = op.inputs[0]
    dtype = op.outputs[0].dtype
    shape, value, fill = (op.graph.unique_name(f'{op.name}/{word}') for word in _NAMES)
    # Unlike tf.shape(), this isn't a constant if the graph knows the shape.
    definitions = {
        shape: node_def('Shape', T=operand.dtype.base_dtype, out_type=tf.int32),
        value: const_def(op_types.ZEROS_ONES_LIKE[op.type], dtype),
        fill: node_def('Fill', T=dtype, index_type=tf.int32),
    }
    inputs = {shape: [operand.name], value: [], fill: [f'{shape}:0', f'{value}:0']}
    for name, definition in definitions.items():
        node = nodes.node.add()
        node.CopyFrom(definition)
        node.name = name
        node.device = op.device
        node.input[:] = inputs[name]
    return list(definitions)
