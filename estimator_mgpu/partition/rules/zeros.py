"""Tells from the graph whether a tensor consists of zeros, or of ones."""

from __future__ import annotations

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import op_types, private
from estimator_mgpu.tf_internals.v1_loops import passed_on


def is_zero(tensor: tf.Tensor) -> bool:
    """Whether the graph alone tells that all of a tensor's entries are zeros."""
    return is_filled_with(0, tensor)


def is_filled_with(number: int, tensor: tf.Tensor) -> bool:
    """The same for another number: 0 or 1."""
    tensor = passed_on(tensor)
    if tensor.op.type in op_types.ZEROS_ONES_LIKE:
        return op_types.ZEROS_ONES_LIKE[tensor.op.type] == number
    filled = tensor.op.inputs[1] if tensor.op.type == op_types.FILL else tensor
    value = private.constant_value(filled)
    return value is not None and bool(np.all(value == number))
