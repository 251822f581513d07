"""What the tasks of a cluster leave for each other, as text in variables of the task it is for."""

from __future__ import annotations

import contextlib

import tensorflow.compat.v1 as tf

# The task's process; the cluster in its TF_CONFIG; the chief that leads it; how a chief has ended.
NAMES = ('process', 'cluster', 'chief', 'end')


class Notes:
    """The notes of one task, over a connection of their own.

    The session's master is the task itself. So a call ends by its time limit if the task's process
    is stopped, where a session of this process's own server waits for that; and a chief's sessions
    on the task, which end as another chief makes one there, are left alone.

    Args:
      task: `/job:worker/task:0`, say.
      target: of the task's server: `grpc://` and its address.
      seconds: how long each call may take.
    """

    def __init__(self, task: str, target: str, seconds: float = 10):
        config = tf.ConfigProto(device_filters=[task], operation_timeout_in_ms=int(1000 * seconds))
        # A connection that others have may be of a network that the task has left since.
        config.rpc_options.disable_session_connection_sharing = True
        self.graph = tf.Graph()
        with self.graph.as_default(), tf.device(f'{task}/cpu:0'), tf.container('estimator_mgpu'):
            self._text = tf.placeholder(tf.string, [])
            self._assign, self._there, self._values = {}, {}, {}
            for name in NAMES:
                variable = tf.get_variable(
                    f'estimator_mgpu_{name}', [], tf.string, use_resource=True
                )
                self._assign[name] = tf.raw_ops.AssignVariableOp(
                    resource=variable.handle, value=self._text
                )
                self._there[name] = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
                self._values[name] = variable.value()
        self.session = tf.Session(target, self.graph, config)

    def __enter__(self) -> Notes:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(tf.errors.OpError):  # The task may have gone.
            self.session.close()

    def read(self, name: str) -> str:
        """Returns a note, or '' if there is none: the task's process may have just begun."""
        if not self.session.run(self._there[name]):
            return ''
        return self.session.run(self._values[name]).decode()

    def write(self, name: str, text: str) -> None:
        """Leaves a note, in the place of the one before."""
        self.session.run(self._assign[name], {self._text: text})
