"""Sessions that are lost one after another, without a new step between: when a worker dies, say."""

from __future__ import annotations

import re
import time

import tensorflow.compat.v1 as tf

_LONGEST_PAUSE = 30  # seconds
_LONGEST_TEXT = 400  # characters of an error
# Lines of an error that say where ops were made, and those in which gRPC repeats it.
_LEFT_OUT = (
    r':|Graph execution error|Detected at node|File "|Original stack trace|Node: |\[\[\{\{node'
)


class Restarts:
    """Counts the sessions that were lost since the last new step, and ends what lasts too long.

    TensorFlow makes a new session at once, for ever, and says at the level INFO only why.

    Args:
      limit: for how many seconds sessions may be lost without a new step.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._step = -1
        self._count = 0
        self._since = 0.0  # when the first of these sessions was begun

    def stepped(self, step: int) -> None:
        """Is told of each step. One that is made again, as no checkpoint has it, isn't new."""
        if step > self._step:
            self._step = step
            self._count = 0

    def lost(self, error: Exception) -> None:
        """Is told of each session that was lost."""
        self._count += 1
        self._cause = error
        again = f' It is loss {self._count} without a new step.' if self._count > 1 else ''
        tf.logging.warning(
            f'The session was lost: {brief(error)}. Training goes on from the last checkpoint, in '
            f'a new session.{again}'
        )

    def pause(self) -> None:
        """Before a new session: waits a little longer each time, and fails beyond the limit."""
        if self._count < 2:
            return
        seconds = time.monotonic() - self._since
        if seconds > self._limit:
            raise TimeoutError(
                f'{self._count} sessions in {seconds:.0f} seconds made no new step '
                f'(session_creation_timeout_secs of RunConfig is {self._limit}). The last one was '
                f'lost by: {brief(self._cause)}. Each machine has to reach every other one at its '
                'address in TF_CONFIG: let its port through.'
            ) from self._cause
        time.sleep(min(2.0 ** (self._count - 2), _LONGEST_PAUSE))

    def begin(self) -> None:
        """As a new session begins, after all tasks were waited for."""
        if self._count < 2:
            self._since = time.monotonic()


def brief(error: Exception) -> str:
    """The beginning of a session's error on one line, without where its ops were made."""
    text = getattr(error, 'message', None) or str(error)
    lines = [line.strip(' \t=') for line in text.splitlines()]
    told = ' '.join(line for line in lines if line and not re.match(_LEFT_OUT, line))
    shown = told if len(told) <= _LONGEST_TEXT else f'{told[:_LONGEST_TEXT]} ...'
    return f'{type(error).__name__}: {shown}'
