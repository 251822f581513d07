"""The order in which a graph touches state: what each op waits for that reads, writes or draws.

Variables, tables, queues, the log and random numbers are state. Most of what an op waits for only
computes, and if it's computed earlier or later, nobody can tell. Which of these have to keep their
order is told by `StateOrder`, before a graph is changed, so that its changes can keep it:

- What has a side effect comes after all side effects that it came after.
- A variable is read before and after the writes that it was read before and after.
- To run an op runs all side effects that it ran, random draws included.

A reference variable is read by an `Identity`, whose output lies in the variable's own memory. There
each op that uses this output reads the variable. Loops and branches that read variables are
alike: TensorFlow takes them apart, and only who uses an output of them has waited for the reads
that the output needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import graphs, op_types
from estimator_mgpu.tf_internals.effects import has_side_effect, is_unordered, upstream_bits
from estimator_mgpu.tf_internals.graphs import topological_order
from estimator_mgpu.tf_internals.liveness import Liveness


class StateOrder:
    """Which ops that touch state each op of a graph waits for, as bits of an int.

    Args:
      ops: all of a graph, as it is now.

    Attributes:
      liveness: of the graph.
      effects: the bits of all ops with side effects.
      late_reads: the bits of the ops that read variables by what loops, branches and reads of
        reference variables give.
    """

    def __init__(self, ops: Sequence[tf.Operation]):
        self.liveness = Liveness(ops)
        self.effects = 0
        self.late_reads = 0
        self._unordered = 0
        self._ops: list[tf.Operation] = []  # by the position of their bits
        self._bits: dict[tf.Operation, int] = {}
        self._variables: dict[tf.Operation, set[tf.Operation]] = {}  # that an op reads or writes
        self._reads: dict[tf.Operation, int] = defaultdict(int)  # by variable
        self._writes: dict[tf.Operation, int] = defaultdict(int)

        order = topological_order(ops)
        self._behind = _read_by_users(order)
        self._not_waited_for = {op for op in ops if not self._can_be_waited_for(op)}
        for op in order:
            self._classify(op)
        self._upstream = upstream_bits(order, self._bits)

    def bits(self, op: tf.Operation) -> int:
        """The bit of an op; 0 if it touches no state."""
        return self._bits.get(op, 0)

    def upstream(self, op: tf.Operation) -> int:
        """The bits of an op and of all that it waited for in the graph as it was."""
        return self._upstream.get(op, 0)

    def is_quiet(self, op: tf.Operation) -> bool:
        """Whether an op has no side effect whose order counts."""
        return not self.bits(op) & (self.effects & ~self._unordered)

    def needs_in_order(self, op: tf.Operation) -> int:
        """The bits of the ops before an op that have to be before it: else it would differ."""
        needed = 0
        is_quiet = self.is_quiet(op)
        if not is_quiet:
            needed = self.effects & ~self._unordered
        for variable in self._variables.get(op, ()):
            needed |= self._writes[variable]
            if not is_quiet:
                needed |= self._reads[variable]
        return needed & self._upstream.get(op, 0) & ~self.bits(op)

    def needs(self, op: tf.Operation) -> int:
        """As `needs_in_order`, and the bits of all side effects that running the op has to run."""
        effects = self.effects & self._upstream.get(op, 0) & ~self.bits(op)
        return effects | self.needs_in_order(op)

    def variables_behind(self, tensor: tf.Tensor) -> Set[tf.Operation]:
        """The variables that are read by whoever uses a tensor."""
        return self._behind.get(tensor.name, set())

    def late_readers(self) -> list[tf.Operation]:
        """The ops that read variables by what loops, branches and reads of references give."""
        return list(self._ops_of(self.late_reads))

    def writes_after(self, op: tf.Operation) -> list[tf.Operation]:
        """The ops that write to the variables that an op reads, and that come after it."""
        writes = 0
        for variable in self._variables[op]:
            writes |= self._writes[variable]
        return [write for write in self._ops_of(writes) if self.upstream(write) & self.bits(op)]

    def forget_read(self, op: tf.Operation) -> None:
        """Notes that an op reads no variable any more, so that no write has to come after it."""
        for variable in self._variables.pop(op, ()):
            self._reads[variable] &= ~self.bits(op)
        self.late_reads &= ~self.bits(op)

    def ops_for(self, missing: int, op: tf.Operation) -> list[tf.Operation]:
        """Ops that an op can wait for, by control edges, so that it waits for all that is missing.

        Args:
          missing: bits of ops that the op waited for in the graph as it was.
          op: one that isn't in a loop.
        """
        found = []
        within = 0  # in branches and loops
        by_output = 0  # branches, each output of which runs its own side effects
        for before in self._ops_of(missing):
            if self._can_be_waited_for(before):
                found.append(before)
            elif before.type in op_types.BRANCHES:
                by_output |= self.bits(before)
            else:
                within |= self.bits(before)
        if within or by_output:
            # These are waited for where the branch or loop ends.
            for end in self._ops_of(self.upstream(op) & ~self.bits(op)):
                ends_branch = self.upstream(end) & by_output and self._ends_control_flow(end)
                ends_other = self.upstream(end) & within and self._can_be_waited_for(end)
                if ends_branch or ends_other:
                    found.append(end)
                    within &= ~self.upstream(end)
        return list(dict.fromkeys(found))

    def _classify(self, op: tf.Operation) -> None:
        has_effect = has_side_effect(op)
        reads_late: set[tf.Operation] = set()
        if not has_effect and op.type not in op_types.SHAPE_QUERIES:
            reads_late = reads_late.union(*map(self.variables_behind, op.inputs))

        variables = reads_late
        if has_effect or op.type in op_types.VALUE_READS:
            variables = reads_late | set(_variables_of(op.inputs))
        if not (has_effect or variables or self._ends_control_flow(op)):
            return

        bit = 1 << len(self._ops)
        self._ops.append(op)
        self._bits[op] = bit
        self._variables[op] = variables
        if has_effect:
            self.effects |= bit
            self._unordered |= bit if is_unordered(op) else 0
        if reads_late:
            self.late_reads |= bit
        for variable in variables:
            (self._writes if has_effect else self._reads)[variable] |= bit

    def _ops_of(self, bits: int) -> Iterator[tf.Operation]:
        """The ops of bits."""
        while bits:
            lowest = bits & -bits
            yield self._ops[lowest.bit_length() - 1]
            bits ^= lowest

    def _can_be_waited_for(self, op: tf.Operation) -> bool:
        """Whether an op can be waited for by ops that are in no loop and may not be dead.

        Who waits for a `tf.cond` itself, rather than for an output, waits for nothing in it.
        """
        is_branch = op.type in op_types.BRANCHES and bool(op.outputs)
        return not (is_branch or self.liveness.may_be_dead(op) or self.liveness.output_frame(op))

    def _ends_control_flow(self, op: tf.Operation) -> bool:
        """Whether an op can be waited for, but something that it waits for can't."""
        if not self._not_waited_for or op in self._not_waited_for:
            return False
        return not self._not_waited_for.isdisjoint(graphs.direct_inputs(op))


