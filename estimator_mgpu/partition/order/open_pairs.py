"""Reads and writes whose order a graph leaves open: which comes first is decided here, once.

Many models compute a learning rate from the global step, and count the step beside it:

    step ----> rate ----> update
      |
      +------> step + 1 - - -> assign to step           when is the step read for the rate?

Nothing says whether the rate reads the step before or after it's counted, so TensorFlow leaves it
to chance. With the same model on several devices, it would be another chance. So:

- A read comes before a write of the same variable, if nothing orders them.
- Two such writes come in the order in which they were made.
- A call, and a branch or a loop of TensorFlow 2, reads and writes when all of its arguments are
  there.
- If the graph orders two accesses only when one of its branches is taken, they have that order
  whichever branch is taken.

That's what one device mostly does, as a read is ready when the step begins. In TensorFlow's own
functions, the order of the program decides. Here it doesn't: if a second loss reads weights after
the first optimizer was made, as those of GANs do, it reads what they were before the step.

In: the finished graph, and what a step is run for. Out: control edges, and the pairs.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.order.accesses import (
    asks_for_value,
    forwards,
    sharing_memory,
    written_state,
)
from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private, tracebacks
from estimator_mgpu.tf_internals.graphs import Inputs
from estimator_mgpu.tf_internals.liveness import Liveness
from estimator_mgpu.tf_internals.upstream import CertainWaits, upstream_bits


class OpenPair(NamedTuple):
    """Two ops that touch the same state, of which the graph doesn't say which comes first.

    Attributes:
      state: the name of what they touch, such as 'global_step'.
      first: the name of the op that comes first: of a read and a write, mostly the read; of two
        writes, the one that was made first.
      second: the name of the op that comes second.
    """

    state: str
    first: str
    second: str


def decide_open_pairs(graph: tf.Graph, results: Sequence[tf.Operation]) -> list[OpenPair]:
    """Adds control edges between ops that touch the same state in an order that is left open.

    Args:
      graph: a finished one, which is changed.
      results: the ops of what a step is run for.

    Returns:
      The pairs whose order was open, and is decided now. If an edge would close a cycle, or nothing
      outside of a loop or a branch can wait for what is in it, the order stays open.
    """
    # In the order in which they were made, as chance mustn't decide which edge closes a cycle.
    inputs = graphs.inputs_upstream(results)
    step = {op: inputs[op] for op in graph.get_operations() if op in inputs}
    accesses = {maker: found for maker, found in _accesses(graph, step) if _may_be_open(found)}
    if not accesses:
        return []
    liveness = Liveness(graph.get_operations())
    pairs = _open_pairs(step, accesses, liveness)
    if not pairs:
        return []

    pairs_of_edge = defaultdict[tuple[tf.Operation, tf.Operation], list[OpenPair]](list)
    for maker, first, second in pairs:
        pair = OpenPair(maker.name, first.name, second.name)
        for target in liveness.enters(second) or [second]:
            for source in _ends(first, target, step, liveness):
                pairs_of_edge[source, target].append(pair)

    decided: list[OpenPair] = []
    waitable = functools.cache(_waitable)
    for source, target in _without_cycles(step, list(pairs_of_edge), liveness):
        function_calls.let_wait(target, [waitable(source)])
        decided += pairs_of_edge[source, target]
    return list(dict.fromkeys(decided))


class _Access(NamedTuple):
    """An op that touches a piece of state, and whether it writes."""

    op: tf.Operation
    writes: bool


def _accesses(
    graph: tf.Graph, step: Collection[tf.Operation]
) -> Iterator[tuple[tf.Operation, list[_Access]]]:
    """For each variable or table of a step, by the op that makes it, the ops that touch it."""
    written = functools.cache(written_state)
    for maker in graphs.ops_of_types(graph, op_types.STATE_HOLDERS):
        if maker in step:
            touching: dict[tf.Operation, bool] = {}  # and whether it writes
            seen: set[tf.Operation] = set()
            stack = [maker.outputs[0]]
            while stack:
                tensor = stack.pop()
                for user in tensor.consumers():
                    if user not in step:
                        continue
                    writes = maker in written(user)
                    reads = asks_for_value(user) and not forwards(user, tensor)
                    if reads or writes:
                        touching[user] = writes
                    if user not in seen:
                        seen.add(user)
                        stack += _forwarded(tensor, user)
            in_order = sorted(touching, key=private.creation_index)
            yield maker, [_Access(user, touching[user]) for user in in_order]


def _forwarded(tensor: tf.Tensor, user: tf.Operation) -> Sequence[tf.Tensor]:
    """The outputs of an op by which others touch the state that a tensor refers to, or lies in."""
    if graphs.is_handle(tensor) and user.type in op_types.FORWARD_VARIABLES:
        return user.outputs
    if graphs.is_handle(tensor):  # Assign, say, gives a reference to what it has written.
        return [output for output in user.outputs if graphs.is_reference_variable(output)]
    in_memory = any(operand.name == tensor.name for operand in sharing_memory(user))
    return user.outputs if in_memory else []


def _may_be_open(accesses: Sequence[_Access]) -> bool:
    return len(accesses) > 1 and any(access.writes for access in accesses)


def _open_pairs(
    step: dict[tf.Operation, Inputs],
    accesses: dict[tf.Operation, list[_Access]],
    liveness: Liveness,
) -> list[tuple[tf.Operation, tf.Operation, tf.Operation]]:
    """The pairs whose order is open: the state, the op that is to come first, the other one."""
    touching = dict.fromkeys(access.op for found in accesses.values() for access in found)
    bits = {op: 1 << index for index, op in enumerate(touching)}
    in_order = graphs.in_topological_order(step)
    upstream = waited_for = upstream_bits(in_order, bits)
    if any(op.type in op_types.MERGE for op in liveness.after_control_flow):
        waited_for = upstream_bits(in_order, bits, CertainWaits(liveness, bits))

    pairs = []
    for maker, found in accesses.items():
        for second in found:
            for first in found:
                if first.op is second.op or not (first.writes or second.writes):
                    continue
                if upstream[first.op] & bits[second.op]:
                    continue
                if upstream[second.op] & bits[first.op]:
                    is_certain = waited_for[second.op] & bits[first.op]
                    is_open = not is_certain or _is_taken_apart(
                        second.op, bits[first.op], waited_for
                    )
                elif second.writes:
                    made = private.creation_index
                    is_open = not first.writes or made(first.op) < made(second.op)
                else:
                    is_open = False  # Seen from the other one.
                if is_open and not liveness.exclude_each_other(first.op, second.op):
                    pairs.append((maker, first.op, second.op))
    return pairs


def _is_taken_apart(call: tf.Operation, first: int, waited_for: dict[tf.Operation, int]) -> bool:
    """Whether an op's functions may run before another op, though an argument comes after that.

    TensorFlow takes calls, branches and loops apart. Then only what they wait for by control edges
    comes before all that their functions do.

    Args:
      first: the bit of the other op.
      waited_for: the bits of what each op waits for in any case.
    """
    if call.type not in op_types.FUNCTION_CALLERS:
        return False
    return not any(waited_for[before] & first for before in call.control_inputs)


def _ends(
    op: tf.Operation, waiting: tf.Operation, step: Collection[tf.Operation], liveness: Liveness
) -> list[tf.Operation]:
    """The ops to wait for so that an op has run: where its loop or branch ends, if it's in one."""
    if liveness.runs_whenever(op, waiting):
        return [op]
    loop = liveness.outermost_loop(op)
    if loop and loop == liveness.outermost_loop(waiting):
        return []  # Nothing in a loop waits for the loop's end.
    ends: list[tf.Operation] = []
    stack = [op]
    seen = {op}
    while stack:
        for user in graphs.consumers_of(stack.pop()):
            if user in step and user not in seen:
                seen.add(user)
                (ends if liveness.runs_whenever(user, waiting) else stack).append(user)
    return ends


