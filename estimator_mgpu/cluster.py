"""Several machines: a task on each, of which the chief trains on the devices of all."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf

from estimator_mgpu import private, reach
from estimator_mgpu.cluster_config import JOBS as _JOBS
from estimator_mgpu.devices import CHIEF, machine_of, spec_of
from estimator_mgpu.reach import listens as _listens

_SAVING = ('MergeV2Checkpoints', 'Save', 'SaveSlices', 'SaveV2')
_NOT_THERE = (
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
)
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
            now = time.monotonic()
            late = now - start > self._limit
            if self._terminated:
                raise SystemExit(_TERMINATED)
            if late or now >= due:
                text = ', '.join(reach.described(task, wanted[task]) for task in missing)
                if late:
                    raise TimeoutError(
                        f'{text}: not reached in {self._limit} seconds '
                        '(session_creation_timeout_secs of RunConfig). Start the script there, and '
                        'let its port through.'
                    )
                tf.logging.warning(f'Waiting for {text}: the script has to be started there, too.')
                due = now + _EVERY
            time.sleep(1)

    def devices(self) -> dict[str, list[str]]:
        """Waits for all tasks, and returns the devices of each; fails if they don't fit."""
        self.wait()
        self._check_alone()
        for task in self._others:
            self._check(task)
        # Servers keep tables, say, from one session to the next, in a container of the job's name.
        tf.Session.reset(self.server.target, [*_JOBS])
        with tf.Session(self.server.target) as session:
            specs = [spec_of(d.name).replace(replica=None) for d in session.list_devices()]
        names = [spec.to_string() for spec in specs if spec.device_type in ('CPU', 'GPU')]
        return {task: [n for n in names if machine_of(n) == task] for task in self.addresses}

    @contextlib.contextmanager
    def training(self, config: Any) -> Iterator[tf.train.SessionRunHook]:
        """Lets a RunConfig train on all machines, with a hook that ends it after SIGTERM's step."""
        self._model_dir = config.model_dir
        vars(config).update(machines=self.devices(), _master=self.server.target)
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
        with self._session_with(self.name) as (session, known, end, _):
            session.run([known.assign(json.dumps(self.addresses)), end.assign('')])
            value, due = end.value(), time.monotonic()
            while not (said := session.run(value)):
                self.wait([CHIEF], lambda: bool(session.run(value)))
                if time.monotonic() >= due:
                    self._check_alone()
                    due = time.monotonic() + _EVERY
                if self._terminated and time.monotonic() > self._terminated + _GRACE:
                    raise SystemExit(_TERMINATED)
                time.sleep(1)
        error, status = json.loads(said)
        if error:
            raise RuntimeError(f'The chief has failed: {error}')
        raise SystemExit(status)

    def _check_alone(self) -> None:
        """Fails if another process has this task's address: it's the same task, elsewhere."""
        identity, start = uuid.uuid4().hex, time.monotonic()
        with self._session_with(self.name) as (session, *_, process):
            session.run(process.assign(identity))
        address = self.addresses[self.name]
        while self._identity_at(address) not in ('', identity):
            if time.monotonic() > start + _EVERY:  # Until then a name may have been an old one.
                atexit.unregister(self._end)  # The other tasks are the other process's.
                raise RuntimeError(
                    f'Two processes are {self.name}: this one, and one that answers at {address}. '
                    'End one, or give this one its own type and index in TF_CONFIG, and its '
                    "machine's address."
                )
            time.sleep(1)

    def _identity_at(self, address: str) -> str:
        """Tells which process has this task's address; '' if that isn't known.

        Not each network lets a machine reach itself by the name that others use.
        """
        if reach.is_server(address):
            with contextlib.suppress(tf.errors.OpError):
                with self._session_with(self.name, f'grpc://{address}') as (session, *_, process):
                    if session.run(tf.is_variable_initialized(process)):
                        return session.run(process.value()).decode()
                    return 'of a process that has just begun'
        return ''

    def check_files(self, graph: tf.Graph) -> None:
        """Fails if a task that is to save a part of a checkpoint doesn't see the model_dir."""
        others = sorted(saving_tasks(graph) - {CHIEF})
        if not others:
            return
        directory = os.path.join(self._model_dir, f'.{uuid.uuid4().hex}')
        tf.io.gfile.makedirs(directory)
        try:
            path = os.path.join(directory, 'file')
            with tf.io.gfile.GFile(path, 'w') as file:
                file.write('')
            for task in others:
                self._check_reads(task, path)
        finally:
            tf.io.gfile.rmtree(directory)

    def _check_reads(self, task: str, path: str) -> None:
        try:
            with self._session_with(task) as (session, *_):
                session.run(tf.io.read_file(path))
        except _NOT_THERE as error:
            raise ValueError(
                f'{task} has variables or iterators that it saves itself, and does not see '
                f'model_dir={self._model_dir!r} of {CHIEF}. Give a directory of a file system of '
                'all machines. The chief saves all if there are only resource variables, which '
                'tf.disable_v2_behavior() turns off, and the program puts none on another task.'
            ) from error

    @contextlib.contextmanager
    def _session_with(self, task: str, target: str = '') -> Iterator[Any]:
        """A session of two tasks, by default from here, and the variables on one of them."""
        # Timeouts are of each call.
        config = tf.ConfigProto(device_filters=[self.name, task], operation_timeout_in_ms=60_000)
        with tf.Graph().as_default(), tf.device(f'{task}/cpu:0'), tf.container('estimator_mgpu'):
            names = (f'estimator_mgpu_{name}' for name in ('cluster', 'end', 'process'))
            strings = [tf.get_variable(name, [], tf.string, use_resource=True) for name in names]
            with tf.Session(target or self.server.target, config=config) as session:
                yield session, *strings

    def _check(self, task: str) -> None:
        """Fails if another task has another cluster, or isn't this script."""
        while not reach.check_server(task, self.addresses[task]):
            self.wait()
        with self._session_with(task) as (session, known, *_):
            initialized, start = tf.is_variable_initialized(known), time.monotonic()
            while not session.run(initialized):  # It has only just begun to listen.
                if time.monotonic() > start + _EVERY:
                    raise RuntimeError(
                        f'{task} listens at {self.addresses[task]}, but the script that has that '
                        "port doesn't call train() of estimator_mgpu.Estimator. End it there."
                    )
                time.sleep(0.1)
            theirs = json.loads(session.run(known.value()))
        if theirs != self.addresses:
            raise ValueError(
                f'TF_CONFIG differs between machines: {task} has the cluster {theirs}, and '
                f'{self.name} has {self.addresses}. Give every machine the same.'
            )

    def _end(self) -> None:
        """Tells the other tasks how this process ends."""
        error = getattr(sys, 'last_value', None)  # which nobody has caught
        text = error and f'{type(error).__name__}: {error}'
        said = json.dumps([text, _TERMINATED if self._terminated else 0])
        for task in self._others:  # each, whatever comes of one
            if reach.is_server(self.addresses[task]):
                with contextlib.suppress(tf.errors.OpError):
                    with self._session_with(task) as (session, _, end, _):
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
        _joined[0].check_files(tf.get_default_graph())
        return result

    scaffold.finalize = finalize_and_wait
    return scaffold


def saving_tasks(graph: tf.Graph) -> set[str]:
    """Names the tasks that write checkpoints, and read them.

    That's the chief for all that `place` has put on others, as a saver doesn't see where. A saver
    has a task save what it finds there itself: variables of the kind before resource variables, and
    variables and iterators that a program has put there.
    """
    return {machine_of(op.device) for op in graph.get_operations() if op.type in _SAVING}


def pin(graph: tf.Graph) -> None:
    """Puts on the chief what has been put on no task, but for what has to be with others."""
    for op in graph.get_operations():
        held = any(t.dtype == tf.resource or private.is_reference(t) for t in op.inputs)
        others = {*private.colocated_with(op)} - {op.name}  # A variable is colocated with itself.
        if spec_of(op.device).job is None and not held and not others:
            private.set_device(op, CHIEF + op.device)
