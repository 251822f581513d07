"""Sessions that are lost one after another, without a new step between: when a worker dies, say.

This counts them, and gives up after a while. `sessions` lets a new session wait for all machines.
"""

from __future__ import annotations

import time

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import error_messages

_LONGEST_PAUSE = 30  # seconds


class Restarts:
    """Counts the sessions that were lost since the last new step, and ends what lasts too long.

    TensorFlow makes a new session at once, for ever, and logs why at the level INFO only.

    Args:
      limit: for how many seconds sessions may be lost without a new step.
      model_dir: where checkpoints are.
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
