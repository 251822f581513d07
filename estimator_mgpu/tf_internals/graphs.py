"""Walks over a finished graph, and changes to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence, Set
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import Any, TypeVar

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import function_calls, op_types
from estimator_mgpu.tf_internals.private import (
    add_control_inputs,
    control_consumers,
    creation_index,
    operations,
    remove_control_inputs,
    set_input,
)

Node = TypeVar('Node', bound=Hashable)

Inputs = Sequence[tf.Operation]
"""What an op directly waits for: for each operand, in order, the op that gives it, and then its
control inputs."""

# The numbers of types: it takes a tenth of the time to compare these. References have the highest.
_RESOURCE = tf.resource.as_datatype_enum
_FIRST_REFERENCE = tf.as_dtype('float32_ref').as_datatype_enum

_NOTHING: Mapping[tf.Operation, Sequence[tf.Operation]] = MappingProxyType({})

_OPS_BY_TYPE = '_estimator_mgpu_ops_by_type'  # An attribute of a graph.


def ops_of_types(graph: tf.Graph, types: Iterable[str]) -> list[tf.Operation]:
    """The ops of a graph that are of some types, in the order in which they were made.

    Many steps look for a few types in a large graph, and TensorFlow is slow to tell an op's type.
    So the graph keeps an index, to which the ops are added that were made since: no op is ever
    removed, and each keeps its type.
    """
    by_type = _ops_by_type(graph)
    found = [op for op_type in types for op in by_type.get(op_type, ())]
    return sorted(found, key=creation_index)


def types_of(graph: tf.Graph) -> list[str]:
    """The types of a graph's ops."""
    return list(_ops_by_type(graph))


def _ops_by_type(graph: tf.Graph) -> dict[str, list[tf.Operation]]:
    """The index of a graph's ops."""
    if not hasattr(graph, _OPS_BY_TYPE):
        setattr(graph, _OPS_BY_TYPE, defaultdict(list))
    by_type: dict[str, list[tf.Operation]] = getattr(graph, _OPS_BY_TYPE)
    known = sum(map(len, by_type.values()))
    for op in operations(graph)[known:]:
        by_type[op.type].append(op)
    return by_type


def set_control_inputs(op: tf.Operation, inputs: Sequence[tf.Operation]) -> None:
    """Makes an op that exists already wait for these, and for no others."""
    remove_control_inputs(op)
    function_calls.let_wait(op, inputs)


