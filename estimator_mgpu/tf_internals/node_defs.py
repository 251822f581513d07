"""NodeDefs: ops as a GraphDef describes them, before they are in a graph.

In: an op's type, and the values of its attributes. Out: a NodeDef without a name and inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import private


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


def set_types(node: Any, dtypes: Sequence[tf.DType]) -> None:
    """Sets those attributes of a NodeDef that follow from its operands.

    TensorFlow does so when it adds an op.

    Args:
      dtypes: of the operands. One argument of the op may take several, as `values` of `Pack`, or
        two may that take as many, as those of `DynamicStitch`.
    """
    arguments = private.op_definition(node.op).input_arg
    lists = [argument for argument in arguments if argument.number_attr or argument.type_list_attr]
    assert len({(one.number_attr, one.type_list_attr) for one in lists}) <= 1, node.op
    others = len(arguments) - len(lists)
    position = 0
    for argument in arguments:
        count = (len(dtypes) - others) // len(lists) if argument in lists else 1
        of_argument = dtypes[position : position + count]
        position += count
        if argument.type_list_attr:
            set_attr(node.attr[argument.type_list_attr], of_argument)
        elif argument.type_attr:
            set_attr(node.attr[argument.type_attr], of_argument[0])
        if argument.number_attr:
            set_attr(node.attr[argument.number_attr], count)


def types_of(node: Any, argument: Any) -> list[tf.DType]:
    """The types of the tensors of an argument of a NodeDef's op: an input, or an output."""
    if argument.type_list_attr:
        return [tf.as_dtype(one) for one in attr_of(node, argument.type_list_attr).list.type]
    dtype = attr_of(node, argument.type_attr).type if argument.type_attr else argument.type
    count = attr_of(node, argument.number_attr).i if argument.number_attr else 1
    return [tf.as_dtype(dtype).base_dtype] * count


def attr_of(node: Any, name: str) -> Any:
    """The AttrValue of a NodeDef. Asking `node.attr` for one that isn't there would add it."""
    return node.attr[name] if name in node.attr else _default(node.op, name)


@functools.cache
def _default(op_type: str, name: str) -> Any:
    """The value of an attribute that a NodeDef leaves out."""
    [attr] = [attr for attr in private.op_definition(op_type).attr if attr.name == name]
    return attr.default_value


def slice_masks(op: tf.Operation) -> dict[str, int]:
    """The masks of a `StridedSlice` by name: bit i of each is for index i of `x[0, ..., 1:]`."""
    names = ('begin', 'end', 'ellipsis', 'new_axis', 'shrink_axis')
    attrs = op.node_def.attr
    return {name: attrs[f'{name}_mask'].i for name in names}
