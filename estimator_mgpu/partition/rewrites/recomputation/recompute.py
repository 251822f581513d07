"""Gradients use copies of forward ops.

The copies run only when the gradients are due, so the originals' outputs can be freed.

The forward ops are cut into segments (`cuts.py`). What crosses a cut is kept. The gradients of a
segment get copies of its ops, which wait at a *barrier* for the gradient that arrives from the next
segment. Here `x` is kept, and `a` and `b` are freed as soon as `c` is there:

    forward       x -------> a -----> b -----> c (kept) -----> ... -----> loss
                  |
    copies     barrier ----> a' ----> b'
                  ^          |        |
                  |          v        v
    gradients     |        of a <-- of b <-- of c <----- ... <----------- of loss
                  |                            |
                  +----------------------------+

Copies compute what the ops have computed, so all numbers stay the same. The last segment has no
copies, as its gradients come at once.

In: the graph, and what a step computes. Out: the same graph, in which the gradients use copies.
"""

from __future__ import annotations

from typing import NamedTuple

from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.partition.rewrites.recomputation.forward_copies import (
    add_copies,
    let_writes_wait,
    ops_to_copy,
)
from estimator_mgpu.partition.rewrites.recomputation.gradients import gradients_before_segments
from estimator_mgpu.partition.rewrites.recomputation.kept_activations import Forward, uses_of_copies
from estimator_mgpu.partition.rewrites.recomputation.step_ops import StepOps
from estimator_mgpu.tf_internals import private


class Recomputation(NamedTuple):
    """What is computed twice.

    Attributes:
      ops: how many forward ops.
      share: their part of the bytes of all activations that gradients use: 0 to 1.
    """

    ops: int
    share: float


def recompute_activations(step: StepOps) -> Recomputation:
    """Lets the gradients of a step use copies of forward ops."""
    order = Order(step.graph)
    forward = Forward(step, order)
    uses = uses_of_copies(step, forward)
    gradients = gradients_before_segments(step, uses, forward, order)
    # If no gradient arrives, copies would run at once, and save nothing.
    uses = [use for use in uses if forward.segment(use.operand.op) in gradients]

    originals = ops_to_copy(uses, forward)
    if not originals:
        return Recomputation(0, 0.0)
    copies = add_copies(step.graph, originals, forward, gradients)
    for use in uses:
        copy = copies[use.operand.op]
        private.set_input(use.op, use.position, copy.outputs[use.operand.value_index])
    let_writes_wait(step.graph, copies, order)

    bytes_of_copies = forward.bytes_of_roots([use.operand for use in uses])
    return Recomputation(len(copies), bytes_of_copies / forward.needed_bytes)
