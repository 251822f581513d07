"""Ops that make tensors of given sizes."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules.signature import WHOLE, Entries, Label, Rule, Signature
from estimator_mgpu.partition.sizes import ONE, Sizes


def fill(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """A value for each entry."""
    entries = sizes.entries(op.inputs[0])
    if entries is None:
        return None
    new = tuple(f'{i}' for i in range(len(entries)))
    return Signature([Entries(new), WHOLE], [new], dims=[entries])


def broadcast_to(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """A dimension of size 1 is repeated, others are kept."""
    dims, entries = sizes.dims(op.inputs[0]), sizes.entries(op.inputs[1])
    if dims is None or entries is None:
        return None
    missing = len(entries) - len(dims)
    new = tuple(f'{i}' for i in range(len(entries)))
    own: list[Label] = [None if d == ONE else new[missing + i] for i, d in enumerate(dims)]
    return Signature([tuple(own), Entries(new)], [new], dims=[entries])


def random(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Numbers without a seed: each tower draws those of its rows.

    With a seed, all numbers are drawn once, in the order of one device.
    """
    entries = sizes.entries(op.inputs[0])
    if entries is None or op.get_attr('seed') or op.get_attr('seed2'):
        return None
    new = tuple(f'{i}' for i in range(len(entries)))
    inputs = [Entries(new)] + [WHOLE] * (len(op.inputs) - 1)
    return Signature(inputs, [new], dims=[entries])


RULES: dict[str, Rule] = {
    'Fill': fill,
    'BroadcastTo': broadcast_to,
    **dict.fromkeys(['RandomStandardNormal', 'RandomUniform', 'TruncatedNormal'], random),
}
