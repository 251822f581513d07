"""How an evaluator, which isn't in the cluster, follows the chief.

It reads checkpoints and the chief's ending in model_dir, and asks the chief's port whether somebody
is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster import ending, reach


class Follower:
    """Lets an evaluator end as the chief ends, once it has nothing more to evaluate.

    Args:
      model_dir: where checkpoints are.
      address: the chief's.
      limit: for how many seconds a chief that can't be reached is waited for.
    """

    def __init__(self, model_dir: str, address: str, limit: float) -> None:
        self._model_dir = model_dir
        self._address = address
        self._limit = limit
        self._ending_before = ending.read(model_dir)  # perhaps of a training that was long ago
        self._returned: Any = ()  # the last checkpoint that `follow` gave; () before the first one
        self._unreached_since: float | None = None  # None while the chief can be reached

    def follow(self, latest_checkpoint: Callable[[], str | None]) -> str | None:
        """Returns the latest checkpoint. If it isn't new and the chief has ended, ends, too.

        Args:
          latest_checkpoint: returns the path of the latest checkpoint; None if there is none.
        """
        # The chief leaves its ending after its last checkpoint. So this is read first: if it's
        # there, the checkpoint below is the last one.
        chief_ending = None
        with contextlib.suppress(tf.errors.OpError):  # A file system may have a bad moment.
            chief_ending = ending.read(self._model_dir)
        checkpoint = latest_checkpoint()

        if checkpoint != self._returned:
            self._returned = checkpoint
            self._unreached_since = None
            return checkpoint

        if (
            chief_ending is not None
            and chief_ending.status is not None
            and chief_ending != self._ending_before
        ):
            chief_ending.end_process('the evaluator')
        self._wait_for_chief()
        return checkpoint

    def _wait_for_chief(self) -> None:
        """Notes whether the chief can be reached, and fails if it couldn't for too long."""
        if reach.listens(self._address):
            self._unreached_since = None
            return

        now = time.monotonic()
        if self._unreached_since is None:
            self._unreached_since = now
            tf.logging.warning(
                f'The evaluator waits for a new checkpoint, and the chief at {self._address} '
                'cannot be reached: the script has to be started there, too.'
            )
        elif now - self._unreached_since > self._limit:
            raise TimeoutError(
                f'The chief at {self._address}: not reached in {self._limit} seconds '
                '(session_creation_timeout_secs of RunConfig), and there is no new checkpoint in '
                f'{self._model_dir}. Start the script there, and then on the evaluator.'
            )


def follower(config: Any) -> Follower | None:
    """Returns the `Follower` of an evaluator; None for other tasks, or if there is no chief."""
    tf_config = json.loads(os.environ.get('TF_CONFIG') or '{}')
    chiefs = tf_config.get('cluster', {}).get('chief')
    if config.task_type != 'evaluator' or not chiefs:
        return None
    return Follower(config.model_dir, chiefs[0], config.session_creation_timeout_secs)
