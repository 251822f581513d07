"""Masks that wait for their turns, a bit for each entry.

With micro-batches, a device needs a mask for one turn at a time. But a mask of seeded dropout is
drawn for the global batch at once, and booleans are a byte each. So a mask is packed as soon as
it's there. Each turn takes the bytes of its rows, and unpacks them on its device. As booleans they
would take eight times as much: of a transformer with seeded dropout, on two devices in eight turns,
a device has 1.6 MB of packed masks beside 26 MB of activations.

    mask        [batch, 4, 6]    booleans
    packed      [batch, 3]       bytes, of which a turn takes its rows
    unpacked    [rows, 3, 8]     booleans, looked up by byte
    shard       [rows, 4, 6]     booleans

In: names of tensors. Out: names of what was added.
"""

from __future__ import annotations

import sys

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.nodes.node_builder import NodeBuilder

_ALIGN_BITS = 0x0102040810204080
"""A number of eight bytes, each 0 or 1, times this has these eight bits as its highest byte.

The product is a sum of eight shifted numbers. Each of these moves another bit to the highest byte.
No two of them have a 1 at the same place, so nothing is carried.
"""

_BYTES = np.arange(256, dtype=np.uint8)
_ENTRIES = np.unpackbits(_BYTES[:, None], axis=1, bitorder=sys.byteorder).tolist()
"""The eight entries that each packed byte stands for: [256, 8]."""


def can_be_packed(mask: tf.Tensor) -> bool:
    """Whether a tensor has booleans, and the entries of a row fill bytes."""
    if mask.dtype.base_dtype != tf.bool or not mask.shape.rank:
        return False
    entries_per_row = mask.shape[1:].num_elements()  # None if the graph doesn't know
    return bool(entries_per_row) and entries_per_row % 8 == 0


def pack(nodes: NodeBuilder, value: str, mask: tf.Tensor, device: str) -> str:
    """Packs the value of a mask, on a device: [rows, bytes].

    Eight booleans are read as one number of eight bytes. Their bits then become one byte of it.

    Args:
      value: the mask's full value.
      mask: the user's tensor, which has the shape of the value.
    """
    bytes_per_row = mask.shape[1:].num_elements() // 8
    eights = nodes.add('Reshape', [value, [-1, bytes_per_row, 8]], device)
    eights = nodes.cast(eights, tf.uint8, device)
    numbers = nodes.add('Bitcast', [eights], device, type=tf.uint64)

    factor = nodes.const(_ALIGN_BITS, tf.uint64, device)
    aligned = nodes.add('Mul', [numbers, factor], device)
    seven_bytes = nodes.const(56, tf.uint64, device)
    highest = nodes.add('RightShift', [aligned, seven_bytes], device)
    return nodes.cast(highest, tf.uint8, device)


def unpack(nodes: NodeBuilder, packed: str, mask: tf.Tensor, device: str) -> str:
    """Unpacks some rows of a mask, on a device.

    Args:
      mask: the user's tensor, which has the shape of a row.
    """
    numbers = nodes.cast(packed, tf.int32, device)
    entries = nodes.const(_ENTRIES, tf.bool, device)
    unpacked = nodes.take(entries, numbers, device)
    return nodes.add('Reshape', [unpacked, [-1, *mask.shape.as_list()[1:]]], device)
