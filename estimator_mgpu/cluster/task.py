"""Several machines: a task on each, of which the chief trains on the devices of all."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster import ending, reach
from estimator_mgpu.cluster.notes import Notes
from estimator_mgpu.cluster.restarts import Restarts
from estimator_mgpu.cluster.tf_config import JOBS
from estimator_mgpu.cluster.watch import Watch
from estimator_mgpu.devices import CHIEF, device_spec, machine_of
from estimator_mgpu.tf_internals import graphs, op_types, private
from estimator_mgpu.tf_internals.lost_sessions import lost_sessions

_NOT_THERE = (
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
)
_EVERY = 30  # seconds from one message to the next on what is waited for
_GRACE = 20  # seconds after SIGTERM in which a task still serves the chief's last checkpoint
_TERMINATED = 128 + signal.SIGTERM
_GONE = tf.errors.AbortedError, tf.errors.DeadlineExceededError, tf.errors.UnavailableError
_joined: list[Task] = []  # A process has one server, for as long as it lives.


class Task:
    """This process, as a task of TF_CONFIG's cluster; it has TensorFlow's server.

    Notes on each other task say what that takes the cluster to be, which chief leads it, and how
    that has ended.

    Attributes:
      addresses: of all tasks, by their names.
      name: `/job:worker/task:0`, say.
      others: the names of the other tasks.
      limit: for how many seconds a task is waited for.
      incarnation: tells this process from others of the same task.
      leads: whether it is a chief that has begun to lead the others.
      waits: whether it waits for other tasks, and says so.
      terminated: when SIGTERM came, by time.monotonic(); 0.0 before.
    """

    def __init__(self, config: Any):
        spec = config.cluster_spec
        self.addresses = addresses(config)
        self.name = f'/job:{config.task_type}/task:{config.task_id}'
        self.others = [task for task in self.addresses if task != self.name]
        self.limit: float = config.session_creation_timeout_secs
        self.incarnation = uuid.uuid4().hex
        self.leads = False
        self.waits = False
        self._model_dirs: list[str] = []  # of a chief's trainings
        self._exit: Any = None  # what sys.exit() was called with
        self._trains = False
        self.terminated = 0.0
        jobs = {job: spec.job_tasks(job) for job in spec.jobs if job in JOBS}
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
            self._note_exit()
            atexit.register(self._end)
        with contextlib.suppress(ValueError):  # Only the main thread may do this.
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._terminate)

    def wait(
        self,
        tasks: Iterable[str] = (),
        ended: Callable[[], Any] = lambda: False,
        answering: bool = False,
    ) -> None:
        """Waits for tasks, and says which can't be reached.

        Args:
          tasks: their names; by default it's all.
          ended: says that there is nothing to wait for any more.
          answering: whether to wait until they answer, too. A stopped process listens still.
        """
        start = due = time.monotonic()
        wanted = list(tasks) or list(self.addresses)
        self.waits = True
        try:
            while (missing := self._missing(wanted, answering)) and not ended():
                now, text = time.monotonic(), ', '.join(missing)
                if self.terminated:
                    raise SystemExit(_TERMINATED)
                if now - start > self.limit:
                    raise TimeoutError(
                        f'{text}: not reached in {self.limit} seconds '
                        '(session_creation_timeout_secs of RunConfig). Start the script there, and '
                        'let its port through.'
                    )
                if now >= due:
                    tf.logging.warning(
                        f'Waiting for {text}: the script has to be started there, too.'
                    )
                    due = now + _EVERY
                time.sleep(1)
        finally:
            self.waits = False

    def _missing(self, tasks: Iterable[str], answering: bool) -> list[str]:
        """Says of tasks that can't be reached where they should be."""
        missing = []
        for task in tasks:
            address = self.addresses[task]
            if not self.listens(task):
                missing.append(reach.described(task, address))
            elif answering and task != self.name and not self._answers(task):
                stopped = 'there, but without an answer: is its process stopped?'
                missing.append(f'{task} at {address} ({stopped})')
        return missing

    def _answers(self, task: str) -> bool:
        with contextlib.suppress(tf.errors.OpError), self.notes_on(task) as notes:
            notes.read('chief')
            return True
        return False

    def listens(self, task: str) -> bool:
        """Whether there is a process at a task's address, maybe one that is stopped."""
        return reach.listens(self.addresses[task])

    def notes_on(self, task: str, seconds: float = 3) -> Notes:
        """Returns the notes on a task; each call of its session has a time limit."""
        return Notes(task, f'grpc://{self.addresses[task]}', seconds)

    def handles_sigterm(self) -> bool:
        """Whether SIGTERM ends training after its step, rather than what a user has set."""
        return signal.getsignal(signal.SIGTERM) == self._terminate

    def devices(self) -> dict[str, list[str]]:
        """Waits for all tasks, and returns the devices of each; fails if they don't fit."""
        self._meet()
        # Servers keep tables, say, from one session to the next, in a container of the job's name.
        tf.Session.reset(self.server.target, [*JOBS])
        with tf.Session(self.server.target) as session:
            specs = [device_spec(d.name).replace(replica=None) for d in session.list_devices()]
        names = [spec.to_string() for spec in specs if spec.device_type in ('CPU', 'GPU')]
        return {task: [n for n in names if machine_of(n) == task] for task in self.addresses}

    def _meet(self) -> None:
        """Waits for all tasks until they fit, and leads them: some may have just been started."""
        start = time.monotonic()
        met = False
        while not met:
            self.wait(answering=self.leads)
            try:
                for task in self.others:
                    self._check(task)
                self._lead()
                met = True
            except _GONE as error:
                if not self.leads:
                    raise
                if time.monotonic() - start > self.limit:
                    raise TimeoutError(
                        f'The tasks did not all answer in {self.limit} seconds '
                        '(session_creation_timeout_secs of RunConfig).'
                    ) from error

    def _check_alone(self) -> None:
        """Fails if another process has this task's address: it's the same task, elsewhere."""
        start = time.monotonic()
        with Notes(self.name, self.server.target, seconds=0) as notes:
            notes.write('process', self.incarnation)
        while self._process_at_address() not in ('', self.incarnation):
            if time.monotonic() > start + _EVERY:  # Until then a name may have been an old one.
                atexit.unregister(self._end)  # The other tasks are the other process's.
                raise RuntimeError(
                    f'Two processes are {self.name}: this one, and one that answers at '
                    f'{self.addresses[self.name]}. End one, or give this one its own type and '
                    "index in TF_CONFIG, and its machine's address."
                )
            time.sleep(1)

    def _process_at_address(self) -> str:
        """Tells which process has this task's address, by its incarnation; '' if it isn't known.

        Not each network lets a machine reach itself by the name that others use.
        """
        if reach.is_server(self.addresses[self.name]):
            with contextlib.suppress(tf.errors.OpError), self.notes_on(self.name) as notes:
                return notes.read('process') or 'one that has just begun'
        return ''

    def _lead(self) -> None:
        """Leaves a note on each task that this chief leads it, unless another does since."""
        with contextlib.ExitStack() as stack:
            notes = {task: stack.enter_context(self.notes_on(task)) for task in self.others}
            chiefs = {task: notes[task].read('chief') for task in notes}
            for task, chief in chiefs.items():
                if self.leads and chief not in ('', self.incarnation):
                    raise RuntimeError(self.replaced_by(task))
            for task, chief in chiefs.items():
                if chief != self.incarnation:
                    notes[task].write('end', '')
                    notes[task].write('chief', self.incarnation)
        self.leads = True

    def replaced_by(self, task: str) -> str:
        """Says that another chief is in the place of this one, by the task where that was seen."""
        return (
            f'Another chief leads {task} at {self.addresses[task]}: it was started in the place of '
            'this one, which was stopped or cut off for a while. This one ends, and writes nothing '
            'more.'
        )

    @contextlib.contextmanager
    def training(self, config: Any) -> Iterator[tuple[_AfterSteps, _BeforeCheckpoints]]:
        """Lets a RunConfig train on all machines, with a hook and a listener."""
        self._restarts, self._model_dir = Restarts(self.limit), config.model_dir
        seconds = config.session_config.operation_timeout_in_ms / 1000
        if not self.leads:
            self._check_alone()
        if self._model_dir not in self._model_dirs:
            ending.leave(self._model_dir, ending.Ending(self.incarnation))
            self._model_dirs.append(self._model_dir)
        with Watch(self) as watch, lost_sessions(self._restarts.lost):
            machines = self.devices()
            vars(config).update(machines=machines, _master=self.server.target)
            self._trains = True
            try:
                yield _AfterSteps(self, self._restarts, watch), _BeforeCheckpoints(watch)
            except tf.errors.DeadlineExceededError as error:
                if not seconds:
                    raise
                silent = watch.silent() or 'All tasks answer'
                raise TimeoutError(
                    f'A call of the session took more than {seconds} seconds '
                    f'(operation_timeout_in_ms of the session config). {silent}.'
                ) from error
            finally:
                self._trains = False
                vars(config).update(machines=None, _master='')
        if self.terminated:
            raise SystemExit(_TERMINATED)

    def begin_session(self) -> None:
        """Before each session of a training, also after a fault: waits for all tasks."""
        self._restarts.pause()
        self._meet()
        self._check_files(tf.get_default_graph())
        self._restarts.begin()

    def _check_files(self, graph: tf.Graph) -> None:
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
            with self.notes_on(task, seconds=60) as notes:
                with notes.graph.as_default(), tf.device(f'{task}/cpu:0'):
                    notes.session.run(tf.io.read_file(path))
        except _NOT_THERE as error:
            raise ValueError(
                f'{task} has variables or iterators that it saves itself, and does not see '
                f'model_dir={self._model_dir!r} of {CHIEF}. Give a directory of a file system of '
                'all machines. The chief saves all if there are only resource variables, which '
                'tf.disable_v2_behavior() turns off, and the program puts none on another task.'
            ) from error

    def serve(self) -> NoReturn:
        """Serves until the chief's process ends, and ends as that does."""
        self._trains = True
        with Notes(self.name, self.server.target, seconds=0) as notes:
            notes.write('cluster', json.dumps(self.addresses))
            asks_chief_at = time.monotonic() + _EVERY
            checks_alone_at = time.monotonic()
            while not (end := self._end_in(notes)):
                now = time.monotonic()
                asks_chief = now > asks_chief_at
                self.wait([CHIEF], lambda: self._end_in(notes), answering=asks_chief)
                if asks_chief:
                    asks_chief_at = now + _EVERY

                if now >= checks_alone_at:
                    self._check_alone()
                    checks_alone_at = time.monotonic() + _EVERY

                if self.terminated and time.monotonic() > self.terminated + _GRACE:
                    raise SystemExit(_TERMINATED)
                time.sleep(1)
        end.end(self.name)

    def _end_in(self, notes: Notes) -> ending.Ending | None:
        """Returns how the chief that leads this task has ended; that of another one is no end."""
        text = notes.read('end')
        end = ending.Ending(*json.loads(text)) if text else None
        return end if end and end.chief == notes.read('chief') else None

    def _check(self, task: str) -> None:
        """Fails if another task has another cluster, or isn't this script."""
        while not reach.check_server(task, self.addresses[task]):
            self.wait()
        with self.notes_on(task, seconds=60) as notes:
            start = time.monotonic()
            while not (known := notes.read('cluster')):  # It has only just begun to listen.
                if time.monotonic() > start + _EVERY:
                    raise RuntimeError(
                        f'{task} listens at {self.addresses[task]}, but the script that has that '
                        "port doesn't call train() of estimator_mgpu.Estimator. End it there."
                    )
                time.sleep(0.1)
            theirs = json.loads(known)
        if theirs != self.addresses:
            raise ValueError(
                f'TF_CONFIG differs between machines: {task} has the cluster {theirs}, and '
                f'{self.name} has {self.addresses}. Give every machine the same.'
            )

    def _note_exit(self) -> None:
        """Notes what sys.exit() is called with: when atexit calls `_end`, nothing else tells."""
        leave = sys.exit

        @functools.wraps(leave)
        def noted(status: Any = None) -> NoReturn:
            if threading.current_thread() is threading.main_thread():  # Another's ends itself only.
                self._exit = status
            leave(status)

        sys.exit = noted

    def _end(self) -> None:
        """Tells the other tasks how this process ends."""
        error = getattr(sys, 'last_value', None)  # which nobody has caught
        if error is not None:
            self.tell(f'{type(error).__name__}: {error}', 1)
        elif self.terminated:
            self.tell(None, _TERMINATED)
        else:
            self.tell(*ending.of_exit(self._exit))

    def tell(self, error: str | None, status: int, but: Iterable[str] = ()) -> None:
        """Tells other tasks, and an evaluator, how this chief ends, unless it was replaced."""
        end = ending.Ending(self.incarnation, error, status)
        with contextlib.ExitStack() as stack:
            led = []
            for task in self.others:  # each, whatever comes of one
                if task not in but and self.listens(task):
                    with contextlib.suppress(tf.errors.OpError):
                        notes = stack.enter_context(self.notes_on(task))
                        chief = notes.read('chief')
                        if self.leads and chief not in ('', self.incarnation):
                            return
                        led.append(notes)
            for notes in led:
                with contextlib.suppress(tf.errors.OpError):
                    notes.write('end', end.text())
                    notes.write('chief', self.incarnation)
        for model_dir in self._model_dirs:
            with contextlib.suppress(tf.errors.OpError):
                ending.leave(model_dir, end)

    def _terminate(self, number: int, frame: Any) -> None:
        self.terminated = time.monotonic()
        if not self._trains:
            raise SystemExit(_TERMINATED)


