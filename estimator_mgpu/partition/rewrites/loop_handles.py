"""What comes after a loop uses the variables that the loop was given, rather than passed on.

The body of a `While` may use a variable. Then the loop also has the variable's handle as an output,
and `tf.gradients` asks for the shape of that:

    variable ---> While ---> handle ---> VariableShape

For this shape, the user's loop would belong to each step, beside the copies of all towers, and it
needs the whole batch. TensorFlow takes it apart and leaves it out, so a step isn't longer. But of a
network with such a loop, micro-batches would save only 33% of the activations, rather than all:

    variable ---> While
        |
        +-------------------------------> VariableShape
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.order.accesses import written_state
from estimator_mgpu.tf_internals import function_calls, graphs, op_types
from estimator_mgpu.tf_internals.effects import maker_of_state
from estimator_mgpu.tf_internals.v1_loops import passed_on


def bypass_loops_of_handles(division: Division) -> None:
    """Lets the users of handles that loops pass on use those that the loops were given."""
    redirections = graphs.Redirections()
    for loop in division.model_ops(op_types.LOOPS):
        for index in _handles_only_passed_on(loop):
            redirections.add(loop.outputs[index], loop.inputs[index])
    redirections.make()


def _handles_only_passed_on(loop: tf.Operation) -> list[int]:
    """The indices of the handles that a loop gives on after each step; none if nothing is known.

    If the loop writes to what a handle names, whoever uses it after the loop may read what was
    written, so that handle isn't among them.
    """
    functions = function_calls.function_graphs(loop)
    handles = [output.value_index for output in loop.outputs if output.dtype == tf.resource]
    if not functions or not handles:
        return []

    _, body = functions
    written = written_state(loop)
    return [
        index
        for index in handles
        if passed_on(body.outputs[index]) is body.inputs[index]
        and maker_of_state(loop.inputs[index]) not in written
    ]
