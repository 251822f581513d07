"""While it trains, a chief asks all other tasks every few seconds whether they are there.

If a task is stopped or cut off, a step waits for it within TensorFlow, as long as that lasts.
Meanwhile Python runs no hook in the main thread. So other threads watch, on the chief. How long
others wait for a chief is the limit of a `Task`.
"""

from __future__ import annotations

import contextlib
import threading
import time

import tensorflow.compat.v1 as tf

from estimator_mgpu.cluster.end_of_chief import EndOfChief
from estimator_mgpu.cluster.leadership import Leadership
from estimator_mgpu.cluster.notes import Notes
from estimator_mgpu.cluster.task import Task

_ASK_EVERY = 5  # seconds from one question to the next
_ANSWER_WITHIN = 10  # seconds in which a task that is well has answered
_LOG_AFTER = 20  # seconds without an answer, after which the log names a task
_LOG_EVERY = 30  # seconds from one such message to the next
_LATER_THAN_OTHERS = 15  # seconds that others have to end the process before this module does


class Watch:
    """Knows which tasks answer, logs which don't, and ends a process that waits for them for ever.

    Each other task has a thread that asks it which chief leads it. One more thread, the judge,
    looks every second at when they have answered. The threads run within a `with` statement:

        with Watch(task, leadership, end) as watch:
            ...  # train
            watch.check()  # before a checkpoint is saved
    """

    def __init__(self, task: Task, leadership: Leadership, end: EndOfChief) -> None:
        self._task = task
        self._leadership = leadership
        self._end = end
        self._over = threading.Event()
        # Times are those of time.monotonic().
        self._awake_since = time.monotonic()  # since when this process wasn't stopped
        # When each task answered last. Until its first answer, its silence counts from now on.
        self._answered_at = dict.fromkeys(task.others, self._awake_since)
        self._logged_at: dict[str, float] = {}  # when the log last named a task as silent
        self._replaced_since: float | None = None  # None if no other chief has replaced this one

    def __enter__(self) -> Watch:
        self._threads = [
            threading.Thread(target=self._ask_until_over, args=[name]) for name in self._task.others
        ]
        self._threads.append(threading.Thread(target=self._judge_until_over))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:  # They end soon: reading a note has a time limit.
            thread.join()

    def check(self) -> None:
        """Raises RuntimeError if another chief has replaced this one.

        First it asks the tasks that haven't answered lately. After this process was stopped, that's
        all of them.
        """
        now = time.monotonic()
        for name in self._task.others:
            silence = now - self._answered_at[name]
            if silence > 2 * _ASK_EVERY and self._task.listens(name):
                with contextlib.suppress(tf.errors.OpError), self._task.notes_on(name) as notes:
                    self.ask(name, notes)
        self.fail_if_replaced()

    def fail_if_replaced(self) -> None:
        """Raises RuntimeError if a task has answered that another chief leads it."""
        if self._leadership.replaced_on:
            raise RuntimeError(self._leadership.replacement_error())

    def silent_tasks(self, seconds: float | None = None) -> str:
        """Says which tasks have been silent for so many seconds; '' if there are none.

        By default, as many as no task that is well is silent.
        """
        limit = _ANSWER_WITHIN if seconds is None else seconds
        return self._described(self._silences(time.monotonic()), limit)

    def ask(self, name: str, notes: Notes) -> None:
        """Asks a task which chief leads it, and notes that it has answered."""
        # These are read before the answer comes: after it, the chief may have begun to lead the
        # task, or have met a new process of it.
        has_begun = self._leadership.has_begun
        known = self._task.processes.get(name)
        leader = self._leadership.leader_of(notes)
        self._answered_at[name] = time.monotonic()
        self._drop_connections_to_old_process(name, known, notes.read('process'))
        if has_begun and self._leadership.is_another(leader):
            self._leadership.replaced_on = name

    def _drop_connections_to_old_process(self, name: str, known: str | None, process: str) -> None:
        """Ends a step that still waits for a process, of which another one has taken the place.

        Args:
          name: the task's.
          known: the incarnation of the process before; None if none is known.
          process: that of the process that answers now; '' if it hasn't said it yet.
        """
        if not known or not process or process == known:
            return
        self._task.processes[name] = process
        tf.logging.warning(
            f'{name} at {self._task.addresses[name]} has been started again. Connections to the '
            'process before are dropped.'
        )
        self._task.drop_connections()

    def _ask_until_over(self, name: str) -> None:
        """Asks a task every few seconds, over the same connection for as long as that holds."""
        while not self._over.wait(_ASK_EVERY):
            if not self._task.listens(name):
                continue
            with contextlib.suppress(tf.errors.OpError), self._task.notes_on(name) as notes:
                while not self._over.is_set():
                    self.ask(name, notes)
                    self._over.wait(_ASK_EVERY)

    def _judge_until_over(self) -> None:
        """Judges every second."""
        while not self._over.is_set():
            before = time.monotonic()
            self._over.wait(1)
            now = time.monotonic()
            if now - before > _ASK_EVERY:  # This process itself was stopped.
                self._awake_since = now
            self.judge(now)

    def judge(self, now: float) -> None:
        """Logs which tasks don't answer, and ends the process once it has waited too long."""
        if self._task.waits:  # `Task.wait` logs for which tasks it waits, and has its own limit.
            self._awake_since = now
        silences = self._silences(now, self._awake_since)
        self._log_changes(silences, now)
        self._end_after_limit(silences)
        self._end_if_replaced(now)

    def _silences(self, now: float, counted_from: float = 0) -> dict[str, float]:
        """For how many seconds each task hasn't answered, of those after `counted_from`."""
        return {name: now - max(at, counted_from) for name, at in self._answered_at.items()}

    def _described(self, silences: dict[str, float], limit: float = 0) -> str:
        """Says which tasks have been silent for longer than a limit; '' if there are none."""
        texts = []
        for name, seconds in silences.items():
            if seconds > limit:
                address = self._task.addresses[name]
                texts.append(f'{name} at {address} has not answered for {seconds:.0f} seconds')
        return ', '.join(texts)

    def _log_changes(self, silences: dict[str, float], now: float) -> None:
        """Logs which tasks are silent, every half minute, and which of these answer again."""
        for name, seconds in silences.items():
            logged_at = self._logged_at.get(name)
            if seconds > _LOG_AFTER and (logged_at is None or now - logged_at >= _LOG_EVERY):
                self._logged_at[name] = now
                tf.logging.warning(
                    f'{self._described({name: seconds})}. Is its process stopped, or its machine '
                    'or its network down? A step waits for it.'
                )
            elif seconds <= _ANSWER_WITHIN and logged_at is not None:
                del self._logged_at[name]
                tf.logging.warning(f'{name} at {self._task.addresses[name]} answers again.')

    def _end_after_limit(self, silences: dict[str, float]) -> None:
        """Ends the process if a task has been silent for too long."""
        # Other code that waits for the task ends at the limit itself. Its error comes first, and
        # tells the cause.
        limit = self._task.limit + _LATER_THAN_OTHERS
        silent = self._described(silences, limit)
        if silent:
            error = f'{silent} (session_creation_timeout_secs: {self._task.limit})'
            self._end.end_process(error, 1)

    def _end_if_replaced(self, now: float) -> None:
        """Ends the process if another chief has replaced it, and the present step doesn't end."""
        if not self._leadership.replaced_on:
            return
        if self._replaced_since is None:
            self._replaced_since = now
        if now - self._replaced_since > _LATER_THAN_OTHERS:
            error = self._leadership.replacement_error()
            self._end.end_process(error, 1)
