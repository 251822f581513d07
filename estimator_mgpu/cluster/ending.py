"""How a chief has ended: what it says of it, and how other tasks end as it did.

Workers and ps tasks read it in a note on themselves. An evaluator, which may evaluate for hours
after all others have gone, reads it in a file in model_dir.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import tensorflow.compat.v1 as tf

FILE = 'estimator_mgpu_chief.json'


class Ending(NamedTuple):
    """How a chief has ended.

    Attributes:
      chief: the incarnation of the chief: each process that is one has another.
      error: the error that it ended by, as text; None for another end.
      status: its exit status; None while it runs.
    """

    chief: str
    error: str | None = None
    status: int | None = None

    def text(self) -> str:
        return json.dumps(self)

    def end(self, name: str) -> NoReturn:
        """Ends the process of another task as the chief has ended."""
        if self.error is not None:
            raise RuntimeError(f'The chief has failed: {self.error}')
        if self.status:
            tf.logging.warning(f'The chief has ended with {self.status}, and so does {name}.')
        raise SystemExit(self.status)


def of_exit(argument: Any) -> tuple[str | None, int]:
    """Returns the error and the status of a process that calls sys.exit() with an argument."""
    if argument is None:
        return None, 0
    if isinstance(argument, int):
        return None, argument & 0xFF  # All that the system keeps of it.
    return str(argument), 1


def leave(model_dir: str, ending: Ending) -> None:
    """Writes a chief's file, but where another chief has written one that hasn't ended."""
    before = read(model_dir)
    if ending.status is not None and before is not None and before.chief != ending.chief:
        return
    tf.io.gfile.makedirs(model_dir)
    path = os.path.join(model_dir, FILE)
    with tf.io.gfile.GFile(f'{path}.{ending.chief}', 'w') as file:
        file.write(ending.text())
    tf.io.gfile.rename(f'{path}.{ending.chief}', path, overwrite=True)


def read(model_dir: str) -> Ending | None:
    """Returns what a chief's file says; None if there is none."""
    with contextlib.suppress(tf.errors.NotFoundError):
        with tf.io.gfile.GFile(os.path.join(model_dir, FILE)) as file:
            return Ending(*json.loads(file.read()))
    return None


class Follower:
    """An evaluator, as it follows the chief: it ends as that does, once it has nothing to do.

    Args:
      model_dir: where checkpoints are.
      address: the chief's.
      limit: for how many seconds a chief that can't be reached is waited for.
      listens: whether there is somebody at an address.
    """

    def __init__(
        self, model_dir: str, address: str, limit: float, listens: Callable[[str], bool]
    ) -> None:
        self._model_dir, self._address, self._limit = model_dir, address, limit
        self._listens = listens
        self._before = read(model_dir)  # perhaps of a training that was long ago
        self._evaluated: Any = ()  # the last checkpoint that was asked for
        self._lost: float | None = None  # when the chief was last found to be gone

    def follow(self, latest: Callable[[], str | None]) -> str | None:
        """Returns the latest checkpoint; if it's no new one, and the chief has ended, ends, too."""
        ending = read(self._model_dir)  # before the checkpoint, of which the last comes before it
        checkpoint = latest()
        if checkpoint != self._evaluated:
            self._evaluated, self._lost = checkpoint, None
            return checkpoint
        if ending is not None and ending != self._before and ending.status is not None:
            ending.end('the evaluator')
        self._wait_for_chief()
        return checkpoint

    def _wait_for_chief(self) -> None:
        if self._listens(self._address):
            self._lost = None
            return
        now = time.monotonic()
        if self._lost is None:
            self._lost = now
            tf.logging.warning(
                f'The evaluator waits for a new checkpoint, and the chief at {self._address} '
                'cannot be reached: the script has to be started there, too.'
            )
        elif now - self._lost > self._limit:
            raise TimeoutError(
                f'The chief at {self._address}: not reached in {self._limit} seconds '
                '(session_creation_timeout_secs of RunConfig), and there is no new checkpoint in '
                f'{self._model_dir}. Start the script there, and then on the evaluator.'
            )
