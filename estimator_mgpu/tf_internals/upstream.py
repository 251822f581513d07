"""What the ops of a graph wait for, as bits of an int: each op that is looked for has a bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import op_types
from estimator_mgpu.tf_internals.graphs import Inputs, begins_steps, ops_of_types
from estimator_mgpu.tf_internals.liveness import Branch, Condition, Liveness


def union(first: int, second: int) -> int:
    """The bits of either; the same object as before if that is all, which saves memory."""
    both = first | second
    if both == first:
        return first
    return second if both == second else both


def upstream_bits(
    order: Mapping[tf.Operation, Inputs],
    bits: Mapping[tf.Operation, int],
    certain: CertainWaits | None = None,
) -> dict[tf.Operation, int]:
    """For each op, its bits and those of all ops that it depends on.

    Args:
      order: the ops that are looked at, as `topological_order` gives them.
      bits: of the ops that are looked for.
      certain: to find only what has run whenever an op has. By default, it's all that running the
        op runs, before or after it.
    """
    if not order:
        return {}
    graph = next(iter(order)).graph
    fed = set(ops_of_types(graph, op_types.FED))
    ways_back = set(ops_of_types(graph, op_types.NEXT_ITERATION))
    upstream: dict[tf.Operation, int] = {}
    is_complete = False
    while not is_complete:
        is_complete = True
        for op, befores in order.items():
            of_befores = [upstream.get(before, 0) for before in befores]
            if certain is not None:
                count = len(op.inputs)
                waited_for = certain.waited_for(op, of_befores[:count], of_befores[count:])
            else:
                waited_for = 0 if op in fed else union_of(of_befores)
            found = union(waited_for, bits.get(op, 0))
            # What a v1 loop computes is known only now for its way back, which comes first. From
            # round to round, an op has the same bits or more, so this ends.
            if op in ways_back and found != upstream.get(op):
                is_complete = False
            upstream[op] = found
    return upstream


class CertainWaits:
    """What has run whenever an op has: not always all that the op depends on.

    A `Merge` waits for one input that is alive. Here, the write of c has run when the `Merge` has,
    or will never run. But if p is false, the read of b may still be running:

        read of b --> write of c, if p is true ---+
                                                  +--> Merge - - -> write of b
                      x, if p is false -----------+

    That of a loop counts as having waited for all that the loop's body waits for, as if the body
    always ran. What is fed waits for nothing.

    Args:
      bits: of the ops that are looked for.
    """

    def __init__(self, liveness: Liveness, bits: Mapping[tf.Operation, int]):
        self._liveness = liveness
        self._of_branch: dict[Branch, int] = defaultdict(int)
        for op, bit in bits.items():
            for branch in _condition(op, liveness):
                self._of_branch[branch] |= bit

    def waited_for(
        self, op: tf.Operation, of_inputs: Sequence[int], of_controls: Sequence[int]
    ) -> int:
        """The bits of what has run whenever an op has, if it runs at all.

        Args:
          of_inputs: the bits of what each of its operands waits for.
          of_controls: the same of its control inputs.
        """
        if op.type in op_types.FED:
            return 0
        if op.type in op_types.MERGE:
            return self._of_merge(op, of_inputs) | union_of(of_controls)
        return union_of([*of_inputs, *of_controls])

    def _of_merge(self, merge: tf.Operation, of_inputs: Sequence[int]) -> int:
        if begins_steps(merge):
            return union_of(of_inputs)
        common = -1  # all bits
        for operand, bits in zip(merge.inputs, of_inputs):
            common &= bits | self._dead_with(operand)
        return common

    def _dead_with(self, tensor: tf.Tensor) -> int:
        """The bits of the ops that don't run if a tensor has a value."""
        branches = self._liveness.condition_of_output(tensor)
        return union_of(self._of_branch[b.opposite()] for b in branches if b.way >= 0)


def _condition(op: tf.Operation, liveness: Liveness) -> Condition:
    """When an op runs. A read counts only if its users run: otherwise nobody sees its value."""
    condition = liveness.condition(op)
    users = op.outputs[0].consumers() if op.type in op_types.VALUE_READS else []
    if users:
        condition |= frozenset.intersection(*map(liveness.condition, users))
    return condition


def union_of(bits: Iterable[int]) -> int:
    """The bits of any; one of the objects if that has all, which saves memory."""
    result = 0
    for others in bits:
        both = result | others
        if both != result:
            result = others if both == others else both
    return result


def positions_of(bits: int) -> Iterator[int]:
    """The positions of bits, the lowest first: 0 and 2 of 0b101."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
