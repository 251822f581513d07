"""Which ops have side effects: they change something, or give another result when run again."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private


class _Declaration(NamedTuple):
    """What TensorFlow declares of a type of ops, but that reads count as ops without a state."""

    takes_references: bool
    is_stateful: bool


def has_side_effect(op: tf.Operation) -> bool:
    """Whether an op changes state, or may give another result when it's run again."""
    declared = _declaration_of_type(op.type)
    if declared is None:  # The type is a function of the op's own graph.
        declared = _read_declaration(op.op_def)
    # An op that writes to a reference variable isn't called stateful.
    if declared.takes_references or not declared.is_stateful:
        return declared.takes_references

    # An op that only makes the handle of a variable, a table or a queue has no side effect.
    only_makes_handles = bool(op.outputs) and all(
        output.dtype == tf.resource or graphs.is_reference_variable(output) for output in op.outputs
    )
    return not only_makes_handles


@functools.cache
def _declaration_of_type(op_type: str) -> _Declaration | None:
    """What is declared of a type; None if TensorFlow doesn't know it."""
    if op_type in op_types.VARIABLE_READS or op_type in op_types.REFERENCE_READS:
        return _Declaration(takes_references=False, is_stateful=False)
    definition = private.op_definition(op_type)
    return None if definition is None else _read_declaration(definition)


def _read_declaration(definition: Any) -> _Declaration:
    return _Declaration(_takes_references(definition), definition.is_stateful)


def type_may_have_side_effects(op_type: str) -> bool:
    """Whether an op of this type may have a side effect."""
    declared = _declaration_of_type(op_type)
    return declared is None or declared.takes_references or declared.is_stateful


def type_may_give_references(op_type: str) -> bool:
    """Whether an output of an op of this type may be a reference."""
    definition = private.op_definition(op_type)
    return definition is None or any(argument.is_ref for argument in definition.output_arg)


def writes_state(op: tf.Operation) -> bool:
    """Whether an op, or a function that it calls, may write to any variable or table.

    `accesses.written_state` says to which ones that the op is given.
    """
    if not has_side_effect(op) or op.type in op_types.STATE_QUERIES:
        return False
    if op.type in op_types.FUNCTION_CALLERS:
        bodies = function_calls.function_graphs(op)
        if not bodies:  # It may write or not.
            return True
        return any(writes_state(inner) for body in bodies for inner in body.get_operations())
    makers = [maker_of_state(operand) for operand in op.inputs if graphs.is_handle(operand)]
    arguments = op_types.PLACEHOLDERS  # of a function
    return any(maker.type in (*op_types.STATE_HOLDERS, *arguments) for maker in makers)


def maker_of_state(handle: tf.Tensor) -> tf.Operation:
    """The op that makes the state that a tensor refers to; in a function, an argument."""
    # An op such as Assign gives on the reference that it's given, as do those of loops.
    maker = handle.op
    while maker.inputs:
        is_forwarded = maker.type in op_types.FORWARD_VARIABLES
        first = maker.inputs[0]
        if not is_forwarded and not graphs.is_reference_variable(first):
            break
        maker = first.op
    return maker


def is_unordered(op: tf.Operation) -> bool:
    """Whether nobody can tell if an op's side effect comes before or after those of others.

    It draws random numbers, fails, only looks at a table, or touches a list that only its own loop
    has. An op that calls functions may do what the ops in these do.
    """
    if op.type in op_types.FUNCTION_CALLERS:
        bodies = function_calls.function_graphs(op)
        inner_ops = [inner for body in bodies for inner in body.get_operations()]
        with_effects = [inner for inner in inner_ops if has_side_effect(inner)]
        return bool(bodies) and all(map(is_unordered, with_effects))
    is_of_loop = op.type.startswith(op_types.HANDLE_PREFIXES)
    harmless = op.type in (*op_types.CHECKS, *op_types.STATE_QUERIES)
    return harmless or is_of_loop or draws_numbers(op)


def draws_numbers(op: tf.Operation) -> bool:
    """Whether an op draws random numbers by a state of its own, as `tf.random.uniform` does."""
    if not has_side_effect(op) or 'seed2' not in op.node_def.attr:
        return False
    return not any(map(graphs.is_handle, op.inputs))


def is_declared_stateful(definition: Any) -> bool:
    """Whether ops of a type may have side effects, draw random numbers or have a state.

    Args:
      definition: the type's OpDef. TensorFlow calls all ops stateful that take a resource, also
        those that only read it.
    """
    return definition.is_stateful or _takes_references(definition)


def can_be_repeated(op: tf.Operation) -> bool:
    """Whether an op may run several times instead of once: it only computes, reads or checks.

    If a check fails in one of the runs, the step fails, as it would after one run. An op that calls
    functions may run several times if all ops in these may.
    """
    if op.type in op_types.FUNCTION_CALLERS:
        bodies = function_calls.function_graphs(op)
        inner_ops = [inner for body in bodies for inner in body.get_operations()]
        return bool(bodies) and all(map(can_be_repeated, inner_ops))
    if op.type in (*op_types.VARIABLE_READS, *op_types.REFERENCE_READS, *op_types.CHECKS):
        return True
    return not is_declared_stateful(op.op_def)


def is_assertion(op: tf.Operation) -> bool:
    """Whether an op is an `If` that fails unless its condition is true, as `tf.Assert` makes one.

    With `If(x, [x, y], then_branch, else_branch)`, the `else_branch` has `Assert(x, y)`, for which
    all that it returns waits.
    """
    if op.type not in op_types.IFS:
        return False
    functions = function_calls.function_graphs(op)
    if not functions:
        return False

    _, else_branch = functions
    condition, *operands = op.inputs
    conditions: set[str] = set()  # what the branch has of the condition: usually one argument
    for argument, operand in zip(else_branch.inputs, operands):
        if operand.name == condition.name:
            conditions.add(argument.name)

    assertions: set[tf.Operation] = set()
    for inner in else_branch.get_operations():
        if inner.type == op_types.ASSERT and inner.inputs[0].name in conditions:
            assertions.add(inner)
    before_outputs = [graphs.ancestors([output.op]) for output in else_branch.outputs]
    return bool(before_outputs) and all(assertions & before for before in before_outputs)


def _takes_references(definition: Any) -> bool:
    return any(argument.is_ref for argument in definition.input_arg)
