"""What comes after a loop uses the variables that the loop was given, rather than passed on.

The body of a `While` may use a variable. Then the loop also has the variable's handle as an output,
and `tf.gradients` asks for the shape of that:

    variable ---> While ---> handle ---> VariableShape

For this shape, the user's loop would run in each step, beside the copies of all towers:

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
    for op in division.model_ops():
        if op.type in op_types.LOOPS:
            for output, operand in zip(op.outputs, op.inputs):
                if output.dtype == tf.resource and _only_passes_on(op, output.value_index):
                    redirections.add(output, operand)
    redirections.make()


def _only_passes_on(loop: tf.Operation, index: int) -> bool:
    """Whether a loop gives a handle on after each step, and doesn't write to what it names.

    If it writes, who reads by its output reads after the loop. False if nothing is known.
    """
    functions = function_calls.function_graphs(loop)
    if not functions or maker_of_state(loop.inputs[index]) in written_state(loop):
        return False
    _, body = functions
    return passed_on(body.outputs[index]) is body.inputs[index]
