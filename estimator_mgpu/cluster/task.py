"""This process as a task of a cluster: its server, and how it waits for the other tasks.

In: a RunConfig that has read TF_CONFIG. Out: a `Task`. What a chief does besides is in `chief`, and
what other tasks do in `serve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster import connections, reach
from estimator_mgpu.cluster.exits import SIGTERM_STATUS
from estimator_mgpu.cluster.notes import Notes
from estimator_mgpu.cluster.tf_config import JOBS
from estimator_mgpu.devices import CHIEF

T = TypeVar('T')
_LOG_EVERY = 30  # seconds from one message to the next on what is waited for
# Seconds after which a process that answers at this task's address is another one. Until then its
# host name may still lead to where the task was before.
_TWIN_PATIENCE = 30
# Environment variables with the hosts that gRPC, or any program, connects to without a proxy.
_NO_PROXY = 'no_grpc_proxy'
_NO_PROXY_OF_ALL = 'no_proxy'


class Task:
    """This process, as a task of TF_CONFIG's cluster. It runs TensorFlow's server.

    Attributes:
      addresses: the address of each task by the task's name, the chief first.
      name: the name of this task, such as `/job:worker/task:0`.
      others: the names of the other tasks.
      limit: for how many seconds a task is waited for.
      processes: on a chief, the incarnations of the other tasks' processes that it has met.
      incarnation: tells this process from others that are, or were, the same task.
      server: TensorFlow's server.
      waits: whether this task is waiting for others, and logs which.
      busy: whether it trains, serves, or tells others how it ends. SIGTERM then only sets
        `sigterm_at`, so that a step can be finished; at other times it ends the process.
      sigterm_at: when SIGTERM came, by time.monotonic(); None if it didn't.
    """

    def __init__(self, config: Any):
        self.addresses = addresses(config)
        self.name = f'/job:{config.task_type}/task:{config.task_id}'
        self.others = [name for name in self.addresses if name != self.name]
        self.limit: float = config.session_creation_timeout_secs
        self.processes: dict[str, str] = {}
        self._peers: set[connections.Peer] = set()  # where the tasks have been
        self.incarnation = uuid.uuid4().hex
        self.waits = False
        self.busy = False
        self.sigterm_at: float | None = None

        self.server = self._start_server(config)
        with contextlib.suppress(ValueError):  # Only the main thread may do this.
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._handle_sigterm)

    def _start_server(self, config: Any) -> tf.train.Server:
        """Starts TensorFlow's server, by which tasks run ops on each other."""
        # Otherwise, closing a session would wait in silence for a task that has gone.
        os.environ.setdefault('GRPC_FAIL_FAST', 'true')
        os.environ[_NO_PROXY] = self._hosts_without_proxy()

        spec = config.cluster_spec
        jobs = {job: spec.job_tasks(job) for job in spec.jobs if job in JOBS}
        try:
            server = tf.train.Server(
                jobs, config.task_type, config.task_id, config.protocol, config.session_config
            )
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
        return server

    def _hosts_without_proxy(self) -> str:
        """The hosts that gRPC connects to directly: the tasks' own, and those named before.

        Otherwise, gRPC would ask the proxy of `http_proxy`, as in companies' networks, for a
        connection to each task. If this variable is set, gRPC doesn't read `no_proxy`.
        """
        before = os.environ.get(_NO_PROXY, os.environ.get(_NO_PROXY_OF_ALL, ''))
        hosts = [reach.host_of(address) for address in self.addresses.values()]
        return ','.join(filter(None, dict.fromkeys([*before.split(','), *hosts])))

    def listens(self, name: str) -> bool:
        """Whether there is a process at a task's address. It may be stopped."""
        return reach.listens(self.addresses[name])

    def notes_on(self, name: str, seconds: float = 3) -> Notes:
        """Returns the notes on a task. Each call that reads or writes one has this time limit."""
        return Notes(name, f'grpc://{self.addresses[name]}', seconds)

    @contextlib.contextmanager
    def notes_on_all(self, names: Iterable[str]) -> Iterator[dict[str, Notes]]:
        """A context with the notes on each of some tasks, by the tasks' names."""
        with contextlib.ExitStack() as stack:
            yield {name: stack.enter_context(self.notes_on(name)) for name in names}

    def drop_connections(self) -> None:
        """Drops the connections to all tasks, of which there are new ones when they are needed.

        A task's name may lead to another machine by now, so those to all that it led to count.
        """
        self._peers |= connections.peers_at(self.addresses.values())
        connections.drop(self._peers)

    def wait(
        self,
        names: Iterable[str] = (),
        ended: Callable[[], T | None] = lambda: None,
        answering: bool = False,
    ) -> T | None:
        """Waits until tasks can be reached, and logs which can't.

        Args:
          names: the tasks'; all tasks if there are none.
          ended: returns why there is nothing to wait for any more; None if there is.
          answering: whether to wait until they answer, too. A stopped process only listens.

        Returns:
          What `ended` has returned; None if all tasks can be reached.
        """
        names = list(names) or list(self.addresses)
        start = time.monotonic()
        next_message_at = start
        self.waits = True
        try:
            while True:
                missing = self._missing(names, answering)
                if not missing:
                    return None
                reason = ended()
                if reason is not None:
                    return reason

                now = time.monotonic()
                if self.sigterm_at is not None:
                    raise SystemExit(SIGTERM_STATUS)
                if now - start > self.limit:
                    raise TimeoutError(
                        f'{", ".join(missing)}: not reached in {self.limit} seconds '
                        '(session_creation_timeout_secs of RunConfig). Start the script there, '
                        'with the same cluster in TF_CONFIG, and let its port through.'
                    )
                if now >= next_message_at:
                    tf.logging.warning(
                        f'Waiting for {", ".join(missing)}: the script has to run there, too, with '
                        'the same cluster in TF_CONFIG.'
                    )
                    next_message_at = now + _LOG_EVERY
                time.sleep(1)
        finally:
            self.waits = False

    def _missing(self, names: Iterable[str], answering: bool) -> list[str]:
        """Describes the tasks that can't be reached: a text for each of them."""
        missing = []
        for name in names:
            address = self.addresses[name]
            if not self.listens(name):
                missing.append(reach.described(name, address))
            elif answering and name != self.name:
                problem = self._problem_of_answer(name)
                if problem:
                    missing.append(f'{name} at {address} (there, but {problem})')
        return missing

    def _problem_of_answer(self, name: str) -> str:
        """Why what listens at a task's address doesn't answer as the task; '' if it does."""
        with contextlib.suppress(tf.errors.OpError), self.notes_on(name) as notes:
            leads = notes.read('leads')
            if leads and json.loads(leads) != self.addresses:
                return f'its TF_CONFIG has another cluster: {leads}'
            return ''
        return 'without an answer: is its process stopped, or does another program use that port?'

    def check_alone(self) -> None:
        """Raises RuntimeError if another process is the same task, on another machine.

        This process leaves its incarnation in its own server, and then reads it at the address that
        TF_CONFIG has for it: another process answers there with another one. A chief also leaves
        which tasks it leads, for tasks that have another cluster.
        """
        with Notes(self.name, self.server.target, seconds=0) as notes:
            notes.write('process', self.incarnation)
            if self.name == CHIEF:
                notes.write('leads', json.dumps(self.addresses))

        address = self.addresses[self.name]
        start = None
        while self._process_at_address() not in ('', self.incarnation):
            if start is None:
                start = time.monotonic()
                tf.logging.warning(
                    f'Another process is {self.name}, and answers at {address}: waiting '
                    f'{_TWIN_PATIENCE} seconds for its end.'
                )
            if time.monotonic() > start + _TWIN_PATIENCE:
                raise RuntimeError(
                    f'Two processes are {self.name}: this one, and one that answers at {address}. '
                    'End one, or give this one its own type and index in TF_CONFIG, and its '
                    "machine's address."
                )
            time.sleep(1)

    def _process_at_address(self) -> str:
        """The incarnation of the process at this task's address; '' if it can't be read.

        In some networks, a machine can't reach itself by the name that others use for it.
        """
        if reach.is_server(self.addresses[self.name]):
            with contextlib.suppress(tf.errors.OpError), self.notes_on(self.name) as notes:
                return notes.read('process') or 'one that has just begun'
        return ''

    def handles_sigterm(self) -> bool:
        """Whether this task handles SIGTERM, rather than a handler of the user's."""
        return signal.getsignal(signal.SIGTERM) == self._handle_sigterm

    def _handle_sigterm(self, number: int, frame: Any) -> None:
        self.sigterm_at = time.monotonic()
        if not self.busy:
            raise SystemExit(SIGTERM_STATUS)


def addresses(config: Any) -> dict[str, str]:
    """Returns the address of each of a RunConfig's tasks by the task's name, the chief first."""
    jobs = config.cluster_spec.as_dict()
    return {
        f'/job:{job}/task:{index}': address
        for job in JOBS
        for index, address in enumerate(jobs.get(job, ()))
    }
