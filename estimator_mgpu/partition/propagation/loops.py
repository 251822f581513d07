"""How loops are sharded: each tower runs a loop of its own, over its own examples.

A loop's variables are what its body is given and returns. The placement of each inside of the loop
has to be one with which the body, given it, returns it: a fixed point. For example, in

    loss, i = tf.while_loop(lambda loss, i: i < 5,
                            lambda loss, i: (loss + tf.reduce_sum(x[:, i]), i + 1), [0.0, 0])

`i` is replicated, and `loss` starts replicated, but the body returns a partial sum if `x` is
sharded. So it's a partial sum inside, which starts with 0.0 on the first tower, and with zeros on
the others.

All towers make the same number of steps: the condition has to be replicated.

A `While` is an op that calls functions, of which towers have copies. A loop of TensorFlow 1 is made
of ops, and towers have copies of all of them; if it can't be sharded otherwise, it's joint.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
    REPLICATE,
    REPLICATE_LIST,
    NotGatherable,
    Partial,
    Placement,
    RowList,
    Shard,
)
from estimator_mgpu.partition.plan import Decision, LocalShape, OpPlan, VariableValue
from estimator_mgpu.partition.propagation.called_functions import CalledFunctions
from estimator_mgpu.partition.propagation.function_bodies import FunctionBody
from estimator_mgpu.partition.propagation.loops_over_rows import (
    decide_row_loop,
    decide_v1_row_loop,
    plans_of_reads,
)
from estimator_mgpu.partition.propagation.scope import Scope
from estimator_mgpu.partition.rules.notation import NotSharded
from estimator_mgpu.partition.sizes import Size
from estimator_mgpu.tf_internals import function_calls, op_types
from estimator_mgpu.tf_internals.v1_loops import V1Loop

_EXAMPLES_DECIDE = 'the examples decide how many steps it takes'


def decide_loop(scope: Scope, op: tf.Operation, placements: Sequence[Placement]) -> Decision | None:
    """Decides how a loop that calls functions runs; None if it runs once.

    Args:
      op: a `While`.
      placements: of the op's inputs, with which the loop's variables start.

    Raises:
      NotSharded: if the loop has to run once, with the reason.
    """
    graphs = function_calls.function_graphs(op)
    if all(placement == REPLICATE for placement in placements) or not graphs:
        return None
    condition, body_graph = graphs
    unchanged = {
        index
        for index, output in enumerate(body_graph.outputs)
        if output is body_graph.inputs[index]
    }
    functions = CalledFunctions(scope, [body_graph], op.inputs, placements, unchanged)
    if any(isinstance(placement, RowList) for placement in placements):
        return decide_row_loop(functions, condition)

    body = _find_fixed_point(functions)
    output_dims = _output_dims(functions, body, op.outputs, body_graph.outputs, are_variables=True)
    request_count = len(functions.requests)
    condition_body = functions.visit(condition, assumes=False)
    _check_condition(condition_body, condition.outputs[0])
    if len(functions.requests) > request_count:
        raise NotSharded(_EXAMPLES_DECIDE)

    # No op on a tower uses the output of a variable that is only read, or of a tower's own size.
    needs = functions.needs(graphs)
    output_placements = [
        None if isinstance(need, (VariableValue, LocalShape)) else placement
        for need, placement in zip(needs, functions.placements)
    ]
    plan = OpPlan(tuple(needs), functions=[condition_body.scope.ops, body.scope.ops])
    return Decision(plan, output_placements, output_dims)


def decide_v1_loop(scope: Scope, loop: V1Loop, placements: Sequence[Placement]) -> Decision | None:
    """Decides how a loop of TensorFlow 1 runs; None if it runs once.

    Args:
      scope: the graph, or the loop around it, that the loop is in.

    Returns:
      A decision whose only function has the plans of all of the loop's ops.

    Raises:
      NotSharded: if the loop has to run once, with the reason.
    """
    # Nothing in a loop runs once: towers have copies of an inner loop in any case, and its lists
    # change in each step.
    is_replicated = all(placement == REPLICATE for placement in placements)
    if is_replicated and not scope.in_function:
        return None
    if loop.body is None:
        raise NotSharded('the ops of this v1 loop are connected in an unusual way')
    called_with = scope, [loop.body], loop.inputs, placements, loop.body.unchanged
    functions = CalledFunctions(*called_with)
    if any(isinstance(placement, RowList) for placement in placements):
        return decide_v1_row_loop(functions, loop)

    try:
        return _decide_v1_loop(functions, loop)
    except NotSharded:
        if scope.in_function and not scope.is_joint:
            raise
    return _decide_v1_loop(CalledFunctions(*called_with, is_joint=True), loop)


def _decide_v1_loop(functions: CalledFunctions, loop: V1Loop) -> Decision:
    """Decides how a loop runs, either joint or not."""
    [loop_body] = functions.bodies
    body = _find_fixed_point(functions)
    output_dims = _output_dims(
        functions, body, loop.outputs, loop_body.results, are_variables=False
    )
    _check_condition(body, loop_body.condition)

    lists = [
        (tensor, placement)
        for tensor, placement in zip(loop.inputs, functions.placements)
        if tensor.dtype == tf.resource and isinstance(placement, NotGatherable)
    ]
    return Decision(
        _plan_of_v1_loop(functions, body, loop),
        [body.scope.placement_of(result) for result in loop_body.results],
        output_dims,
        lists,
        in_loop={**body.scope.placements, **body.scope.in_loops},
    )


def _plan_of_v1_loop(functions: CalledFunctions, body: FunctionBody, loop: V1Loop) -> OpPlan:
    """The plan of a loop: the forms of its inputs, and as its only function, plans of its ops."""
    ops = {
        op.name: OpPlan(
            tuple(body.form_of_value(tensor) for tensor in op.inputs),
            is_joint=functions.is_joint and op.type == op_types.LOOP_CONDITION,
        )
        for op in loop.all_ops
    }
    ops.update(body.scope.ops)

    needs = functions.needs([body.graph])
    ops.update(plans_of_reads(loop, needs))
    return OpPlan(tuple(needs), functions=[ops], is_joint=functions.is_joint)


def _find_fixed_point(functions: CalledFunctions) -> FunctionBody:
    """Finds the placements of the loop's variables inside of the loop, and visits its body.

    Raises:
      NotSharded: if the loop has to run once, with the reason.
    """
    while True:  # What is reduced only becomes more.
        reduced_before = len(functions.reduced)
        functions.start_again()
        functions.find_placements(_place_returned)
        body = functions.visit(functions.bodies[0], assumes=False)
        if functions.is_joint:  # Towers agree on whether there is another step.
            condition = body.graph.condition
            if isinstance(body.scope.placement_of(condition), Partial):
                functions.reduced.add(condition.name)
        if len(functions.reduced) == reduced_before:
            _check_fixed_point(functions, body)
            return body


def _place_returned(functions: CalledFunctions, body: FunctionBody) -> None:
    """Places a loop's variables before a step as after it, as far as that is possible."""
    for index, placement in enumerate(body.returned()):
        if functions.is_joint and _is_other_partial(placement):
            functions.reduced.add(body.graph.outputs[index].name)
        else:
            functions.placements[index] = _met(functions.placements[index], placement)


