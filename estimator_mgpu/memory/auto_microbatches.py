"""`microbatches='auto'`: as many micro-batches as the memory of the devices needs.

In: errors of steps for which the memory was too small, and the graphs that `replicate()` has built
for them. Out: the number of micro-batches for the next attempt; or an error that says what would
help, where more of them wouldn't.

The results don't depend on the number of micro-batches, so it can be changed between two steps. An
`Estimator` makes each call in attempts. The first one has one micro-batch, and each has twice as
many as the one before. It ends with an error if that hasn't helped: if there is no memory for the
same op as before, which needs as much as before. `error_messages` knows which errors these are. For
training, evaluation and prediction each, the number that was enough is kept for later calls.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import steps
from estimator_mgpu.checkpoints import checkpoint_files
from estimator_mgpu.errors import step_errors
from estimator_mgpu.memory import memory_advice
from estimator_mgpu.tf_internals import error_messages, function_calls, op_types, tf_estimator
from estimator_mgpu.tf_internals.error_messages import reason_in_sentence

AUTO = 'auto'
_MODES = tf_estimator.estimator.ModeKeys
_GOES_ON = {
    _MODES.TRAIN: 'Training goes on from {checkpoint}: steps made since then are made again',
    _MODES.EVAL: 'Evaluation starts over',
    _MODES.PREDICT: 'Prediction goes on with the first example that has none',
}


Attempt = contextlib.AbstractContextManager[list[tf.train.SessionRunHook]]
"""A context, which gives the hooks that the session in it needs: see `Call.attempt()`."""


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
        self._examples: dict[str, int] = {}  # of the last batch whose size only a step knew

    def __repr__(self) -> str:
        return repr(AUTO)

    def count(self, mode: str) -> int:
        """How many micro-batches the next graph of a mode has."""
        return self._counts.get(mode, 1)

    def set_count(self, count: int, mode: str) -> None:
        """Lets the next graph of a mode have so many micro-batches."""
        self._counts[mode] = count

    def noted(self, mode: str, examples: tf.Tensor) -> tf.Tensor:
        """A number of examples, noted before any op that needs it can run.

        After an error it's too late to ask for it.

        Args:
          examples: of the global batch, an int32 scalar.
        """
        if self.count(mode) == 1:
            return examples  # If memory is too small, two micro-batches are tried in any case.

        def note(count: Any) -> Any:
            self._examples[mode] = int(count)
            return count

        noted = tf.numpy_function(note, [examples], examples.dtype, stateful=False)
        noted.set_shape([])
        return noted

    def limit(self, mode: str, step: steps.Step, examples: int | None) -> int | None:
        """The most micro-batches that a device can have; None if it isn't known.

        Args:
          step: what is known of the graph's steps.
          examples: of the batch whose step has failed; None if the caller doesn't know.
        """
        if step.most_microbatches is not None:
            return step.most_microbatches
        if examples is None and step.microbatches > 1:
            examples = self._examples.get(mode)
        return None if examples is None else -(-examples // len(step.devices))


class Call:
    """A call of an Estimator's or a predictor's, which is made in attempts.

    Args:
      auto: knows how many micro-batches a graph gets; None if the user has said it. Then there is
        one attempt.
      model_dir: where steps may write.
    """

    def __init__(self, auto: AutoMicrobatches | None, mode: str, model_dir: str):
        self._auto = auto
        self._mode = mode
        self._model_dir = model_dir
        self._first_count = 1 if auto is None else auto.count(mode)
        self._failed: dict[_Failed, int] = {}  # and with how many micro-batches it did first

    @property
    def is_repeated(self) -> bool:
        """Whether this isn't the first attempt, so that its graph may have more micro-batches."""
        return bool(self._failed)

    def attempts(self) -> Iterator[Attempt]:
        """Attempts at the call, each with more micro-batches than the one before."""
        while True:
            yield self.attempt(Progress())

    @contextlib.contextmanager
    def attempt(
        self, progress: Progress, examples: int | None = None
    ) -> Iterator[list[tf.train.SessionRunHook]]:
        """A context in which a graph is built, and its session runs steps, by the hooks it gives.

        If memory is too small, it swallows the error, and there may be another attempt; or it
        raises an error that says what would help.

        Args:
          progress: that of a graph which is there already, or a new one.
          examples: of the batch; None if it isn't known, or if there are several batches.
        """
        if self.is_repeated:
            # The last attempt's session, and so the memory of its variables, is in cycles.
            gc.collect()
        try:
            yield [] if self._auto is None else [progress]
        except tf.errors.ResourceExhaustedError as raised:
            if not self._prepare_next(raised, progress, examples):
                raise

    def _prepare_next(
        self, raised: tf.errors.OpError, progress: Progress, examples: int | None
    ) -> bool:
        """Gives the next graph more micro-batches; returns whether they help against an error.

        Raises:
          _TooLittleMemory: if memory is too small, and they don't help.
        """
        auto = self._auto
        if auto is None:
            return False
        error = step_errors.original(raised)
        is_of_disk = checkpoint_files.is_of_writing(error, self._model_dir)
        if is_of_disk or not error_messages.is_of_step_memory(error):
            return False
        if progress.graph is None:
            return False  # An input_fn has run a session of its own.

        step = steps.of_graph(progress.graph)
        limit = auto.limit(self._mode, step, examples)
        obstacle = self._obstacle(error, progress, step, limit)
        if obstacle is not None:
            auto.set_count(self._first_count, self._mode)  # More haven't helped.
            text = (
                f'Out of memory: {reason_in_sentence(error)}. Each device had {step.microbatches} '
                f'micro-batch(es), and more would not help: {obstacle.why}. '
                f'{memory_advice.remedies(useless=obstacle.useless)}'
            )
            raise _TooLittleMemory(error.node_def, error.op, text) from error

        # Another call of a predictor may have found a larger number.
        count = max(memory_advice.more_microbatches(step, limit), auto.count(self._mode))
        auto.set_count(count, self._mode)
        self._log_that_it_goes_on(error, progress, count)
        return True

    def _obstacle(
        self, error: tf.errors.OpError, progress: Progress, step: steps.Step, limit: int | None
    ) -> memory_advice.Obstacle | None:
        """Why more micro-batches would not help; None if they would, as far as is known."""
        if not progress.has_session:
            return memory_advice.VARIABLES_ARE_TOO_LARGE
        obstacle = memory_advice.obstacle_to_microbatches(step, limit)
        if obstacle is None:
            failed = _failed(error, step)
            if self._failed.setdefault(failed, step.microbatches) < step.microbatches:
                return memory_advice.needs_as_much(failed.op, step)
        return obstacle

    def _log_that_it_goes_on(self, error: Exception, progress: Progress, count: int) -> None:
        """Logs how many micro-batches the next attempt has, and where it begins."""
        checkpoint = checkpoint_files.last_checkpoint_name(self._model_dir) or 'the start'
        text = (
            f'Out of memory: {reason_in_sentence(error)}. From now on, each device runs {count} '
            'micro-batches, one after another. '
            f'{_GOES_ON[self._mode].format(checkpoint=checkpoint)}. If there is an input_fn, '
            'it is called anew.'
        )
        if function_calls.has_function_with(progress.graph, op_types.GENERATOR_DATASET):
            text += (
                ' Its data comes from a Python generator. If that is one which cannot begin anew, '
                f'the examples of at least {progress.batches} batch(es) are lost, which this '
                'attempt has taken.'
            )
        tf.logging.warning('%s', text)


class _Failed(NamedTuple):
    """What there was no memory for.

    Attributes:
      op: the name of the user's op, of which a copy may have failed; None if it isn't known.
      device: of the op that has failed.
      reason: what TensorFlow says of it: mostly, the shape of a tensor.
    """

    op: str | None
    device: str
    reason: str


class Progress(tf.train.SessionRunHook):
    """Notes how far an attempt has come.

    Attributes:
      graph: what it has built; None before that.
      has_session: whether a session has all variables, so that steps begin.
      batches: how many have been taken at least, for the step that has failed as well.
    """

    graph: tf.Graph | None = None
    has_session = False
    batches = 0

    def begin(self) -> None:
        self.graph = tf.get_default_graph()

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.has_session = True

    def before_run(self, run_context: Any) -> None:
        self.batches += 1


def _failed(error: tf.errors.OpError, step: steps.Step) -> _Failed:
    """What an error says there was no memory for."""
    name = error_messages.node_name(error) if error.op is None else error.op.name
    copy = step.names.copy_of(name) if step.names is not None and name is not None else None
    device = '' if error.op is None else error.op.device
    return _Failed(name if copy is None else copy.op_name, device, reason_in_sentence(error))
