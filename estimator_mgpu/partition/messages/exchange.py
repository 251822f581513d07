"""Adds the ops by which devices exchange slices of a value.

In: what each device has of a sum, or the value that one device has, as vectors; and their slices.
Out: the sum of each slice on the owner; or the value on another device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from estimator_mgpu.partition.messages.slices import Slice
from estimator_mgpu.partition.nodes.node_builder import NodeBuilder


class Vector(NamedTuple):
    """All entries of a value, on a device.

    Attributes:
      name: of the tensor.
      device: its own.
      member: the device of trees that shares the memory of that one.
    """

    name: str
    device: str
    member: str


def add_up(
    nodes: NodeBuilder, slices: Sequence[Slice], vectors: Sequence[Vector], owner: str
) -> list[str]:
    """Adds up vectors, each slice from the bottom of its tree to the top.

    Args:
      slices: all of a value.
      vectors: what is added up.
      owner: at the top of all trees.

    Returns:
      The sum of each slice, on the owner.
    """
    pieces = [(vector.member, _split(nodes, slices, vector)) for vector in vectors]
    sums = []
    for number, (_, tree) in enumerate(slices):
        summands = defaultdict[str, list[str]](list)
        for member, of_vector in pieces:
            summands[member].append(of_vector[number])
        for device, above in reversed(tree.items()):
            summands[above].append(nodes.sum(summands[device], device))
        sums.append(nodes.sum(summands[owner], owner))
    return sums


class Handed:
    """A value that its owner sends in slices, which devices hand on.

    Args:
      slices: all of the value.
      value: what the owner has.
    """

    def __init__(self, nodes: NodeBuilder, slices: Sequence[Slice], value: Vector):
        self._nodes = nodes
        self._slices = slices
        self._pieces = [{value.member: piece} for piece in _split(nodes, slices, value)]
        self._values = {value.member: value.name}

    def on(self, device: str) -> str:
        """The value on a device of the trees, as a vector."""
        if device not in self._values:
            pieces = [
                self._piece(number, tree[device]) for number, (_, tree) in enumerate(self._slices)
            ]
            self._values[device] = self._nodes.concat(pieces, 0, device)
        return self._values[device]

    def _piece(self, number: int, device: str) -> str:
        """A slice on a device, which hands it on."""
        pieces = self._pieces[number]
        if device not in pieces:
            piece = self._piece(number, self._slices[number].tree[device])
            pieces[device] = self._nodes.add('Identity', [piece], device)
        return pieces[device]


def _split(nodes: NodeBuilder, slices: Sequence[Slice], vector: Vector) -> list[str]:
    """The slices of a vector, on its device."""
    return nodes.split(vector.name, [entries for entries, _ in slices], vector.device)
