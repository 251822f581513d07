"""The line in the log as training starts: how the batch is sharded, and what costs time.

In: what is known of the default graph's steps (`steps`). Each function but the first one returns
what to say of one thing; many return '' if that is little.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import steps
from estimator_mgpu.batches.batch import RANK_REMEDY
from estimator_mgpu.devices import Devices, device_spec, has_useless_passes
from estimator_mgpu.partition.micro_batches.schedule import Schedule
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.partition.rewrites.recomputation.recompute import Recomputation
from estimator_mgpu.reports.work import Works, ops_run_once, works_of
from estimator_mgpu.tf_internals import op_types

_SHARE_TO_TELL = 0.05  # of all output, or of all activations: the log is silent on less


def log_sharding(devices: Devices, microbatches: int, config: Any) -> None:
    """Logs how the default graph's batch is sharded, and what costs time without need.

    Args:
      devices: as for `replicate()`.
      microbatches: how many were asked for.
      config: the RunConfig of the training; None if it isn't known.
    """
    step = steps.of_graph(tf.get_default_graph())
    most = step.most_microbatches
    has_too_many_turns = step.plan is not None and most is not None and microbatches > most
    nothing_is_sharded = step.plan is None and len(step.devices) > 1
    is_on_cpu = device_spec(step.devices[0]).device_type == 'CPU'
    lacks_gpu = len(step.devices) == 1 and step.plan is None and devices is None and is_on_cpu

    # Not all devices that the user may expect have something to do.
    is_unexpected = has_too_many_turns or nothing_is_sharded or lacks_gpu
    level = tf.logging.WARN if is_unexpected else tf.logging.INFO
    if not tf.get_logger().isEnabledFor(level):
        return  # To find what runs once takes about a hundredth of start-up.

    counts: Sequence[Any] = step.examples_per_device or ['its share'] * len(step.devices)
    towers = ', '.join(f'{device} ({n})' for device, n in zip(step.devices, counts))
    text = f'The input_fn gives the global batch; its examples go to {towers}.'
    if step.plan is not None:
        text += f' {len(step.plan.ops)} ops are sharded.{_run_once(step.plan)}'
        text += _useless_passes(devices, config)
    elif nothing_is_sharded:
        text = (
            'Nothing is sharded: fewer examples than devices, or none in a dense or sparse tensor '
            'of known rank.'
        )
        if step.has_arrays:
            text += (
                ' NumPy arrays become constants of the graph. Let the input_fn give tensors: '
                'tf.data.Dataset.from_tensor_slices((features, labels)).batch(100).'
            )
    elif lacks_gpu:
        text += (
            ' That is one CPU device, as TensorFlow finds no GPU; devices=2 makes two logical CPU '
            'devices.'
        )
    if has_too_many_turns:
        text += f' microbatches={microbatches} is more than a device has examples: {most}.'
    if step.schedule is not None:
        text += _micro_batches(step.schedule)
        if step.microbatches > 1 and most is None:
            least = step.microbatches * len(step.devices)
            text += f' With fewer than {least} examples, some of them are empty.'
    if step.recomputation is not None:
        text += _recomputed(step.recomputation)
    if step.unknown:
        names = ', '.join(step.unknown)
        text += f' The rank of {names} is unknown, so ops on it run once: {RANK_REMEDY}.'
    tf.logging.log(level, '%s', text)


def _micro_batches(schedule: Schedule) -> str:
    """Says what micro-batches save, and what they don't."""
    chained = f'{schedule.chainable:.0%} of the activations'
    if schedule.is_worth_it:
        text = (
            f' Each device runs {schedule.turns} micro-batches one after another, and keeps '
            f'{chained} for one of them at a time.'
        )
        if schedule.chainable < 1 - _SHARE_TO_TELL:
            text += f' The others are kept {schedule.why_others_are_kept}.'
        return text

    remedy = 'more devices would help'
    batch_norms = [*op_types.BATCH_NORMS, *op_types.BATCH_NORMS.values()]
    normalized = tuple(
        op.name for op in tf.get_default_graph().get_operations() if op.type in batch_norms
    )
    if any(join.op.startswith(normalized) for join in schedule.joins):
        remedy = "batch_norm='device' would help"
    return (
        f' microbatches={schedule.turns} is left out: it would save only {chained}, as the others '
        f'are kept {schedule.why_others_are_kept}; {remedy}.'
    )


def _recomputed(recomputation: Recomputation) -> str:
    """Says what is computed twice."""
    if not recomputation.ops:
        return ' recompute=True is left out: it would save too little of the activations.'
    return (
        f' {recomputation.ops} ops run a second time for the gradients, so that '
        f"{recomputation.share:.0%} of the activations needn't be kept."
    )


def _run_once(plan: Plan) -> str:
    """Says what runs once: most of all output, or of what is heavy; '' if that is little."""
    if not plan.once:
        return ''
    works = works_of(plan)
    return _costliest_once(plan, works) + _products_once(plan, works)


def _costliest_once(plan: Plan, works: Works) -> str:
    """Says for which reason most of the output is of ops that run once; '' if that is little."""
    once = ops_run_once(plan, works)
    shares: dict[str, float] = defaultdict(float)
    for op in once:
        shares[op.why] += op.share
    why = max(shares, key=lambda why: shares[why], default='')
    if shares[why] <= _SHARE_TO_TELL:
        return ''
    costliest = next(op.name for op in once if op.why == why)
    return f' {shares[why]:.0%} of all output is of {costliest} and more that run once: {why}.'


def _products_once(plan: Plan, works: Works) -> str:
    """Says how many matrix products and convolutions run once; '' if few do."""
    once = {op.name: work.products for op, work in works.items() if op.name in plan.once}
    count = sum(once.values())
    total = sum(work.products for work in works.values())
    if count <= _SHARE_TO_TELL * total:
        return ''
    most = max(once, key=lambda name: once[name])
    why, _ = plan.once[most]
    return (
        f' {count} of {total} matrix products and convolutions run once, most of them in {most}: '
        f'{why}.'
    )


def _useless_passes(devices: Devices, config: Any) -> str:
    """Says that the session config makes start-up longer than it has to be; '' if it doesn't."""
    session = getattr(config, 'session_config', None)
    if session is None or not has_useless_passes(session, devices):
        return ''
    return (
        ' The session config has graph optimizers on that make no step shorter, but start-up up to '
        'twice as long. They are off in estimator_mgpu.session_config(devices): set your own '
        'options there.'
    )
