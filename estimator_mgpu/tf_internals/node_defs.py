"""NodeDefs: ops as a GraphDef describes them, before they are in a graph.

In: an op's type, and the values of its attributes. Out: a NodeDef without a name and inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf


def node_def(op: str, **attrs: Any) -> Any:
    """A NodeDef that has neither a name nor inputs."""
    node = tf.NodeDef(op=op)
    for key, value in attrs.items():
        set_attr(node.attr[key], value)
    return node


def const_def(value: Any, dtype: tf.DType) -> Any:
    """The NodeDef of a constant."""
    return node_def('Const', dtype=dtype, value=np.asarray(value, dtype.as_numpy_dtype))


def set_attr(attr: Any, value: Any) -> None:
    """Sets an attribute of a NodeDef.

    It's a DType, shape, tensor, text or number, or a list of integers or DTypes.
    """
    if isinstance(value, tf.DType):
        attr.type = value.as_datatype_enum
    elif isinstance(value, tf.TensorShape):
        attr.shape.CopyFrom(value.as_proto())
    elif isinstance(value, bytes):
        attr.tensor.ParseFromString(value)
    elif isinstance(value, np.ndarray):
        attr.tensor.CopyFrom(tf.make_tensor_proto(value))
    elif isinstance(value, str):
        attr.s = value.encode()
    elif isinstance(value, bool):
        attr.b = value
    elif isinstance(value, int):
        attr.i = value
    elif value and isinstance(value[0], tf.DType):
        attr.list.CopyFrom(tf.AttrValue.ListValue(type=[dtype.as_datatype_enum for dtype in value]))
    else:
        attr.list.CopyFrom(tf.AttrValue.ListValue(i=value))
