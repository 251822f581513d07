"""Walks over a graph that is finished, and changes of it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from graphlib import TopologicalSorter

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals.op_types import NEXT_ITERATION
from estimator_mgpu.tf_internals.private import (
    add_control_inputs,
    control_consumers,
    creation_index,
    remove_control_inputs,
    set_input,
)


def set_control_inputs(op: tf.Operation, inputs: Sequence[tf.Operation]) -> None:
    """Makes an op that exists already wait for these, and for no others."""
    remove_control_inputs(op)
    add_control_inputs(op, list(dict.fromkeys(inputs)))


def consumers_of(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that directly wait for an op."""
    return [user for t in op.outputs for user in t.consumers()] + control_consumers(op)


def direct_inputs(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that an op directly waits for."""
    return [*(t.op for t in op.inputs), *op.control_inputs]


def ancestors(ops: Sequence[tf.Operation]) -> set[tf.Operation]:
    """Returns these ops, and all that they wait for, by data or control."""
    seen, stack = set(ops), list(ops)
    while stack:
        before = set(direct_inputs(stack.pop()))
        stack += before - seen
        seen |= before
    return seen


def redirect_consumers(op: tf.Operation, outputs: dict[int, tf.Tensor], last: tf.Operation) -> None:
    """Gives whoever uses an op's outputs others; whoever waits for it waits for `last` instead."""
    for index, tensor in outputs.items():
        for user in op.outputs[index].consumers():
            for i, given in enumerate(user.inputs):
                if given is op.outputs[index]:
                    set_input(user, i, tensor)
    for user in control_consumers(op):
        set_control_inputs(user, [*(c for c in user.control_inputs if c is not op), last])


def is_reference_variable(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a variable of TensorFlow 1's kind, rather than a value."""
    return tensor.dtype is not tensor.dtype.base_dtype


def colocated_with(op: tf.Operation) -> list[str]:
    """Names the ops that an op has to be with."""
    return [name.decode()[len('loc:@') :] for name in op.node_def.attr['_class'].list.s]


def outermost_graph(graph: tf.Graph) -> tf.Graph:
    """Returns the graph that a function's graph is being traced for, or the graph itself."""
    while hasattr(graph, 'outer_graph'):
        graph = graph.outer_graph
    return graph


def dependents(sources: Sequence[tf.Tensor], before: Set[str]) -> list[tf.Operation]:
    """All of the model's ops that depend on the sources, in the order in which they were made."""
    reached: set[tf.Operation] = set()
    stack = [op for t in sources for op in t.consumers()]
    while stack:
        op = stack.pop()
        if op not in reached and op.name not in before:
            reached.add(op)
            stack += consumers_of(op)
    return sorted(reached, key=creation_index)


def topological_order(ops: Sequence[tf.Operation]) -> list[tf.Operation]:
    """The ops, each after those that it depends on."""
    given = {op: [] if op.type in NEXT_ITERATION else direct_inputs(op) for op in ops}
    return [op for op in TopologicalSorter(given).static_order() if op in given]
