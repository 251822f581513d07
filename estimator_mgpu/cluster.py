"""Several machines: a task on each, of which the chief trains on the devices of all."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.devices import CHIEF, machine_of, spec_of

_JOBS = ('chief', 'worker', 'ps')  # An evaluator is in no cluster.
_EVERY = 30  # seconds from one message to the next on what is waited for
_GRACE = 20  # seconds after SIGTERM in which a task still serves the chief's last checkpoint
_TERMINATED = 128 + signal.SIGTERM
_joined: list[Task] = []  # A process has one server, for as long as it lives.


class Task:
    """This process, as a task of TF_CONFIG's cluster; it has TensorFlow's server.

    Variables on each other task say what that takes the cluster to be, and how the chief has ended.
    """

    def __init__(self, config: Any):
        spec = config.cluster_spec
        self.addresses = addresses(config)
        self.name = f'/job:{config.task_type}/task:{config.task_id}'
        self._limit: float = config.session_creation_timeout_secs
        self._others = [task for task in self.addresses if task != self.name]
        self._trains = False
        self._terminated = 0.0  # when SIGTERM came
        jobs = {job: spec.job_tasks(job) for job in spec.jobs if job in _JOBS}
        # Else to close a session would wait, in silence, for a task that has gone.
        os.environ.setdefault('GRPC_FAIL_FAST', 'true')
        try:
            own = config.task_type, config.task_id, config.protocol, config.session_config
            self.server = tf.train.Server(jobs, *own)
        except tf.errors.OpError as error:
            raise RuntimeError(
                f"{self.name} can't listen at {self.addresses[self.name]} ({error.message}). If "
                'another process has that port, end it, or give another one in TF_CONFIG on every '
                'machine.'
            ) from error
        tf.logging.warning(
            f'{self.name} listens on all addresses of its machine, and nothing that machines send '
            'each other is encrypted or authenticated: run it in a private network.'
        )
        if self.name == CHIEF:
            atexit.register(self._end)
        with contextlib.suppress(ValueError):  # Only the main thread may do this.
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._terminate)

    def wait(self, tasks: Iterable[str] = (), ended: Callable[[], bool] = lambda: False) -> None:
        """Waits for tasks, by default all, to be reached, and says which can't; or until ended."""
        start = due = time.monotonic()
        wanted = {task: self.addresses[task] for task in tasks or self.addresses}
        while (missing := [t for t, a in wanted.items() if not _listens(a)]) and not ended():
            now, text = time.monotonic(), ', '.join(f'{t} at {wanted[t]}' for t in missing)
            if self._terminated:
                raise SystemExit(_TERMINATED)
            if now - start > self._limit:
                raise TimeoutError(
                    f'{text}: not reached in {self._limit} seconds (session_creation_timeout_secs '
                    'of RunConfig). Start the script there, and let its port through.'
                )
            if now >= due:
                tf.logging.warning(f'Waiting for {text}: the script has to be started there, too.')
                due = now + _EVERY
            time.sleep(1)

    def devices(self, model_dir: str) -> dict[str, list[str]]:
        """Waits for all tasks, and returns the devices of each; fails if they don't fit."""
        self.wait()
        path = os.path.join(model_dir, f'.{uuid.uuid4().hex}')
        tf.io.gfile.makedirs(path)
        try:
            for task in self._others:
                self._check(task, path)
        finally:
            tf.io.gfile.rmtree(path)
        # Servers keep tables, say, from one session to the next, in a container of the job's name.
        tf.Session.reset(self.server.target, [*_JOBS])
        with tf.Session(self.server.target) as session:
            specs = [spec_of(d.name).replace(replica=None) for d in session.list_devices()]
        names = [spec.to_string() for spec in specs if spec.device_type in ('CPU', 'GPU')]
        return {task: [n for n in names if machine_of(n) == task] for task in self.addresses}

    @contextlib.contextmanager
    def training(self, config: Any) -> Iterator[tf.train.SessionRunHook]:
        """Lets a RunConfig train on all machines, with a hook that ends it after SIGTERM's step."""
        vars(config).update(machines=self.devices(config.model_dir), _master=self.server.target)
        hook, self._trains = tf.train.SessionRunHook(), True
        hook.after_run = lambda context, _: context.request_stop() if self._terminated else None
        try:
            yield hook
        finally:
            self._trains = False
            vars(config).update(machines=None, _master='')
        if self._terminated:
            raise SystemExit(_TERMINATED)

    def serve(self) -> NoReturn:
        """Serves until the chief's process ends, and ends as that does."""
        self._trains = True
        with self._session_with(self.name) as (session, known, end):
            session.run([known.assign(json.dumps(self.addresses)), end.assign('')])
            value = end.value()
            while not (said := session.run(value)):
                self.wait([CHIEF], lambda: bool(session.run(value)))
                if self._terminated and time.monotonic() > self._terminated + _GRACE:
                    raise SystemExit(_TERMINATED)
                time.sleep(1)
        error, status = json.loads(said)
        if error:
            raise RuntimeError(f'The chief has failed: {error}')
        raise SystemExit(status)

    @contextlib.contextmanager
    def _session_with(self, task: str) -> Iterator[Any]:
        """A session of two tasks, and the variables on one of them."""
        # Timeouts are of each call.
        config = tf.ConfigProto(device_filters=[self.name, task], operation_timeout_in_ms=60_000)
        with tf.Graph().as_default(), tf.device(f'{task}/cpu:0'), tf.container('estimator_mgpu'):
            names = ('estimator_mgpu_cluster', 'estimator_mgpu_end')
            strings = [tf.get_variable(name, [], tf.string, use_resource=True) for name in names]
            with tf.Session(self.server.target, config=config) as session:
                yield session, *strings

    def _check(self, task: str, path: str) -> None:
        """Fails if another task has another cluster, or doesn't see what is in the model_dir."""
        with self._session_with(task) as (session, known, _):
            initialized, start = tf.is_variable_initialized(known), time.monotonic()
            while not session.run(initialized):  # It has only just begun to listen.
                if time.monotonic() > start + _EVERY:
                    raise RuntimeError(
                        f'{task} listens at {self.addresses[task]}, but the script that has that '
                        "port doesn't call train() of estimator_mgpu.Estimator. End it there."
                    )
                time.sleep(0.1)
            theirs = json.loads(session.run(known.value()))
            seen = session.run(tf.io.matching_files(path))
        if theirs != self.addresses:
            raise ValueError(
                f'TF_CONFIG differs between machines: {task} has the cluster {theirs}, and '
                f'{self.name} has {self.addresses}. Give every machine the same.'
            )
        if not seen.size:
            raise ValueError(
                f'{task} does not see model_dir={os.path.dirname(path)!r} of {self.name}. Give a '
                'directory of a file system of all machines: each has a part of a checkpoint.'
            )

    def _end(self) -> None:
        """Tells the other tasks how this process ends."""
        error = getattr(sys, 'last_value', None)  # which nobody has caught
        text = error and f'{type(error).__name__}: {error}'
        said = json.dumps([text, _TERMINATED if self._terminated else 0])
        for task in self._others:  # each, whatever comes of one
            if _listens(self.addresses[task]):
                with contextlib.suppress(tf.errors.OpError):
                    with self._session_with(task) as (session, _, end):
                        session.run(end.assign(said))

    def _terminate(self, number: int, frame: Any) -> None:
        self._terminated = time.monotonic()
        if not self._trains:
            raise SystemExit(_TERMINATED)


