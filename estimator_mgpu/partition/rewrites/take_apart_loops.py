"""Loops whose steps need what all examples give become loops of TensorFlow 1.

A decoder goes on until all examples are finished:

    tf.while_loop(lambda i, state, finished: ~tf.reduce_all(finished), ...)

And if a step trains weights, the next one uses them:

    tf.while_loop(lambda i, w: i < 5, lambda i, w: (i + 1, w - tf.gradients(loss(w), w)[0]), ...)

So all towers have to make each step together, and combine what each says. A `While` can't do so: it
calls functions, and each tower would call its own. The ops of a v1 loop can, as they are in the
graph, in one frame. TensorFlow itself makes such ops of each `While` when a session begins. Here it
is done before that:

    start --> While(condition, body) --> result      =>

    start --> Enter --> Merge --> Switch --> Exit --> result
                          ^        ^  |
                          |        |  +--> ops of the body --> NextIteration --+
                          |        |                                           |
                          |     LoopCond <-- ops of the condition <-- Merge    |
                          +----------------------------------------------------+
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.rewrites.function_ops import add_ops, after, take_place_of
from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private, tracebacks
from estimator_mgpu.tf_internals.effects import has_side_effect

_ADDS = (*op_types.SUMS_OF_TWO, 'AddN', op_types.IDENTITY)
_SUMS_OVER_FIRST = ('BiasAddGrad', 'Conv2DBackpropFilter', 'DepthwiseConv2dNativeBackpropFilter')


def take_apart_loops(division: Division) -> None:
    """Replaces the outputs of loops that depend on the batch by those of equal v1 loops.

    The loops stay in the graph, for whoever fetches them.
    """
    if not graphs.ops_of_types(division.graph, op_types.LOOPS):
        return
    of_batch = graphs.dependents(division.inputs, division.existing_ops)
    candidates = [op for op in of_batch if op.type in op_types.LOOPS]
    while candidates:  # Each loop's inner loops come next; no function calls itself.
        loop = candidates.pop()
        functions = function_calls.function_graphs(loop)
        if not functions or any(map(_has_effects, functions)):
            continue
        if _examples_decide(*functions) or _examples_change_steps(functions[1]):
            candidates += _take_apart(loop, division)


def _examples_change_steps(body: Any) -> bool:
    """Whether a step uses a variable that the step before has computed from a sum over examples.

    Of the ops that sum over dimension 0, those count that almost always do so over examples. What
    is only summed up, over all steps, needn't be the sum over all examples before the loop ends.
    """
    for argument, output in zip(body.inputs, body.outputs):
        if output is argument or not output.dtype.is_floating or _is_only_added_to(argument):
            continue
        if any(map(_sums_over_first, graphs.ancestors([output.op], graphs.data_inputs))):
            return True
    return False


def _is_only_added_to(tensor: tf.Tensor) -> bool:
    """Whether ops only add to a tensor, and to what comes of that."""
    seen: set[tf.Operation] = set()
    tensors = [tensor]
    while tensors:
        users = set(tensors.pop().consumers()) - seen
        if not all(user.type in _ADDS for user in users):
            return False
        seen |= users
        tensors += [output for user in users for output in user.outputs]
    return True


def _sums_over_first(op: tf.Operation) -> bool:
    """Whether an op sums over dimension 0, as the gradient of a weight does."""
    if op.type in _SUMS_OVER_FIRST:
        return True
    if op.type == 'MatMul':
        return bool(op.get_attr('transpose_a'))
    if op.type in op_types.REDUCTIONS and op.inputs[0].shape.rank:
        axes = private.constant_value(op.inputs[1])
        return axes is not None and 0 in np.ravel(axes)
    return False


def _examples_decide(condition: Any, body: Any) -> bool:
    """Whether a loop's condition depends on a reduction."""
    visited: set[tf.Operation] = set()
    needed = {condition.outputs[0].op}
    while needed:
        # A check that is waited for may reduce, but decides nothing.
        ops = graphs.ancestors(list(needed), graphs.data_inputs) - visited
        if any(op.type in op_types.REDUCTIONS for op in ops):
            return True
        visited |= ops
        # What a variable is in the next step, the body computes in this one.
        needed = set()
        for in_condition, in_body, output in zip(condition.inputs, body.inputs, body.outputs):
            is_used = in_condition.op in ops or in_body.op in ops
            if is_used and output.op not in visited:
                needed.add(output.op)
    return False


