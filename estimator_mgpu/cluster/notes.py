"""What the tasks of a cluster leave for each other: texts, in variables on the receiver."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import tensorflow.compat.v1 as tf

NAMES = (
    'process',  # the incarnation of the task's process
    'version',  # of this package
    'cluster',  # the addresses of all tasks in its TF_CONFIG, in JSON
    'leads',  # on a chief: the addresses of the tasks that it leads, in JSON
    'chief',  # the incarnation of the chief that leads the task
    'session',  # tells the chief's session from earlier ones
    'renewed',  # the session for which the task has renewed its connections
    'end',  # how a chief has ended, an `Ending` as text
)


def version() -> str:
    """The version of this package. Tasks of two versions may not understand each other's notes."""
    package: Any = sys.modules[__name__.partition('.')[0]]
    return package.__version__


class Notes:
    """The notes on one task, over a connection of their own.

    The session's master is the task's own server, for two reasons. If the task's process is
    stopped, a call ends by its time limit; with this process's server as the master, it would wait.
    And a chief's sessions go on: those that it has on a task end as another process of the chief
    makes one there.

    Args:
      name: the task's, such as `/job:worker/task:0`.
      target: of the task's server: `grpc://` and its address.
      seconds: how long each call may take; 0 for as long as it takes.

    Attributes:
      graph: a graph of its own, which others may add ops to.
      session: runs this graph on the task.
    """

    def __init__(self, name: str, target: str, seconds: float = 10):
        config = tf.ConfigProto(device_filters=[name], operation_timeout_in_ms=int(1000 * seconds))
        # A connection that others have may be of a network that the task has left since.
        config.rpc_options.disable_session_connection_sharing = True
        # TensorFlow takes a target that is this process's own address for this process, although
        # another one may be there. With a time limit, calls go to the address.
        config.rpc_options.use_rpc_for_inprocess_master = seconds > 0

        self._writes = {}  # these and the next ones by the names of notes
        self._exist = {}
        self._texts = {}
        self.graph = tf.Graph()
        # In a container of its own, notes outlast the resources of a training.
        with self.graph.as_default(), tf.device(f'{name}/cpu:0'), tf.container('estimator_mgpu'):
            self._new_text = tf.placeholder(tf.string, [])
            for note in NAMES:
                variable = tf.get_variable(
                    f'estimator_mgpu_{note}', [], tf.string, use_resource=True
                )
                self._writes[note] = tf.raw_ops.AssignVariableOp(
                    resource=variable.handle, value=self._new_text
                )
                self._exist[note] = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
                self._texts[note] = variable.value()
        self.session = tf.Session(target, self.graph, config)

    def __enter__(self) -> Notes:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(tf.errors.OpError):  # The task may have gone.
            self.session.close()

    def read(self, note: str) -> str:
        """Returns a note, or '' if there is none: the task's process may have just begun."""
        if not self.session.run(self._exist[note]):
            return ''
        return self.session.run(self._texts[note]).decode()

    def write(self, note: str, text: str) -> None:
        """Leaves a note, which replaces the one before."""
        self.session.run(self._writes[note], {self._new_text: text})
