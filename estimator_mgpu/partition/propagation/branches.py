"""How branches and calls of functions are sharded.

All towers take the same branch, but for assertions, as the op that chooses one runs once. All
branches have to give a value in the same placement, but for what is replicated or empty in one of
them, and for Optionals.

In loops and functions, `tf.cond` and `tf.switch_case` stay ops that call functions, and so do calls
in branches, and calls that XLA compiles. Each tower calls its own copy of the function, with its
shards of the arguments. An assertion in a function is a branch, too, which fails unless its
condition holds: by that, each tower asks for its own examples.

Branches of TensorFlow 1 are made of ops. A `Switch` passes its input on to one of two branches, and
a `Merge` passes on what comes out of the branch that was taken. The ops of the other branch don't
run:

    x, choice --> Switch --+--> ops of one branch ----+
                           +--> ops of the other one --+--> Merge --> y

So towers can have copies of a `Switch`, of a `Merge`, and of the ops between, each by its own rule.
A branch may even sum over all towers: since all take the same branch, all parts are there, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import (
    REPLICATE,
    ByBranch,
    NotGatherable,
    Partial,
    Placement,
    Shard,
    common_placement,
)
from estimator_mgpu.partition.plan import FULL, LOCAL, Decision, Need, OpPlan, Slice, VariableValue
from estimator_mgpu.partition.propagation.called_functions import CalledFunctions
from estimator_mgpu.partition.propagation.function_bodies import FunctionBody
from estimator_mgpu.partition.propagation.scope import Scope
from estimator_mgpu.partition.propagation.value_origins import output_behind
from estimator_mgpu.partition.rules.notation import NotSharded
from estimator_mgpu.partition.rules.zeros import is_zero
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import Size
from estimator_mgpu.tf_internals import function_calls, op_types
from estimator_mgpu.tf_internals.v1_loops import passed_on


def decide_branches(
    scope: Scope, op: tf.Operation, placements: Sequence[Placement]
) -> Decision | None:
    """Decides how an op that calls one of several functions runs; None if it runs once.

    Args:
      op: an `If`, a `Case`, or a call of one function.

    Raises:
      NotSharded: if the op has to run once, with the reason.
    """
    # The first input of `If` and `Case` chooses a branch, and isn't an argument of the branches.
    first_argument = 1 if op.type in op_types.BRANCHES else 0
    arguments = list(op.inputs)[first_argument:]
    branches = function_calls.function_graphs(op)
    is_replicated = all(placement == REPLICATE for placement in placements[first_argument:])
    if is_replicated or not branches:
        return None

    _check_choices(op, placements)
    every_argument = range(len(arguments))
    functions = CalledFunctions(
        scope,
        branches,
        arguments,
        placements[first_argument:],
        unchanged=every_argument,
        are_branches=op.type in op_types.BRANCHES,
    )
    while True:  # Shards that are requested only become more.
        functions.find_placements()
        bodies = [functions.visit(branch, assumes=False) for branch in branches]
        if not _request_shards(functions, bodies):
            break

    # In the graph, a branch that returns no examples needn't be sharded: it runs once. In a
    # function nothing runs once, and such a branch may be an assertion.
    output_placements, output_dims = _outputs(scope, op, bodies)
    returns_no_examples = all(placement == REPLICATE for placement in output_placements)
    if returns_no_examples and not scope.in_function:
        return None

    # What chooses is replicated, unless it's the condition of an assertion.
    of_choice = [
        FULL if placement == REPLICATE else LOCAL for placement in placements[:first_argument]
    ]
    needs = _needs_of_arguments(functions, op)
    plan = OpPlan((*of_choice, *needs), functions=[body.scope.ops for body in bodies])
    return Decision(plan, output_placements, output_dims)


def _check_choices(op: tf.Operation, placements: Sequence[Placement]) -> None:
    """Checks that an op takes the same branch as those that made the Optionals it's given.

    Args:
      op: an `If`, a `Case`, or a call of one function.

    Raises:
      NotSharded: if another tensor, or none, chooses its branch.
    """
    choices = {given.choice for given in placements if isinstance(given, ByBranch)}
    if choices and choices != {output_behind(op.inputs[0])}:
        raise NotSharded('it is given what other branches have computed')


def _outputs(
    scope: Scope, op: tf.Operation, bodies: Sequence[FunctionBody]
) -> tuple[list[Placement], list[list[Size] | None]]:
    """The placements of an op's outputs, and the sizes of those that are shards.

    Args:
      op: the op that calls the functions.
      bodies: what was found of each function.

    Raises:
      NotSharded: if the functions return an output in several placements, or as sizes that differ.
    """
    placements: list[Placement] = []
    all_dims: list[list[Size] | None] = []
    for index, output in enumerate(op.outputs):
        placement = _returned(bodies, index, output)
        dims = None
        if isinstance(placement, Shard):
            returned = [(body.scope.sizes, body.graph.outputs[index]) for body in bodies]
            factor = _factor(returned, placement, output.name)
            sizes, tensor = returned[0]
            dims = scope.sizes.dims_of_shard(output, placement, factor, sizes.rank(tensor))
        placements.append(placement)
        all_dims.append(dims)
    return placements, all_dims


def _needs_of_arguments(functions: CalledFunctions, op: tf.Operation) -> list[Need]:
    """The forms in which a tower's copy of an op needs the arguments of the functions it calls.

    XLA compiles a function for one device, which has to have all variables that the function uses.
    So a tower's copy is given the values of variables, unless the function returns the variable.
    """
    if op.type not in op_types.PARTITIONED_CALLS:
        return functions.needs(readers=[])
    [function] = functions.bodies
    needs = functions.needs(readers=[function])
    for index, argument in enumerate(function.inputs):
        is_returned = any(output is argument for output in function.outputs)
        if is_returned and isinstance(needs[index], VariableValue):
            needs[index] = FULL
    return needs


def _request_shards(functions: CalledFunctions, bodies: Sequence[FunctionBody]) -> bool:
    """Lets towers make shards of what a branch returns replicated, and another one as a shard.

    Such as zeros, the gradient of what the branch doesn't use.

    Returns:
      Whether a shard is requested that wasn't before.
    """
    before = len(functions.requests)
    for outputs in zip(*(body.graph.outputs for body in bodies)):
        placements = [body.scope.placement_of(output) for body, output in zip(bodies, outputs)]
        shard = common_placement(placements)
        if not isinstance(shard, Shard):
            continue
        first = placements.index(shard)
        factor = bodies[first].scope.sizes.per_row(outputs[first], shard.axis, shard.rows)
        for body, output, placement in zip(bodies, outputs, placements):
            source = passed_on(output)
            is_made = placement == REPLICATE and body.can_make_shard(source, shard.in_blocks)
            if is_made and factor is not None:
                request = Slice(shard.axis, shard.rows, factor, shard.in_blocks)
                functions.requests.setdefault(source.op, request)
    return len(functions.requests) > before


def _returned(bodies: Sequence[FunctionBody], index: int, output: tf.Tensor) -> Placement:
    """The one placement in which all functions return an output.

    If one of them returns a partial sum or a list, another one may return something empty: zeros,
    which change no sum, or a list without elements. In an Optional each may return something else.

    Args:
      bodies: what was found of each function.
      index: the output's.
      output: of the op that calls the functions.

    Raises:
      NotSharded: if they return it in several placements, or as sizes that differ.
    """
    tensors = [body.graph.outputs[index] for body in bodies]
    placements = [body.scope.placement_of(tensor) for body, tensor in zip(bodies, tensors)]
    placement = common_placement(placements)
    for tensor, in_branch in zip(tensors, placements):
        is_empty = in_branch == REPLICATE and _is_empty(tensor, placement)
        if in_branch != placement and not is_empty:
            optionals = (op_types.OPTIONAL, op_types.NO_OPTIONAL)
            if all(tensor.op.type in optionals for tensor in tensors):
                return ByBranch(output_behind(output.op.inputs[0]), tuple(placements))
            raise NotSharded(f'{tensor.name} is sharded, or a partial sum, in some branches only')
    differs = any(body.differs(tensor) for body, tensor in zip(bodies, tensors))
    if placement == REPLICATE and differs:
        raise NotSharded(f'{output.name} is a size that depends on the tower')
    return placement


def _is_empty(tensor: tf.Tensor, placement: Placement) -> bool:
    """Whether a replicated tensor adds nothing to what others are in a placement."""
    if isinstance(placement, NotGatherable):
        return tensor.op.type in op_types.EMPTY_LISTS
    return isinstance(placement, Partial) and placement.reduce == 'sum' and is_zero(tensor)


def decide_switch(
    scope: Scope, op: tf.Operation, placements: Sequence[Placement]
) -> Decision | None:
    """Decides how a `Switch` runs: both outputs have the placement of the input.

    Args:
      op: a `Switch`.
      placements: of the value, and of the bool that says whether output 1 has it.
    """
    value, choice = placements
    if value == REPLICATE or (scope.in_function and choice != REPLICATE):
        return None
    dims = scope.sizes.dims(op.inputs[0]) if isinstance(value, Shard) else None
    return Decision(OpPlan((LOCAL, FULL)), [value, value], [dims, dims])


def decide_merge(
    scope: Scope, op: tf.Operation, placements: Sequence[Placement]
) -> Decision | None:
    """Decides how a `Merge` runs.

    Args:
      op: a `Merge`, which gives a value, and which of its inputs it was.
      placements: of its inputs. No placement is partial.

    Raises:
      NotSharded: if it has to run once, with the reason.
    """
    placement = common_placement(placements)
    if placement == REPLICATE:
        return None
    if any(other not in (placement, REPLICATE) for other in placements):
        raise NotSharded(f'the branches before {op.name} give it in several placements')

    replicated: Need = LOCAL  # An empty list, of which each tower makes its own.
    dims: list[Size] | None = None
    if isinstance(placement, Shard):
        given = [(scope.sizes, tensor) for tensor in op.inputs]
        factor = _factor(given, placement, op.name)
        replicated = Slice(placement.axis, placement.rows, factor, placement.in_blocks)
        rank = scope.sizes.rank(op.inputs[0])
        dims = scope.sizes.dims_of_shard(op.outputs[0], placement, factor, rank)
    needs = [LOCAL if other == placement else replicated for other in placements]
    return Decision(OpPlan(tuple(needs)), [placement, REPLICATE], [dims, None])


def _factor(values: Sequence[tuple[Sizes, tf.Tensor]], shard: Shard, name: str) -> Size:
    """How many entries an example has along the axis of a shard that branches give.

    Args:
      values: what each branch gives, with the sizes in its function, or in the graph.
      shard: the placement of all of them.
      name: of what they are for, by which an error names it.

    Raises:
      NotSharded: if that isn't known, or not the same in all branches.
    """
    factors = {sizes.per_row(tensor, shard.axis, shard.rows) for sizes, tensor in values}
    factor = factors.pop()
    if factors or factor is None or factor.static is None:
        raise NotSharded(f'the size of {name} is unknown, or not the same in all branches')
    return factor