class _AfterSteps(tf.train.SessionRunHook):
    """After each step, a chief notes it, and ends if it has been replaced, or got SIGTERM."""

    def __init__(self, task: Task, restarts: Restarts, watch: Watch) -> None:
        self._task, self._restarts, self._watch = task, restarts, watch

    def begin(self) -> None:
        self._global_step = tf.train.get_global_step()

    def before_run(self, run_context: Any) -> Any:
        return tf.train.SessionRunArgs(self._global_step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._restarts.stepped(int(run_values.results))
        self._watch.fail_if_replaced()
        if self._task.terminated:
            run_context.request_stop()


class _BeforeCheckpoints(tf.train.CheckpointSaverListener):
    """A chief that has been replaced saves nothing."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def before_save(self, session: tf.Session, global_step_value: int) -> None:
        self._watch.check()


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


def follower(config: Any) -> ending.Follower | None:
    """Returns what an evaluator follows the chief by; None for other tasks, or without a chief."""
    cluster = json.loads(os.environ.get('TF_CONFIG') or '{}').get('cluster', {})
    if config.task_type != 'evaluator' or not cluster.get('chief'):
        return None
    limit = config.session_creation_timeout_secs
    return ending.Follower(config.model_dir, cluster['chief'][0], limit, reach.listens)


def addresses(config: Any) -> dict[str, str]:
    """Returns a RunConfig's tasks, the chief first, each with its address."""
    jobs = config.cluster_spec.as_dict()
    return {f'/job:{job}/task:{i}': a for job in JOBS for i, a in enumerate(jobs.get(job, ()))}


def hold(scaffold: tf.train.Scaffold) -> tf.train.Scaffold:
    """Lets a scaffold's session, also one after a fault, wait for all tasks."""
    finalize = scaffold.finalize

    def finalize_and_wait() -> Any:
        result = finalize()
        pin(tf.get_default_graph())
        _joined[0].begin_session()
        return result

    scaffold.finalize = finalize_and_wait
    return scaffold


def saving_tasks(graph: tf.Graph) -> set[str]:
    """Names the tasks that write checkpoints, and read them.

    That's the chief for all that `place` has put on others, as a saver doesn't see where. A saver
    has a task save what it finds there itself: variables of the kind before resource variables, and
    variables and iterators that a program has put there.
    """
    return {
        machine_of(op.device)
        for op in graph.get_operations()
        if op.type in op_types.CHECKPOINT_WRITES
    }


def pin(graph: tf.Graph) -> None:
    """Puts on the chief what has been put on no task, but for what has to be with others."""
    for op in graph.get_operations():
        held = any(t.dtype == tf.resource or graphs.is_reference_variable(t) for t in op.inputs)
        others = {*graphs.colocated_with(op)} - {op.name}  # A variable is colocated with itself.
        if device_spec(op.device).job is None and not held and not others:
            private.set_device(op, CHIEF + op.device)
