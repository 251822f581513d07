"""What a chief does: it waits for the other tasks before each session, and trains on all devices.

In: this process as a `Task`. Out: for each training, the devices of all tasks, a session hook, and
a listener that looks, before each checkpoint, whether it may be saved.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster import reach, saving
from estimator_mgpu.cluster.end_of_chief import ChiefSigterm, EndOfChief
from estimator_mgpu.cluster.exits import SIGTERM_STATUS
from estimator_mgpu.cluster.leadership import Leadership
from estimator_mgpu.cluster.notes import version
from estimator_mgpu.cluster.restarts import Restarts
from estimator_mgpu.cluster.task import Task
from estimator_mgpu.cluster.tf_config import JOBS
from estimator_mgpu.cluster.watch import Watch
from estimator_mgpu.devices import device_spec, machine_of
from estimator_mgpu.tf_internals import error_messages
from estimator_mgpu.tf_internals.lost_sessions import LOST, lost_sessions

T = TypeVar('T')
_RENEW_WITHIN = 10  # seconds for all tasks, each of which looks every second whether it has to
_SCRIPT_PATIENCE = 30  # seconds from a task's first answer until its script calls train()
# The errors of a task that ends, or is stopped, while the chief asks it something.
_LOST_WHILE_ASKED = (*LOST, tf.errors.DeadlineExceededError)


class Chief:
    """The task that builds the graph, and runs it on the devices of all tasks.

    Attributes:
      task: this process.
      leadership: that over the other tasks.
      end: how this process ends.
      watch: of the other tasks, while it trains; None at other times.
    """

    # Of the training that goes on, or was the last.
    _restarts: Restarts
    _model_dir: str

    def __init__(self, task: Task) -> None:
        self.task = task
        self.leadership = Leadership(task)
        self.watch: Watch | None = None
        self.end = EndOfChief(task, self.leadership)
        self._sigterm = ChiefSigterm(task, self.end, lambda: self.watch)

    def prepare_end(self) -> None:
        """Makes this process tell the other tasks how it ends, as it ends, be it by SIGTERM."""
        self.end.tell_at_exit()
        self._sigterm.listen()

    @contextlib.contextmanager
    def training(self, config: Any) -> Iterator[tuple[_AfterSteps, _BeforeCheckpoints]]:
        """A context in which the devices of all machines can be trained on.

        Args:
          config: the Estimator's RunConfig. It gets the attribute `machines`, with the devices of
            each task, and the session's master.

        Yields:
          What training needs: a hook, and a listener for checkpoints, which has to be the last one.
        """
        self._restarts = Restarts(self.task.limit, config.model_dir)
        self._model_dir = config.model_dir
        if not self.leadership.has_begun:
            self.task.check_alone()
        self.leadership.begin_training(self._model_dir)

        lost = lost_sessions(self._restarts.lost)
        with Watch(self.task, self.leadership, self.end) as watch, lost:
            self.watch = watch
            try:
                machines = self.devices()
                vars(config).update(machines=machines, _master=self.task.server.target)
                self.task.busy = True
                with _explained_time_limit(config, watch):
                    hook = _AfterSteps(self.task, self._restarts, watch)
                    yield hook, _BeforeCheckpoints(watch)
            finally:
                self.watch = None
                self.task.busy = False
                vars(config).update(machines=None, _master='')

        if self.task.sigterm_at is not None:
            raise SystemExit(SIGTERM_STATUS)

    def devices(self) -> dict[str, list[str]]:
        """Waits for all tasks, and returns the CPUs and GPUs of each by the task's name.

        Raises:
          ValueError: if a task has another cluster in its TF_CONFIG.
          RuntimeError: if a task's script doesn't train, or has another version of this package, or
            another chief leads a task.
          TimeoutError: if a task doesn't answer.
        """
        return self._meet(self._list_devices)

    def _list_devices(self) -> dict[str, list[str]]:
        """Clears what an earlier training has left on the tasks, and returns their devices."""
        # Servers keep resources such as tables from one session to the next, in a container that
        # has the job's name.
        tf.Session.reset(self.task.server.target, [*JOBS])

        found = []
        with tf.Session(self.task.server.target) as session:
            for device in session.list_devices():
                spec = device_spec(device.name).replace(replica=None)
                if spec.device_type in ('CPU', 'GPU'):
                    found.append(spec.to_string())

        devices = {}
        for name in self.task.addresses:
            devices[name] = [device for device in found if machine_of(device) == name]
        return devices

    def begin_session(self) -> None:
        """Waits for all tasks. Each session of a training begins with it, also after a fault."""
        self._restarts.pause()
        self._meet(self._prepare_session)
        self._restarts.begin()

    def _prepare_session(self) -> None:
        """Has all tasks make new connections for a session, and checks `model_dir`.

        Some of the old connections may lead to a machine that has gone.
        """
        session = uuid.uuid4().hex
        with self.task.notes_on_all(self.task.others) as all_notes:
            for notes in all_notes.values():
                notes.write('session', session)

            end = time.monotonic() + _RENEW_WITHIN
            for name, notes in all_notes.items():
                while notes.read('renewed') != session:
                    if time.monotonic() > end:
                        tf.logging.warning(
                            f'{name} keeps its connections: it may be busy. If it waits for a '
                            'machine that has gone, start it again.'
                        )
                        break
                    time.sleep(0.1)
        saving.check_model_dir(tf.get_default_graph(), self._model_dir, self.task.notes_on)

    def _meet(self, prepare: Callable[[], T]) -> T:
        """Waits until all tasks answer, checks and leads them, and returns what `prepare` returns.

        It waits for a task that hasn't been started yet, was killed, or is stopped or cut off. If a
        task is lost after it has answered, also while `prepare` runs, all tasks are asked again, as
        another process may be that task by then.
        """
        start = time.monotonic()
        while True:
            self._wait_for_answers()
            self.task.drop_connections()
            try:
                for name in self.task.others:
                    self._check_cluster(name)
                if not self.leadership.has_begun:  # It may have been cut off while it waited.
                    self.task.check_alone()
                self.leadership.lead()
                return prepare()
            except _LOST_WHILE_ASKED as error:
                if time.monotonic() - start > self.task.limit:
                    raise TimeoutError(
                        f'The tasks did not all answer in {self.task.limit} seconds '
                        '(session_creation_timeout_secs of RunConfig).'
                    ) from error
                tf.logging.warning(
                    f'All tasks are asked again, as one was lost: {error_messages.summary(error)}'
                )
                time.sleep(1)  # A task that fails at once isn't asked all the time.

    def _wait_for_answers(self) -> None:
        """Waits until all tasks answer. Fails if another program answers in the place of one."""
        fail_if_followed = self.leadership.fail_if_followed
        self.task.wait(ended=fail_if_followed)  # until something listens at all addresses
        for name in self.task.others:
            reach.check_server(name, self.task.addresses[name])
        self.task.wait(ended=fail_if_followed, answering=True)

    def _check_cluster(self, name: str) -> None:
        """Fails if another task has another cluster or version, or if its script doesn't train.

        It also notes which process is the task.
        """
        with self.task.notes_on(name) as notes:
            start = time.monotonic()
            cluster = notes.read('cluster')
            while not cluster:  # Its script hasn't called train() yet.
                if time.monotonic() > start + _SCRIPT_PATIENCE:
                    address = self.task.addresses[name]
                    raise RuntimeError(
                        f"{name} listens at {address}, but the script that has that port doesn't "
                        'call train() of estimator_mgpu.Estimator. End it there.'
                    )
                time.sleep(0.1)
                cluster = notes.read('cluster')
            there = notes.read('version') or '0.2 or older'
            self.task.processes[name] = notes.read('process')

        if there != version():
            raise RuntimeError(
                f'Two versions of estimator_mgpu: {self.task.name} has {version()}, and {name} at '
                f'{self.task.addresses[name]} has {there}. Install the same one on every machine.'
            )
        addresses = json.loads(cluster)
        if addresses != self.task.addresses:
            raise ValueError(
                f'TF_CONFIG differs between machines: {name} has the cluster {addresses}, and '
                f'{self.task.name} has {self.task.addresses}. Give every machine the same.'
            )

    def until_saved(self, train: Callable[[], T]) -> T:
        """Returns what `train` returns, which trains up to the last step.

        If a task is lost as hooks come to their end, it's called again, and trains from the last
        checkpoint: one of them saves the last step, and `MonitoredSession` makes no new session
        then.
        """
        while True:
            try:
                return train()
            except LOST as error:
                if not saving.is_of_end(error):
                    raise
                self._restarts.lost(error)


@contextlib.contextmanager
def _explained_time_limit(config: Any, watch: Watch) -> Iterator[None]:
    """Names the tasks that don't answer in the error of a session's call that takes too long."""
    seconds = config.session_config.operation_timeout_in_ms / 1000
    try:
        yield
    except tf.errors.DeadlineExceededError as error:
        if not seconds:
            raise
        silent = watch.silent_tasks() or 'All tasks answer'
        raise TimeoutError(
            f'A call of the session took more than {seconds} seconds '
            f'(operation_timeout_in_ms of the session config). {silent}.'
        ) from error


class _AfterSteps(tf.train.SessionRunHook):
    """Notes each step, and ends training if the chief has been replaced, or got SIGTERM."""

    def __init__(self, task: Task, restarts: Restarts, watch: Watch) -> None:
        self._task = task
        self._restarts = restarts
        self._watch = watch

    def begin(self) -> None:
        self._global_step = tf.train.get_global_step()

    def before_run(self, run_context: Any) -> Any:
        return tf.train.SessionRunArgs(self._global_step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._restarts.stepped(int(run_values.results))
        self._watch.fail_if_replaced()
        if self._task.sigterm_at is not None:
            run_context.request_stop()


class _BeforeCheckpoints(tf.train.CheckpointSaverListener):
    """Keeps a chief that has been replaced from saving.

    It's the last listener, so that it looks right before a save.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def before_save(self, session: tf.Session, global_step_value: int) -> None:
        self._watch.check()