def _without_cycles(
    step: Mapping[tf.Operation, Inputs],
    edges: Sequence[tuple[tf.Operation, tf.Operation]],
    liveness: Liveness,
) -> Iterator[tuple[tf.Operation, tf.Operation]]:
    """The edges that close no cycle; a loop of TensorFlow 1 counts as a single op."""

    def op_or_frame(op: tf.Operation) -> Any:
        return liveness.outermost_loop(op) or op

    inputs: dict[Any, dict[Any, None]] = defaultdict(dict)
    for op, befores in step.items():
        user = op_or_frame(op)
        before = map(op_or_frame, befores)
        inputs[user].update(dict.fromkeys(other for other in before if other != user))
    between = {edge: (op_or_frame(edge[0]), op_or_frame(edge[1])) for edge in edges}
    distinct = list(dict.fromkeys(between.values()))
    possible = set(graphs.without_cycles(lambda user: inputs.get(user, {}), distinct))
    return (edge for edge, ends in between.items() if ends in possible)


def _waitable(op: tf.Operation) -> tf.Operation:
    """The op itself; of a call or a branch, one that waits for its outputs, too.

    TensorFlow takes these apart. Who waits for the op itself then only waits for its side effects.
    Who waits for a loop waits for its end.
    """
    outputs = [output for output in op.outputs if output.dtype not in (tf.resource, tf.variant)]
    if op.type not in op_types.FUNCTION_CALLERS or op.type in op_types.LOOPS or not outputs:
        return op
    with op.graph.as_default(), tf.name_scope(None), tf.device(op.device or None):
        with tf.control_dependencies(None), tracebacks.made_for(op):
            ends = [tf.identity(output, f'{op.name}/end') for output in outputs]
            with tf.control_dependencies([op, *ends]):
                return tf.no_op(f'{op.name}/ends')
