"""What towers' copies wait for by control edges, and what the user's ops do.

On one device, `with tf.control_dependencies(updates): optimizer.minimize(loss)` lets all gradients
wait for updates of moving averages, which need the examples of all towers. Gradients would be the
same if they were computed earlier, though, so the towers don't wait; the variables are written
after the updates, as on one device:

    tower 0:  activations ----> gradient ---+
                   |                        +--> sum --> write
                   +--> update of the       |              ^
                   +--> moving average -----|--------------+
    tower 1:  activations ----> gradient ---+

So a copy that has no side effect doesn't wait for what runs once, unless it reads a variable that
is written before. Instead, those of the user's ops that come later wait for it: what writes, and
what gives somebody a value to fetch.

In: a plan, and the order in which the user's graph touches state. Out: ops to wait for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.order.accesses import makers_of_state
from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.partition.plan import (
    LOCAL,
    OF_SIZES,
    Need,
    Plan,
    Reduced,
    Sharded,
    VariableValue,
)
from estimator_mgpu.partition.towers.origins import Origins
from estimator_mgpu.tf_internals import graphs, op_types
from estimator_mgpu.tf_internals.upstream import union, union_of


class Waits:
    """Decides what copies and the user's ops wait for.

    Args:
      ops: the user's, each after those that it depends on.
      sharded: those that run on every tower.
      order: in which the graph touched state, before identities were bypassed.
      origins: which full values are made of what towers have.
    """

    def __init__(
        self,
        ops: Collection[tf.Operation],
        sharded: Sharded,
        plan: Plan,
        order: Order,
        origins: Origins,
    ):
        self._plan = plan
        self._sharded = sharded
        self._order = order
        self._origins = origins
        self._of_batch = set(plan.order)
        self._sharded_bits = 0
        for op in sharded:
            self._sharded_bits |= order.bits(op)
        # What is decided, by the user's ops. Of a sharded op, each tower has a copy; the op itself
        # stays for whoever fetches it, and is in all of these as well.
        self._waits_of_copy: dict[tf.Operation, Sequence[tf.Operation]] = {}
        self._waits: dict[tf.Operation, Sequence[tf.Operation]] = {}  # of those it had, which stay
        self._added: dict[tf.Operation, Sequence[tf.Operation]] = {}  # which ones it gets

        # As bits, what has certainly run once a copy has, or the user's op; itself included.
        self._waited_for_by_copy: dict[tf.Operation, int] = {}
        self._waited_for: dict[tf.Operation, int] = {}

        # By gradients. They are known only once all ops were visited, so whatever follows from
        # these gradients is visited again then.
        self._reads_to_wait_for: dict[tf.Operation, list[tf.Operation]] = {}

        self._needed_by_copies = self._find_needed_by_copies()
        # The others neither wait for anything now nor may have to.
        waiting = [op for op in ops if not order.follows_nothing(op) or op.control_inputs]
        self._visit_all(waiting)
        self._reads_to_wait_for = self._find_reads_to_wait_for(ops)
        if self._reads_to_wait_for:
            changed = graphs.descendants(list(self._reads_to_wait_for))
            again = [op for op in ops if op in changed]
            self._visit_all(graphs.topological_order(again, self._reads_to_wait_for))

    def _visit_all(self, ops: Collection[tf.Operation]) -> None:
        """Decides what ops wait for, each after those that it depends on."""
        in_loops = self._order.liveness.in_loops
        ways_back = [op for op in in_loops if op.type in op_types.NEXT_ITERATION]

        def known_of_loops() -> list[tuple[int | None, int | None]]:
            return [
                (self._waited_for.get(op), self._waited_for_by_copy.get(op)) for op in ways_back
            ]

        is_complete = False
        while not is_complete:
            # What a v1 loop waits for is known only once its way back is visited, which comes
            # last. Within loops no waits are added: so what is known of a loop only grows once its
            # `Enter` ops are settled, and this ends.
            known = known_of_loops()
            for op in ops:
                if op in self._sharded:
                    self._visit_copy(op)
                self._visit(op)
            is_complete = known == known_of_loops()

    def of_copy(self, op: tf.Operation) -> Sequence[tf.Operation]:
        """The ops for which a copy of an op waits by control edges; of sharded ones, the copies.

        If an op isn't sharded, it's a constant, of which each tower has a copy.
        """
        if op in self._waits_of_copy:
            return self._waits_of_copy[op]
        return [] if self._may_wait_otherwise(op) else op.control_inputs

    def of_op(self, op: tf.Operation) -> Sequence[tf.Operation]:
        """The ops for which one of the user's ops still waits; of sharded ones, all copies."""
        return self._waits.get(op, op.control_inputs)

    def of_read(self, op: tf.Operation, tensor: tf.Tensor) -> Sequence[tf.Operation]:
        """The ops for which the read of a variable waits whose value a copy is given.

        A call, a branch or a loop reads a variable when all of its arguments are there. A copy is
        given the variable's value instead, which is read as soon as the writes before it are done.

        Args:
          op: the call, branch or loop; of a loop of TensorFlow 1, the `Enter` of the variable.
        """
        writes = self._order.writes_to(set(makers_of_state([tensor])))
        waits = self._order.ops_for(writes & self._order.must_come_before(op), op)
        if self._order.liveness.may_be_dead(op):  # Writes in the same branch are among these.
            waits += op.control_inputs
        return list(dict.fromkeys(waits))

    def added(self, op: tf.Operation) -> Sequence[tf.Operation]:
        """Further ops for which one of the user's ops waits: those before it no longer do."""
        return self._added.get(op, ())

    def ops_with_added(self) -> list[tf.Operation]:
        """The user's ops that wait for further ones."""
        return [op for op, added in self._added.items() if added]

    def missing(self, replacements: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """The ops that a tensor waits for, but not the value that is used in its place.

        Args:
          replacements: the tensor, and what one rewrite after another uses in its place. For
            example, a call's output is replaced by an identity that waits for all that the call
            does, and the identity by its operand.
        """
        used = replacements[-1]
        waited_for = self._bits_of_operand(used)
        ops: list[tf.Operation] = []
        for tensor in replacements:
            needed = self._order.must_have_run(tensor.op)
            if tensor is used:  # The effects of an op that was replaced happen in its place.
                needed |= self._order.bits(tensor.op) & self._order.effects
            missing = needed & ~waited_for
            ops += self._order.ops_for(missing, tensor.op)
            waited_for = union(missing, waited_for)
        return ops

    def effects_of(self, replacements: Sequence[tf.Tensor]) -> int:
        """The bits of all side effects that come with a tensor.

        Args:
          replacements: the tensor, and what one rewrite after another uses in its place.
        """
        bits = self._order.bits(replacements[-1].op) & self._order.effects
        for tensor in replacements:
            bits = union(self._order.must_have_run(tensor.op), bits)
        return bits

    def touches_state(self, replacements: Sequence[tf.Tensor]) -> bool:
        """Whether a tensor outside of loops is made by reading or changing state.

        A loop of TensorFlow 1 may do both in its ops; and the loop of a backward pass takes what
        that of the forward pass has left for it.

        Args:
          replacements: the tensor, and what one rewrite after another uses in its place.
        """
        if self._order.liveness.output_frame(replacements[0].op):
            return False
        return any(
            tensor.op.type in op_types.EXIT
            or self._order.bits(tensor.op)
            or self._order.variables_behind(tensor)
            for tensor in replacements
        )

    def _visit_copy(self, op: tf.Operation) -> None:
        needs = self._sharded[op].needs
        of_inputs = [self._bits_of_need(op, tensor, need) for tensor, need in zip(op.inputs, needs)]
        waits = [
            before
            for before in op.control_inputs
            if before in self._sharded or not self._may_wait_otherwise(op)
        ]
        waits += self._reads_to_wait_for.get(op, ())
        bits = self._order.certain.waited_for(op, of_inputs, self._bits_of_controls(waits))
        if not self._order.liveness.frame(op):
            added = self._order.ops_for(self._order.must_come_before(op) & ~bits, op)
            waits += added
            bits = union(self._bits_of_added(added), bits)

        self._waits_of_copy[op] = waits
        self._waited_for_by_copy[op] = union(self._order.bits(op), bits)

    def _visit(self, op: tf.Operation) -> None:
        # What it waits for doesn't run if it's fed.
        may_be_fed = op.type in op_types.PLACEHOLDERS
        # If copies need it, it mustn't wait for what waits for them.
        runs_early = op in self._needed_by_copies and op in self._of_batch and not may_be_fed
        waits = [] if runs_early else op.control_inputs
        of_inputs = [self._bits_of_operand(tensor) for tensor in op.inputs]
        bits = self._order.certain.waited_for(op, of_inputs, self._bits_of_controls(waits))

        added: Sequence[tf.Operation] = []
        if not (self._order.liveness.frame(op) or may_be_fed):
            order = self._order
            needed = order.must_come_before(op) if runs_early else order.must_have_run(op)
            added = order.ops_for(needed & ~bits, op)
            bits = union(self._bits_of_added(added), bits)

        self._waits[op] = waits
        self._added[op] = added
        self._waited_for[op] = union(self._order.bits(op), bits)

    def _find_reads_to_wait_for(
        self, ops: Iterable[tf.Operation]
    ) -> dict[tf.Operation, list[tf.Operation]]:
        """For each tower's gradient, its own reads for which it waits, so that the write needn't.

        A reference variable is written after all reads of it. Its gradient comes after most of
        these anyhow. If the write itself waited for the others, each device would have to send a
        message; so the tower's gradient waits for them:

            tower 0:  read - - -> gradient ---+
                                              +--> sum --> write
            tower 1:  read - - -> gradient ---+

        Returns:
          By the sharded op that gives a write its value, the sharded ops to wait for.
        """
        edges = []
        late_reads = self._sharded_bits & self._order.late_reads
        runs_whenever = self._order.liveness.runs_whenever
        for op in self.ops_with_added():
            reads = late_reads & self._order.must_come_before(op)
            missing = [read for read in self._added[op] if self._order.bits(read) & reads]
            gradient = self._nearest_made_from_all(op) if missing else None
            if gradient is not None and self._may_wait_otherwise(gradient):
                edges += [
                    (read, gradient)
                    for read in missing
                    if read is not gradient and runs_whenever(read, gradient)
                ]
        if not edges:
            return {}

        loop_of = self._order.liveness.outermost_loop
        ops_of_loop = defaultdict[Any, list[tf.Operation]](list)
        for op in ops:
            if loop_of(op):
                ops_of_loop[loop_of(op)].append(op)

        def inputs_of(op_or_loop: Any) -> list[Any]:
            """What an op, or a loop of TensorFlow 1 as a whole, waits for."""
            before: list[tf.Operation] = []
            for op in ops_of_loop.get(op_or_loop, [op_or_loop]):
                waits = [*self._waits_of_copy.get(op, ()), *self._added.get(op, ())]
                before += [*waits, *graphs.direct_inputs(op)]
            others = dict.fromkeys(loop_of(op) or op for op in before)
            return [other for other in others if other != op_or_loop]

        found = defaultdict[tf.Operation, list[tf.Operation]](list)
        for read, gradient in graphs.without_cycles(inputs_of, edges):
            found[gradient].append(read)
        return dict(found)

    def _nearest_made_from_all(self, op: tf.Operation) -> tf.Operation | None:
        """The nearest sharded op on whose copies in all towers one of the user's ops depends."""
        queue = deque(op.inputs)
        seen = {tensor.name for tensor in queue}
        while queue:
            tensor = queue.popleft()
            if self._origins.is_made_from_all(tensor):
                return tensor.op
            if not self._origins.is_made_from_local(tensor):
                new = [operand for operand in tensor.op.inputs if operand.name not in seen]
                seen.update(operand.name for operand in new)
                queue += new
        return None

    def _find_needed_by_copies(self) -> set[tf.Operation]:
        """The user's ops without side effects that run once, and that copies of ops need."""
        needed: set[tf.Operation] = set()
        stack: list[tf.Operation] = []
        for op, op_plan in self._sharded.items():
            for tensor, need in zip(op.inputs, op_plan.needs):
                if not isinstance(need, OF_SIZES):
                    stack += self._user_ops_of([tensor])
        while stack:
            op = stack.pop()
            if op not in needed:
                needed.add(op)
                stack += self._user_ops_of(op.inputs)
                if not (self._order.is_quiet(op) and self._may_wait_otherwise(op)):
                    stack += [c for c in op.control_inputs if c not in self._sharded]
        return {op for op in needed if self._order.is_quiet(op) and self._may_wait_otherwise(op)}

    def _user_ops_of(self, tensors: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """The user's ops of tensors, but of those that towers make."""
        return [t.op for t in tensors if not self._origins.is_made_from_local(t)]

    def _may_wait_otherwise(self, op: tf.Operation) -> bool:
        """Whether an op may wait for other ops than it did: it isn't in v1 control flow."""
        return self._order.liveness.always_runs(op)

    def _bits_of_need(self, op: tf.Operation, tensor: tf.Tensor, need: Need) -> int:
        """The bits of what a copy of an op is given for a tensor."""
        if isinstance(need, OF_SIZES):
            return 0  # The tensor itself isn't used.
        # In a loop of TensorFlow 1, a full value is what each tower has, and a variable's value
        # enters by a copy of its `Enter`.
        is_of_towers = need == LOCAL or isinstance(need, (Reduced, VariableValue))
        if (is_of_towers or op.name in self._plan.frames) and tensor.op in self._sharded:
            return self._waited_for_by_copy.get(tensor.op, 0)
        if tensor.op.type == op_types.CONST:
            # Each tower has a copy, which waits for nothing but its branch.
            waits = [] if self._may_wait_otherwise(tensor.op) else tensor.op.control_inputs
            return union_of(self._bits_of_controls(waits))
        return self._bits_of_operand(tensor)

    def _bits_of_operand(self, tensor: tf.Tensor) -> int:
        """The bits of a full value."""
        if self._origins.is_size_of_local(tensor):
            return 0
        if self._origins.is_made_from_all(tensor):
            return self._waited_for_by_copy.get(tensor.op, 0)
        if self._origins.is_made_from_local(tensor):
            # It's the first tower's: what the others' copies do isn't waited for.
            return self._waited_for_by_copy.get(tensor.op, 0) & ~self._sharded_bits
        return self._waited_for.get(tensor.op, 0)

    def _bits_of_controls(self, ops: Sequence[tf.Operation]) -> list[int]:
        """The bits of ops that are waited for by control edges; of sharded ones, of all copies."""
        return [
            (self._waited_for_by_copy if op in self._sharded else self._waited_for).get(op, 0)
            for op in ops
        ]

    def _bits_of_added(self, ops: Sequence[tf.Operation]) -> int:
        """The bits of ops that an op waits for in addition, and of what has run before these."""
        return union_of([*self._bits_of_controls(ops), *map(self._order.bits, ops)])
