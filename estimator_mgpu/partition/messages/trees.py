"""Makes the tree by which a slice of a value gets from its owner to all devices.

    value       owner --> a --> b, c        Each device sends the slice to those below it.
    gradient    owner <-- a <-- b, c        Each adds up its own and those of the devices below it.

So a device receives as many bytes as it sends: the slice once, from and to the one above it, and
once more for each device below it. Each slice has another tree: in each, the devices that have sent
least so far have most below them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from estimator_mgpu.devices import machine_of

# How many times a ring's bytes the busiest device, or machine, is to send. As slices stay whole, it
# may send up to half of one more.
_OF_A_RING = 1.04
_BESIDE_MACHINES = 1.2  # a device of several machines, as links between these are slower

Tree = dict[str, str]
"""The device above each one but the owner. Devices come after the one above them."""


def room_of(unsliced: float, total: float, count: int, of_a_ring: float) -> float:
    """How many bytes a device, or a machine, may still send of slices to those below it.

    Anyhow, it sends the gradients of others' values, and each of its own values to all others if
    that isn't sliced: so each value once, or its gradient, and what isn't sliced `count - 2` times
    more.

    Args:
      unsliced: the bytes of its own values that aren't sliced.
      total: of all values.
      count: how many devices there are, or machines.
      of_a_ring: what it may send in all, relative to a ring of them.
    """
    ring = 2 * total * (count - 1) / count
    return of_a_ring * ring - total - unsliced * (count - 2)


class Room:
    """How many bytes of slices each device, and each machine, may still send to those below it.

    Args:
      devices: all.
      unsliced: by device, the bytes of its values that aren't sliced.
      total: the bytes of all values.
    """

    def __init__(self, devices: Sequence[str], unsliced: Mapping[str, float], total: float):
        self._machines = defaultdict[str, list[str]](list)
        for device in devices:
            self._machines[machine_of(device)].append(device)
        of_a_ring = _OF_A_RING if len(self._machines) == 1 else _BESIDE_MACHINES
        self._room = {
            device: room_of(unsliced[device], total, len(devices), of_a_ring) for device in devices
        }
        for machine in self._machines:
            of_machine = sum(
                size for owner, size in unsliced.items() if machine_of(owner) == machine
            )
            self._room[machine] = room_of(of_machine, total, len(self._machines), _OF_A_RING)

    def tree(self, owner: str, size: float) -> Tree:
        """Makes the tree of a slice, and takes the room that it needs.

        Only one device of each other machine is below one of another machine.

        Args:
          owner: of the value.
          size: of the slice, in bytes.
        """
        tree = _Tree(owner, size, self._room)
        # `room_of` has counted a gradient of the slice, which the owner sends to nobody.
        self._room[owner] += size
        self._room[machine_of(owner)] += size
        others = dict(self._machines)
        own = others.pop(machine_of(owner))
        tree.add(own, [owner])
        heads = [max(devices, key=self._room.__getitem__) for devices in others.values()]
        tree.add(heads, own)
        for head, devices in zip(heads, others.values()):
            tree.add(devices, [head])
        return tree.above


class _Tree:
    """A tree that grows.

    Attributes:
      above: the tree.
    """

    def __init__(self, owner: str, size: float, room: dict[str, float]):
        self.above: Tree = {}
        self._size = size
        self._room = room  # by device and by machine
        self._hops = {owner: 0}  # from the owner

    def add(self, devices: Iterable[str], top: Iterable[str]) -> None:
        """Adds the devices that aren't in the tree yet, below those at the top, or each other.

        Those with the most room come first, as others can be below them.
        """
        joined = list(top)
        new = [device for device in devices if device not in self._hops]
        for device in sorted(new, key=lambda d: -self._room_for(d, joined[0])):
            above = self._best(device, joined)
            self.above[device] = above
            self._hops[device] = self._hops[above] + 1
            for sender in self._senders(device, above):
                self._room[sender] -= self._size
            joined.append(device)

    def _best(self, device: str, joined: Sequence[str]) -> str:
        """The device to put another one below: of those with room, the fewest hops from the owner.

        Room for half of the slice is enough, as for others there may be too much by a half.
        """
        roomy = [above for above in joined if self._room_for(above, device) >= self._size / 2]
        if roomy:
            return min(roomy, key=self._hops.__getitem__)
        return max(joined, key=lambda above: self._room_for(above, device))

    def _room_for(self, above: str, device: str) -> float:
        """How many bytes a device may send to another one, which may be on another machine."""
        return min(self._room[sender] for sender in self._senders(device, above))

    def _senders(self, device: str, above: str) -> list[str]:
        """The device above another one; and its machine, if the other one is on another machine."""
        machine = machine_of(above)
        return [above] if machine == machine_of(device) else [above, machine]
