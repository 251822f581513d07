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
ring, or a tenth more. Logical CPU devices share their memory, so nothing is sliced for them.
Whatever the slices, all entries are added up in the order of the towers.

In: the values that towers need in full, with their sizes and devices. Out: for such a value, or for
a sum of the same size on the same device, how many entries are on which device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import machine_of, memory_of
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.plan import FULL, Plan
from estimator_mgpu.partition.towers.once_devices import runs_at_its_table
from estimator_mgpu.tf_internals import op_types

_MORE_THAN_A_RING = 1.1  # what the busiest device may send or receive
# Bytes: a value that isn't larger isn't sliced, as a message costs about as much. `everywhere` lets
# each device make such a value.
SMALL = 1 << 16
_SMALLEST_SLICE = 1 << 12


class Sent(NamedTuple):
    """A value that is sent to all devices.

    Attributes:
      size: its bytes.
      owner: the device that has it.
      is_sliceable: whether its shape is known, and it's no part of a pack.
    """

    size: int
    owner: str
    is_sliceable: bool


def find_sent(
    plan: Plan, packs: Container[str], device_of_full: Callable[[tf.Tensor], str]
) -> dict[str, Sent]:
    """Finds what is sent to all devices: what towers need in full, and no tower makes.

    Args:
      plan: which ops are sharded.
      packs: the names of tensors that share a message with others.
      device_of_full: gives the device of a tensor's full value.
    """
    of_batch = set(plan.order)
    sent = {}
    for op in plan.order:
        op_plan = plan.ops.get(op.name)
        if op_plan is None or runs_at_its_table(op, op_plan, device_of_full):
            continue  # Rows are sent, rather than the table.
        for tensor, need in zip(op.inputs, op_plan.needs):
            if need != FULL or tensor.op in of_batch or tensor.op.type == op_types.CONST:
                continue
            if tensor.dtype.base_dtype.is_floating:
                is_known = tensor.shape.is_fully_defined() and tensor.name not in packs
                sent[tensor.name] = Sent(bytes_of(tensor), device_of_full(tensor), is_known)
    return sent


class Part(NamedTuple):
    """A slice: some entries of a value, and the device that adds them up or hands them on."""

    device: str
    entries: int


Shares = dict[str, float]  # by place, a device or a machine, how many bytes of a value it has