def join(config: Any) -> Task:
    """Makes this process a task of its RunConfig's cluster, unless it is already."""
    if not _joined:
        _joined.append(Task(config))
    if _joined[0].addresses != addresses(config):
        raise RuntimeError(
            f'This process is in the cluster {_joined[0].addresses} already, and TF_CONFIG has '
            f'{addresses(config)} now. Start another process for another cluster.'
        )
    return _joined[0]


def addresses(config: Any) -> dict[str, str]:
    """Returns a RunConfig's tasks, the chief first, each with its address."""
    jobs = config.cluster_spec.as_dict()
    return {f'/job:{job}/task:{i}': a for job in _JOBS for i, a in enumerate(jobs.get(job, ()))}


def hold(scaffold: tf.train.Scaffold) -> tf.train.Scaffold:
    """Lets a scaffold's session, also one after a fault, wait for all tasks."""
    finalize = scaffold.finalize

    def finalize_and_wait() -> Any:
        result = finalize()
        pin(tf.get_default_graph())
        _joined[0].wait()
        return result

    scaffold.finalize = finalize_and_wait
    return scaffold


def pin(graph: tf.Graph) -> None:
    """Puts on the chief what has been put on no task, but for what has to be with others."""
    for op in graph.get_operations():
        held = any(t.dtype == tf.resource or private.is_reference(t) for t in op.inputs)
        others = {*private.colocated_with(op)} - {op.name}  # A variable is colocated with itself.
        if spec_of(op.device).job is None and not held and not others:
            private.set_device(op, CHIEF + op.device)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(':')
    with contextlib.suppress(OSError):
        socket.create_connection((host.strip('[]'), int(port)), timeout=5).close()
        return True
    return False
