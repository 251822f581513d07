"""What helps if a device has too little memory for a step.

In: what is known of the graph's step. Out: how many micro-batches would need less memory, or the
obstacle to more of them; and sentences for error messages.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import steps

# What helps besides micro-batches, in words.
_MORE_DEVICES = 'more devices'
_RECOMPUTATION = 'recompute=True for deep networks'
_SMALLER_BATCH = 'a smaller batch'


class Obstacle(NamedTuple):
    """Why more micro-batches would not help.

    Attributes:
      why: to be part of a sentence.
      useless: what else would not help, for the same reason.
    """

    why: str
    useless: Collection[str] = ()


VARIABLES_ARE_TOO_LARGE = Obstacle(
    'it ran out before the first step, as variables were made or restored',
    useless=[_RECOMPUTATION, _SMALLER_BATCH],
)


def obstacle_to_microbatches(step: steps.Step, limit: int | None) -> Obstacle | None:
    """What keeps more micro-batches from helping; None if they would help, as far as is known.

    Args:
      step: that of the graph which has needed too much memory.
      limit: the most micro-batches that a device can have; None if it isn't known.
    """
    if step.nothing_is_sharded:
        return Obstacle('nothing is sharded', useless=[_MORE_DEVICES])
    if step.leaves_out_microbatches:
        return Obstacle(
            f'they would save only {step.schedule.chainable:.0%} of the activations (the others '
            f'are kept {step.schedule.why_others_are_kept})'
        )
    if limit is not None and step.microbatches >= limit:
        return Obstacle('a batch has too few examples for more', useless=[_SMALLER_BATCH])
    return None


def needs_as_much(op: str | None, step: steps.Step) -> Obstacle:
    """What keeps more micro-batches from helping, if the last doubling hasn't helped.

    Args:
      op: the name of the user's op for which memory is too small; None if it isn't known.
      step: that of its graph.
    """
    runs_once = step.plan is not None and op in step.plan.once
    name = 'the same op' if op is None else f'the op {op}'
    kind = ', which runs once, unsharded,' if runs_once else ''
    return Obstacle(
        f'{name}{kind} needed as much memory with fewer of them',
        useless=[_MORE_DEVICES] if runs_once else [],
    )


def more_microbatches(step: steps.Step, limit: int | None) -> int:
    """How many micro-batches to try next: twice as many, if there is no obstacle.

    The arguments are those of `obstacle_to_microbatches()`.
    """
    doubled = 2 * step.microbatches
    return doubled if limit is None else min(doubled, limit)


def for_op(op: tf.Operation | None, step: steps.Step) -> str:
    """Says what helps if memory is too small for an op.

    Args:
      op: the op; None if it isn't known.
      step: that of its graph.
    """
    if op is not None and step.plan is not None and op.name in step.plan.once:
        return (
            'On more devices it needs as much memory: Estimator.explain() tells what keeps it from '
            'being sharded.'
        )
    if not step.devices:  # The graph isn't known.
        return remedies('more micro-batches')
    limit = step.most_microbatches
    obstacle = obstacle_to_microbatches(step, limit)
    useless = [] if step.recomputation is None else [_RECOMPUTATION]  # That's on already.
    if obstacle is not None:
        return remedies(useless=[*useless, *obstacle.useless])
    return remedies(f'replicate(microbatches={more_microbatches(step, limit)})', useless=useless)


def remedies(*first: str, useless: Collection[str] = ()) -> str:
    """Says what helps if a device has too little memory.

    Args:
      *first: what helps most, in words.
      useless: what wouldn't help, as in an `Obstacle`.
    """
    helps = list(first)
    for remedy in (_MORE_DEVICES, _RECOMPUTATION, _SMALLER_BATCH):
        if remedy not in useless:
            helps.append(remedy)
    return (
        f'To need less memory on each device, use {", ".join(helps)}, or '
        "variables='cpu', by which variables and optimizer slots are in the host's memory."
    )
