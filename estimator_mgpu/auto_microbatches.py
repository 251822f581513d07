"""`microbatches='auto'`: as many micro-batches as the memory of the devices needs.

In: errors of steps for which the memory was too small, and the graphs that `replicate()` has built
for them. Out: the number of micro-batches for the next attempt; or an error that says what would
help, where more of them wouldn't.

The results don't depend on the number of micro-batches, so it can be changed between two steps. An
`Estimator` makes each call in attempts. The first one has one micro-batch, and each has twice as
many as the one before. For training, evaluation and prediction each, the number is kept for later
calls.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import checkpoints, failures, memory_advice, steps
from estimator_mgpu.tf_internals import error_messages, tf_estimator

AUTO = 'auto'
_MODES = tf_estimator.estimator.ModeKeys
_GOES_ON = {
    _MODES.TRAIN: 'Training goes on from {checkpoint}: steps made since then are made again',
    _MODES.EVAL: 'Evaluation starts over',
    _MODES.PREDICT: 'Prediction goes on with the first example that has none',
}


class _TooLittleMemory(tf.errors.ResourceExhaustedError):
    """Memory is too small, and micro-batches are no remedy. It isn't tried again.

    Nor are calls around it: it may be of an evaluation during training.
    """


class AutoMicrobatches:
    """How many micro-batches each device has. It is found for each mode by itself.

    It's the option `microbatches` of a model_fn that an `Estimator` has replicated. A mode is one
    of ModeKeys: training, evaluation or prediction.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}  # of micro-batches
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

    def attempts(self, mode: str, model_dir: str) -> Iterator[Attempt]:
        """Attempts at a call, each with more micro-batches than the one before.

        Args:
          mode: that of the call.
          model_dir: where the call may write.
        """
        while True:
            yield Attempt(self, mode, model_dir)
            gc.collect()  # The attempt's session, and so the memory of its variables, is in cycles.

    def limit(self, mode: str, step: steps.Step) -> int | None:
        """The most micro-batches that a device can have; None if it isn't known.

        Args:
          mode: that of a graph.
          step: what is known of the graph's steps.
        """
        if step.most_microbatches is None and mode in self._largest:
            return -(-self._largest[mode] // len(step.devices))
        return step.most_microbatches

    def raise_to(self, count: int, mode: str) -> None:
        """Lets the next graph of a mode have so many micro-batches, or more."""
        self._counts[mode] = max(count, self.count(mode))


class Attempt:
    """A context, in which a graph is built, and its session runs steps.

    It gives the hooks that the session needs. If memory is too small, it swallows the error, and
    there may be another attempt; or it raises an error that says what would help.

    Several threads may be in it at once, as far as they run the session.

    Args:
      auto: knows how many micro-batches the graph gets.
      mode: that of the graph.
      model_dir: where steps may write.
    """

    def __init__(self, auto: AutoMicrobatches, mode: str, model_dir: str):
        self._auto = auto
        self._mode = mode
        self._model_dir = model_dir
        self._progress = _Progress()

    def __enter__(self) -> list[tf.train.SessionRunHook]:
        return [self._progress]

    def __exit__(self, _: Any, raised: BaseException | None, traceback: Any) -> bool:
        if not isinstance(raised, tf.errors.ResourceExhaustedError):
            return False
        error = failures.original(raised)
        is_of_disk = checkpoints.is_of_writing(error, self._model_dir)
        if is_of_disk or not error_messages.is_of_step_memory(error):
            return False

        graph = self._progress.graph
        if graph is None:
            return False  # An input_fn has run a session of its own.
        step = steps.of_graph(graph)
        limit = self._auto.limit(self._mode, step)
        obstacle = memory_advice.obstacle_to_microbatches(step, limit)
        if not self._progress.has_session:
            obstacle = memory_advice.VARIABLES_ARE_TOO_LARGE
        if obstacle is not None:
            raise _without_remedy(error, step.microbatches, obstacle) from error

        self._auto.raise_to(memory_advice.more_microbatches(step, limit), self._mode)
        self._log_that_it_goes_on(error)
        return True

    def _log_that_it_goes_on(self, error: Exception) -> None:
        """Logs how many micro-batches the next attempt has, and where it begins."""
        checkpoint = checkpoints.last_checkpoint_name(self._model_dir) or 'the start'
        tf.logging.warning(
            f'Out of memory: {_reason(error)}. From now on, each device runs '
            f'{self._auto.count(self._mode)} micro-batches, one after another. '
            f'{_GOES_ON[self._mode].format(checkpoint=checkpoint)}. If there is an input_fn, it is '
            'called anew.'
        )


class _Progress(tf.train.SessionRunHook):
    """Notes how far an attempt has come.

    Attributes:
      graph: what it has built; None before that.
      has_session: whether a session has all variables, so that steps begin.
    """

    graph: tf.Graph | None = None
    has_session = False

    def begin(self) -> None:
        self.graph = tf.get_default_graph()

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.has_session = True


def _reason(error: Exception) -> str:
    """What is wrong, to be part of a sentence."""
    return error_messages.reason(error).rstrip('.')


def _without_remedy(
    error: tf.errors.ResourceExhaustedError, count: int, obstacle: memory_advice.Obstacle
) -> _TooLittleMemory:
    """An error that says why there are no more micro-batches, and what would help.

    Args:
      error: TensorFlow's.
      count: how many micro-batches each device had.
      obstacle: why more would not help.
    """
    text = (
        f'Out of memory: {_reason(error)}. Each device had {count} micro-batch(es), and more would '
        f'not help: {obstacle.why}. {memory_advice.remedies(useless=obstacle.useless)}'
    )
    return _TooLittleMemory(error.node_def, error.op, text)
