"""Calls of functions become part of the graph: what they call is then divided as anything else."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private

_AS_THEY_ARE = {'_noinline', '_XlaMustCompile'}  # attributes of functions and of calls


def inline_calls(graph: tf.Graph, before: Set[str]) -> dict[str, tf.Tensor]:
    """Lets whoever uses what a `tf.function` returns use the function's own ops instead.

    The calls stay, to be fetched. Returns, by names of their outputs, what is used in their place.
    """
    replaced: dict[str, tf.Tensor] = {}
    done = set(before)
    while calls := [
        o
        for o in graph.get_operations()
        if o.type in op_types.PARTITIONED_CALLS and o.name not in done
    ]:
        for op in calls:  # of functions that may call others
            done.add(op.name)
            if (function := _function(op)) is not None:
                tensors, last = _body(op, function)
                made = list(zip(op.outputs, tensors))  # A function may have got more since.
                graphs.redirect_consumers(op, {t.value_index: own for t, own in made}, last)
                replaced.update((t.name, own) for t, own in made)
    return replaced


def _function(op: tf.Operation) -> Any:
    """The graph of what an op calls; None if it has to be called."""
    if private.in_v1_control_flow(op) or not function_calls.function_graphs(op):
        return None
    definition, graph = function_calls.function_definition(
        op.graph, function_calls.called_functions(op.node_def)[0].name
    )
    kept = _AS_THEY_ARE.intersection([*definition.attr, *op.node_def.attr])
    return None if kept else graph


def _body(op: tf.Operation, function: Any) -> tuple[list[tf.Tensor], tf.Operation]:
    """Adds a function's ops; returns its outputs, and an op that waits for all it does."""
    given = {t.name: own for t, own in zip(function.inputs, op.inputs)}
    waited = {f'^{t.op.name}': own for t, own in zip(function.inputs, op.inputs)}
    definition = function.as_graph_def()
    nodes = [node for node in definition.node if f'^{node.name}' not in waited]
    for node in nodes:
        node.attr.pop('_class', None)
    used = {name for node in nodes for name in node.input}
    used |= {f'{name}:0' for name in used}
    made = [t.name for t in function.outputs if t.name not in given]
    scope = f'{op.name}/inlined'
    with tf.control_dependencies(None), tf.device(op.device), tf.name_scope(None):
        found = tf.import_graph_def(
            tf.GraphDef(node=nodes, versions=definition.versions),  # The graph has its library.
            {name: tensor for name, tensor in {**given, **waited}.items() if name in used},
            return_elements=made + [effect.name for effect in function.control_outputs],
            name=scope,
        )
        given.update(zip(made, found))
        outputs = [given[t.name] for t in function.outputs]
        waits = [*found[len(made) :], *op.control_inputs, *(t.op for t in outputs)]
        with tf.control_dependencies(waits):
            last = tf.no_op(f'{op.name}/done')
    for node in nodes if op.control_inputs else ():
        own = op.graph.get_operation_by_name(f'{scope}/{node.name}')
        if own.op_def.is_stateful:
            private.add_control_inputs(own, op.control_inputs)
    return outputs, last
