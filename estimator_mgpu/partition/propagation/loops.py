"""How a `tf.while_loop` is sharded: each tower runs a loop of its own, over its own examples.

A loop's variables are what its body is given and returns. The placement of each inside of the loop
has to be one with which the body, given it, returns it: a fixed point. For example, in

    loss, i = tf.while_loop(lambda loss, i: i < 5,
                            lambda loss, i: (loss + tf.reduce_sum(x[:, i]), i + 1), [0.0, 0])

`i` is replicated, and `loss` starts replicated, but the body returns a partial sum if `x` is
sharded. So it's a partial sum inside, which starts with 0.0 on the first tower, and with zeros on
the others.

All towers make the same number of steps: the condition has to be replicated.

This module is about loops that call functions; `v1_loops` is about those of TensorFlow 1.
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
    Shard,
)
from estimator_mgpu.partition.plan import (
    FULL,
    Decision,
    LocalShape,
    OpPlan,
    VariableValue,
)
from estimator_mgpu.partition.propagation.called_functions import CalledFunctions, variable_value
from estimator_mgpu.partition.propagation.function_bodies import FunctionBody
from estimator_mgpu.partition.propagation.scope import Scope
from estimator_mgpu.partition.rules.notation import NotSharded
from estimator_mgpu.partition.sizes import Size
from estimator_mgpu.tf_internals import function_calls


def decide_loop(scope: Scope, op: tf.Operation, placements: Sequence[Placement]) -> Decision | None:
    """Decides how a loop runs; None if it runs once.

    Args:
      scope: the graph, or the function, that the loop is in.
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
    functions = CalledFunctions(scope, [body_graph], list(op.inputs), placements, unchanged)

    body, returned = find_fixed_point(functions)
    output_dims = [
        _output_dims(functions, body, output, placement, index)
        for index, (output, placement) in enumerate(zip(op.outputs, returned))
    ]
    condition_body = _check_condition(functions, condition)

    needs = functions.needs()
    for index, need in enumerate(needs):
        if need == FULL:
            needs[index] = variable_value(scope, graphs, index) or FULL

    # No op on a tower uses the output of a variable that is only read, or of a tower's own size.
    output_placements = [
        None if isinstance(need, (VariableValue, LocalShape)) else placement
        for need, placement in zip(needs, returned)
    ]
    plan = OpPlan(tuple(needs), functions=[condition_body.scope.ops, body.scope.ops])
    decision = Decision(plan, output_placements, output_dims)
    return decision if scope.make_lists(op, decision) else None


def find_fixed_point(functions: CalledFunctions) -> tuple[FunctionBody, list[Placement]]:
    """Finds the placements of the loop's variables inside of the loop.

    Returns:
      What was found of the loop's body, and the placements in which it returns the variables.

    Raises:
      NotSharded: if the loop has to run once, with the reason.
    """
    while True:  # What is reduced only becomes more.
        reduced_before = len(functions.reduced)
        functions.start_again()
        _assume_fixed_point(functions)
        body, returned = functions.visit(functions.bodies[0], assumes=False)
        if len(functions.reduced) == reduced_before:
            _check_fixed_point(functions, body, returned)
            return body, returned


def _assume_fixed_point(functions: CalledFunctions) -> None:
    """Visits the body, on assumptions, until the placements of the variables don't change."""
    while True:  # A placement changes once, as `_met` says; requests and what is reduced only grow.
        placements = list(functions.placements)
        counts = len(functions.requests), len(functions.reduced)
        body, returned = functions.visit(functions.bodies[0], assumes=True)
        for index, placement in enumerate(returned):
            if functions.is_joint and _is_other_partial(placement):
                functions.reduced.add(body.graph.outputs[index].name)
            else:
                functions.placements[index] = _met(functions.placements[index], placement)
        functions.shard_requested()
        is_complete = counts == (len(functions.requests), len(functions.reduced))
        if is_complete and placements == functions.placements:
            return


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


def _check_fixed_point(
    functions: CalledFunctions, body: FunctionBody, returned: Sequence[Placement]
) -> None:
    """Checks that a loop's variables are after a step as they were before it.

    Args:
      functions: the loop's.
      body: what was found of the loop's body.
      returned: the placements in which the body returns the variables.

    Raises:
      NotSharded: if the placement or the size of a variable is another one, or isn't known.
    """
    for index, (tensor, placement) in enumerate(zip(body.graph.outputs, returned)):
        name = functions.arguments[index].name
        if placement != functions.placements[index]:
            raise NotSharded(f'in it, {name} has another placement after a step than before')
        if placement == REPLICATE and body.differs(tensor) and not functions.sizes(index):
            raise NotSharded(f'in it, {name} is a size that depends on the tower')
        if isinstance(placement, Shard):
            rank = len(body.scope.sizes.dims(tensor) or [])
            entries_per_row = body.scope.sizes.per_row(tensor, placement.axis, placement.rows)
            before = functions.rank(index), functions.factor(index, placement.axis)
            if (rank, entries_per_row) != before:
                raise NotSharded(f'the size of {name} is unknown, or changes from step to step')


def _output_dims(
    functions: CalledFunctions,
    body: FunctionBody,
    output: tf.Tensor,
    placement: Placement,
    index: int,
) -> list[Size] | None:
    """The dimensions of an output, if it's sharded; None if it isn't.

    Args:
      functions: the loop's.
      body: what was found of the loop's body.
      output: of the loop.
      placement: in which the body returns the output.
      index: the output's.
    """
    returned = body.graph.outputs[index]
    if placement == REPLICATE and body.differs(returned):
        functions.scope.sizes.set_entries(output, functions.sizes(index))
    if not isinstance(placement, Shard):
        return None
    factor = functions.factor(index, placement.axis)
    rank = len(body.scope.sizes.dims(returned) or [])
    return functions.scope.sizes.dims_of_shard(output, placement, factor, rank)


def _check_condition(functions: CalledFunctions, condition: tf.Graph) -> FunctionBody:
    """Visits the condition, and raises NotSharded unless it's the same on all towers."""
    request_count = len(functions.requests)
    body, [decision] = functions.visit(condition, assumes=False)
    is_same = decision == REPLICATE and not body.differs(condition.outputs[0])
    if not is_same or len(functions.requests) > request_count:
        raise NotSharded('the examples decide how many steps it takes')
    return body