class Slices:
    """Decides what is sliced.

    Args:
      sent: the values that are sent to all devices, by the names of their tensors.
      devices: those of towers.
    """

    def __init__(self, sent: Mapping[str, Sent], devices: Sequence[str]):
        self._sent = sent
        self._unsliced_bytes: Counter[str] = Counter()  # by their owner's memory
        for value in sent.values():
            self._unsliced_bytes[memory_of(value.owner)] += value.size

        # Several machines share a value among each other, and then each among its devices: among
        # one of those that share their memory.
        self._memories: set[str] = set()
        self._place_of: dict[str, str] = {}
        self._places: dict[str, list[str]] = {}
        machines = {machine_of(device) for device in devices}
        for device in devices:
            memory = memory_of(device)
            self._place_of[device] = machine_of(device) if len(machines) > 1 else memory
            if memory not in self._memories:
                self._memories.add(memory)
                self._places.setdefault(self._place_of[device], []).append(device)

        large = self._find_large()
        # For each byte of a slice, how many are received: from all others, but if another place
        # than the owner adds it up, the owner receives one, too.
        others = len(self._places) - 1
        sums = self._share(large, self._unsliced_base(), others, others - 1)
        # And how many are sent: a place doesn't hand its slice on to the owner, nor to itself.
        base = self._base_of_reads(large, sums)
        reads = self._share(large, base, others - 1, others - 1)
        self._reads = dict(zip(large, reads))
        self._sums = defaultdict[tuple[int, str], list[Shares]](list)
        for name, shares in zip(large, sums):
            self._sums[sent[name].size, sent[name].owner].append(shares)

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

    def _find_large(self) -> list[str]:
        """The names of the values that are sliced: as few as possible, always the largest ones."""
        count = len(self._memories)
        if count < 3:  # Two devices send and receive the same, whichever owns what.
            return []
        total = sum(self._unsliced_bytes.values())
        # A device that owns `size` of all bytes receives their gradients from each other device,
        # and the values of the rest; and it sends as much. So it's within the limit if
        #     size * (count - 1) + (total - size) <= _MORE_THAN_A_RING * ring
        ring = 2 * total * (count - 1) / count
        limit = (_MORE_THAN_A_RING * ring - total) / (count - 2)

        candidates = defaultdict[str, list[str]](list)  # by owner, the smallest first
        for name in sorted(self._sent, key=lambda name: self._sent[name].size):
            value = self._sent[name]
            if value.is_sliceable and value.size > SMALL and value.owner in self._place_of:
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

    def _base_of_reads(self, large: Sequence[str], sums: Sequence[Shares]) -> dict[str, float]:
        """What each place sends: that, and the slices of gradients that others add up."""
        base = self._unsliced_base()
        for name, shares in zip(large, sums):
            size = self._sent[name].size
            owner = self._place_of[self._sent[name].owner]
            base[owner] += size - shares.get(owner, 0)  # Its own part of a gradient isn't sent.
        return base

    def _share(
        self, large: Sequence[str], base: Mapping[str, float], cost: int, cost_at_owner: int
    ) -> list[Shares]:
        """Shares values among places, so that the busiest one has as little to do as possible.

        Args:
          large: the names of the values.
          base: what each place has to do anyhow, in bytes.
          cost: what each byte of a share adds to that.
          cost_at_owner: the same at the owner of the value.

        Returns:
          For each value, the shares of places.
        """
        if cost_at_owner == 0:  # Of two machines, the owner's is no busier than the other one.
            return [
                {self._place_of[self._sent[name].owner]: self._sent[name].size} for name in large
            ]

        low = 0.0
        high = max(base.values()) + cost * sum(self._sent[name].size for name in large)
        shares = self._fill(large, base, high, cost, cost_at_owner)
        assert shares is not None, 'up to this level, any place could take all values'
        for _ in range(40):
            level = (low + high) / 2
            attempt = self._fill(large, base, level, cost, cost_at_owner)
            if attempt is None:
                low = level
            else:
                shares, high = attempt, level
        return shares

    def _fill(
        self,
        large: Sequence[str],
        base: Mapping[str, float],
        level: float,
        cost: int,
        cost_at_owner: int,
    ) -> list[Shares] | None:
        """Gives each place as much as it can take up to a level; None if that isn't all.

        Owners come first. What they leave goes to one place after the other, so that there are few
        slices.
        """
        room = {place: max(level - load, 0.0) for place, load in base.items()}
        shares: list[Shares] = []
        left: list[float] = []
        for name in large:
            size = self._sent[name].size
            owner = self._place_of[self._sent[name].owner]
            part = min(size, room[owner] / cost_at_owner)
            if part < _SMALLEST_SLICE:
                part = 0.0
            room[owner] -= part * cost_at_owner
            shares.append({owner: part})
            left.append(size - part)

        places = list(base)
        for of_value, rest in zip(shares, left):
            while rest > 0 and places:
                place = places[0]
                part = min(rest, room[place] / cost)
                if part == rest or part >= _SMALLEST_SLICE:
                    of_value[place] = of_value.get(place, 0.0) + part
                    room[place] -= part * cost
                    rest -= part
                if rest > 0:
                    places.pop(0)
            if rest > 0:
                return None
        return shares

    def _in_entries(self, shares: Shares, entries: int) -> list[Part]:
        """Shares in whole entries of the devices of each place, but for those without one."""
        total = sum(shares.values())
        slices = []
        before = 0
        done = 0.0
        for place, share in shares.items():
            devices = self._places[place]
            for device in devices:
                done += share / len(devices)
                end = min(round(entries * done / total), entries)
                if end > before:
                    slices.append(Part(device, end - before))
                    before = end
        return slices
