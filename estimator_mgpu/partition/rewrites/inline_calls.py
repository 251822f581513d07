"""Calls of a `tf.function` become part of the graph, so that what they call is sharded as usual.

    x --> PartitionedCall(f) --> user        =>        x --> ops of f --> user

Loops and branches call functions, too: `take_apart_branches` and `take_apart_loops` come next.
`propagation` shards those that stay.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.rewrites.function_ops import add_ops, after, take_place_of
from estimator_mgpu.partition.rewrites.function_waits import add_waits
from estimator_mgpu.tf_internals import function_calls, graphs, op_types, tracebacks
from estimator_mgpu.tf_internals.liveness import Liveness


def inline_calls(division: Division) -> None:
    """Replaces the outputs of calls by those of the called function's own ops, added to the graph.

    The calls stay in the graph, for whoever fetches them.
    """
    graph = division.graph
    visited = set(division.existing_ops)
    while True:  # Functions may call others, which come next; but none calls itself.
        calls = [
            op
            for op in graphs.ops_of_types(graph, op_types.PARTITIONED_CALLS)
            if op.name not in visited
        ]
        if not calls:
            return
        visited.update(call.name for call in calls)
        liveness = Liveness(graph.get_operations())
        for call in calls:
            function = _function_to_inline(call, liveness)
            if function is not None:
                _inline(call, function, division)


def _function_to_inline(call: tf.Operation, liveness: Liveness) -> Any:
    """The graph of the function that an op calls; None if it has to be called."""
    functions = function_calls.function_graphs(call)
    # In a v1 loop or a branch, a function's constants would run outside of it.
    if not functions or not liveness.always_runs(call):
        return None
    stays = function_calls.call_attributes(call) & op_types.STAYS_A_CALL
    return None if stays else functions[0]


def _inline(call: tf.Operation, function: Any, division: Division) -> None:
    """Lets a function's ops take the place of a call."""
    scope = f'{call.name}/inlined'
    with tracebacks.made_for(call, {scope: function}):
        with tf.control_dependencies(None), tf.device(call.device), tf.name_scope(None):
            added = add_ops(function, call.inputs, scope)
            before = [*added.effects, *call.control_inputs]
            outputs = [after(before, output, f'{call.name}/output') for output in added.outputs]
            ends = [*added.effects, *(output.op for output in outputs)]
            take_place_of(call, outputs, ends, division)

        liveness = Liveness(added.ops)

        def is_inlined(op: tf.Operation) -> bool:
            is_call = op.type in op_types.PARTITIONED_CALLS
            return is_call and _function_to_inline(op, liveness) is not None

        add_waits(call, call.inputs, added.ops, liveness, is_inlined)
