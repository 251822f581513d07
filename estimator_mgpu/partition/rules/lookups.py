"""Lookups: rows of indices or keys into what is whole."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules.signature import (
    WHOLE,
    Operand,
    Rule,
    Signature,
    axis,
    labels,
    rank,
    without,
)
from estimator_mgpu.partition.sizes import Sizes


def gather(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`Gather`, `GatherV2`: each index by itself; leading batch dimensions go together."""
    params = labels(op.inputs[0], sizes, 'p')
    along = axis(op, 2, sizes, len(params)) if op.type == 'GatherV2' else 0
    batch = op.get_attr('batch_dims') if op.type == 'GatherV2' else 0
    if along is None:
        return None
    indices = params[:batch] + labels(op.inputs[1], sizes, 'i')[batch:]
    own = without(params, [along])
    result = own[:along] + indices[batch:] + own[along + 1 :]
    return Signature([own, indices] + [WHOLE] * (len(op.inputs) - 2), [result])


def resource_gather(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Rows of a variable, where the variable is."""
    if op.get_attr('batch_dims'):
        return None
    indices = labels(op.inputs[1], sizes)
    return Signature(
        [WHOLE, indices], [indices + (None,) * (rank(op.outputs[0], sizes) - len(indices))]
    )


def gather_nd(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Each vector of indices by itself."""
    indices = without(labels(op.inputs[1], sizes), [rank(op.inputs[1], sizes) - 1])
    result = indices[:-1] + (None,) * (rank(op.outputs[0], sizes) - len(indices) + 1)
    return Signature([WHOLE, indices], [result])


def one_hot(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Each index becomes a vector."""
    own = labels(op.inputs[0], sizes)
    at = op.get_attr('axis') % (len(own) + 1)
    return Signature([own, WHOLE, WHOLE, WHOLE], [own[:at] + (None,) + own[at:]])


def table_find(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Each key by itself, where the table is."""
    keys = labels(op.inputs[1], sizes)
    if rank(op.outputs[0], sizes) != len(keys):
        return None
    return Signature([WHOLE, keys, WHOLE], [keys])


def segment_sum(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`UnsortedSegmentSum`: a sum over the entries of each segment."""
    ids = labels(op.inputs[1], sizes)
    data = ids + (None,) * (rank(op.inputs[0], sizes) - len(ids))
    inputs: list[Operand] = [data, ids, WHOLE]
    return Signature(inputs, [(None,) * rank(op.outputs[0], sizes)], 'sum')


RULES: dict[str, Rule] = {
    'Gather': gather,
    'GatherV2': gather,
    'ResourceGather': resource_gather,
    'GatherNd': gather_nd,
    'ResourceGatherNd': gather_nd,
    'OneHot': one_hot,
    'LookupTableFind': table_find,
    'LookupTableFindV2': table_find,
    'UnsortedSegmentSum': segment_sum,
}