def _is_other_partial(placement: Placement) -> bool:
    """Whether it's a partial result, but not a sum: no loop's variable can be one."""
    return isinstance(placement, Partial) and placement.reduce != 'sum'


def _met(before: Placement, after: Placement) -> Placement:
    """The placement of a loop's variable that has one before a step, and another one after it.

    What starts replicated can be sharded, made a list of shards, or a partial sum, before the loop.
    It can't be another partial result: all towers but the first start with zeros, which add nothing
    to a sum, but may be larger than the maximum, say.

    What the body returns replicated is left as it was: `_check_fixed_point` tells if that holds.
    Likewise for a list into which values are put that weren't known to be sharded.
    """
    if after in (before, REPLICATE):
        return before
    if before == REPLICATE and not _is_other_partial(after):
        return after
    if before == REPLICATE_LIST and isinstance(after, NotGatherable):
        return after
    raise NotSharded(f'in it, a {before} becomes a {after}')


def _check_fixed_point(functions: CalledFunctions, body: FunctionBody) -> None:
    """Checks that a loop's variables are after a step as they were before it.

    Raises:
      NotSharded: if the placement or the size of a variable is another one, or isn't known.
    """
    for index, (tensor, placement) in enumerate(zip(body.graph.outputs, body.returned())):
        name = functions.arguments[index].name
        if placement != functions.placements[index]:
            raise NotSharded(f'in it, {name} has another placement after a step than before')
        if placement == REPLICATE and body.differs(tensor) and not functions.sizes(index):
            raise NotSharded(f'in it, {name} is a size that depends on the tower')
        if isinstance(placement, Shard):
            rank = body.scope.sizes.rank(tensor)
            entries_per_row = body.scope.sizes.per_row(tensor, placement.axis, placement.rows)
            before = functions.rank(index), functions.factor(index, placement.axis)
            if (rank, entries_per_row) != before:
                raise NotSharded(f'the size of {name} is unknown, or changes from step to step')


def _output_dims(
    functions: CalledFunctions,
    body: FunctionBody,
    outputs: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor],
    are_variables: bool,
) -> list[list[Size] | None]:
    """The dimensions of the outputs that are sharded; None for each of the others.

    Args:
      body: what was found of the loop's body.
      results: the tensors in the body that become the outputs.
      are_variables: whether these are the loop's variables, in order, of which as much is known
        after the loop as before it. Others may have a size that only the loop knows.

    Raises:
      NotSharded: if the size of an output is unknown, or if the output itself is a size that is
        another one on each tower, and unknown.
    """
    sizes = functions.scope.sizes
    output_dims: list[list[Size] | None] = []
    for index, (output, result) in enumerate(zip(outputs, results)):
        placement = body.scope.placement_of(result)
        if placement == REPLICATE and body.differs(result):
            if are_variables:
                sizes.set_entries(output, functions.sizes(index))
            elif output.consumers():
                raise NotSharded(f'{output.name} is a size that depends on the tower')

        dims = None
        if isinstance(placement, Shard):
            factor = body.scope.sizes.per_row(result, placement.axis, placement.rows)
            if factor is None or (factor.static is None and not are_variables):
                raise NotSharded(f'the size of {output.name} is unknown')
            dims = sizes.dims_of_shard(output, placement, factor, body.scope.sizes.rank(result))
        output_dims.append(dims)
    return output_dims


def _check_condition(body: FunctionBody, condition: tf.Tensor) -> None:
    """Raises NotSharded unless the condition is the same on all towers."""
    if body.scope.placement_of(condition) != REPLICATE or body.differs(condition):
        raise NotSharded(_EXAMPLES_DECIDE)
