"""How an evaluator, which isn't in the cluster, follows the chief.

It reads checkpoints and the chief's ending in model_dir, and asks the chief's port whether somebody
is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster import ending, reach
from estimator_mgpu.tf_internals import tf_estimator


class Follower:
    """Lets an evaluator end as the chief ends, once it has nothing more to evaluate.

    A chief that can't be reached at its address is waited for, up to a limit in seconds.
    """

    def __init__(self, model_dir: str, address: str, limit: float) -> None:
        self._model_dir = model_dir
        self._address = address
        self._limit = limit
        self._ending_before = ending.read(model_dir)  # perhaps of a training that was long ago
        self._seen: Any = ()  # the last checkpoint that `follow` saw; () before the first call
        self._unreached_since: float | None = None  # None while the chief can be reached

    def follow(self) -> None:
        """Has to be called before each look for a checkpoint, which is evaluated if it's new.

        If there has been no new one since the last call, and the chief has ended, it ends, too.
        """
        # The chief leaves its ending after its last checkpoint. So this is read first: if it's
        # there, the checkpoint below is the last one.
        chief_ending = None
        with contextlib.suppress(tf.errors.OpError):  # A file system may have a bad moment.
            chief_ending = ending.read(self._model_dir)
        checkpoint = tf.train.latest_checkpoint(self._model_dir)
        if checkpoint != self._seen:
            self._seen = checkpoint
            self._unreached_since = None
            return

        if (
            chief_ending is not None
            and chief_ending.status is not None
            and chief_ending != self._ending_before
        ):
            chief_ending.end_as_chief_did('the evaluator')
        self._wait_for_chief()

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
                f'cannot be reached: the script has to be started there, too.{self._ended_before()}'
            )
        elif now - self._unreached_since > self._limit:
            raise TimeoutError(
                f'The chief at {self._address}: not reached in {self._limit} seconds '
                '(session_creation_timeout_secs of RunConfig), and there is no new checkpoint in '
                f'{self._model_dir}. Start the script there, and then on the evaluator.'
                f'{self._ended_before()}'
            )

    def _ended_before(self) -> str:
        """What to say of a chief that had ended before this evaluator began; '' if none had."""
        before = self._ending_before
        if before is None or before.status is None:
            return ''
        return (
            f' A chief had ended with {before.status} before this evaluator began: if it was '
            "this training's, nothing is left to evaluate."
        )


def _follow(estimator: Any) -> None:
    """Lets an estimator follow the chief, if it's that of an evaluator."""
    follower = getattr(estimator, '_follower', None)
    if follower is not None:
        follower.follow()


def follower(config: Any) -> Follower | None:
    """Returns the `Follower` of an evaluator; None for other tasks, or if there is no chief."""
    tf_config = json.loads(os.environ.get('TF_CONFIG') or '{}')
    chiefs = tf_config.get('cluster', {}).get('chief')
    if config.task_type != 'evaluator' or not chiefs:
        return None
    return Follower(config.model_dir, chiefs[0], config.session_creation_timeout_secs)


tf_estimator.before_each_evaluation(_follow)
