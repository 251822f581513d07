"""Which ops run within a v1 loop, and which may be dead: told by the types of ops alone.

TensorFlow's own record, the control flow context of an op, is missing in an imported graph.

*Loops.* The ops of a v1 loop run in a frame, once in each iteration. An edge must not lead from one
frame to another, but through `Enter` and `Exit`. `Enter` runs outside of the frame into which it
takes a value; `Exit` runs inside.

*Dead ops.* `Switch` has a value on one of its outputs; the other one is dead. An op is dead, so
isn't run, if anything that it waits for is dead, be it by a control edge; and so are its outputs. A
`Merge` is alive if one of its inputs is:

                 false --> g(x) --+
    x --> Switch                  +--> Merge      g and h may be dead, Switch and Merge are not
                 true ---> h(x) --+

Here each op has a condition: which way switches have to go so that the op is alive. For g it's
"false", and for h "true". The condition of a `Merge` whose inputs differ in the way of one switch,
as here, is what both have in common: nothing, so it's always alive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs, op_types
from estimator_mgpu.tf_internals.graphs import topological_order

Frame = tuple[bytes, ...]
"""The names of the loops around an op, the outermost one first; () outside of any loop."""


class Branch(NamedTuple):
    """Something on which it depends whether an op is alive: which way a switch goes.

    If the condition of a `Merge` can't be told from switches, it's whether the `Merge` is alive.

    Attributes:
      decision: the predicate of the switch, or its value if it's a constant, or the `Merge`.
      way: the output of the switch that has to have the value: 0 or 1; -1 for a `Merge`.
      frame: in which it's decided.
    """

    decision: tf.Tensor | tf.Operation | bool
    way: int
    frame: Frame

    def opposite(self) -> Branch:
        """The other way of the switch."""
        return self._replace(way=1 - self.way)


Condition = frozenset[Branch]
"""An op is alive if all of these hold."""
_ALWAYS: Condition = frozenset()

_CONTROL_FLOW = frozenset((*op_types.ENTER, *op_types.SWITCH))


class Liveness:
    """Where the ops of a graph run, and whether they always do.

    Args:
      ops: those that are looked at: all of a graph, or with all that they depend on.

    Attributes:
      after_control_flow: the only ops that may be in a loop, or dead.
      in_loops: the ops that run in loops, or whose outputs are in one, in the order of `ops`.
    """

    def __init__(self, ops: Sequence[tf.Operation]):
        self._input_frames: dict[tf.Operation, Frame] = {}
        self._output_frames: dict[tf.Operation, Frame] = {}
        self._conditions: dict[tf.Operation, Condition] = {}
        self._enters: dict[Frame, list[tf.Operation]] = defaultdict(list)
        control_flow = graphs.ops_of_types(ops[0].graph, _CONTROL_FLOW) if ops else []
        begins = set(control_flow).intersection(ops)
        self.after_control_flow = graphs.descendants(list(begins)).intersection(ops)
        candidates = [op for op in ops if op in self.after_control_flow]
        order = topological_order(candidates)
        for op in order:
            self._add(op)
        # In that order, a `NextIteration` comes before what it depends on: so it's added again.
        for op in order:
            if op.type in op_types.NEXT_ITERATION:
                self._add(op)
        self.in_loops = [op for op in candidates if self.is_in_loop(op)]

    def frame(self, op: tf.Operation) -> Frame:
        """The loops in which an op runs."""
        return self._input_frames.get(op, ())

    def output_frame(self, op: tf.Operation) -> Frame:
        """The loops in which an op's outputs are. For `Enter` and `Exit`, not those of the op."""
        return self._output_frames.get(op, ())

    def is_in_loop(self, op: tf.Operation) -> bool:
        """Whether an op runs in a loop, or its outputs are in one."""
        return bool(self.frame(op) or self.output_frame(op))

    def outermost_loop(self, op: tf.Operation) -> Frame:
        """The outermost loop that an op, or its outputs, are in; () if there is none."""
        return (self.frame(op) or self.output_frame(op))[:1]

    def enters(self, op: tf.Operation) -> Sequence[tf.Operation]:
        """The `Enter` ops by which the outermost loop around an op begins; none outside of loops.

        Nothing in a loop can wait for an op outside of it: so these have to.
        """
        return self._enters.get(self.outermost_loop(op), ())

    def may_be_dead(self, op: tf.Operation) -> bool:
        """Whether an op may be dead. An op in a loop may be, as the last iteration ends early."""
        return bool(self._conditions.get(op, _ALWAYS))

    def always_runs(self, op: tf.Operation) -> bool:
        """Whether an op runs exactly once: neither in a loop nor in a branch."""
        return not (self.is_in_loop(op) or self.may_be_dead(op))

    def runs_whenever(self, op: tf.Operation, other: tf.Operation) -> bool:
        """Whether another op, where it runs, can wait for an op: it isn't dead, nor in a loop."""
        if self.output_frame(op) or self.frame(other):
            return False
        return self._conditions.get(op, _ALWAYS) <= self._conditions.get(other, _ALWAYS)

    def condition(self, op: tf.Operation) -> Condition:
        """Which way switches have to go so that an op is alive."""
        return self._conditions.get(op, _ALWAYS)

    def condition_of_output(self, tensor: tf.Tensor) -> Condition:
        """The condition of a tensor: its op's, and of a switch also the way that it goes."""
        condition = self.condition(tensor.op)
        if tensor.op.type in op_types.SWITCH:
            decision = _source(tensor.op.inputs[1])
            return condition | {Branch(decision, tensor.value_index, self.frame(tensor.op))}
        return condition

    def exclude_each_other(self, op: tf.Operation, other: tf.Operation) -> bool:
        """Whether two ops never run in the same step, as they're in different branches.

        Of branches in a loop, one may be taken in one iteration, and the other one in the next.
        """
        branches = [b for b in self.condition(op) if b.way >= 0 and not b.frame]
        opposite = {branch.opposite() for branch in branches}
        return not opposite.isdisjoint(self.condition(other))

    def output_may_be_dead(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor may be dead: as its op may be, or as its op is a switch."""
        return bool(self.condition_of_output(tensor))

    def _add(self, op: tf.Operation) -> None:
        """Finds the frames and the condition of an op, given those of what it waits for."""
        # An op runs in the frame of what it waits for: even a constant in a loop waits for an op
        # there. A loop's way back has no frame yet when the loop's `Merge` is added, so the longest
        # frame counts.
        frame = max(map(self.output_frame, graphs.direct_inputs(op)), key=len, default=())
        self._input_frames[op] = frame
        self._output_frames[op] = frame
        if op.type in op_types.ENTER:
            self._output_frames[op] = (*frame, op.get_attr('frame_name'))
            if not frame:
                self._enters[self._output_frames[op]].append(op)
        elif op.type in op_types.EXIT:
            self._output_frames[op] = frame[:-1]
        self._conditions[op] = self._condition_of(op)

    def _condition_of(self, op: tf.Operation) -> Condition:
        """The condition of an op, given those of what it waits for."""
        if op.type in op_types.MERGE:
            # Of a loop's two inputs, the first iteration has what the loop begins with.
            inputs = [tensor for tensor in op.inputs if not graphs.is_way_back(tensor)]
            conditions = [self.condition_of_output(tensor) for tensor in inputs]
            return _condition_of_merge(op, conditions, self.frame(op))

        condition = _ALWAYS.union(
            *map(self.condition_of_output, op.inputs),
            *(self._conditions.get(before, _ALWAYS) for before in op.control_inputs),
        )
        if op.type in op_types.EXIT:
            # It gives a value once the loop has ended, whatever in the loop has decided that.
            frame = self.frame(op)
            return frozenset(b for b in condition if b.frame[: len(frame)] != frame)
        return condition


def _condition_of_merge(
    merge: tf.Operation, conditions: Sequence[Condition], frame: Frame
) -> Condition:
    """The condition of a `Merge`: that one of the conditions of its inputs holds.

    Of {p is true, q is true} and {p is true, q is false}, that's {p is true}.
    """
    remaining = set(conditions)
    pair = _complementary_pair(remaining)
    while pair is not None:
        remaining -= set(pair)
        remaining.add(pair[0] & pair[1])
        pair = _complementary_pair(remaining)

    common = frozenset.intersection(*remaining)
    if common in remaining:
        return common
    return common | {Branch(merge, -1, frame)}


def _complementary_pair(conditions: Iterable[Condition]) -> tuple[Condition, Condition] | None:
    """Two conditions that are the same but for the way in which one switch goes."""
    for condition in conditions:
        for branch in condition:
            other = condition - {branch} | {branch.opposite()}
            if branch.way >= 0 and other in conditions:
                return condition, other
    return None


def _source(predicate: tf.Tensor) -> tf.Tensor | bool:
    """What a predicate is a copy of; or its value, as towers have their own copies of constants.

    `tf.cond` gives its switches several copies of one predicate. If that is a variable, each switch
    has a read of its own. With `recompute=True`, copies of ops are given it by a barrier: an
    `EnsureShape` or a `StopGradient`.
    """
    barriers = (op_types.ENSURE_SHAPE, op_types.STOP_GRADIENT)
    copies = (op_types.IDENTITY, op_types.READ_VARIABLE, *op_types.SWITCH, *barriers)
    while predicate.op.type in copies:
        predicate = predicate.op.inputs[0]
    is_constant = predicate.op.type == op_types.CONST
    return bool(tf.get_static_value(predicate)) if is_constant else predicate
