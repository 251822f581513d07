"""How a chief has ended: what it leaves for other tasks, which end as it did.

Workers and ps tasks read it in a note on themselves. A file in model_dir is for those that the
chief doesn't reach: an evaluator, which may evaluate for hours after all others have gone, and a
task, or another chief, that was away and comes back.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import NamedTuple, NoReturn

import tensorflow.compat.v1 as tf

FILE = 'estimator_mgpu_chief.json'
_READ_EVERY = 30  # seconds from one look at the file to the next


class Ending(NamedTuple):
    """How a chief has ended.

    Attributes:
      incarnation: the chief's, which tells its process from earlier and later chiefs.
      error: the error that it ended by, as text; None if it ended without one.
      status: its exit status; None while it runs.
      at: when it ended, by time.time(). Only the file has this and the next one.
      untold: the addresses of the tasks that it couldn't tell.
    """

    incarnation: str
    error: str | None = None
    status: int | None = None
    at: float = 0.0
    untold: tuple[str, ...] = ()

    @classmethod
    def from_text(cls, text: str) -> Ending:
        """Reads what `text()` has written.

        Raises:
          ValueError: if the text is something else.
        """
        try:
            incarnation, error, status, *more = json.loads(text)  # no more in version 0.2
            ending = cls(incarnation, error, status, *more)
            has_types = (
                isinstance(ending.incarnation, str)
                and isinstance(ending.error, (str, type(None)))
                and isinstance(ending.status, (int, type(None)))
                and isinstance(ending.at, (int, float))
                and isinstance(ending.untold, (list, tuple))
            )
            if not has_types:
                raise TypeError('A field is of another type.')
        except (RecursionError, TypeError, ValueError) as cause:
            raise ValueError(f'{text[:40]!r} is no ending of a chief.') from cause
        return ending._replace(untold=tuple(ending.untold))

    def text(self) -> str:
        """The ending as JSON, for a note or a file."""
        return json.dumps(self)

    def end_as_chief_did(self, name: str) -> NoReturn:
        """Ends this process, another task. The log calls it by this name."""
        if self.error is not None:
            raise RuntimeError(f'The chief has failed: {self.error}')
        if self.status:
            tf.logging.warning(f'The chief has ended with {self.status}, and so does {name}.')
        raise SystemExit(self.status)

    def was_missed(self, address: str, limit: float) -> bool:
        """Whether the task at an address was away as the chief ended with 0: it has nothing to do.

        After `limit` seconds, that doesn't count any more.
        """
        is_recent = abs(time.time() - self.at) < limit
        return self.status == 0 and address in self.untold and is_recent


class FileReader:
    """Reads a chief's file now and then, for a process that waits for others.

    Not every task sees the file.

    Attributes:
      before: what the file said at first; None if there was none.
    """

    def __init__(self, model_dir: str) -> None:
        self._model_dir = model_dir
        self._next_read_at = time.monotonic()
        self.before = self._read()

    def read_now_and_then(self) -> Ending | None:
        """Returns what the file says, twice a minute; None at other times, and without a file."""
        if time.monotonic() < self._next_read_at:
            return None
        self._next_read_at = time.monotonic() + _READ_EVERY
        return self._read()

    def _read(self) -> Ending | None:
        with contextlib.suppress(tf.errors.OpError):
            return read(self._model_dir)
        return None


def write(model_dir: str, ending: Ending) -> None:
    """Writes the file of a chief that begins or ends.

    A chief that ends writes nothing if the file is another chief's, which has replaced it.
    """
    before = read(model_dir)
    is_anothers = before is not None and before.incarnation != ending.incarnation
    if ending.status is not None and is_anothers:
        return

    # A file is renamed in one go, so that nobody reads half of it.
    tf.io.gfile.makedirs(model_dir)
    path = os.path.join(model_dir, FILE)
    with tf.io.gfile.GFile(f'{path}.{ending.incarnation}', 'w') as file:
        file.write(ending.text())
    tf.io.gfile.rename(f'{path}.{ending.incarnation}', path, overwrite=True)


def read(model_dir: str) -> Ending | None:
    """Returns what a chief's file says; None if there is no file, or a damaged one."""
    path = os.path.join(model_dir, FILE)
    try:
        with tf.io.gfile.GFile(path) as file:
            return Ending.from_text(file.read())
    except tf.errors.NotFoundError:
        return None
    except ValueError as error:  # also if it isn't UTF-8
        tf.logging.warning(
            f'{path}, which says how the chief has ended, is damaged and counts as missing '
            f'({error}). The chief writes it anew as it begins and ends.'
        )
        return None
