"""Which large values are sent in slices, so that no device sends or receives much more than others.

Each step, a variable's owner sends its value to all other devices, and receives a gradient from
each. If all devices own equally many bytes, each of them sends and receives as much as in a ring.
But one variable may be larger than all others together. Then the gradients are summed in slices, on
several devices, and put together at the owner; and the owner sends each slice of the value to one
device, which hands it on:

    gradients    slice 0 of each tower --> device 0 --+
                 slice 1 of each tower --> device 1 --+--> owner
                 slice 2 of each tower --> device 2 --+

    value        owner --> device 1: slice 1 --> all other devices
                       --> device 2: slice 2 --> all other devices

A slice is a further message from each device, so only as many values are sliced as are needed: with
n devices, of V bytes in all, the busiest device is to send and receive 2 V (n - 1) / n, as in a
ring, or a tenth more. Logical CPU devices share their memory, so nothing is sliced for them. If
there were many more messages than without slices, devices exchange slices in a `Grid`.

In: the values that towers need in full, with their sizes and devices. Out: for such a value, or for
a sum of the same size on the same device, how many entries are on which device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import machine_of, memory_of
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.messages import sharing
from estimator_mgpu.partition.messages.grid import Grid, Position, most_levels
from estimator_mgpu.partition.messages.packing import Pack, values_read
from estimator_mgpu.partition.messages.sharing import Shares, Value
from estimator_mgpu.partition.once_devices import runs_at_its_table
from estimator_mgpu.partition.plan import Plan, Sharded

_MORE_THAN_A_RING = 1.1  # what the busiest device may send or receive
_MORE_MESSAGES = 2  # than without slices
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


class Part(NamedTuple):
    """A slice: some entries of a value, and the device that adds them up or hands them on."""

    device: str
    entries: int
    position: Position  # of the device


class Slices:
    """Decides what is sliced.

    Attributes:
      grid: that of the devices that have slices.

    Args:
      sent: the values that are sent to all devices, by the names of their tensors.
    """

    def __init__(self, sent: Mapping[str, Sent], devices: Sequence[str]):
        self._sent = sent
        self._unsliced_bytes: Counter[str] = Counter()  # by their owner's memory
        # Several machines share a value among each other, and then each among its devices: among
        # one of those that share their memory.
        self._memories: dict[str, str] = {}  # by memory, the first device
        self._place_of: dict[str, str] = {}
        self._places: dict[str, list[str]] = {}
        self._has_machines = len(set(map(machine_of, devices))) > 1
        for device in devices:
            memory = memory_of(device)
            self._place_of[device] = machine_of(device) if self._has_machines else memory
            if memory not in self._memories:
                self._memories[memory] = device
                self._places.setdefault(self._place_of[device], []).append(device)

        for levels in range(1, most_levels(self._machines()) + 1):
            self.grid = Grid(self._machines(), levels)
            large = self._find_large()
            sums = self._share(large, self._unsliced_base(), is_sum=True)
            self._reads = self._share(large, self._base_of_reads(sums), is_sum=False)
            if self._has_few_messages([*sums.values(), *self._reads.values()]):
                break
        self._sums = defaultdict[tuple[int, str], list[Shares]](list)
        for name, value in sent.items():
            if value.is_sliceable:
                self._sums[value.size, value.owner].append(sums.get(name, {}))

    def _machines(self) -> list[list[str]]:
        """The devices of each machine, one of those that share their memory."""
        places = list(self._places.values())
        return places if self._has_machines else [[device for [device] in places]]

    def _share(
        self, large: Sequence[str], base: Mapping[str, float], is_sum: bool
    ) -> dict[str, Shares]:
        """Shares the named values among places, which have to do `base` anyhow."""
        values = {name: Value(self._sent[name].size, self._owner(name)) for name in large}
        columns = [len(self._places)] if self._has_machines else self.grid.columns
        return sharing.share(values, base, columns, is_sum)

    def _owner(self, name: str) -> str:
        """The place that has a value."""
        return self._place_of[self._sent[name].owner]

    def _has_few_messages(self, slices: Sequence[Shares]) -> bool:
        """Whether values and gradients, some in slices, don't take many more messages for that."""
        pairs = len(self._memories) - 1
        messages = pairs * (2 * len(self._sent) - len(slices))
        for shares in slices:
            messages += self.grid.messages([position for position, _ in self._at(shares)])
        return messages <= _MORE_MESSAGES * pairs * 2 * len(self._sent)

    def of_value(self, name: str, entries: int) -> list[Part]:
        """The slices of a value that is sent to all devices; [] if it's sent as a whole."""
        return self._in_entries(self._reads.get(name, {}), entries)

    def of_sum(self, size: int, owner: str, entries: int) -> list[Part]:
        """The slices of a sum of so many bytes for an owner; [] if it's made there as a whole.

        Such are gradients, which are as large as their variables.
        """
        alike = self._sums.get((size, owner))
        if not alike:
            return []
        shares = alike.pop(0)
        alike.append(shares)  # If there are more sums than values, these take turns.
        return self._in_entries(shares, entries)

    def is_in_grid(self, device: str) -> bool:
        """Whether a device has a position: the host of GPUs, say, has none."""
        return memory_of(device) in self._memories

    def position(self, device: str) -> Position:
        """The position of a device in the grid, or of the one there that shares its memory."""
        return self.grid.positions(self._memories[memory_of(device)])[0]

    def _find_large(self) -> list[str]:
        """The names of the values that are sliced: as few as possible, always the largest ones."""
        self._unsliced_bytes.clear()
        for value in self._sent.values():
            self._unsliced_bytes[memory_of(value.owner)] += value.size
        count = len(self._memories)
        if count < 3:  # Two devices send and receive the same, whichever owns what.
            return []
        total = sum(self._unsliced_bytes.values())
        # A device that owns `size` of all bytes receives their gradients from each other device,
        # and the values of the rest; and it sends as much. So it's within the limit if
        #     size * (count - 1) + (total - size) <= _MORE_THAN_A_RING * ring
        ring = 2 * total * (count - 1) / count
        limit = (_MORE_THAN_A_RING * ring - total) / (count - 2)
        if self.grid.levels > 1:
            limit /= 2  # It has to exchange slices in its row, however much else it does.

        candidates = defaultdict[str, list[str]](list)  # by owner, the smallest first
        for name in sorted(self._sent, key=lambda name: self._sent[name].size):
            value = self._sent[name]
            is_large = value.size * (count - 1) > _SMALL
            if value.is_sliceable and is_large and value.owner in self._place_of:
                candidates[memory_of(value.owner)].append(name)

        large: list[str] = []
        while self._unsliced_bytes:
            busiest, size = self._unsliced_bytes.most_common(1)[0]
            if size <= limit or not candidates[busiest]:
                return large
            large.append(candidates[busiest].pop())
            self._unsliced_bytes[busiest] -= self._sent[large[-1]].size
        return large

    def _unsliced_base(self) -> dict[str, float]:
        """What each place receives for what isn't sliced, and sends; less what all places do.

        As for a device in `_find_large`, that is total + size * (count - 2), less the total.
        """
        count = len(self._places)
        return {
            place: (count - 2) * sum(self._unsliced_bytes[memory_of(device)] for device in devices)
            for place, devices in self._places.items()
        }

    def _base_of_reads(self, sums: Mapping[str, Shares]) -> dict[str, float]:
        """As `_unsliced_base`, with the slices of gradients that each place sends to others."""
        base = self._unsliced_base()
        for name, shares in sums.items():
            owner = self._owner(name)  # Its own part of a gradient isn't sent.
            base[owner] += self._sent[name].size - shares.get(owner, 0)
        return base

    def _in_entries(self, shares: Shares, entries: int) -> list[Part]:
        """Shares in whole entries of the devices of each place, but for those without one."""
        total = sum(shares.values())
        slices = []
        before = 0
        done = 0.0
        for position, share in self._at(shares):
            done += share
            end = min(round(entries * done / total), entries)
            if end > before:
                slices.append(Part(self.grid.device(position), end - before, position))
                before = end
        return slices

    def _at(self, shares: Shares) -> list[tuple[Position, float]]:
        """The positions at which shares are, in their order, with the bytes that each has."""
        found = []
        for place, share in shares.items():
            positions = [p for device in self._places[place] for p in self.grid.positions(device)]
            found += [(position, share / len(positions)) for position in positions]
        return sorted((position, share) for position, share in found if share > 0)
