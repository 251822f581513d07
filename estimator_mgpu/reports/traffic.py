"""What devices send each other when ops run, counted in the graph: no step runs.

In: the ops of a finished graph, on their devices. Out: messages: from where, to where, how large.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import device_spec
from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.once_devices import device_of
from estimator_mgpu.tf_internals import graphs


class Traffic(NamedTuple):
    """What a device sends to others in a step, and receives from them."""

    sent: int  # bytes
    received: int  # bytes
    messages: int  # that it sends: a tensor is one message for each device that needs it


class Message(NamedTuple):
    """A tensor that a device sends to another one, or the end of an op for which the other waits.

    Attributes:
      source: the device that sends it.
      target: the other one.
      size: how many bytes; 0 of the end of an op.
      name: of the tensor, or of the op.
    """

    source: str
    target: str
    size: int
    name: str

    @property
    def is_tensor(self) -> bool:
        """Whether it's a tensor that is sent."""
        return ':' in self.name


def messages(ops: Sequence[tf.Operation], first: str) -> list[Message]:
    """What devices send each other when ops run.

    TensorFlow sends a tensor once to each device. An op without a device counts as on the first.
    """
    devices = {op: device_of_op(op, first) for op in graphs.ancestors(ops)}
    sent: dict[tuple[str, str], Message] = {}
    for op, device in devices.items():
        for tensor in op.inputs:
            source = devices[tensor.op]
            if source != device:
                sent[tensor.name, device] = Message(source, device, bytes_of(tensor), tensor.name)
        for before in op.control_inputs:
            if devices[before] != device:
                sent[before.name, device] = Message(devices[before], device, 0, before.name)
    return list(sent.values())


def device_of_op(op: tf.Operation, first: str) -> str:
    """The device of an op, or of what it's colocated with; else the first device."""
    device = device_of(op)
    if not device:
        for name in graphs.colocated_with(op):
            device = device_of(op.graph.get_operation_by_name(name))
            if device:
                break
    return device_spec(device or first).to_string()


def by_device(moved: Sequence[Message]) -> dict[str, Traffic]:
    """What each device sends and receives, of the messages between all of them."""
    sent, received, count = Counter[str](), Counter[str](), Counter[str]()
    for message in moved:
        sent[message.source] += message.size
        received[message.target] += message.size
        count[message.source] += 1
    return {to: Traffic(sent[to], received[to], count[to]) for to in sorted({*count, *received})}


def bytes_between(moved: Sequence[Message]) -> dict[str, dict[str, int]]:
    """How many bytes go from one device to another, of the messages between all of them."""
    sent: dict[str, Counter[str]] = {}
    for message in moved:
        sent.setdefault(message.source, Counter())[message.target] += message.size
    return {source: dict(sizes) for source, sizes in sorted(sent.items())}
