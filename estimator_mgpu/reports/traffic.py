"""What devices send each other when ops run, counted in the graph: no step runs.

In: the ops of a finished graph, on their devices. Out: messages: from where, to where, how large.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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


def messages(ops: Sequence[tf.Operation], first: str) -> list[tuple[str, str, int]]:
    """What devices send each other when ops run: from, to and bytes of each message.

    TensorFlow sends a tensor once to each device. An op without a device counts as on the first.
    """
    devices = {op: device_of_op(op, first) for op in graphs.ancestors(ops)}
    sent = {
        (source, target, tensor.name): bytes_of(tensor)
        for source, target, tensor in _crossing(devices)
    }
    for op, device in devices.items():
        for before in op.control_inputs:
            if devices[before] != device:
                sent.setdefault((devices[before], device, before.name), 0)
    return [(source, target, size) for (source, target, _), size in sent.items()]


def tensors_sent(ops: Sequence[tf.Operation], first: str) -> list[tuple[str, str, tf.Tensor]]:
    """The tensors that devices send each other when ops run, each with from and to.

    Control edges aren't among them.
    """
    return _crossing({op: device_of_op(op, first) for op in graphs.ancestors(ops)})


def _crossing(devices: Mapping[tf.Operation, str]) -> list[tuple[str, str, tf.Tensor]]:
    """As `tensors_sent`, by the devices of all ops that run."""
    needed = {(t.name, device): t for op, device in devices.items() for t in op.inputs}
    return [
        (devices[tensor.op], device, tensor)
        for (_, device), tensor in needed.items()
        if devices[tensor.op] != device
    ]


def device_of_op(op: tf.Operation, first: str) -> str:
    """The device of an op, or of what it's colocated with; else the first device."""
    device = device_of(op)
    if not device:
        for name in graphs.colocated_with(op):
            device = device_of(op.graph.get_operation_by_name(name))
            if device:
                break
    return device_spec(device or first).to_string()


def by_device(moved: Sequence[tuple[str, str, int]]) -> dict[str, Traffic]:
    """What each device sends and receives, of the messages between all of them."""
    sent, received, count = Counter[str](), Counter[str](), Counter[str]()
    for source, target, size in moved:
        sent[source] += size
        received[target] += size
        count[source] += 1
    return {to: Traffic(sent[to], received[to], count[to]) for to in sorted({*count, *received})}


def bytes_between(moved: Sequence[tuple[str, str, int]]) -> dict[str, dict[str, int]]:
    """How many bytes go from one device to another, of the messages between all of them."""
    sent: dict[str, Counter[str]] = {}
    for source, target, size in moved:
        sent.setdefault(source, Counter())[target] += size
    return {source: dict(sizes) for source, sizes in sorted(sent.items())}
