"""The order in which a graph touches state: what each op waits for that reads, writes or draws.

Variables, tables, queues, the log and random numbers are state. Most of what an op waits for only
computes, and if it's computed earlier or later, nobody can tell. `Order` says which ops of the
finished graph have to keep their order when it's changed:

- Two ops with side effects: the one that came first still comes first.
- A read of a variable and a write to it: the same.
- Whoever runs an op runs all side effects that came with it, random draws included.

A placeholder waits for nothing: TensorFlow drops what a tensor waits for if it's fed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.order.accesses import (
    makers_of_state,
    read_by_users,
    read_late,
    written_state,
)
from estimator_mgpu.tf_internals import function_calls, graphs, op_types
from estimator_mgpu.tf_internals.effects import (
    has_side_effect,
    is_unordered,
    type_may_have_side_effects,
)
from estimator_mgpu.tf_internals.graphs import topological_order
from estimator_mgpu.tf_internals.liveness import Frame, Liveness
from estimator_mgpu.tf_internals.upstream import (
    CertainWaits,
    positions_of,
    union,
    upstream_bits,
)


class Order:
    """Which ops that touch state each op of a graph waits for, as bits of an int.

    Args:
      graph: one, as it is now.

    Attributes:
      liveness: of the graph.
      certain: what ops wait for in any case.
      effects: the bits of all ops with side effects.
      late_reads: the bits of the ops that read variables late, as `accesses` says.
    """

    def __init__(self, graph: tf.Graph):
        ops = graph.get_operations()
        self.liveness = Liveness(ops)
        self.effects = 0
        self.late_reads = 0
        self._unordered = 0
        self._ops: list[tf.Operation] = []  # by the position of their bits
        self._bit_of: dict[tf.Operation, int] = {}
        self._variables: dict[tf.Operation, set[tf.Operation]] = {}  # that an op reads or writes
        self._reads: dict[tf.Operation, int] = defaultdict(int)  # by variable
        self._writes: dict[tf.Operation, int] = defaultdict(int)

        order = topological_order(ops)
        self._behind = read_by_users(graph, order)
        branches = graphs.ops_of_types(graph, op_types.BRANCHES)
        may_be_dead = self.liveness.after_control_flow.union(branches)
        self._not_waited_for = {op for op in may_be_dead if not self._can_be_waited_for(op)}
        users = {user for op in self._not_waited_for for user in graphs.consumers_of(op)}
        candidates = users.union(self._ops_that_may_touch_state(graph))
        for op in order:
            if op in candidates:
                self._classify(op, op in users and self._ends_control_flow(op))
        self._upstream = upstream_bits(order, self._bit_of)
        self.certain = CertainWaits(self.liveness, self._bit_of)
        # The bits of what has run whenever an op has: but for a `Merge`, which takes either input,
        # that's all.
        self._certainly_before = self._upstream
        if any(op.type in op_types.MERGE for op in may_be_dead):
            self._certainly_before = upstream_bits(order, self._bit_of, self.certain)
        self._needed_by_loops: dict[tf.Operation, int] = defaultdict(int)  # by `Enter`
        self._let_enters_wait(order)

    def bits(self, op: tf.Operation) -> int:
        """The bit of an op; 0 if it touches no state."""
        return self._bit_of.get(op, 0)

    def upstream(self, op: tf.Operation) -> int:
        """The bits of an op and of all that running it ran in the graph as it was."""
        return self._upstream.get(op, 0)

    def follows_nothing(self, op: tf.Operation) -> bool:
        """Whether running an op ran nothing that touches state, in the graph as it was."""
        return self._upstream.get(op) == 0

    def is_quiet(self, op: tf.Operation) -> bool:
        """Whether nobody can tell when an op runs: its side effect, if any, has no order."""
        return not self.bits(op) & (self.effects & ~self._unordered)

    def must_come_before(self, op: tf.Operation) -> int:
        """The bits of the ops before an op that have to stay before it: else it would differ."""
        if op not in self._bit_of and op not in self._needed_by_loops:
            return 0
        needed = 0 if self.is_quiet(op) else self.effects & ~self._unordered
        needed |= self._needed_by_loops.get(op, 0)
        for variable in self._variables.get(op, ()):
            needed |= self._writes[variable]
            if self._writes[variable] & self.bits(op):
                needed |= self._reads[variable]
        return needed & self._upstream.get(op, 0) & ~self.bits(op)

    def must_have_run(self, op: tf.Operation) -> int:
        """As `must_come_before`, and the bits of all side effects that an op has to run."""
        effects = self.effects & self._upstream.get(op, 0) & ~self.bits(op)
        return effects | self.must_come_before(op)

    def variables_behind(self, tensor: tf.Tensor) -> Set[tf.Operation]:
        """The variables that are read by whoever uses a tensor."""
        return self._behind.get(tensor.name, set())

    def ops_with_effects(self) -> list[tf.Operation]:
        """The ops with side effects."""
        return list(self._ops_of(self.effects))

    def late_readers(self) -> list[tf.Operation]:
        """The ops that read variables late, as `accesses` says."""
        return list(self._ops_of(self.late_reads))

    def writes_to(self, variables: Iterable[tf.Operation]) -> int:
        """The bits of the ops that write to some of these variables."""
        writes = 0
        for variable in variables:
            writes |= self._writes[variable]
        return writes

    def writes_after(self, op: tf.Operation) -> list[tf.Operation]:
        """The ops that write to the variables that an op reads, and that come after it."""
        writes = self.writes_to(self._variables[op])
        return [write for write in self._ops_of(writes) if self.upstream(write) & self.bits(op)]

    def read_instead(self, op: tf.Operation, copies: Iterable[tf.Operation]) -> None:
        """Notes that copies of variables are read in the place of what an op reads."""
        for copy in copies:
            if copy not in self._bit_of:
                self._add_bit(copy)
                self._upstream[copy] = self.bits(copy) | self._upstream.get(copy.inputs[0].op, 0)
            self._variables.setdefault(copy, set()).update(self._variables[op])
            for variable in self._variables[op]:
                self._reads[variable] |= self.bits(copy)
            for write in self.writes_after(op):
                self._upstream[write] |= self.bits(copy)
        for variable in self._variables.pop(op, ()):
            self._reads[variable] &= ~self.bits(op)
        self.late_reads &= ~self.bits(op)
        if not self.bits(op) & self.effects:
            # It touches no state any more. In `upstream` of others, nothing asks for its bit.
            del self._bit_of[op]

    def ops_for(self, missing: int, op: tf.Operation) -> list[tf.Operation]:
        """Ops that an op can wait for, by control edges, so that it waits for what is missing.

        There are none for what is in a loop that the op doesn't come after, or in a branch that
        hasn't ended.

        Args:
          missing: bits of ops that the op waited for in the graph as it was.
          op: one that isn't in a loop.
        """
        found = []
        within = 0  # in branches and loops
        by_output = 0  # branches, each output of which runs its own side effects
        waited_for = set(op.control_inputs)
        for before in self._ops_of(missing):
            runs = before.type not in op_types.BRANCHES and self.liveness.runs_whenever(before, op)
            if before not in self._not_waited_for or before in waited_for or runs:
                found.append(before)
            elif before.type in op_types.BRANCHES:
                by_output |= self.bits(before)
            else:
                within |= self.bits(before)
        if within or by_output:
            # These are waited for where the branch or loop ends: where it has ended for certain, or
            # where it has if its branch is taken.
            for has_run in (self._certainly_before, self._upstream):
                for end in self._ops_of(self.upstream(op) & ~self.bits(op)):
                    ends_branch = self.upstream(end) & by_output and self._ends_control_flow(end)
                    ended = within & has_run.get(end, 0)
                    if ends_branch or (ended and end not in self._not_waited_for):
                        found.append(end)
                        within &= ~ended
        return list(dict.fromkeys(found))

    def _let_enters_wait(self, ops: Iterable[tf.Operation]) -> None:
        """Notes what loops of TensorFlow 1 have to wait for where they begin.

        Nothing in a loop can wait for an op outside, so the loop begins after it. All of its
        `Enter` ops wait: whoever comes after the loop relies on that, also if the body never runs.
        """
        within = defaultdict[Frame, int](int)  # the bits of a loop's ops
        candidates = self.liveness.after_control_flow
        ops_in_loops = [op for op in ops if op in candidates and self.liveness.frame(op)]
        for op in ops_in_loops:
            within[self.liveness.outermost_loop(op)] |= self.bits(op)
        for op in ops_in_loops:
            loop = self.liveness.outermost_loop(op)
            needed = self.must_come_before(op) & ~within[loop]
            if not needed:
                continue
            upstream = self._upstream[op] & ~within[loop]
            for enter in self.liveness.enters(op):
                self._needed_by_loops[enter] |= needed
                self._upstream[enter] = union(upstream, self._upstream[enter])

    def _ops_that_may_touch_state(self, graph: tf.Graph) -> set[tf.Operation]:
        """The only ops that may have a side effect or read a variable."""
        types = [
            op_type
            for op_type in graphs.types_of(graph)
            if op_type in op_types.VALUE_READS or type_may_have_side_effects(op_type)
        ]
        late_readers = {
            user for name in self._behind for user in graph.get_tensor_by_name(name).consumers()
        }
        return late_readers.union(graphs.ops_of_types(graph, types))

    def _classify(self, op: tf.Operation, ends_control_flow: bool) -> None:
        has_effect = has_side_effect(op)
        reads_late = read_late(op, self._behind)
        if self.liveness.frame(op) and not (has_effect or any(o.consumers() for o in op.outputs)):
            reads_late = set()  # Nobody sees what is read: what is in a loop can't be fetched.
        variables = reads_late
        if has_effect or op.type in op_types.VALUE_READS:
            variables = reads_late | set(makers_of_state(op.inputs))
        if not (has_effect or variables or ends_control_flow):
            return

        bit = self._add_bit(op)
        self._variables[op] = variables
        if has_effect:
            self.effects |= bit
            self._unordered |= bit if is_unordered(op) else 0
        if reads_late:
            self.late_reads |= bit
        written = written_state(op) if has_effect else set()
        for variable in variables:
            (self._writes if variable in written else self._reads)[variable] |= bit

    def _add_bit(self, op: tf.Operation) -> int:
        bit = 1 << len(self._ops)
        self._ops.append(op)
        self._bit_of[op] = bit
        return bit

    def _ops_of(self, bits: int) -> Iterator[tf.Operation]:
        """The ops of bits."""
        return (self._ops[position] for position in positions_of(bits))

    def _can_be_waited_for(self, op: tf.Operation) -> bool:
        """Whether an op can be waited for by ops that are in no loop and may not be dead."""
        if self.liveness.may_be_dead(op) or self.liveness.output_frame(op):
            return False
        return op.type not in op_types.BRANCHES or not op.outputs or _runs_all_effects(op)

    def _ends_control_flow(self, op: tf.Operation) -> bool:
        """Whether an op can be waited for, but something that it waits for can't."""
        if not self._not_waited_for or op in self._not_waited_for:
            return False
        return not self._not_waited_for.isdisjoint(graphs.direct_inputs(op))


def _runs_all_effects(branches: tf.Operation) -> bool:
    """Whether who waits for a `tf.cond` itself, rather than for an output, waits for its effects.

    That's so in a `tf.function`, which notes what its branches run for its effects. Otherwise only
    an output runs what it depends on.
    """
    for body in function_calls.function_graphs(branches):
        awaited = graphs.ancestors(list(body.control_outputs))
        if any(has_side_effect(op) and op not in awaited for op in body.get_operations()):
            return False
    return bool(function_calls.function_graphs(branches))
