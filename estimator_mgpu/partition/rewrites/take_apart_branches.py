"""Branches of TensorFlow 2 become branches of TensorFlow 1.

    y = tf.cond(p, lambda: tf.reduce_mean(f(x)), lambda: 0.0)

An `If` calls functions, and each tower would call its own. So no function could have a mean over
the batch, or draw numbers for all examples. The ops of a branch of TensorFlow 1 can, as they are in
the graph. TensorFlow itself makes such ops of each `If` when a session begins. Here it is done
before that:

    x, p --> If(then_branch, else_branch) --> y      =>

    x, p --> Switch --+--> ops of then_branch --+
                      +--> ops of else_branch --+--> Merge --> y

A `Case` is an `If` whose else_branch is another `If`, and so on.

The gradient of an `If` is another one, with the same condition. What its branches need of what the
branches before have computed, these return, each value in an `Optional`, as only one of them has a
value. Ops of the graph use the value itself:

    value --> Optional --> Merge --> Switch --> value --> gradient      =>      value --> gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.rewrites.function_ops import (
    AddedOps,
    Body,
    add_bodies,
    after,
    take_place_of,
)
from estimator_mgpu.partition.rewrites.function_waits import add_waits
from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private, tracebacks
from estimator_mgpu.tf_internals.effects import has_side_effect, is_assertion
from estimator_mgpu.tf_internals.liveness import Liveness
from estimator_mgpu.tf_internals.v1_loops import passed_on


def take_apart_branches(division: Division) -> None:
    """Replaces the outputs of branches that depend on the batch by those of equal v1 branches.

    These stay as they are:

    - branches in loops, and in functions that are called;
    - assertions;
    - branches that a number or a text chooses as if it were a bool;
    - those that read a reference variable, or give a handle;
    - a `Case` with one branch, and branches of which only the definitions are known.

    The ops that called branches stay, too, for whoever fetches them.
    """
    _Rewrite(division).run()


class _Side(NamedTuple):
    """A side of a `Switch`, to which a value goes by the decision."""

    decision: tf.Tensor  # a bool
    output: int  # of the `Switch`: 1 if the decision is True


class _Returned(NamedTuple):
    """What the branches of an op return for one of its outputs."""

    choice: tf.Tensor  # what chooses a branch
    values: Sequence[tf.Tensor]  # by branch


class _Rewrite:
    """The branches of a graph that are taken apart."""

    def __init__(self, division: Division):
        self._division = division
        self._visited: set[tf.Operation] = set()  # those taken apart, and those in loops
        self._bodies: dict[tf.Operation, list[Body]] = {}  # by those to take apart
        # The ops of branches that are still given the same as the op that calls the branches.
        self._without_operands: set[tf.Operation] = set()
        # By the names of outputs, and of what takes their place, what each branch has returned.
        self._returned: dict[str, _Returned] = {}
        # Ops that make Optionals: `_note_unused` finds those that no step needs any more.
        self._optionals: list[tf.Operation] = []
        # The outputs of each `Switch`, by the names of its input and of its decision.
        self._switched: dict[tuple[str, str], list[tf.Tensor]] = {}
        # By the names of outputs of a `Switch`, the identities that branches use in their place.
        self._in_branches: dict[str, tf.Tensor] = {}
        self._liveness = Liveness([])  # of the ops that were added last
        # Whether a `Case` takes a branch: by the name of what chooses it, and the branch's number.
        self._decisions: dict[tuple[str, int], tf.Tensor] = {}

    def run(self) -> None:
        """Takes apart all branches that can be."""
        while True:  # Branches in branches come next. It ends, as no function calls itself.
            branches = self._next_branches()
            if not branches:
                return
            liveness = Liveness(self._division.graph.get_operations())
            self._add_bodies([op for op in branches if not liveness.is_in_loop(op)])
            for op in branches:
                self._visited.add(op)
                if op in self._bodies:
                    self._take_apart(op)
            self._note_unused()

    def _next_branches(self) -> list[tf.Operation]:
        """The ops that depend on the batch, choose a branch and can be taken apart."""
        candidates = graphs.ops_of_types(self._division.graph, op_types.BRANCHES)
        branches = list(filter(self._can_take_apart, candidates))
        if not branches:
            return []
        of_batch = set(graphs.dependents(self._division.inputs, self._division.existing_ops))
        return [op for op in branches if op in of_batch]

    def _add_bodies(self, ops: Sequence[tf.Operation]) -> None:
        """Adds the ops of the branches of several ops, each an `If` or a `Case`, all at once.

        They are given what these ops are given. What they are to have instead may be made of what
        other branches return, so that's there only when these are taken apart.
        """
        for op in ops:
            scopes = [
                f'{op.name}/{label}' for label in function_calls.functions_by_label(op.node_def)
            ]
            functions = function_calls.function_graphs(op)
            self._bodies[op] = [
                Body(function, op.inputs[1:], scope, op.device)
                for scope, function in zip(scopes, functions)
            ]
        bodies = [body for op in ops for body in self._bodies[op]]
        with tf.control_dependencies(None), tf.name_scope(None):
            add_bodies(bodies)
        added: list[tf.Operation] = []
        for op in ops:
            for body in self._bodies[op]:
                of_branch = body.ops(self._division.graph)
                tracebacks.give(op, of_branch, {body.scope: body.function})
                added += of_branch
        self._without_operands.update(added)
        self._liveness = Liveness(added)

    def _can_take_apart(self, op: tf.Operation) -> bool:
        """Whether an op chooses a branch, and its branches can be ops of the graph."""
        # Of an assertion, each tower has a copy that checks the tower's own examples.
        if op.type not in op_types.BRANCHES or op in self._visited or is_assertion(op):
            return False
        # TensorFlow takes a number or a text, too, false if it's 0 or empty. `Switch` doesn't.
        if op.type in op_types.IFS and op.inputs[0].dtype != tf.bool:
            return False
        # Who uses the memory of a reference variable in a branch can't be waited for from outside.
        if any(map(graphs.reads_reference, op.inputs)):
            return False
        # What a `Merge` makes of the handles of variables isn't known as a variable any more.
        if any(output.dtype == tf.resource for output in op.outputs):
            return False
        # There is none if only definitions are known, and nothing to choose from if there is one.
        return len(function_calls.function_graphs(op)) > 1

    def _take_apart(self, op: tf.Operation) -> None:
        """Lets v1 branches take the place of an `If` or a `Case`."""
        with tracebacks.made_for(op):
            with tf.control_dependencies(None), tf.device(op.device), tf.name_scope(None):
                returned, ends = self._connect_branches(op)
                results = [
                    self._result(output, values, op) for output, values in zip(op.outputs, returned)
                ]
                end = _merged(ends, f'{op.name}/end')
                last = [result.op for result in [*results, end] if result is not None]
                take_place_of(op, results, last, self._division)

    def _connect_branches(
        self, op: tf.Operation
    ) -> tuple[list[tuple[tf.Tensor, ...]], list[tf.Tensor]]:
        """Gives the ops of all branches what they use.

        Args:
          op: an `If` or a `Case`.

        Returns:
          For each output what each branch returns; and for each branch a tensor that is there once
          its side effects are, and is dead if the branch isn't taken.
        """
        returned: list[Sequence[tf.Tensor]] = []
        ends: list[tf.Tensor] = []
        for number, body in enumerate(self._bodies[op]):
            sides = self._sides(op, number)
            pivot = self._in_branch(op, op.inputs[0], sides)
            operands = self._operands(op, body.function, number, sides)
            added = body.with_operands(operands)
            self._without_operands.difference_update(added.ops)
            for inner in added.ops:
                if not graphs.direct_inputs(inner):
                    private.add_control_inputs(inner, [pivot.op])
            add_waits(op, operands, added.ops, self._liveness, self._can_take_apart)

            effects = [effect for effect in added.effects if has_side_effect(effect)]
            outputs = self._bypass_optionals(added)
            returned.append([after(effects, output, f'{body.scope}/output') for output in outputs])
            with tf.control_dependencies(effects):
                ends.append(tf.identity(pivot, f'{body.scope}/end'))
        return list(zip(*returned)), ends

    def _sides(self, op: tf.Operation, branch: int) -> list[_Side]:
        """The sides of switches that lead to a branch, by its number."""
        choice = op.inputs[0]
        if op.type in op_types.IFS:
            return [_Side(choice, 1 - branch)]  # The first branch is taken if it's true.
        last = len(function_calls.function_graphs(op)) - 1
        sides = [_Side(self._decision(op, number), 0) for number in range(branch)]
        # A number that no branch has takes the last one.
        return sides if branch == last else [*sides, _Side(self._decision(op, branch), 1)]

    def _decision(self, case: tf.Operation, number: int) -> tf.Tensor:
        """Whether a `Case` takes the branch of a number; the same tensor as for its gradient."""
        choice = case.inputs[0]
        key = choice.name, number
        if key not in self._decisions:
            self._decisions[key] = tf.equal(choice, number, f'{case.name}/is_{number}')
        return self._decisions[key]

    def _operands(
        self, op: tf.Operation, function: Any, branch: int, sides: Sequence[_Side]
    ) -> list[tf.Tensor]:
        """What takes the place of a branch's arguments: dead, if used, unless the branch is taken.

        Args:
          op: the op that calls the branch.
          function: the branch's graph.
          branch: its number.
          sides: those that lead to it.
        """
        operands = []
        for argument, tensor in zip(function.inputs, op.inputs[1:]):
            returned = self._returned.get(_behind_identities(tensor).name)
            if returned is not None and _is_same(returned.choice, op.inputs[0]):
                operands.append(returned.values[branch])
            elif _is_used(argument, function):
                operands.append(self._in_branch(op, tensor, sides))
            else:
                operands.append(tensor)
        return operands

    def _in_branch(self, op: tf.Operation, tensor: tf.Tensor, sides: Sequence[_Side]) -> tf.Tensor:
        """A tensor that is dead unless a branch of an op is taken. So is its op, unlike `Switch`.

        Gradients use the same.
        """
        for side in sides:
            key = tensor.name, side.decision.name
            if key not in self._switched:
                name = f'{op.name}/switch'
                switch = tf.raw_ops.Switch(data=tensor, pred=side.decision, name=name)
                self._switched[key] = list(switch)
            tensor = self._switched[key][side.output]
        if tensor.name not in self._in_branches:
            self._in_branches[tensor.name] = tf.identity(tensor, f'{op.name}/in_branch')
        return self._in_branches[tensor.name]

    def _bypass_optionals(self, added: AddedOps) -> list[tf.Tensor]:
        """Lets ops use what was put into an Optional rather than take it out.

        Args:
          added: the ops of a branch.

        Returns:
          The branch's outputs.
        """
        redirections = graphs.Redirections()
        has_effects = any(map(has_side_effect, added.ops))
        for op in added.ops:
            if op.type in (op_types.OPTIONAL, op_types.NO_OPTIONAL):
                self._optionals.append(op)
            elif op.type == op_types.OPTIONAL_VALUE and op.inputs[0].op.type == op_types.OPTIONAL:
                for output, value in zip(op.outputs, op.inputs[0].op.inputs):
                    value = redirections.in_place_of(value)
                    if has_effects and op.control_inputs:  # It may be waited for in their place.
                        with tf.control_dependencies(op.control_inputs):
                            value = tf.identity(value, f'{op.name}/value')
                    redirections.add(output, value)
                    self._division.replaced[output.name] = value
        redirections.make()
        return [redirections.in_place_of(output) for output in added.outputs]

    def _note_unused(self) -> None:
        """Notes that no step makes the Optionals that nobody needs any more."""
        for op in self._optionals:
            if all(map(self._is_unused, op.outputs[0].consumers())):
                self._division.unused.add(op.name)

    def _is_unused(self, op: tf.Operation) -> bool:
        """Whether others are used in the place of an op."""
        replaced = self._division.replaced
        is_replaced = any(output.name in replaced for output in op.outputs)
        return is_replaced or op.name in self._division.unused

    def _result(
        self, output: tf.Tensor, values: Sequence[tf.Tensor], op: tf.Operation
    ) -> tf.Tensor | None:
        """What is used in the place of an output; None if only gradients use it.

        The gradients of a branch take the value of that branch.

        Args:
          output: of the op that calls the branches.
          values: what each branch returns.
          op: that op.
        """
        returned = _Returned(op.inputs[0], values)
        self._returned[output.name] = returned
        if output.dtype == tf.variant and self._is_for_gradients(output, op.inputs[0]):
            return None
        merged = _merged(values, f'{op.name}/merge')
        merged.set_shape(output.shape)
        self._returned[merged.name] = returned
        return after(op.control_inputs, merged, f'{op.name}/output')

    def _is_for_gradients(self, tensor: tf.Tensor, choice: tf.Tensor) -> bool:
        """Whether only branches that the same tensor chooses use a tensor."""
        for user in tensor.consumers():
            if user in self._without_operands:
                continue
            if user.type == op_types.IDENTITY:
                is_for_gradients = self._is_for_gradients(user.outputs[0], choice)
            else:
                is_for_gradients = self._can_take_apart(user) and _is_same(user.inputs[0], choice)
            if not (is_for_gradients or self._is_unused(user)):
                return False
        return True


def _merged(values: Sequence[tf.Tensor], name: str) -> tf.Tensor:
    """The value of the branch that is taken: the last two are joined first."""
    *others, merged = values
    for value in reversed(others):
        merged = tf.raw_ops.Merge(inputs=[merged, value], name=name).output
    return merged


def _is_same(choice: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether two tensors choose the same branch."""
    return passed_on(choice) is passed_on(other)


def _behind_identities(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that identities have passed on.

    Unlike `passed_on`, it stops at a `Switch`: a value from before it is there even where the
    branch after it isn't taken.
    """
    while tensor.op.type == op_types.IDENTITY:
        tensor = tensor.op.inputs[0]
    return tensor


def _is_used(argument: tf.Tensor, function: Any) -> bool:
    """Whether a function uses, or returns, an argument."""
    is_returned = any(output is argument for output in function.outputs)
    return is_returned or bool(graphs.consumers_of(argument.op))
