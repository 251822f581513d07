"""Sends full values to the devices that need them: each once to a device, or to a machine.

In: a tensor, and a device. Out: the name of its value there. TensorFlow itself sends what an op
takes from another device; nodes are only added where messages are saved, or cut.
"""

from __future__ import annotations

from collections import defaultdict

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import relay
from estimator_mgpu.partition.messages.exchange import Handed, Vector
from estimator_mgpu.partition.towers.values import Values


class Sender:
    """Sends full values.

    Args:
      values: gives these.
    """

    def __init__(self, values: Values):
        self._values = values
        self._packs = values.packs
        self._slices = values.slices
        self._devices = values.division.devices
        self._nodes = values.nodes
        self._unpacked = defaultdict[str, dict[str, str]](dict)  # by device, then by tensor
        self._handed: dict[str, Handed] = {}  # what is sent in slices, by tensor

    def send(self, value: str, source: str, target: str) -> str:
        """Sends a value to the machine of another device, once for all towers there."""
        receiver = relay(self._devices, target, source)
        return value if receiver is None else self._nodes.add('Identity', [value], receiver)

    def is_packed(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor shares messages with others."""
        return tensor.name in self._packs

    def receive_packed(self, tensor: tf.Tensor, device: str) -> str:
        """The value of a packed tensor on another device, to which its pack is sent once."""
        unpacked = self._unpacked[device]
        source = self._values.origins.device_of_full(tensor)
        if tensor.name not in unpacked:
            pack = self._packs[tensor.name]
            names = [packed.name for packed in pack.tensors]
            with self._nodes.serving(tensor.op, is_for_many=True):
                vector = pack.join(names, self._nodes, source)
                vector = self.send(vector, source, device)
                unpacked.update(pack.split(vector, self._nodes, device))
        return unpacked[tensor.name]

    def receive(self, tensor: tf.Tensor, device: str) -> str:
        """A full value on another device: sent as a whole, or in slices that devices hand on."""
        full = self._values.full(tensor)
        source = self._values.origins.device_of_full(tensor)
        slices = self._slices.of_value(tensor.name, tensor.shape.num_elements() or 0)
        owner, member = self._slices.member(source), self._slices.member(device)
        if not slices or member == owner or not self._slices.is_in_trees(device):
            return self.send(full, source, device)

        with self._nodes.serving(tensor.op):
            if tensor.name not in self._handed:
                flat = self._nodes.add('Reshape', [full, [-1]], source)
                value = Vector(flat, source, owner)
                self._handed[tensor.name] = Handed(self._nodes, slices, value)
            vector = self._handed[tensor.name].on(member)
            return self._nodes.add('Reshape', [vector, tensor.shape.as_list()], device)
