"""`microbatches='auto'`: as many micro-batches as the memory of the devices needs.

In: errors of steps for which the memory was too small, and what `replicate()` has built for them.
Out: the number of micro-batches for the next attempt; or an error that says what would help, where
more of them wouldn't.

The results don't depend on the number of micro-batches, so it can be changed between two steps. An
`Estimator` makes each call in attempts. The first one has one micro-batch, and each has twice as
many as the one before. For training, evaluation and prediction each, the number is kept for later
calls.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import checkpoints, failures, steps
from estimator_mgpu.tf_internals import error_messages, tf_estimator

AUTO = 'auto'
_MODES = tf_estimator.estimator.ModeKeys
_GOES_ON = {
    _MODES.TRAIN: 'Training goes on from {checkpoint}, and steps made since then are made again',
    _MODES.EVAL: 'Evaluation starts over',
    _MODES.PREDICT: 'Prediction goes on with the first example that has none',
}


class _TooLittleMemory(tf.errors.ResourceExhaustedError):
    """Memory is too small, and micro-batches are no remedy. It isn't tried again.

    Nor are calls around it: it may be of an evaluation during training.
    """


class _Built(NamedTuple):
    """What is known of a graph that was built.

    Attributes:
      devices: how many devices share the batch.
      examples: how many examples a batch has, if the graph knows.
      microbatches: how many each device has.
      obstacle: why more micro-batches would be of no use; '' if they would.
    """

    devices: int
    examples: int | None
    microbatches: int
    obstacle: str


class AutoMicrobatches:
    """How many micro-batches each device has. It is found for each mode by itself.

    It's the option `microbatches` of a model_fn that an `Estimator` has replicated. A mode is one
    of ModeKeys: training, evaluation or prediction.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}  # of micro-batches
        self._built: dict[str, _Built] = {}  # the last graph
        self._largest: dict[str, int] = {}  # of the batches whose size only a step knew

    def __repr__(self) -> str:
        return repr(AUTO)

    def count(self, mode: str) -> int:
        """How many micro-batches the next graph of a mode has."""
        return self._counts.get(mode, 1)

    def noted(self, mode: str, examples: tf.Tensor) -> tf.Tensor:
        """A number of examples, noted before any op that needs it can run.

        After an error it's too late to ask for it.

        Args:
          mode: the mode of the graph.
          examples: of the global batch, an int32 scalar.
        """
        if self.count(mode) == 1:
            return examples  # If memory is too small, two micro-batches are tried in any case.

        def note(count: Any) -> Any:
            self._largest[mode] = max(self._largest.get(mode, 0), int(count))
            return count

        noted = tf.numpy_function(note, [examples], examples.dtype, stateful=False)
        noted.set_shape([])
        return noted

    def note_graph(self, mode: str, step: steps.Step) -> None:
        """Notes what was built for a mode."""
        obstacle = ''
        schedule = step.schedule
        if self.count(mode) > 1 and step.plan is None:
            obstacle = 'nothing is sharded'
        elif schedule is not None and not schedule.is_worth_it:
            names = ', '.join(join.op for join in schedule.joins[:2])
            obstacle = (
                f'they would save only {schedule.chainable:.0%} of the activations (most of the '
                f'others are needed for {names or "what the step is run for"})'
            )
        examples = step.examples if isinstance(step.examples, int) else None
        microbatches = 1 if obstacle else self.count(mode)
        self._built[mode] = _Built(len(step.devices), examples, microbatches, obstacle)

    def attempts(self, mode: str, model_dir: str) -> Iterator[Any]:
        """Attempts at a call, each with more micro-batches than the one before.

        An attempt is a context, in which the call is made and returns. It gives hooks that the call
        needs. If memory is too small, the context swallows the error, and there is another attempt;
        or it raises an error that says what would help.

        Args:
          mode: that of the call.
          model_dir: where the call may write.
        """
        while True:
            yield self._attempt(mode, model_dir)
            gc.collect()  # The attempt's session, and so the memory of its variables, is in cycles.

    @contextlib.contextmanager
    def _attempt(self, mode: str, model_dir: str) -> Iterator[list[tf.train.SessionRunHook]]:
        begun = _Begun()
        self._built.pop(mode, None)
        try:
            yield [begun]
        except tf.errors.ResourceExhaustedError as raised:
            error = failures.original(raised)
            is_of_disk = checkpoints.is_of_writing(error, model_dir)
            if is_of_disk or not error_messages.is_of_step_memory(error):
                raise
            obstacle = self._obstacle(mode)
            if not begun.has_session:
                obstacle = 'it ran out before the first step, as variables were made or restored'
            if obstacle:
                built = self._built.get(mode)
                count = self.count(mode) if built is None else built.microbatches
                raise _without_remedy(error, count, obstacle) from error
            self._double(mode, error, model_dir)

    def _obstacle(self, mode: str) -> str:
        """Why more micro-batches would be of no use; '' if they would, as far as is known."""
        built = self._built.get(mode)
        if built is None:
            return 'it ran out before the model was built'
        if built.obstacle:
            return built.obstacle
        limit = self._limit(mode)
        if limit is not None and self.count(mode) >= limit:
            return 'a batch has too few examples for more'
        return ''

    def _limit(self, mode: str) -> int | None:
        """The most micro-batches that a device can have; None if it isn't known."""
        built = self._built[mode]
        if built.examples is not None:
            return built.examples // built.devices  # as in `divide()`
        if mode in self._largest:
            return -(-self._largest[mode] // built.devices)
        return None

    def _double(self, mode: str, error: Exception, model_dir: str) -> None:
        count = 2 * self.count(mode)
        limit = self._limit(mode)
        if limit is not None:
            count = min(count, limit)
        self._counts[mode] = count

        checkpoint = checkpoints.last_checkpoint_name(model_dir) or 'the start'
        goes_on = _GOES_ON[mode].format(checkpoint=checkpoint)
        tf.logging.warning(
            f'Out of memory: {_reason(error)}. From now on, each device runs {count} '
            f'micro-batches, one after another. {goes_on}; the input_fn is called anew.'
        )


class _Begun(tf.train.SessionRunHook):
    """Notes that a session has all variables, so that steps begin."""

    has_session = False

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.has_session = True


def _reason(error: Exception) -> str:
    """What is wrong, to be part of a sentence."""
    return error_messages.reason(error).rstrip('.')


def _without_remedy(
    error: tf.errors.ResourceExhaustedError, count: int, obstacle: str
) -> _TooLittleMemory:
    """An error that says why there are no more micro-batches, and what would help.

    Args:
      error: TensorFlow's.
      count: how many micro-batches each device had.
      obstacle: why more would be of no use.
    """
    text = (
        f'Out of memory: {_reason(error)}. Each device had {count} micro-batch(es), '
        f'and more would not help: {obstacle}. What can help: more devices, a smaller batch, '
        "recompute=True for deep networks, variables='cpu' if variables take much of the memory."
    )
    return _TooLittleMemory(error.node_def, error.op, text)