def _read_by_users(order: Iterable[tf.Operation]) -> dict[str, set[tf.Operation]]:
    """By name, the tensors whose users read variables by them, with these variables."""
    shared: dict[str, set[tf.Operation]] = {}
    for op in order:
        for output in op.outputs:
            if graphs.is_reference_variable(output):
                shared[output.name] = set(_variables_of([output]))
        if op.type in op_types.FUNCTION_CALLERS:
            variables = set(_variables_of(op.inputs))
            shared.update((output.name, variables) for output in op.outputs if variables)
        elif op.type in op_types.MAY_SHARE_MEMORY:
            variables = set().union(*(shared.get(operand.name, ()) for operand in op.inputs))
            if variables:
                for output in op.outputs:
                    shared.setdefault(output.name, variables)
    return shared


def _variables_of(tensors: Iterable[tf.Tensor]) -> Iterator[tf.Operation]:
    """The ops that make the variables, or other state, that tensors refer to."""
    for tensor in tensors:
        if tensor.dtype != tf.resource and not graphs.is_reference_variable(tensor):
            continue
        # An op such as Assign gives on the reference that it's given, as do those of loops.
        maker = tensor.op
        while maker.inputs:
            is_forwarded = maker.type in op_types.FORWARD_VARIABLES
            first = maker.inputs[0]
            if not is_forwarded and not graphs.is_reference_variable(first):
                break
            maker = first.op
        yield maker
