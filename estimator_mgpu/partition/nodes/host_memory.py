r"""Keeps small values in the memory of the host, where they are made and needed.

A GPU's kernel takes and gives most tensors in the GPU's memory, but sizes and the like in that of
the host. For example, the host cuts the indices of a sparse tensor for each tower. They are counted
from the tower's first row, and an op without a kernel for GPUs crosses them with others:

    host:  GatherV2         SparseCross          host:  GatherV2 -> Sub -> SparseCross
                   \        ^              =>
    GPU:            v  Sub /                     GPU:

On the GPU, the subtraction would cost two copies, and the GPU would wait for the second one.

In: added NodeDefs with their devices. Out: other devices for those that are better on the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import host_of
from estimator_mgpu.tf_internals import kernels


class _Edge(NamedTuple):
    """A tensor that an added node gives to another one.

    Attributes:
      source: the node that has made it.
      is_on_host: whether that one's kernel leaves it in the memory of the host.
      target: the node that takes it.
      is_taken_on_host: whether that one's kernel takes it from there.
    """

    source: str
    is_on_host: bool
    target: str
    is_taken_on_host: bool


def move_to_host(
    nodes: Sequence[Any],
    inputs_from_graph: dict[str, tf.Tensor],
    may_move: Callable[[Any], bool],
) -> None:
    """Moves NodeDefs from a GPU to the host if no other op on the GPU gives or takes their values.

    Args:
      nodes: all that are added to a graph.
      inputs_from_graph: the graph's own tensors that they use, by name.
      may_move: whether only other added nodes use what a node gives, and it may be on any device.
    """
    candidates = {
        node.name: node for node in nodes if kernels.is_gpu(node.device) and may_move(node)
    }
    if not candidates:
        return
    edges_of = defaultdict[str, list[_Edge]](list)
    for edge in _edges(nodes, inputs_from_graph, candidates.keys()):
        edges_of[edge.source].append(edge)
        edges_of[edge.target].append(edge)

    # If one stays on its GPU, its neighbors may have to stay, too.
    to_look_at = list(candidates)
    while to_look_at:
        name = to_look_at.pop()
        if name in candidates and not _is_better_on_host(name, edges_of[name], candidates.keys()):
            del candidates[name]
            for edge in edges_of[name]:
                to_look_at += [edge.source, edge.target]
    for node in candidates.values():
        node.device = host_of(node.device)


def _is_better_on_host(name: str, edges: Sequence[_Edge], candidates: Set[str]) -> bool:
    """Whether the host has all that a node takes and gives, and a copy is saved if it moves there.

    Args:
      name: of the node.
      edges: its own.
      candidates: the names of nodes that are taken to be on the host.
    """
    taken = [edge for edge in edges if edge.target == name]
    given = [edge for edge in edges if edge.source == name]
    if not all(edge.is_on_host or edge.source in candidates for edge in taken):
        return False
    if not all(edge.is_taken_on_host or edge.target in candidates for edge in given):
        return False
    needs_gpu_memory = not all(edge.is_taken_on_host for edge in taken)
    gives_gpu_memory = not all(edge.is_on_host for edge in given)
    return bool(given) and (needs_gpu_memory or gives_gpu_memory)


def _edges(
    nodes: Sequence[Any], inputs_from_graph: dict[str, tf.Tensor], ends: Set[str]
) -> Iterator[_Edge]:
    """The tensors that added nodes, at least one of which is named, give each other or are given.

    Args:
      nodes: all that are added to a graph.
      inputs_from_graph: the graph's own tensors that they use, by name.
      ends: the names of nodes.
    """
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        operands = [operand for operand in node.input if not operand.startswith('^')]
        sources = [operand.partition(':')[0] for operand in operands]
        if node.name not in ends and ends.isdisjoint(sources):
            continue
        for operand, source, is_taken in zip(operands, sources, kernels.inputs_on_host(node)):
            if node.name in ends or source in ends:
                if source in by_name:
                    index = int(operand.partition(':')[2] or 0)
                    is_on_host = kernels.outputs_on_host(by_name[source])[index]
                else:
                    is_on_host = _is_on_host(inputs_from_graph[operand])
                yield _Edge(source, is_on_host, node.name, is_taken)


def _is_on_host(tensor: tf.Tensor) -> bool:
    """Whether it's known that one of the graph's own tensors is in the memory of the host."""
    if not tensor.op.device:
        return False
    return kernels.outputs_on_host(tensor.op.node_def)[tensor.value_index]
