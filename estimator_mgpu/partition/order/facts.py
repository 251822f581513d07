"""What has to stay true of a graph while it's changed: which state it touches, in which order.

In: a graph with all that the model_fn has built. Out: `Facts`, which know it by the names of ops.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.order.accesses import (
    makers_of_state,
    read_by_users,
    read_late,
    written_state,
)
from estimator_mgpu.tf_internals import graphs, op_types
from estimator_mgpu.tf_internals.effects import has_side_effect
from estimator_mgpu.tf_internals.liveness import Liveness
from estimator_mgpu.tf_internals.upstream import CertainWaits, positions_of, union_of, upstream_bits

VARIABLE = 'ESTIMATOR_MGPU_CHECK'
"""The environment variable that switches the check on."""


def noted(graph: tf.Graph, results: Sequence[tf.Operation]) -> Facts | None:
    """The facts of a graph, with the results of its steps; None if no check is asked for."""
    is_on = os.environ.get(VARIABLE, '') not in ('', '0')
    return Facts(graph, results) if is_on else None


class Facts:
    """What has to stay true of a graph: noted before it's changed.

    Args:
      graph: a finished one.
      results: the ops of what steps are run for.

    Attributes: all by the names of ops.
      names: all ops.
      may_be_dead: those in branches of TensorFlow 1, which may not be taken.
      in_loops: those in loops of TensorFlow 1.
      waiting_placeholders: the placeholders that wait for something already.
      local_state: the makers of TensorArrays and stacks, of which each tower has its own.
      written: the state that an op writes.
      read: the state that an op reads.
      effects: the ops with side effects.
      writers: the ops that a result runs and that write what all towers share.
      of_results: the side effects that each result runs.
      before: of an op, those before it that touch the same state, where one of the two writes;
        each with that state. What is in the opposite branch never runs with it, and isn't there.
      writes_before: of an op, the writes before it of what it reads, also those that come before it
        only if a branch is taken.
    """

    def __init__(self, graph: tf.Graph, results: Sequence[tf.Operation]):
        ops = graph.get_operations()
        in_order = graphs.topological_order(ops)
        liveness = Liveness(ops)
        behind = read_by_users(graph, in_order)
        self.names = {op.name for op in ops}
        self.may_be_dead = {op.name for op in ops if liveness.may_be_dead(op)}
        self.in_loops = {op.name for op in liveness.in_loops}
        self.waiting_placeholders = {
            op.name for op in ops if op.type in op_types.PLACEHOLDERS and op.control_inputs
        }
        self.local_state = {op.name for op in ops if op.type in op_types.HANDLES}

        self.written: dict[str, set[str]] = {}
        self.read: dict[str, set[str]] = {}
        self._bits: dict[tf.Operation, int] = {}
        self._touching: list[str] = []  # by the position of their bits
        for op in in_order:
            written = names_of(written_state(op))
            read = names_of(read_state(op, behind)) - written
            if written:
                self.written[op.name] = written
            if read:
                self.read[op.name] = read
            if written or read or has_side_effect(op):
                self._bits[op] = 1 << len(self._touching)
                self._touching.append(op.name)
        self.effects = {op.name for op in self._bits if has_side_effect(op)}
        self.writers = {
            op.name
            for op in graphs.ancestors(results)
            if self.written.get(op.name, set()) - self.local_state
        }
        upstream = upstream_bits(in_order, self._bits)
        self.of_results = [self._names_of(upstream[op]) & self.effects for op in results]

        waited_for = upstream_bits(in_order, self._bits, CertainWaits(liveness, self._bits))
        reads = self._bits_by_state(self.read)
        writes = self._bits_by_state(self.written)
        self.before: dict[str, dict[str, set[str]]] = {}
        self.writes_before: dict[str, set[str]] = {}
        for op in self._bits:
            self.before[op.name] = {
                other: states
                for other, states in self._accesses_among(waited_for[op], op, reads, writes).items()
                if not liveness.exclude_each_other(op, graph.get_operation_by_name(other))
            }
            to_what_it_reads = union_of(writes[state] for state in self.read.get(op.name, ()))
            self.writes_before[op.name] = self._names_of(upstream[op] & to_what_it_reads)

    def _accesses_among(
        self, bits: int, op: tf.Operation, reads: dict[str, int], writes: dict[str, int]
    ) -> dict[str, set[str]]:
        """The ops that touch the same state as an op, where one of the two writes; with that state.

        Args:
          bits: of the ops that are looked at.
          reads: the bits of the ops that read each piece of state.
          writes: the same of those that write it.
        """
        found = defaultdict[str, set[str]](set)
        for state in self.written.get(op.name, ()):
            for other in self._names_of(bits & (reads[state] | writes[state]) & ~self._bits[op]):
                found[other].add(state)
        for state in self.read.get(op.name, ()):
            for write in self._names_of(bits & writes[state]):
                found[write].add(state)
        return found

    def _bits_by_state(self, states: dict[str, set[str]]) -> dict[str, int]:
        """The bits of the ops that touch each piece of state."""
        found = defaultdict[str, int](int)
        for op, bit in self._bits.items():
            for state in states.get(op.name, ()):
                found[state] |= bit
        return found

    def _names_of(self, bits: int) -> set[str]:
        return {self._touching[position] for position in positions_of(bits)}


def read_state(op: tf.Operation, behind: dict[str, set[tf.Operation]]) -> Iterable[tf.Operation]:
    """The variables that an op reads, at once or late."""
    if op.type in (*op_types.VALUE_READS, *op_types.STATE_QUERIES, *op_types.FUNCTION_CALLERS):
        yield from makers_of_state(op.inputs)
    yield from read_late(op, behind)


def names_of(ops: Iterable[tf.Operation]) -> set[str]:
    return {op.name for op in ops}
