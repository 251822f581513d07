"""Gradients use copies of forward ops.

The copies run only when the gradients are due, so the originals' outputs can be freed.

The forward ops are cut into segments (`recompute_cuts.py`). What crosses a cut is kept. The
gradients of a segment get copies of its ops, which wait at a *gate* for the gradient that arrives
from the next segment. Here `x` is kept, and `a` and `b` are freed as soon as `c` is there:

    forward      x -----> a -----> b -----> c (kept) -----> ... -----> loss
                 |
    copies     gate ----> a' ----> b'
                 ^        |        |
                 |        v        v
    gradients    |      of a <-- of b <-- of c <----- ... <----------- of loss
                 |                         |
                 +-------------------------+

Copies compute what the ops have computed, so all numbers stay the same. The last segment has no
copies, as its gradients come at once.

Not copied are ops

- that have side effects, draw random numbers or read state, or that may not run: in v1 loops, and
  in branches;
- that don't depend on the values of examples, such as masks of dropout: what they need is random
  numbers, which would have to be kept;
- whose outputs aren't all floats, such as masks and indices;
- whose outputs are small, so that it costs little to keep them.

In: the graph, and what a step computes. Out: the same graph, in which the gradients use copies.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.rewrites.recompute_cuts import (
    Activation,
    choose_cuts,
    crosses_any,
    segment_of,
)
from estimator_mgpu.tf_internals import function_calls, graphs, op_types, private
from estimator_mgpu.tf_internals.effects import upstream_bits
from estimator_mgpu.tf_internals.state_order import StateOrder

_SMALL = 64  # What is smaller than the largest activation by this factor is kept.


class Recomputation(NamedTuple):
    """What is computed twice.

    Attributes:
      ops: how many forward ops.
      share: their part of the bytes of all activations that gradients use: 0 to 1.
    """

    ops: int
    share: float


def recompute_activations(
    graph: tf.Graph,
    inputs: Sequence[tf.Tensor],
    loss: tf.Tensor,
    results: Sequence[tf.Tensor | tf.Operation],
    existing_ops: Set[str],
) -> Recomputation:
    """Lets the gradients of a step use copies of forward ops.

    Args:
      graph: the graph that the model_fn has built.
      inputs: the tensors of the batch.
      loss: what is minimized, or one of several losses.
      results: what a step is run for.
      existing_ops: names of ops that were there before the model_fn, which stay as they are.
    """
    step = _StepOps(inputs, loss, results, existing_ops)
    order = StateOrder(graph.get_operations())
    forward = _Forward(step, order)
    uses = _uses_of_copies(step, forward)
    gradients = _gradients_before_segments(step, uses, forward, order)
    # If no gradient arrives, copies would run at once, and save nothing.
    uses = [use for use in uses if forward.segment(use.operand.op) in gradients]

    originals = _ops_to_copy(uses, forward)
    if not originals:
        return Recomputation(0, 0.0)
    copies = _add_copies(graph, originals, forward, gradients)
    for use in uses:
        copy = copies[use.operand.op]
        private.set_input(use.op, use.position, copy.outputs[use.operand.value_index])
    _let_writes_wait(graph, copies, order)

    bytes_of_copies = forward.bytes_of_roots([use.operand for use in uses])
    return Recomputation(len(copies), bytes_of_copies / forward.needed_bytes)


class _StepOps:
    """The ops of a step.

    Args:
      inputs: the tensors of the batch.
      loss: what is minimized, or one of several losses.
      results: what a step is run for.
      existing_ops: names of ops that were there before the model_fn.

    Attributes:
      inputs: the names of the tensors of the batch.
      ops: all of them.
      forward: those that depend on the values of the batch, but not on gradients; or on gradients
        that are a part of the loss.
      backward: the others that depend on the values of the batch.
      needed: the ops that results depend on. What an Identity only waits for doesn't count.
    """

    def __init__(
        self,
        inputs: Sequence[tf.Tensor],
        loss: tf.Tensor,
        results: Sequence[tf.Tensor | tf.Operation],
        existing_ops: Set[str],
    ):
        self.inputs = {tensor.name for tensor in inputs}
        of_loss = graphs.ancestors([loss.op])
        ends = [getattr(result, 'op', result) for result in results]
        self.ops = graphs.ancestors([loss.op, *ends])
        others = self.ops - of_loss
        gradients = list(filter(private.is_made_by_gradients, others))
        # In an imported graph, nothing tells which ops are made by tf.gradients.
        late = others & graphs.descendants(gradients) if gradients else others

        of_values = self.ops & _dependents_of_values(inputs, existing_ops)
        self.forward = _in_order_of_creation(of_values - late)
        self.backward = of_values & late
        self.needed = _ops_needed_by([loss.op, *ends])


def _ops_needed_by(results: Sequence[tf.Operation]) -> set[tf.Operation]:
    """What ops depend on, but for what identities only wait for, as those of `tf.tuple` do.

    `tf.gradients` lets the gradients of an op wait for each other, also for those of constants,
    from which nothing is computed.
    """
    needed = set(results)
    stack = list(results)
    while stack:
        op = stack.pop()
        before = {operand.op for operand in op.inputs}
        if op.type != op_types.IDENTITY:
            before.update(op.control_inputs)
        stack += before - needed
        needed |= before
    return needed


def _dependents_of_values(inputs: Sequence[tf.Tensor], existing_ops: Set[str]) -> set[tf.Operation]:
    """The ops that are computed from the values of tensors, rather than from their shapes."""
    reached: set[tf.Operation] = set()
    stack = list(inputs)
    while stack:
        for op in stack.pop().consumers():
            if op not in reached and _uses_values(op) and op.name not in existing_ops:
                reached.add(op)
                stack += op.outputs
    return reached


def _uses_values(op: tf.Operation) -> bool:
    """Whether an op needs more of its inputs than their shapes."""
    return op.type not in op_types.SHAPE_QUERIES and op.type not in op_types.ZEROS_ONES_LIKE


def _in_order_of_creation(ops: set[tf.Operation]) -> list[tf.Operation]:
    """The ops, each after those that it depends on, and else as they were made."""
    missing = {}
    for op in ops:
        # A v1 loop's way back depends on the loop.
        begins = op.type in op_types.NEXT_ITERATION
        missing[op] = 0 if begins else len(ops.intersection(graphs.direct_inputs(op)))

    ready = [(private.creation_index(op), op) for op in ops if not missing[op]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, op = heapq.heappop(ready)
        ordered.append(op)
        for user in ops.intersection(graphs.consumers_of(op)):
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, (private.creation_index(user), user))
    return ordered


class _Forward:
    """The forward ops of a step, cut into segments.

    Args:
      step: the ops of a step.
      order: in which the graph touches state.

    Attributes:
      needed_bytes: those of all activations that gradients use.
    """

    def __init__(self, step: _StepOps, order: StateOrder):
        self._positions = {op: position for position, op in enumerate(step.forward)}
        self._inputs = step.inputs
        self._roots: dict[str, tf.Tensor] = {}  # by name, in whose memory a tensor is
        for op in step.forward:
            for output in op.outputs:
                self._roots[output.name] = self._root_of(output)

        needed = self._needed_by(step.backward)
        self.needed_bytes = sum(map(bytes_of, needed.values()))
        self._largest = max(map(bytes_of, needed.values()), default=0)
        self._copyable = _copyable_ops(step, order)
        self._activations = self._find_activations(set(needed))

        own = sum(bytes_of(root) for name, root in needed.items() if name in self._activations)
        activations = list(self._activations.values())
        self._cuts = choose_cuts(activations, len(step.forward), self.needed_bytes - own)

    def is_of_batch(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor depends on the values of the batch."""
        return tensor.op in self._positions or tensor.name in self._inputs

    def segment(self, op: tf.Operation) -> int:
        """The number of an op's segment."""
        return segment_of(self._positions[op], self._cuts)

    def is_kept(self, tensor: tf.Tensor) -> bool:
        """Whether gradients use a tensor itself, rather than that of a copy of its op."""
        root = self._roots.get(tensor.name)
        if root is None or tensor.op not in self._copyable:
            return True
        activation = self._activations.get(root.name)
        if activation is None or crosses_any(activation, self._cuts):
            return True
        return segment_of(activation.made, self._cuts) == len(self._cuts)  # the last one

    def is_large(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor may be large, compared to the largest activation."""
        has_unknown_size = tensor.shape.rank is None or None in tensor.shape.as_list()[1:]
        return has_unknown_size or bytes_of(tensor) * _SMALL > self._largest

    def bytes_of_roots(self, tensors: Sequence[tf.Tensor]) -> int:
        """The bytes of activations, or of views of them; each counts once."""
        roots = {self._roots[tensor.name].name: self._roots[tensor.name] for tensor in tensors}
        return sum(map(bytes_of, roots.values()))

    def _root_of(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor in whose memory a tensor is: its own, or that of what it's a view of."""
        op = tensor.op
        if op.type == op_types.IDENTITY_N:
            source = op.inputs[tensor.value_index]
        elif op.type in op_types.VIEWS:
            source = op.inputs[0]
        else:
            return tensor
        return self._roots.get(source.name, tensor)

    def _needed_by(self, backward: Set[tf.Operation]) -> dict[str, tf.Tensor]:
        """The memory of the forward pass that gradients use, by name."""
        needed = {}
        for op in filter(_uses_values, backward):
            for operand in op.inputs:
                if operand.name in self._roots:
                    root = self._roots[operand.name]
                    needed[root.name] = root
        return needed

    def _find_activations(self, needed: Set[str]) -> dict[str, Activation]:
        """What can be computed again, by name, but for small tensors."""
        last_uses: dict[str, int] = {}
        for op, position in self._positions.items():
            for operand in op.inputs if _uses_values(op) else ():
                if operand.name in self._roots:
                    last_uses[self._roots[operand.name].name] = position

        activations = {}
        for op, position in self._positions.items():
            for output in op.outputs if op in self._copyable else ():
                is_root = self._roots[output.name] is output
                if is_root and self.is_large(output):
                    activations[output.name] = Activation(
                        made=position,
                        last_use=last_uses.get(output.name, position),
                        bytes=bytes_of(output),
                        is_needed=output.name in needed,
                    )
        return activations


def _copyable_ops(step: _StepOps, order: StateOrder) -> set[tf.Operation]:
    """The forward ops that can run a second time, later.

    For example, a product with a reference variable `w` reads `w` when it runs. Its copy gets the
    same value if it runs before `w` is updated. So the update has to wait for the copy
    (`_let_writes_wait`), which it can't if the copy, or gradients that use it, come after the
    update themselves.
    """
    readers = set(order.late_readers()).intersection(step.forward)
    before_copies = set()
    if readers:
        forward = set(step.forward)
        users = [op for op in step.backward if not forward.isdisjoint(graphs.direct_inputs(op))]
        before_copies = graphs.ancestors([*step.forward, *users])
    copyable = set()
    for op in step.forward:
        if op in readers:
            is_same_later = all(
                write not in before_copies and order.liveness.always_runs(write)
                for write in order.writes_after(op)
            )
        else:
            is_same_later = not order.bits(op)
        if is_same_later and order.liveness.always_runs(op) and _computes_floats(op):
            copyable.add(op)
    return copyable


def _computes_floats(op: tf.Operation) -> bool:
    """Whether an op computes floats, and is given neither resources nor lists, nor is fed."""
    if op.type in op_types.PLACEHOLDERS:
        return False
    takes_values = all(operand.dtype not in (tf.resource, tf.variant) for operand in op.inputs)
    return takes_values and all(
        output.dtype.is_floating and not graphs.is_reference_variable(output)
        for output in op.outputs
    )


class _Use(NamedTuple):
    """An operand for which an op of the gradients gets the output of a copy."""

    op: tf.Operation
    position: int  # of its input
    operand: tf.Tensor


def _uses_of_copies(step: _StepOps, forward: _Forward) -> list[_Use]:
    """Where gradients use activations that aren't kept."""
    return [
        _Use(op, position, operand)
        for op in sorted(step.backward, key=private.creation_index)
        if _uses_values(op)
        for position, operand in enumerate(op.inputs)
        if not forward.is_kept(operand)
    ]


def _gradients_before_segments(
    step: _StepOps, uses: Sequence[_Use], forward: _Forward, order: StateOrder
) -> dict[int, list[tf.Operation]]:
    """The ops of gradients for which the copies of each segment wait, by its number.

    These are the gradients that arrive, and all else that frees memory of later segments. For
    example, the gradient of a layer's weights isn't needed for that of the layer before it. If it
    ran when all layers have theirs, the activations of all would be there at once.

    With three segments of one layer each, the last one has no copies, and there are

        {1: [gradient of layer 1's output, gradient of layer 2's weights],
         0: [gradient of layer 0's output, gradient of layer 1's weights]}
    """
    upstream = _segments_upstream(step, uses, forward)

    # Copies of a segment may wait only for ops that depend on no copy of this segment or an earlier
    # one. Otherwise two segments could wait for each other.
    def is_before(op: tf.Operation, segment: int) -> bool:
        segments_up_to_this = (2 << segment) - 1  # as bits: of segment 1, 0b11
        is_independent = not upstream[op] & segments_up_to_this
        return is_independent and order.liveness.always_runs(op)

    arriving = defaultdict[int, set[tf.Operation]](set)
    for use in uses:
        segment = forward.segment(use.operand.op)
        sources = [source.op for source in _sources(use.op, step)]
        if all(is_before(source, segment) for source in sources):
            arriving[segment].update(sources)

    heavy = {op for op in step.backward & step.needed if _frees_memory(op, forward, order)}
    heavy_before = _last_before_segments(heavy, list(arriving), is_before)
    return {
        segment: sorted(ops.union(heavy_before[segment]), key=private.creation_index)
        for segment, ops in arriving.items()
        if ops
    }


def _segments_upstream(
    step: _StepOps, uses: Sequence[_Use], forward: _Forward
) -> dict[tf.Operation, int]:
    """For each op of a step, the segments on whose copies it depends, a bit for each.

    With three segments, the gradients of the last one have 0b00, as they use no copies. Those of
    segment 1 have 0b10, and those of segment 0, which come after them, 0b11.
    """
    segments_of_user = defaultdict[tf.Operation, int](int)
    for use in uses:
        for op in _with_siblings(use.op, step):
            segments_of_user[op] |= 1 << forward.segment(use.operand.op)
    return upstream_bits(list(step.ops), segments_of_user)


def _last_before_segments(
    ops: Set[tf.Operation],
    segments: Sequence[int],
    is_before: Callable[[tf.Operation, int], bool],
) -> dict[int, list[tf.Operation]]:
    """The ops that come before each segment, but not before a later one, by its number.

    Without those that others of them use: who waits for these waits for them, too.
    """
    last: dict[int, list[tf.Operation]] = {}
    remaining = set(ops)
    for segment in sorted(segments, reverse=True):
        early = {op for op in remaining if is_before(op, segment)}
        remaining -= early
        last[segment] = [op for op in early if early.isdisjoint(graphs.consumers_of(op))]
    return last


def _sources(op: tf.Operation, step: _StepOps) -> list[tf.Tensor]:
    """The gradients that an op uses, without the identities of them that only wait."""
    sources = []
    for operand in op.inputs:
        if operand.op in step.backward:
            while operand.op.type == op_types.IDENTITY:
                operand = operand.op.inputs[0]
            sources.append(operand)
    return sources


def _with_siblings(op: tf.Operation, step: _StepOps) -> set[tf.Operation]:
    """An op, and the others that use the same gradients, directly or by identities.

    TensorFlow may fuse them: oneDNN computes the gradient of a bias with that of the weights. The
    copies that one of them uses can't wait for another one, then.
    """
    siblings = {op}
    stack = _sources(op, step)
    while stack:
        for user in stack.pop().consumers():
            if user not in siblings and user in step.backward:
                siblings.add(user)
                stack += user.outputs if user.type == op_types.IDENTITY else []
    return siblings


def _frees_memory(op: tf.Operation, forward: _Forward, order: StateOrder) -> bool:
    """Whether an op uses something large, and touches no state."""
    if order.bits(op) or not _uses_values(op):
        return False
    return any(operand.dtype.is_floating and forward.is_large(operand) for operand in op.inputs)


def _ops_to_copy(uses: Sequence[_Use], forward: _Forward) -> list[tf.Operation]:
    """The ops that compute operands from what is kept."""
    found: dict[tf.Operation, None] = {}
    stack = [use.operand.op for use in uses]
    while stack:
        op = stack.pop()
        if op not in found:
            found[op] = None
            stack += [operand.op for operand in op.inputs if not forward.is_kept(operand)]
    return sorted(found, key=private.creation_index)


def _add_copies(
    graph: tf.Graph,
    originals: Sequence[tf.Operation],
    forward: _Forward,
    gradients: dict[int, list[tf.Operation]],
) -> dict[tf.Operation, tf.Operation]:
    """Adds copies of ops, and lets those that use no other copies wait for gradients.

    Args:
      graph: to which they are added.
      originals: the ops, with all that they need and that isn't kept.
      forward: tells what is kept.
      gradients: for which the copies of each segment wait, by its number.

    Returns:
      The copy of each op.
    """
    scope = graph.unique_name('recompute')
    operands = _gated_operands(originals, forward, gradients, scope)
    _import_copies(graph, operands, forward, scope)

    copies = {}
    for op in originals:
        copy = graph.get_operation_by_name(f'{scope}/{op.name}')
        for output, output_of_copy in zip(op.outputs, copy.outputs):
            output_of_copy.set_shape(output.shape)  # The model_fn may have set it.
        function_calls.let_wait(copy, op.control_inputs)
        copies[op] = copy
    return copies


def _gated_operands(
    originals: Sequence[tf.Operation],
    forward: _Forward,
    gradients: dict[int, list[tf.Operation]],
    scope: str,
) -> dict[tf.Operation, list[tf.Tensor]]:
    """The operands of each op; for a copy that uses no other copies, one of them is a gate.

    The gate does nothing but wait. If the copies had control inputs, TensorFlow's graph optimizers
    wouldn't fuse them as they fuse the originals, and results would be rounded in another way.
    """
    gated: dict[tf.Operation, list[tf.Tensor]] = {}
    gates: dict[tuple[int, str], tf.Tensor] = {}  # by segment, and what they let through
    for op in originals:
        operands = list(op.inputs)
        gated[op] = operands
        if not all(map(forward.is_kept, operands)):
            continue  # It waits for another copy.

        position = _first_of_batch(operands, forward)
        segment = forward.segment(op)
        key = (segment, operands[position].name)
        if key not in gates:
            gates[key] = _gate(operands[position], gradients[segment], f'{scope}/gate_{segment}')
        operands[position] = gates[key]
    return gated


def _first_of_batch(operands: Sequence[tf.Tensor], forward: _Forward) -> int:
    """The position of the first operand that depends on the batch; a forward op has one."""
    return next(i for i, operand in enumerate(operands) if forward.is_of_batch(operand))


def _import_copies(
    graph: tf.Graph,
    operands: dict[tf.Operation, list[tf.Tensor]],
    forward: _Forward,
    scope: str,
) -> None:
    """Adds copies of ops to a graph, which use each other where an operand isn't kept.

    Args:
      graph: to which they are added.
      operands: those of each op, with gates.
      forward: tells what is kept.
      scope: the name scope of the copies.
    """
    graph_def = tf.GraphDef(versions=graph.graph_def_versions)
    used: dict[str, tf.Tensor] = {}  # what exists already, by name
    for op, operands_of_copy in operands.items():
        node = graph_def.node.add()
        node.CopyFrom(op.node_def)
        node.name = f'{scope}/{op.name}'
        node.attr.pop('_class', None)
        del node.input[:]
        for operand in operands_of_copy:
            if forward.is_kept(operand):
                node.input.append(operand.name)
                used[operand.name] = operand
            else:
                node.input.append(f'{scope}/{operand.name}')

    with graph.as_default(), tf.control_dependencies(None), tf.device(None):
        tf.import_graph_def(graph_def, used, name='')


def _gate(tensor: tf.Tensor, gradients: Sequence[tf.Operation], name: str) -> tf.Tensor:
    """A tensor that is there when gradients are.

    It isn't an Identity, as those that wait are bypassed.
    """
    with tensor.graph.as_default(), tf.name_scope(None), tf.device(tensor.device):
        with tf.control_dependencies(None), tf.control_dependencies(gradients):
            if tensor.shape.rank is None:
                return tf.stop_gradient(tensor, name)
            any_sizes = tf.TensorShape([None] * tensor.shape.rank)
            return tf.raw_ops.EnsureShape(input=tensor, shape=any_sizes, name=name)


def _let_writes_wait(
    graph: tf.Graph, copies: dict[tf.Operation, tf.Operation], order: StateOrder
) -> None:
    """Lets writes to reference variables wait for the copies that read these, as for the ops."""
    readers = [op for op in order.late_readers() if op in copies]
    if not readers:
        return

    bits = {copies[op]: 1 << index for index, op in enumerate(readers)}
    upstream = upstream_bits(graph.get_operations(), bits)
    waits = defaultdict[tf.Operation, list[tf.Operation]](list)
    for op in readers:
        for write in order.writes_after(op):
            if not upstream[write] & bits[copies[op]]:
                waits[write].append(copies[op])
    for write, before in waits.items():
        function_calls.let_wait(write, before)