def _has_effects(function: Any) -> bool:
    """Whether an op of a function has side effects, or one of a function that it calls.

    Checks don't count.
    """
    for op in function.get_operations():
        if op.type in op_types.FUNCTION_CALLERS:
            called = function_calls.function_graphs(op)
            if not called or any(map(_has_effects, called)):
                return True
        elif has_side_effect(op) and op.type not in op_types.CHECKS:
            return True
    return False


def _take_apart(loop: tf.Operation, division: Division) -> list[tf.Operation]:
    """Lets a v1 loop take the place of a `While`; returns the inner loops, each a `While`."""
    scope = f'{loop.name}/apart'
    condition, body = function_calls.function_graphs(loop)
    functions = {f'{scope}/condition': condition, f'{scope}/body': body}
    with tracebacks.made_for(loop, functions):
        with tf.control_dependencies(None), tf.device(loop.device), tf.name_scope(None):
            results, ops = _add_loop(loop, condition, body, scope)
            exits = [result.op for result in results if result.op.type in op_types.EXIT]
            take_place_of(loop, results, exits, division)
    return [op for op in ops if op.type in op_types.LOOPS]


def _add_loop(
    loop: tf.Operation, condition: Any, body: Any, scope: str
) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Adds a v1 loop that does the same as a `While`.

    Args:
      loop: the `While`.
      condition: the graph of its condition.
      body: the graph of its body.
      scope: what the names of the loop's ops begin with; the name of its frame, too.

    Returns:
      The results, and the ops of the condition and of the body.
    """
    # Other inputs are constants of the loop: no step changes them.
    variables = [
        index for index, output in enumerate(body.outputs) if output is not body.inputs[index]
    ]
    enters = _add_enters(loop, variables, scope)
    at_begin = list(enters)
    for index in variables:
        # The second input will be the way back, which is still to be made.
        merge = tf.raw_ops.Merge(inputs=[enters[index]] * 2, name=f'{scope}/merge_{index}')
        merge.output.set_shape(body.inputs[index].shape)
        at_begin[index] = merge.output

    in_condition = add_ops(condition, at_begin, f'{scope}/condition')
    with tf.control_dependencies(in_condition.effects):
        goes_on = tf.raw_ops.LoopCond(input=in_condition.outputs[0], name=f'{scope}/goes_on')

    results = list(loop.inputs)
    in_step = list(enters)
    for index, value in enumerate(at_begin):
        if index in variables:
            switch = tf.raw_ops.Switch(data=value, pred=goes_on, name=f'{scope}/switch_{index}')
            last = switch.output_false
            results[index] = tf.raw_ops.Exit(data=last, name=f'{scope}/exit_{index}')
            in_step[index] = tf.identity(switch.output_true, name=f'{scope}/step_{index}')
        else:
            results[index] = after(loop.control_inputs, results[index], f'{loop.name}/output')

    in_body = add_ops(body, in_step, f'{scope}/body')
    ways_back = []
    with tf.control_dependencies(in_body.effects):
        for index in variables:
            output = in_body.outputs[index]
            way_back = tf.raw_ops.NextIteration(data=output, name=f'{scope}/next_{index}')
            private.set_input(at_begin[index].op, 1, way_back)
            ways_back.append(way_back.op)

    constants = {enter.op for index, enter in enumerate(enters) if index not in variables}
    _keep_in_frame([*in_condition.ops, goes_on.op], at_begin[variables[0]], constants)
    _keep_in_frame([*in_body.ops, *ways_back], in_step[variables[0]], constants)
    return results, [*in_condition.ops, *in_body.ops]


def _add_enters(loop: tf.Operation, variables: Sequence[int], scope: str) -> list[tf.Tensor]:
    """Adds the `Enter` ops of a loop, which wait for what the `While` waits for.

    Args:
      loop: the `While`.
      variables: the indices of the inputs that a step may change.
      scope: as of `_add_loop`.
    """
    with tf.control_dependencies(loop.control_inputs):
        return [
            tf.raw_ops.Enter(
                data=start,
                frame_name=scope,
                is_constant=index not in variables,
                parallel_iterations=loop.get_attr('parallel_iterations'),
                name=f'{scope}/enter_{index}',
            )
            for index, start in enumerate(loop.inputs)
        ]


def _keep_in_frame(
    ops: Sequence[tf.Operation], variable: tf.Tensor, constants: set[tf.Operation]
) -> None:
    """Lets those ops of a loop wait for a variable that use nothing but constants.

    So they are in the frame, they run in each step on whatever device they are placed, and what the
    body makes is dead once the loop has ended. TensorFlow does so in the v1 loops that it makes.
    """
    for op in ops:
        if constants.issuperset(graphs.direct_inputs(op)):
            private.add_control_inputs(op, [variable.op])
