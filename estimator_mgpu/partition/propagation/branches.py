"""How `tf.cond`, `tf.switch_case` and calls of functions are sharded.

All towers take the same branch, as the op that chooses one runs once. Each tower calls its own copy
of the branch, with its shards of the arguments. All branches have to return an output in the same
placement.

An assertion in a function is a branch, too, which fails unless its condition holds. There each
tower chooses by its own examples.
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
from estimator_mgpu.partition.plan import FULL, LOCAL, Decision, Need, OpPlan
from estimator_mgpu.partition.propagation.called_functions import CalledFunctions, variable_value
from estimator_mgpu.partition.propagation.function_bodies import FunctionBody
from estimator_mgpu.partition.propagation.scope import Scope
from estimator_mgpu.partition.rules.notation import NotSharded
from estimator_mgpu.partition.rules.zeros import is_zero
from estimator_mgpu.partition.sizes import Size
from estimator_mgpu.tf_internals import function_calls, op_types


def decide_branches(
    scope: Scope, op: tf.Operation, placements: Sequence[Placement]
) -> Decision | None:
    """Decides how an op that calls one of several functions runs; None if it runs once.

    Args:
      scope: the graph, or the function, that the op is in.
      op: an `If`, a `Case`, or a call of one function.
      placements: of the op's inputs.

    Raises:
      NotSharded: if the op has to run once, with the reason.
    """
    # The first input of `If` and `Case` chooses a branch, and isn't an argument of the branches.
    chooses = 1 if op.type in op_types.BRANCHES else 0
    arguments = list(op.inputs)[chooses:]
    branches = function_calls.function_graphs(op)
    is_replicated = all(placement == REPLICATE for placement in placements[chooses:])
    if is_replicated or not branches:
        return None

    every_argument = range(len(arguments))
    functions = CalledFunctions(
        scope, branches, arguments, placements[chooses:], unchanged=every_argument
    )
    _place_arguments(functions)

    bodies: list[FunctionBody] = []
    returned: list[list[Placement]] = []  # by branch and output
    for branch in branches:
        body, placements_in_branch = functions.visit(branch, assumes=False)
        bodies.append(body)
        returned.append(placements_in_branch)

    output_placements, output_dims = _outputs(functions, op, bodies, returned)
    # In the graph, a branch that returns no examples runs once. In a function nothing can run once,
    # and such a branch may check examples.
    returns_no_examples = all(placement == REPLICATE for placement in output_placements)
    if returns_no_examples and not scope.in_function:
        return None

    # What chooses is replicated, unless it's the condition of an assertion.
    choice = [FULL if placement == REPLICATE else LOCAL for placement in placements[:chooses]]
    needs = _needs_of_arguments(functions, op)
    plan = OpPlan((*choice, *needs), functions=[body.scope.ops for body in bodies])
    decision = Decision(plan, output_placements, output_dims)
    return decision if scope.make_lists(op, decision) else None


def _outputs(
    functions: CalledFunctions,
    op: tf.Operation,
    bodies: Sequence[FunctionBody],
    returned: Sequence[Sequence[Placement]],
) -> tuple[list[Placement], list[list[Size] | None]]:
    """The placements and the dimensions of an op's outputs.

    Args:
      functions: the branches.
      op: the op that calls them.
      bodies: what was found of each branch.
      returned: the placements in which each branch returns its outputs.
    """
    output_placements: list[Placement] = []
    output_dims: list[list[Size] | None] = []
    for index, output in enumerate(op.outputs):
        placement = _joined(
            [body.graph.outputs[index] for body in bodies],
            [of_branch[index] for of_branch in returned],
        )
        output_placements.append(placement)
        output_dims.append(_output_dims(functions, output, placement, bodies, index))
    return output_placements, output_dims


def _needs_of_arguments(functions: CalledFunctions, op: tf.Operation) -> list[Need]:
    """The forms in which a tower's copy of an op needs the arguments of the functions it calls."""
    needs = functions.needs()
    if op.type in op_types.PARTITIONED_CALLS:
        needs = [_value_of_variable(functions, index) or need for index, need in enumerate(needs)]
    return needs


def _value_of_variable(functions: CalledFunctions, index: int) -> Need | None:
    """The value of a variable that a called function only reads; None if it needs the variable.

    XLA compiles a function for one device, which has to have all variables that the function uses.
    So a tower's copy is given values.
    """
    [function] = functions.bodies
    is_returned = any(output is function.inputs[index] for output in function.outputs)
    return None if is_returned else variable_value(functions.scope, [function], index)


def _place_arguments(functions: CalledFunctions) -> None:
    """Visits the branches until no further arguments have to be sharded for them."""
    while True:  # Requests only become more, and what is sharded stays so.
        placements = list(functions.placements)
        request_count = len(functions.requests)
        for branch in functions.bodies:
            functions.visit(branch, assumes=True)
            functions.shard_requested()
        if (placements, request_count) == (functions.placements, len(functions.requests)):
            return


def _joined(tensors: Sequence[tf.Tensor], placements: Sequence[Placement]) -> Placement:
    """The one placement in which all branches return an output.

    If one branch returns a partial sum or a list, another one may return something empty: zeros,
    which change no sum, or a list without elements.

    Args:
      tensors: what each branch returns.
      placements: of the tensors, inside of the branches.
    """
    on_towers = [placement for placement in placements if placement != REPLICATE]
    if not on_towers:
        return REPLICATE

    joined = on_towers[0]
    for tensor, placement in zip(tensors, placements):
        if placement == joined:
            continue
        is_empty_list = isinstance(joined, NotGatherable) and tensor.op.type in op_types.EMPTY_LISTS
        adds_nothing = isinstance(joined, Partial) and joined.reduce == 'sum' and is_zero(tensor)
        if placement != REPLICATE or not (is_empty_list or adds_nothing):
            raise NotSharded(f'{tensor.name} is sharded, or a partial sum, in some branches only')
    return joined


def _output_dims(
    functions: CalledFunctions,
    output: tf.Tensor,
    placement: Placement,
    bodies: Sequence[FunctionBody],
    index: int,
) -> list[Size] | None:
    """The dimensions of an output, if it's sharded; None if it isn't.

    Args:
      functions: the branches.
      output: of the op that calls the branches.
      placement: the output's.
      bodies: what was found of the branches.
      index: the output's.
    """
    returned = [body.graph.outputs[index] for body in bodies]
    sizes = [body.scope.sizes for body in bodies]
    if placement == REPLICATE:
        for body, tensor in zip(bodies, returned):
            if body.differs(tensor):
                raise NotSharded(f'{output.name} is a size that depends on the tower')
    if not isinstance(placement, Shard):
        return None

    axis = placement.axis
    factors = [
        of_branch.per_row(tensor, axis, placement.rows)
        for of_branch, tensor in zip(sizes, returned)
    ]
    factor = factors[0]
    if factor is None or factor.static is None or any(other != factor for other in factors):
        raise NotSharded(f'the size of {output.name} is unknown, or not the same in all branches')
    rank = len(sizes[0].dims(returned[0]) or [])
    return functions.scope.sizes.dims_of_shard(output, placement, factor, rank)
