"""What TensorFlow itself says of the shapes that an op takes, before any step runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf


def copy_of(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Operation:
    """Adds an op that does the same to other inputs; raises ValueError if it doesn't take them."""
    attrs = {name: value for name, value in op.node_def.attr.items() if name[0] != '_'}
    types = [tensor.dtype.base_dtype for tensor in op.outputs]
    return tf.get_default_graph().create_op(
        op.type, list(inputs), types, name=f'copies/{op.name}', attrs=attrs, op_def=op.op_def
    )


def takes(op: tf.Operation, inputs: Sequence[Any]) -> bool:
    """Whether TensorFlow makes such an op of inputs: arrays, or shapes where these say enough.

    Of some ops it looks at shapes only when they run, and of a few never.
    """
    with tf.Graph().as_default():
        tensors = [
            tf.constant(given, tensor.dtype.base_dtype)
            if isinstance(given, np.ndarray)
            else tf.placeholder(tensor.dtype.base_dtype, given)
            for tensor, given in zip(op.inputs, inputs)
        ]
        try:
            copy_of(op, tensors)
        except ValueError:
            return False
    return True