def consumers_of(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that directly wait for an op."""
    return [user for t in op.outputs for user in t.consumers()] + control_consumers(op)


def direct_inputs(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that an op directly waits for."""
    return [t.op for t in op.inputs] + op.control_inputs


def is_way_back(tensor: tf.Tensor) -> bool:
    """Whether a tensor is what a step of a v1 loop leaves for the next one."""
    return tensor.op.type in op_types.NEXT_ITERATION


def begins_steps(op: tf.Operation) -> bool:
    """Whether an op is the `Merge` of a v1 loop's variable, rather than that of a branch."""
    return op.type in op_types.MERGE and any(map(is_way_back, op.inputs))


def data_inputs(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops whose outputs an op uses."""
    return [t.op for t in op.inputs]


def ancestors(
    ops: Iterable[tf.Operation], inputs_of: Callable[[tf.Operation], Inputs] = direct_inputs
) -> set[tf.Operation]:
    """Returns these ops, and all that they wait for.

    Args:
      ops: where the search begins.
      inputs_of: gives what an op directly waits for.
    """
    return set(inputs_upstream(ops, inputs_of))


def inputs_upstream(
    ops: Iterable[tf.Operation], inputs_of: Callable[[tf.Operation], Inputs] = direct_inputs
) -> dict[tf.Operation, Inputs]:
    """These ops, and all that they wait for, each with what it directly waits for.

    Args:
      ops: where the search begins.
      inputs_of: gives what an op directly waits for.
    """
    inputs: dict[tf.Operation, Inputs] = {}
    stack = list(ops)
    while stack:
        op = stack.pop()
        if op not in inputs:
            inputs[op] = inputs_of(op)
            stack += inputs[op]
    return inputs


def descendants(
    ops: Sequence[tf.Operation], until: Container[tf.Operation] = ()
) -> set[tf.Operation]:
    """Returns these ops, and all that wait for them, but for what waits for ops in `until` only."""
    seen = set(ops)
    stack = list(ops)
    while stack:
        op = stack.pop()
        if op not in until:
            new = set(consumers_of(op)) - seen
            seen |= new
            stack += new
    return seen


def path_to(
    targets: Container[tf.Operation], op: tf.Operation, dead_ends: set[tf.Operation]
) -> set[tf.Operation]:
    """Returns the ops of a path from an op, along its consumers, to one of `targets`.

    In a graph of which TensorFlow has just imported most ops, this is much faster than `ancestors`:
    it follows one path, and makes no Python objects for inputs of ops.

    Args:
      targets: where a path may end.
      op: where it begins.
      dead_ends: ops from which no path leads to `targets`. If there's no path from `op`, the ops
        that were tried are added.

    Returns:
      All ops on the path, both ends included; none if there's no path.
    """
    previous: dict[tf.Operation, tf.Operation | None] = {op: None}
    stack = [op]
    while stack:
        reached = stack.pop()
        if reached in targets:
            path = {reached}
            step = previous[reached]
            while step is not None:
                path.add(step)
                step = previous[step]
            return path

        for consumer in consumers_of(reached):
            if consumer not in previous and consumer not in dead_ends:
                previous[consumer] = reached
                stack.append(consumer)

    dead_ends.update(previous)
    return set()


class Redirections:
    """Tensors that are used, and ops that are waited for, in place of others.

    They are collected first, and then made at once, so that an op with thousands of inputs, such as
    a concatenation of features, is looked at once rather than for each of these.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, tf.Tensor] = {}  # by the names of those that aren't used any more
        self._outputs: list[tf.Tensor] = []  # these
        self._ops: dict[tf.Operation, tf.Operation] = {}  # by those that aren't waited for any more

    def add(self, output: tf.Tensor, replacement: tf.Tensor) -> None:
        """Lets the ops that use an output use another tensor."""
        self._tensors[output.name] = replacement
        self._outputs.append(output)

    def add_wait(self, op: tf.Operation, other: tf.Operation) -> None:
        """Lets the ops that wait for an op by a control edge wait for another one."""
        self._ops[op] = other

    def in_place_of(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor that is going to be used in place of another one: mostly this one itself."""
        while tensor.name in self._tensors:
            tensor = self._tensors[tensor.name]
        return tensor

    def make(self) -> None:
        """Changes the graph. The ops and outputs that aren't used any more stay in it."""
        users = [user for output in self._outputs for user in output.consumers()]
        for user in dict.fromkeys(users):
            for position, operand in enumerate(user.inputs):
                replacement = self.in_place_of(operand)
                if replacement is not operand:
                    set_input(user, position, replacement)

        waiting = [user for op in self._ops for user in control_consumers(op)]
        for user in dict.fromkeys(waiting):
            before = map(self._op_in_place_of, user.control_inputs)
            remove_control_inputs(user)
            # A call among them did wait, so it needn't begin to wait for its arguments, too.
            add_control_inputs(user, list(dict.fromkeys(before)))

    def _op_in_place_of(self, op: tf.Operation) -> tf.Operation:
        while op in self._ops:
            op = self._ops[op]
        return op


def redirect_consumers(op: tf.Operation, outputs: dict[int, tf.Tensor], last: tf.Operation) -> None:
    """Lets the consumers of an op use other tensors, and those that wait for it another op.

    Args:
      op: the op, which stays in the graph.
      outputs: by the index of an output, the tensor that is used in its place.
      last: the op that is waited for in place of `op`.
    """
    redirections = Redirections()
    for index, replacement in outputs.items():
        redirections.add(op.outputs[index], replacement)
    redirections.add_wait(op, last)
    redirections.make()


def is_reference_variable(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a variable of TensorFlow 1's kind, rather than a value."""
    return tensor.dtype.as_datatype_enum >= _FIRST_REFERENCE


def is_handle(tensor: tf.Tensor) -> bool:
    """Whether a tensor refers to a variable, a table or other state, rather than having a value."""
    number = tensor.dtype.as_datatype_enum
    return number == _RESOURCE or number >= _FIRST_REFERENCE


def reads_reference(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a variable of TensorFlow 1's kind, or the read of one."""
    return is_reference_variable(tensor) or (
        tensor.op.type == op_types.IDENTITY and is_reference_variable(tensor.op.inputs[0])
    )


def colocated_with(op: tf.Operation) -> list[str]:
    """Names the ops that an op has to be with."""
    return colocations(op.node_def)


def colocations(node: Any) -> list[str]:
    """Names the ops that the op of a NodeDef has to be with."""
    if '_class' not in node.attr:
        return []
    return [name.decode()[len('loc:@') :] for name in node.attr['_class'].list.s]


def outermost_graph(graph: tf.Graph) -> tf.Graph:
    """Returns the graph that a function's graph is being traced for, or the graph itself."""
    while hasattr(graph, 'outer_graph'):
        graph = graph.outer_graph
    return graph


def dependents(sources: Sequence[tf.Tensor], excluded: Set[str]) -> list[tf.Operation]:
    """The ops that depend on tensors, in the order in which they were made.

    Args:
      excluded: names of ops that are left out, with what depends on the tensors by these only.
    """
    reached: set[tf.Operation] = set()
    distinct = {tensor.name: tensor for tensor in sources}  # Many gradients may be one tensor.
    stack = [op for tensor in distinct.values() for op in tensor.consumers()]
    while stack:
        op = stack.pop()
        if op not in reached and op.name not in excluded:
            reached.add(op)
            stack += consumers_of(op)
    return sorted(reached, key=creation_index)


def topological_order(
    ops: Iterable[tf.Operation], added: Mapping[tf.Operation, Sequence[tf.Operation]] = _NOTHING
) -> dict[tf.Operation, Inputs]:
    """The ops, each after those that it depends on, and after those that are `added` to these.

    Returns:
      The ops in this order, each with what it directly waits for, which needn't be asked again as
      long as the graph stays as it is.
    """
    return in_topological_order({op: direct_inputs(op) for op in ops}, added)


def in_topological_order(
    inputs: dict[tf.Operation, Inputs],
    added: Mapping[tf.Operation, Sequence[tf.Operation]] = _NOTHING,
) -> dict[tf.Operation, Inputs]:
    """As `topological_order`, of ops with what they directly wait for. It may return these."""
    if _is_in_order(inputs, added):  # as most are that come as they were made
        return inputs

    def waits_of(op: tf.Operation) -> Sequence[tf.Operation]:
        # What a v1 loop's way back waits for would make a circle.
        befores = () if op.type in op_types.NEXT_ITERATION else inputs[op]
        return [*befores, *added.get(op, ())]

    order = sorted_by_inputs({op: waits_of(op) for op in inputs})
    return {op: inputs[op] for op in order}


def sorted_by_inputs(inputs: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """The nodes, each after those that it waits for, and soon after the last one of these.

    The order is that of `graphlib`, which takes four times as long.

    Args:
      inputs: by node, what it waits for: such nodes, or others, which aren't in the result.

    Raises:
      CycleError: if nodes wait for each other; its second argument lists them.
    """
    users: dict[Node, list[Node]] = {}
    for node, befores in inputs.items():
        users.setdefault(node, [])
        for before in befores:
            users.setdefault(before, []).append(node)

    missing = {node: len(befores) for node, befores in inputs.items() if befores}
    ready = [node for node in users if node not in missing]
    for node in ready:  # It grows as what nodes wait for becomes ready.
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)

    if len(ready) < len(users):
        TopologicalSorter(inputs).prepare()  # It raises an error, which says what the cycle is.
    return [node for node in ready if node in inputs]


def without_cycles(
    inputs_of: Callable[[Node], Iterable[Node]], edges: Sequence[tuple[Node, Node]]
) -> list[tuple[Node, Node]]:
    """The edges that can be added to a graph. Of those that close a cycle, the last is left out.

    None can be added if what they begin with waits for a cycle of its own, and an edge closes one.

    Args:
      inputs_of: what a node of the graph waits for.
      edges: each from a node to one that is to wait for it.
    """
    upstream: dict[Node, list[Node]] = {}
    """All that the sources of edges wait for. A cycle goes through a source, so it's in here."""
    stack = [source for source, _ in edges]
    while stack:
        node = stack.pop()
        if node not in upstream:
            upstream[node] = list(inputs_of(node))
            stack += upstream[node]

    remaining = list(edges)
    if not any(target in upstream for _, target in edges):
        return remaining
    while remaining:  # Each round takes one of them away, or is the last.
        extended = {node: [*befores] for node, befores in upstream.items()}
        for source, target in remaining:
            extended.setdefault(target, []).append(source)
        try:
            TopologicalSorter(extended).prepare()
        except CycleError as error:
            cycle: list[Node] = error.args[1]
            steps = set(zip(cycle, cycle[1:]))
            closing = [edge for edge in remaining if edge in steps]
            if not closing:
                return []
            remaining.remove(closing[-1])
        else:
            break
    return remaining


def _is_in_order(
    inputs: Mapping[tf.Operation, Inputs], added: Mapping[tf.Operation, Sequence[tf.Operation]]
) -> bool:
    """Whether each op comes after those of its inputs that are among the ops."""
    not_seen = set(inputs)
    for op, befores in inputs.items():
        if not not_seen.isdisjoint(befores) and op.type not in op_types.NEXT_ITERATION:
            return False
        if op in added and not not_seen.isdisjoint(added[op]):
            return False
        not_seen.remove(op)
    return True
