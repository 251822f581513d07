"""The `while_loop`s of TensorFlow 1: loops that are made of ops, rather than of functions.

Each variable of such a loop goes around in a circle:

    start --> Enter --> Merge --> Switch ----> Exit --> result
                          ^        ^  |
                          |        |  +--> ops of the body --> NextIteration --+
                          |        |                                           |
                          |     LoopCond <-- ops of the condition <-- Merge    |
                          +----------------------------------------------------+

What the loop only uses, a constant of the loop, comes in by an `Enter` alone. All ops between
`Enter` and `Exit` are in one *frame*: they can use only what is in the frame. A loop in a loop has
a frame in a frame.

Loops are found by the types of their ops, since an imported graph has nothing else that tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Union

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import op_types
from estimator_mgpu.tf_internals.graphs import (
    begins_steps,
    direct_inputs,
    is_way_back,
    sorted_by_inputs,
)
from estimator_mgpu.tf_internals.liveness import Frame, Liveness


@dataclass(eq=False)
class V1Loop:
    """A loop. Like an op, it has a type, a name, inputs and outputs.

    Attributes:
      name: that of its frame.
      enters: the ops by which all comes in: variables, and then constants.
      exits: the ops by which results come out: the last values of variables, or of them.
      all_ops: all of its ops, `enters`, `exits` and those of inner loops included.
      body: its condition and its body; None if its ops aren't connected as in the picture above.
    """

    name: str
    enters: Sequence[tf.Operation]
    exits: Sequence[tf.Operation]
    all_ops: Sequence[tf.Operation]
    body: LoopBody | None
    type = op_types.V1_LOOP

    @property
    def inputs(self) -> list[tf.Tensor]:
        """What comes in, in the order of `enters`."""
        return [enter.inputs[0] for enter in self.enters]

    @property
    def outputs(self) -> list[tf.Tensor]:
        """What comes out, in the order of `exits`."""
        return [exit.outputs[0] for exit in self.exits]


OpOrLoop = Union[tf.Operation, V1Loop]
"""An op, or a loop that takes the place of all of its ops."""


@dataclass(eq=False)
class LoopBody:
    """A loop's condition and body. Like a function's graph, it has inputs, ops and outputs.

    Attributes:
      name: the loop's.
      inputs: the values at the begin of a step, of variables and constants.
      outputs: those at its end, in the same order.
      results: what the loop gives when it ends, in the order of its `exits`.
      condition: whether the loop goes on, a bool scalar.
      unchanged: indices of the inputs that are the same in each step.
      ops: its ops and inner loops, each after those that it depends on.
    """

    name: str
    inputs: Sequence[tf.Tensor]
    outputs: Sequence[tf.Tensor]
    results: Sequence[tf.Tensor]
    condition: tf.Tensor
    unchanged: Container[int]
    ops: Sequence[OpOrLoop]

    def get_operations(self) -> Sequence[OpOrLoop]:
        """As of a `tf.Graph`."""
        return self.ops


def find_loops(unused: Container[str], liveness: Liveness) -> list[V1Loop]:
    """The outermost loops of a graph.

    Args:
      unused: names of ops that are left out.
      liveness: of all ops of the graph.
    """
    members = defaultdict[Frame, list[tf.Operation]](list)
    for op in liveness.in_loops:
        begins = op.type in op_types.ENTER
        frame = liveness.output_frame(op) if begins else liveness.frame(op)
        if frame and op.name not in unused:
            members[frame].append(op)

    # The innermost first, as the loops around them contain them.
    inner_loops = defaultdict[Frame, list[V1Loop]](list)
    for frame in sorted(members, key=len, reverse=True):
        loop = _loop(frame[-1].decode(), members[frame], inner_loops[frame])
        inner_loops[frame[:-1]].append(loop)
    return inner_loops[()]


def _loop(name: str, ops: Sequence[tf.Operation], inner: Sequence[V1Loop]) -> V1Loop:
    """The loop of a frame.

    Args:
      name: the frame's.
      ops: those in the frame, but in no inner one.
      inner: the loops in it.
    """
    all_ops = [*ops, *(op for loop in inner for op in loop.all_ops)]
    enters = [op for op in ops if op.type in op_types.ENTER]
    exits = [op for op in ops if op.type in op_types.EXIT]
    variables = _variables(ops)
    if variables is None or any(loop.body is None for loop in inner):
        return V1Loop(name, enters, exits, all_ops, body=None)

    begins = [variable.enter for variable in variables]
    constants = [enter for enter in enters if enter not in begins]
    condition = variables[0].condition
    around = {condition, *enters, *exits}
    for variable in variables:
        around |= {variable.merge, variable.next_iteration}
    body_ops = with_loops([op for op in all_ops if op not in around], inner)

    # A constant is the same at the begin and at the end of a step.
    constant_values = [enter.outputs[0] for enter in constants]
    begin = [variable.merge.outputs[0] for variable in variables]
    end = [variable.next_iteration.inputs[0] for variable in variables]
    unchanged = {index for index, variable in enumerate(variables) if variable.is_unchanged}
    unchanged.update(range(len(variables), len(variables) + len(constants)))

    body = LoopBody(
        name,
        inputs=begin + constant_values,
        outputs=end + constant_values,
        results=[exit.inputs[0] for exit in exits],
        condition=condition.inputs[0],
        unchanged=unchanged,
        ops=_handles_kept_last(body_ops),
    )
    return V1Loop(name, [*begins, *constants], exits, all_ops, body)


def _handles_kept_last(ops: Sequence[OpOrLoop]) -> list[OpOrLoop]:
    """Lets ops that keep a handle in a stack come after those that say what is in its list."""
    keep_handles = [
        op for op in ops if op.type == op_types.STACK_PUSH and op.inputs[1].dtype == tf.resource
    ]
    return [op for op in ops if op not in keep_handles] + keep_handles


class _Variable(NamedTuple):
    """The ops of one variable of a loop."""

    enter: tf.Operation
    merge: tf.Operation
    condition: tf.Operation
    next_iteration: tf.Operation

    @property
    def is_unchanged(self) -> bool:
        """Whether each step leaves it as it is."""
        return passed_on(self.next_iteration.inputs[0]) is self.merge.outputs[0]


def _variables(ops: Sequence[tf.Operation]) -> list[_Variable] | None:
    """The variables of a loop, by the ops in its frame, but in no inner one.

    It's None if they aren't connected as in the picture above.
    """
    conditions = {op for op in ops if op.type == op_types.LOOP_CONDITION}
    try:
        variables = [_variable(op) for op in ops if begins_steps(op)]
    except ValueError:
        return None
    has_one_condition = len(conditions) == 1
    return (
        variables if has_one_condition and {v.condition for v in variables} == conditions else None
    )


def _variable(merge: tf.Operation) -> _Variable:
    """The variable of a `Merge`.

    Raises:
      ValueError: if its ops aren't connected as in the picture above.
    """
    [enter] = [tensor.op for tensor in merge.inputs if tensor.op.type in op_types.ENTER]
    [next_iteration] = [tensor.op for tensor in merge.inputs if is_way_back(tensor)]
    [switch] = [
        op
        for op in merge.outputs[0].consumers()
        if op.type in op_types.SWITCH and op.inputs[1].op.type == op_types.LOOP_CONDITION
    ]
    return _Variable(enter, merge, switch.inputs[1].op, next_iteration)


def passed_on(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor itself, or the one that it passes on without a change, in the same frame."""
    while tensor.op.type in op_types.PASS_ON:
        tensor = tensor.op.inputs[0]
    return tensor


def entered(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor itself, or the one outside of loops that it passes on without a change."""
    while tensor.op.type in (*op_types.PASS_ON, *op_types.ENTER):
        tensor = tensor.op.inputs[0]
    return tensor


def with_loops(ops: Iterable[tf.Operation], loops: Sequence[V1Loop]) -> list[OpOrLoop]:
    """The ops, each after those that it depends on, with loops in the place of their ops."""
    if not loops:
        return sorted_by_inputs({op: direct_inputs(op) for op in ops})
    loop_of = {op: loop for loop in loops for op in loop.all_ops}
    inputs: dict[OpOrLoop, list[OpOrLoop]] = {}
    for op in ops:
        op_or_loop = loop_of.get(op, op)
        if op_or_loop not in inputs:
            begins = op_or_loop.enters if isinstance(op_or_loop, V1Loop) else [op]
            sources = [source for begin in begins for source in direct_inputs(begin)]
            inputs[op_or_loop] = [loop_of.get(source, source) for source in sources]
    return sorted_by_inputs(inputs)
