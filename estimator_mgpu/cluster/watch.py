"""While it trains, a chief asks all other tasks every few seconds whether they are there.

A step waits for all tasks within TensorFlow, for as long as one of them is stopped or cut off.
Until then Python runs no signal handler and no hook, but it runs other threads.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import Protocol

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster.notes import Notes

EVERY = 5  # seconds from one question to the next
_SILENT = 20  # seconds without an answer, after which the log names a task
_AGAIN = 30  # seconds from one such message to the next
_GRACE = 15  # seconds that a step may take after what should end it, if a task doesn't answer
_WITHIN = 10  # seconds in which a task that is well has answered


class Watcher(Protocol):
    """What a `Watch` needs of the `Task` whose process it's in."""

    others: list[str]  # the names of all other tasks
    addresses: dict[str, str]
    incarnation: str
    leads: bool  # whether the other tasks have been told that this one is their chief
    waits: bool
    limit: float  # seconds for which it waits for a task

    def listens(self, task: str) -> bool: ...

    def notes_on(self, task: str) -> Notes: ...

    def handles_sigterm(self) -> bool: ...

    def replaced_by(self, task: str) -> str: ...

    def tell(self, error: str | None, status: int, but: Iterable[str] = ()) -> None: ...


class Watch:
    """Knows which tasks answer, says which don't, and ends a process that waits for these.

    Each task has a thread that asks it for its note on the chief, and one more thread looks at what
    these have heard. It's a context manager: the threads end with it.

    Attributes:
      replaced: the task by which another chief was found to be in the place of this one, or ''.
    """

    def __init__(self, task: Watcher) -> None:
        self.replaced = ''
        self._task = task
        self._over = threading.Event()
        self._signals: int | None = None  # where the numbers of signals can be read
        self._answered: dict[str, float] = {}  # when a task was last heard
        self._awake = time.monotonic()  # since when this process hasn't been stopped
        self._told: dict[str, float] = {}  # when the log last named a task that doesn't answer
        self._ends_since: float | None = None  # since when the process should end
        self._terminated = False

    def __enter__(self) -> Watch:
        if threading.current_thread() is threading.main_thread():  # No other one may do this.
            self._listen_to_signals()
        self._threads = [
            threading.Thread(target=self._ask, args=[name]) for name in self._task.others
        ]
        self._threads.append(threading.Thread(target=self._look))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:  # Each calls no longer than the time limit of notes.
            thread.join()
        if self._signals is not None:
            signal.set_wakeup_fd(-1)
            for end in self._pipe:
                os.close(end)

    def check(self) -> None:
        """Fails if another chief has replaced this one; asks tasks that weren't heard lately."""
        now = time.monotonic()
        for name in self._task.others:
            if now - self._answered.get(name, 0) > 2 * EVERY and self._task.listens(name):
                with contextlib.suppress(tf.errors.OpError), self._task.notes_on(name) as notes:
                    self.hear(name, notes)
        self.fail_if_replaced()

    def fail_if_replaced(self) -> None:
        if self.replaced:
            raise RuntimeError(self._task.replaced_by(self.replaced))

    def hear(self, name: str, notes: Notes) -> None:
        """Asks a task which chief leads it."""
        leads = self._task.leads
        chief = notes.read('chief')
        self._answered[name] = time.monotonic()
        if leads and chief not in ('', self._task.incarnation):
            self.replaced = name

    def silent(self) -> str:
        """Names the tasks that haven't answered lately."""
        now = time.monotonic()
        return self._names({n: now - at for n, at in self._answered.items()}, _WITHIN)

    def look(self, now: float) -> None:
        """Says which tasks don't answer, and ends the process if it waits in vain."""
        if self._task.waits:  # It says itself for whom, and how long.
            self._awake = now
        silent = {name: now - max(at, self._awake) for name, at in self._answered.items()}
        self._tell(silent, now)
        limit = self._task.limit + _GRACE  # Up to the limit alone, whoever else waits fails by it.
        if any(seconds > limit for seconds in silent.values()):
            text = self._names(silent, limit)
            self._end(f'{text} (session_creation_timeout_secs: {self._task.limit})', 1)
        if not self._terminated and not self.replaced:
            return
        if self._ends_since is None:
            self._ends_since = now
        if now - self._ends_since > _GRACE:
            if self.replaced:
                self._end(self._task.replaced_by(self.replaced), 1)
            elif text := self._names(silent, _WITHIN):
                self._end(f'SIGTERM came while a step waited: {text}', 128 + signal.SIGTERM)

    def _tell(self, silent: dict[str, float], now: float) -> None:
        for name, seconds in silent.items():
            if seconds > _SILENT and now - self._told.get(name, now - _AGAIN) >= _AGAIN:
                self._told[name] = now
                tf.logging.warning(
                    f'{self._names({name: seconds})}. Is its process stopped, or its machine or '
                    'its network down? A step waits for it.'
                )
            elif seconds <= _WITHIN and name in self._told:
                del self._told[name]
                tf.logging.warning(f'{name} at {self._task.addresses[name]} answers again.')

    def _names(self, silent: dict[str, float], beyond: float = 0) -> str:
        """Names the tasks that have been silent for longer."""
        addresses = self._task.addresses
        return ', '.join(
            f'{name} at {addresses[name]} has not answered for {seconds:.0f} seconds'
            for name, seconds in silent.items()
            if seconds > beyond
        )

    def _end(self, error: str, status: int) -> None:
        """Ends the process, whose main thread can't: the other tasks first."""
        tf.logging.error(f'{error}. This process ends.')
        terminated = status == 128 + signal.SIGTERM
        silent = [n for n, at in self._answered.items() if time.monotonic() - at > _WITHIN]
        self._task.tell(None if terminated else error, status, but=silent)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _look(self) -> None:
        while not self._over.is_set():
            before = time.monotonic()
            self._wait_for_signals(1)
            now = time.monotonic()
            if now - before > EVERY:
                self._awake = now
            self.look(now)

    def _ask(self, name: str) -> None:
        """Asks a task until the end, over the same connection while that is there."""
        while not self._over.wait(EVERY):
            if not self._task.listens(name):
                continue
            with contextlib.suppress(tf.errors.OpError), self._task.notes_on(name) as notes:
                while not self._over.is_set():
                    self.hear(name, notes)
                    self._over.wait(EVERY)

    def _listen_to_signals(self) -> None:
        """Has the numbers of signals written to where a thread can read them."""
        self._pipe = os.pipe()
        reads, writes = self._pipe
        os.set_blocking(writes, False)
        before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if before == -1:
            self._signals = reads
            return
        signal.set_wakeup_fd(before)  # It's somebody else's.
        for end in self._pipe:
            os.close(end)

    def _wait_for_signals(self, seconds: float) -> None:
        if self._signals is None:
            self._over.wait(seconds)
        elif select.select([self._signals], [], [], seconds)[0]:
            came = signal.SIGTERM in os.read(self._signals, 4096)
            self._terminated |= came and self._task.handles_sigterm()
