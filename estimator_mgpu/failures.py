"""Which op of the user's, on which device and which examples, an error of a step is about.

In: the error of a step that a call of an Estimator's method raises. Out: an error of the same class
that also names the user's op and its line, with TensorFlow's as its cause:

    loss : Tensor had NaN values
    loss/CheckNumerics ran in tower 2, on /device:GPU:2, with examples 6 to 8 of 0 to 11. It was
    made by File "model.py", line 5, in model_fn
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import steps, user_lines
from estimator_mgpu.partition.plan import Plan
from estimator_mgpu.partition.sizes import RowSpace
from estimator_mgpu.partition.towers.names import CopyName
from estimator_mgpu.partition.towers.shards import static_extents
from estimator_mgpu.tf_internals import error_messages

# Errors that say that a session was lost, or closed: whichever op they name has no part in it.
_OF_SESSIONS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.UnavailableError,
)


@contextlib.contextmanager
def op_errors_explained() -> Iterator[None]:
    """Explains errors of the ops of a divided graph, and errors of memory."""
    try:
        yield
    except tf.errors.OpError as error:
        explained = _explained(error)
        if explained is None:
            raise
        raise explained from error


def _explained(error: tf.errors.OpError) -> tf.errors.OpError | None:
    """An error that says more than another; None if there is nothing to add."""
    # Whatever the graph is like, and however the error is made: the user sees it.
    with contextlib.suppress(Exception):
        sentences = _explanation(error)
        if sentences:
            text = '\n'.join([error_messages.reason(error), ' '.join(sentences)])
            # Without the op, as str() would end with its traceback, which the cause has anyway.
            return type(error)(error.node_def, None, text)
    return None


def _explanation(error: tf.errors.OpError) -> list[str]:
    """What there is to say about an error; nothing if TensorFlow has said all."""
    if isinstance(error, _OF_SESSIONS):
        return []
    step = steps.Step(None, None, [])
    if error.op is not None:
        step = steps.of_graph(error.op.graph)

    where = _where(error.op, step) if step.plan is not None else ''
    sentences = [where] if where else []
    if error_messages.is_of_step_memory(error):
        sentences.append(_less_memory(error.op, step))
    if where:
        frame = user_lines.frame_of(error.op)
        if frame is not None:
            sentences.append(
                f'It was made by File "{frame.filename}", line {frame.lineno}, in {frame.name}'
            )
    return sentences


def _where(op: tf.Operation, step: steps.Step) -> str:
    """Which of the user's ops has failed, and on which examples; '' if that's of no interest."""
    if op.name in step.plan.once:
        why, _ = step.plan.once[op.name]
        return f'{op.name} ran once, on the global batch: {why}.'
    copy = step.names.copy_of(op.name)
    if copy is not None:
        examples = _examples(step, copy)
        return f'{copy.op_name} ran in tower {copy.tower}, on {op.device}, with {examples}.'
    if step.names.is_added(op.name):
        return f'{op.name} ran on {op.device}, for an op of all towers.'
    return ''


def _examples(step: steps.Step, copy: CopyName) -> str:
    """Says which examples a tower's copy of an op has."""
    if _row_spaces(step.plan, copy.op_name) - {step.plan.rows}:
        return 'its share of the rows'  # that a mask left, say
    if not isinstance(step.examples, int):
        return 'its share of the examples'
    extents = static_extents(step.examples, len(step.devices), step.microbatches)
    start, count = extents[copy.tower]
    if count == 1:
        return f'example {start} of 0 to {step.examples - 1}'
    return f'examples {start} to {start + count - 1} of 0 to {step.examples - 1}'


def _row_spaces(plan: Plan, op_name: str) -> set[RowSpace]:
    """What the rows are that an op takes and makes."""
    forms: list[Any] = []
    if op_name in plan.ops:
        forms += plan.ops[op_name].needs
    for placements in (plan.placements, plan.in_loops):
        for name, placement in placements.items():
            if name.partition(':')[0] == op_name:
                forms.append(placement)
    return {form.rows for form in forms if hasattr(form, 'rows')}


def _less_memory(op: tf.Operation | None, step: steps.Step) -> str:
    """Says what helps if a device has too little memory for an op of a step."""
    if op is not None and step.plan is not None and op.name in step.plan.once:
        return (
            'On more devices it needs as much memory: Estimator.explain() tells what keeps it from '
            'being sharded.'
        )
    if not step.devices:  # The op isn't known, and so nor is its graph.
        return remedies('more micro-batches')
    more = _more_microbatches(step)
    return remedies() if more is None else remedies(f'replicate(microbatches={more})')


def remedies(*first: str) -> str:
    """Says what helps if a device has too little memory.

    Args:
      *first: what helps most, in words.
    """
    helps = [*first, 'more devices', 'recompute=True for deep networks', 'a smaller batch']
    return (
        f'To need less memory on each device, use {", ".join(helps)}, or '
        "variables='cpu', by which variables and optimizer slots are in the host's memory."
    )


def _more_microbatches(step: steps.Step) -> int | None:
    """How many micro-batches need less memory than those of a graph; None if none do."""
    nothing_is_sharded = step.plan is None and len(step.devices) > 1
    if step.leaves_out_microbatches or nothing_is_sharded:
        return None
    more = 2 * step.microbatches
    if isinstance(step.examples, int):
        more = min(more, step.examples // len(step.devices))
    return more if more > step.microbatches else None
