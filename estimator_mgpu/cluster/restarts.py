"""What follows when a session is lost, as when a task is killed: training goes on in a new one.

TensorFlow makes it, and `Chief.begin_session` lets it wait for all tasks. `Restarts` counts the
sessions that are lost one after another, without a new step between, and gives up after a while.
`LastStep` lets no session go on after the last step.
"""

from __future__ import annotations

import time
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import error_messages

_LONGEST_PAUSE = 30  # seconds


class Restarts:
    """Counts the sessions that were lost since the last new step, and ends what lasts too long.

    TensorFlow makes a new session at once, for ever, and logs why at the level INFO only. Here
    sessions may be lost without a new step for `limit` seconds.
    """

    def __init__(self, limit: float, model_dir: str) -> None:
        self._limit = limit
        self._model_dir = model_dir
        self._last_step = -1
        self._lost_sessions = 0  # since the last new step
        self._failing_since = 0.0  # when the session after the first one that was lost began

    def stepped(self, step: int) -> None:
        """Has to be called after each step.

        A step that is made again, as the last checkpoint was before it, isn't new.
        """
        if step > self._last_step:
            self._last_step = step
            self._lost_sessions = 0

    def lost(self, error: Exception) -> None:
        """Has to be called for each session that was lost, with the error that it was lost by."""
        self._lost_sessions += 1
        self._last_error = error
        checkpoint = tf.train.latest_checkpoint(self._model_dir)
        next_one = f'Training goes on from the last checkpoint, {checkpoint}, in a new session.'
        if not checkpoint:
            next_one = (
                f'There is no checkpoint in {self._model_dir}, so training starts from its '
                'beginning, in a new session.'
            )
        count = ''
        if self._lost_sessions > 1:
            count = f' These are {self._lost_sessions} lost sessions without a new step.'
        summary = error_messages.summary(error)
        tf.logging.warning(f'The session was lost: {summary}. {next_one}{count}')

    def pause(self) -> None:
        """Waits before a new session, a little longer each time. Fails beyond the limit."""
        if self._lost_sessions < 2:
            return

        seconds = time.monotonic() - self._failing_since
        if seconds > self._limit:
            raise TimeoutError(
                f'{self._lost_sessions} sessions in {seconds:.0f} seconds made no new step '
                f'(session_creation_timeout_secs of RunConfig is {self._limit}). The last one was '
                f'lost by: {error_messages.summary(self._last_error)}. Each machine has to reach '
                'every other one at its address in TF_CONFIG: let its port through.'
            ) from self._last_error
        time.sleep(min(2.0 ** (self._lost_sessions - 2), _LONGEST_PAUSE))

    def begin(self) -> None:
        """Has to be called as a new session begins, after all tasks were waited for."""
        if self._lost_sessions < 2:
            self._failing_since = time.monotonic()


class LastStep(tf.train.SessionRunHook):
    """Ends training at its last step, also if a session is lost after that one.

    In such a session's place, TensorFlow makes another one, which makes a step, whatever hooks have
    asked for in the lost one.

    Args:
      steps: how many steps training has from its beginning on; None if `max_steps` says it.
      max_steps: the last step; None if `steps` says it, or if training ends with its input.
    """

    def __init__(self, steps: int | None, max_steps: int | None) -> None:
        self._steps = steps
        self._last = max_steps
        self._is_over = False

    def begin(self) -> None:
        self._global_step = tf.train.get_global_step()

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        step = int(session.run(self._global_step))
        if self._last is None and self._steps is not None:
            self._last = step + self._steps
        self._is_over = self._last is not None and step >= self._last
        if self._is_over:
            coord.request_stop()  # It ends a training that begins with this session.

    def before_run(self, run_context: Any) -> Any:
        if self._is_over:  # This ends a training in which another session was lost.
            raise tf.errors.OutOfRangeError(None, None, f'Step {self._last} was the last one.')
        return tf.train.SessionRunArgs(self._global_step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        # A step may have fetched the number of the one before.
        if self._last is None or int(run_values.results) + 1 < self._last:
            return
        if int(run_context.session.run(self._global_step)) >= self._last:
            run_context.request_stop()
