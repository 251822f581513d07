"""Which large values are sent in slices, so that no device sends or receives much more than others.

Each step, a variable's owner sends its value to all other devices, and receives a gradient from
each. If all devices own equally many bytes, each of them sends and receives as much as in a ring.
But one variable may be larger than all others together. Then it's cut into slices. The owner sends
each slice to one device or more, which hand it on; and on the way back, they add up its gradient:

    owner --> device 1: slice 1 --> all other devices
          --> device 2: slice 2 --> all other devices

A slice is a further message to each device, and one from it. So only as many values are sliced as
are needed: with n devices, of V bytes in all, the busiest device is to send and receive
2 V (n - 1) / n, as in a ring, or a tenth more. And these have so few slices that there are at most
twice as many messages as without any. If slices are fewer than devices, those that a slice is sent
to hand it on to others, and these again: see `trees`. Logical CPU devices share their memory, so
nothing is sliced for them.

In: the values that towers need in full, with their sizes and devices. Out: for such a value, or for
a sum of the same size on the same device, the entries of its slices, and a tree for each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import memory_of
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.messages.packing import Pack, values_read
from estimator_mgpu.partition.messages.trees import Room, Tree, room_of
from estimator_mgpu.partition.once_devices import runs_at_its_table
from estimator_mgpu.partition.plan import Plan, Sharded

_MORE_THAN_A_RING = 1.1  # what the busiest device may send or receive without slices
_MOST_SLICES = 5  # of a value: with more, bytes are hardly more even
_SMALL = 1 << 18  # bytes: a value isn't sliced if its owner sends no more to all others


class Sent(NamedTuple):
    """A value that is sent to all devices.

    Attributes:
      size: its bytes.
      owner: the device that has it.
      is_sliceable: whether its shape is known, and it's no pack.
    """

    size: int
    owner: str
    is_sliceable: bool


def find_sent(
    plan: Plan,
    sharded: Sharded,
    packs: Mapping[str, Pack],
    device_of_full: Callable[[tf.Tensor], str],
) -> dict[str, Sent]:
    """Finds what is sent to all devices: what towers need in full, and no tower makes.

    Args:
      sharded: its ops that run on every tower.
      packs: those of tensors that share a message with others, by name.
      device_of_full: gives the device of a tensor's full value.

    Returns:
      By the name of the tensor, or of the first one of a pack.
    """
    sent = {}
    for op, tensor in values_read(plan, sharded):
        if runs_at_its_table(op, sharded[op], device_of_full):
            continue  # Rows are sent, rather than the table.
        if tensor.dtype.base_dtype.is_floating:
            pack = packs.get(tensor.name)
            tensors = [tensor] if pack is None else pack.tensors
            is_sliceable = pack is None and tensor.shape.is_fully_defined()
            size = sum(map(bytes_of, tensors))
            sent[tensors[0].name] = Sent(size, device_of_full(tensor), is_sliceable)
    return sent


class Slice(NamedTuple):
    """Some entries of a value, and the tree by which devices hand them on."""

    entries: int
    tree: Tree


class Slices:
    """Decides what is sliced.

    Args:
      sent: the values that are sent to all devices, by the names of their tensors.
    """

    def __init__(self, sent: Mapping[str, Sent], devices: Sequence[str]):
        self._sent = sent
        self._members: dict[str, str] = {}  # by memory, the first device
        for device in devices:
            self._members.setdefault(memory_of(device), device)
        self._trees = self._make_trees()
        self._trees_of_sums = defaultdict[tuple[int, str], list[Sequence[Tree]]](list)
        for name, value in sent.items():
            if value.is_sliceable:
                self._trees_of_sums[value.size, value.owner].append(self._trees.get(name, []))

    def of_value(self, name: str, entries: int) -> list[Slice]:
        """The slices of a value that is sent to all devices; [] if it's sent as a whole."""
        return _in_entries(self._trees.get(name, []), entries)

    def of_sum(self, size: int, owner: str, entries: int) -> list[Slice]:
        """The slices of a sum of so many bytes for an owner; [] if it's made there as a whole.

        Such are gradients, which are as large as their variables.
        """
        alike = self._trees_of_sums.get((size, owner))
        if not alike:
            return []
        trees = alike.pop(0)
        alike.append(trees)  # If there are more sums than values, these take turns.
        return _in_entries(trees, entries)

    def is_in_trees(self, device: str) -> bool:
        """Whether slices get to the memory of a device: the host of GPUs, say, is in no tree."""
        return memory_of(device) in self._members

    def member(self, device: str) -> str:
        """The device in the trees that shares the memory of a device; itself if there is none."""
        return self._members.get(memory_of(device), device)

    def _make_trees(self) -> dict[str, list[Tree]]:
        """Makes the trees of the slices of each value that is sliced, by name."""
        unsliced = Counter[str]()
        for value in self._sent.values():
            unsliced[self.member(value.owner)] += value.size
        total = sum(unsliced.values())
        large = self._find_large(unsliced, total)
        trees: dict[str, list[Tree]] = {name: [] for name in large}
        if large:
            # Each device is sent so many slices of each large value, and all others as a whole, and
            # sends the gradients. That's at most twice as many messages as values if
            #     count * len(large) + len(sent) - len(large) <= 2 * len(sent)
            count = min(_MOST_SLICES, 1 + len(self._sent) // len(large))
            room = Room(list(self._members.values()), unsliced, total)
            for name in large * count:
                size, owner, _ = self._sent[name]
                trees[name].append(room.tree(self.member(owner), size / count))
        return trees

    def _find_large(self, unsliced: Counter[str], total: int) -> list[str]:
        """The names of the values that are sliced: as few as possible, always the largest ones.

        Args:
          unsliced: by owner, the bytes of all its values. Those of sliced ones are subtracted.
          total: of all.
        """
        count = len(self._members)
        if count < 3:  # Two devices send and receive the same, whichever owns what.
            return []
        candidates = defaultdict[str, list[str]](list)  # by owner, the smallest first
        for name in sorted(self._sent, key=lambda name: self._sent[name].size):
            value = self._sent[name]
            is_large = value.size * (count - 1) > _SMALL
            if value.is_sliceable and is_large and self.is_in_trees(value.owner):
                candidates[self.member(value.owner)].append(name)

        large: list[str] = []
        while unsliced:
            busiest, size = unsliced.most_common(1)[0]
            if room_of(size, total, count, _MORE_THAN_A_RING) >= 0 or not candidates[busiest]:
                return large
            large.append(candidates[busiest].pop())
            unsliced[busiest] -= self._sent[large[-1]].size
        return large


def _in_entries(trees: Sequence[Tree], entries: int) -> list[Slice]:
    """Slices of a value of so many entries, about equally many for each tree."""
    if not trees:
        return []
    ends = [entries * number // len(trees) for number in range(len(trees) + 1)]
    return [Slice(end - start, tree) for start, end, tree in zip(ends, ends[1:], trees)]
