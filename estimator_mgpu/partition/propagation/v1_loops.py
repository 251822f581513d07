"""How a loop of TensorFlow 1 is sharded. It's made of ops, and towers have copies of all of them.

As in `loops`, the placement of each of the loop's variables is a fixed point: if the body is given
the variable in it, the body returns the variable in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
    REPLICATE,
    NotGatherable,
    Partial,
    Placement,
    Shard,
)
from estimator_mgpu.partition.plan import FULL, Decision, OpPlan
from estimator_mgpu.partition.propagation.called_functions import CalledFunctions, variable_value
from estimator_mgpu.partition.propagation.function_bodies import FunctionBody
from estimator_mgpu.partition.propagation.loops import find_fixed_point
from estimator_mgpu.partition.propagation.scope import Scope
from estimator_mgpu.partition.rules.notation import NotSharded
from estimator_mgpu.partition.sizes import Size
from estimator_mgpu.tf_internals import op_types
from estimator_mgpu.tf_internals.v1_loops import V1Loop


def decide_v1_loop(scope: Scope, loop: V1Loop, placements: Sequence[Placement]) -> Decision | None:
    """Decides how a loop runs; None if it runs once.

    Args:
      scope: the graph, or the loop around it, that the loop is in.
      loop: the loop.
      placements: of its inputs.

    Returns:
      A decision whose only function has the plans of all of the loop's ops.

    Raises:
      NotSharded: if the loop has to run once, with the reason.
    """
    # A loop in a loop can't run once: towers have copies of it in any case, and lists change in it.
    is_replicated = all(placement == REPLICATE for placement in placements)
    if is_replicated and not scope.in_function:
        return None
    if loop.body is None:
        raise NotSharded('the ops of this v1 loop are connected in an unusual way')

    try:
        return _decide(scope, loop, placements, is_joint=False)
    except NotSharded:
        if scope.in_function and not scope.is_joint:
            raise
    return _decide(scope, loop, placements, is_joint=True)


def _decide(
    scope: Scope,
    loop: V1Loop,
    placements: Sequence[Placement],
    is_joint: bool,
) -> Decision | None:
    """Decides how a loop runs, either joint or not.

    Args:
      scope: the graph, or the loop around it, that the loop is in.
      loop: the loop.
      placements: of its inputs.
      is_joint: whether all towers make each step together.
    """
    assert loop.body is not None
    functions = CalledFunctions(
        scope, [loop.body], loop.inputs, placements, loop.body.unchanged, is_joint
    )
    body, returned = find_fixed_point(functions)
    condition = loop.body.condition
    if is_joint and isinstance(body.scope.placement_of(condition), Partial):
        functions.reduced.add(condition.name)
        body, returned = find_fixed_point(functions)
    _check_condition(body, condition)

    output_placements = [body.scope.placement_of(result) for result in loop.body.results]
    output_dims = [
        _output_dims(functions, body, output, result)
        for output, result in zip(loop.outputs, loop.body.results)
    ]
    lists = [
        (tensor, placement)
        for tensor, placement in zip(loop.inputs, returned)
        if tensor.dtype == tf.resource and isinstance(placement, NotGatherable)
    ]
    decision = Decision(
        _plan(functions, body, loop),
        output_placements,
        output_dims,
        lists,
        in_loop={**body.scope.placements, **body.scope.in_loops},
    )
    return decision if scope.make_lists(loop, decision) else None


def _check_condition(body: FunctionBody, condition: tf.Tensor) -> None:
    """Raises NotSharded unless the condition is the same on all towers."""
    if body.scope.placement_of(condition) != REPLICATE or body.differs(condition):
        raise NotSharded('the examples decide how many steps it takes')


def _output_dims(
    functions: CalledFunctions, body: FunctionBody, output: tf.Tensor, result: tf.Tensor
) -> list[Size] | None:
    """The dimensions of an output, if it's sharded; None if it isn't.

    Args:
      functions: the loop's.
      body: what was found of the loop's body.
      output: of the loop.
      result: the tensor in the loop that becomes the output.
    """
    placement = body.scope.placement_of(result)
    if placement == REPLICATE and body.differs(result) and output.consumers():
        raise NotSharded(f'{output.name} is a size that depends on the tower')
    if not isinstance(placement, Shard):
        return None

    factor = body.scope.sizes.per_row(result, placement.axis, placement.rows)
    if factor is None or factor.static is None:
        raise NotSharded(f'the size of {output.name} is unknown')
    rank = len(body.scope.sizes.dims(result) or [])
    return functions.scope.sizes.dims_of_shard(output, placement, factor, rank)


def _plan(functions: CalledFunctions, body: FunctionBody, loop: V1Loop) -> OpPlan:
    """The plan of a loop: the forms of its inputs, and as its only function, plans of its ops."""
    needs = functions.needs()
    ops = {
        op.name: OpPlan(
            tuple(body.form_of_value(tensor) for tensor in op.inputs),
            is_joint=functions.is_joint and op.type == op_types.LOOP_CONDITION,
        )
        for op in loop.all_ops
    }
    ops.update(body.scope.ops)

    # A variable that is only read is given to the loop by its value.
    for index, enter in enumerate(loop.enters):
        value = variable_value(functions.scope, [loop.body], index)
        if needs[index] == FULL and value is not None:
            needs[index] = value
            for read in enter.outputs[0].consumers():
                ops[read.name] = OpPlan((value,))
    return OpPlan(tuple(needs), functions=[ops], is_joint=functions.is_joint)
