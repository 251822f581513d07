"""Where a value comes from that a loop keeps for its gradient.

A branch in a loop, and its gradient in the loop's gradient, are chosen by the same values. What a
step of a loop computes, it pushes into a list, which is a variable of the loop. A step of the
gradient, which is another loop, takes it out of that list:

    step of a loop:        x > 0 --> p --> If(p, ...)        list, p --> TensorListPushBack --> list
    step of its gradient:  list --> TensorListPopBack --> q --> If(q, ...)

The origin of `q` is output 0 of the op `x > 0`, as is that of `p`.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import function_calls, op_types
from estimator_mgpu.tf_internals.v1_loops import passed_on


def output_behind(tensor: tf.Tensor) -> tuple[tf.Operation, int]:
    """The output of an op that has made a tensor, before loops have passed it on, or kept it.

    Returns:
      The op, and which of its outputs it is.
    """
    tensor = passed_on(tensor)
    if tensor.op.type == op_types.LIST_POP:
        source = _pushed_into(_given_to_loop(passed_on(tensor.op.inputs[0]), may_change=True))
    elif tensor.op.type in op_types.LOOPS:
        source = tensor.op.inputs[tensor.value_index] if _never_changes(tensor) else None
    else:
        source = _given_to_loop(tensor, may_change=False)
    return (tensor.op, tensor.value_index) if source is None else output_behind(source)


def _pushed_into(variable: tf.Tensor | None) -> tf.Tensor | None:
    """What each step of a loop pushes into a list; None of other tensors.

    Args:
      variable: mostly the list as it's after the loop.
    """
    body = None if variable is None else _body_of(variable.op)
    if variable is None or body is None:
        return None
    push = body.outputs[variable.value_index].op
    return push.inputs[1] if push.type == op_types.LIST_PUSH else None


def _given_to_loop(tensor: tf.Tensor, may_change: bool) -> tf.Tensor | None:
    """What a loop is given for an argument of its body; None for other tensors.

    Args:
      tensor: mostly an argument of a loop's body.
      may_change: whether steps may change it, as a list. Otherwise it's None for those that do.
    """
    body = tensor.graph
    positions = [i for i, argument in enumerate(getattr(body, 'inputs', ())) if argument is tensor]
    if not positions:
        return None
    for op in body.outer_graph.get_operations():
        if _body_of(op) is body:
            [index] = positions
            is_given = may_change or _never_changes(op.outputs[index])
            return op.inputs[index] if is_given else None
    return None


def _never_changes(variable: tf.Tensor) -> bool:
    """Whether no step changes the variable of a loop, given as it's after the loop."""
    body = _body_of(variable.op)
    index = variable.value_index
    return body is not None and passed_on(body.outputs[index]) is body.inputs[index]


def _body_of(op: tf.Operation) -> Any:
    """The graph of a loop's body; None of other ops, and if it isn't known."""
    graphs = function_calls.function_graphs(op) if op.type in op_types.LOOPS else []
    return graphs[1] if graphs else None
