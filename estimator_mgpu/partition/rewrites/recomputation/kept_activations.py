"""What of the forward pass is kept for gradients, and what is computed again.

Not computed again are ops

- that have side effects, draw random numbers or read state, or that may not run: in v1 loops, and
  in branches;
- that don't depend on the values of examples, such as masks of dropout: what they need is random
  numbers, which would have to be kept;
- whose outputs aren't all floats, such as masks and indices;
- whose outputs are small, so that it costs little to keep them.

In: the ops of a step. Out: `Forward`, and where gradients use what isn't kept.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.partition.rewrites.recomputation.cuts import (
    Activation,
    choose_cuts,
    crosses_any,
    segment_of,
)
from estimator_mgpu.partition.rewrites.recomputation.step_ops import StepOps
from estimator_mgpu.tf_internals import graphs, op_types, private

_SMALL = 64  # What is smaller than the largest activation by this factor is kept.


class Forward:
    """The forward ops of a step, cut into segments.

    Args:
      step: the ops of a step.
      order: in which the graph touches state.

    Attributes:
      needed_bytes: those of all activations that gradients use.
    """

    def __init__(self, step: StepOps, order: Order):
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
        for op in backward:
            for operand in op.inputs:
                if operand.name in self._roots:
                    root = self._roots[operand.name]
                    needed[root.name] = root
        return needed

    def _find_activations(self, needed: Set[str]) -> dict[str, Activation]:
        """What can be computed again, by name, but for small tensors."""
        last_uses: dict[str, int] = {}
        for op, position in self._positions.items():
            for operand in op.inputs:
                if operand.name in self._roots:
                    last_uses[self._roots[operand.name].name] = position

        activations = {}
        for op, position in self._positions.items():
            if op not in self._copyable:
                continue
            for output in op.outputs:
                is_root = self._roots[output.name] is output
                if is_root and self.is_large(output):
                    activations[output.name] = Activation(
                        made=position,
                        last_use=last_uses.get(output.name, position),
                        bytes=bytes_of(output),
                        is_needed=output.name in needed,
                    )
        return activations


def _copyable_ops(step: StepOps, order: Order) -> set[tf.Operation]:
    """The forward ops that can run a second time, later.

    For example, a product with a reference variable `w` reads `w` when it runs. Its copy gets the
    same value if it runs before `w` is updated. So the update has to wait for the copy
    (`let_writes_wait`), which it can't if the copy, or gradients that use it, come after the
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


class Use(NamedTuple):
    """An operand for which an op of the gradients gets the output of a copy."""

    op: tf.Operation
    position: int  # of its input
    operand: tf.Tensor


def uses_of_copies(step: StepOps, forward: Forward) -> list[Use]:
    """Where gradients use activations that aren't kept."""
    uses = []
    for op in sorted(step.backward, key=private.creation_index):
        for position, operand in enumerate(op.inputs):
            if not forward.is_kept(operand):
                uses.append(Use(op, position, operand))
    return uses
