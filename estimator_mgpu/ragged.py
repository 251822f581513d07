"""Parts of sparse and ragged tensors that ops give: shapes, and where rows begin and end."""

from __future__ import annotations

import re

import tensorflow.compat.v1 as tf

from estimator_mgpu import private

# Ops that make sparse tensors, as wide as the longest row.
MAKES_SPARSE = frozenset(
    ['ParseExample', 'ParseExampleV2', 'StringSplit', 'StringSplitV2', 'RaggedTensorToSparse']
    + ['CTCBeamSearchDecoder', 'CTCGreedyDecoder', 'DeserializeManySparse']
)
_MAKES_RAGGED = re.compile('Ragged|ParseExample|Unicode|.*(NGrams|Tokenize)')


def shapes(op: tf.Operation) -> list[tf.Tensor]:
    """Lists the shapes of sparse tensors among an op's outputs."""
    return named(op, ('shape', 'shapes'))


def is_shape(output: tf.Tensor) -> bool:
    """Whether an output of an op that makes sparse tensors is the shape of one."""
    return any(output is other for other in shapes(output.op))


def is_bounds(output: tf.Tensor) -> bool:
    """Whether an output says where rows begin and end, as ragged tensors have it."""
    op = output.op
    if _MAKES_RAGGED.match(op.type):
        return any(output is other for other in named(op, ('splits',)))
    if op.type != 'ConcatV2' or not output.dtype.is_integer:
        return False
    first, *others, _ = op.inputs  # A 0, and the sums of lengths.
    ends = len(others) == 1 and others[0].op.type == 'Cumsum' and others[0].shape.rank == 1
    start = private.constant_value(first) if ends else None
    return start is not None and start.tolist() == [0]


def named(op: tf.Operation, ends: tuple[str, ...]) -> list[tf.Tensor]:
    """Lists the outputs of an op whose names, as the op defines them, have one of these ends."""
    found: list[tf.Tensor] = []
    start = 0
    for arg in op.op_def.output_arg:
        end = start + (op.get_attr(arg.number_attr) if arg.number_attr else 1)
        if arg.type_list_attr:
            end = start + len(op.get_attr(arg.type_list_attr))
        found += op.outputs[start:end] if arg.name.endswith(ends) else []
        start = end
    return found
