"""How a chief has ended: what it leaves for other tasks, which end as it did.

Workers and ps tasks read it in a note on themselves. An evaluator, which may evaluate for hours
after all others have gone, reads it in a file in model_dir.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple, NoReturn

import tensorflow.compat.v1 as tf

FILE = 'estimator_mgpu_chief.json'


class Ending(NamedTuple):
    """How a chief has ended.

    Attributes:
      chief: the incarnation of the chief, which tells its process from earlier and later chiefs.
      error: the error that it ended by, as text; None if it ended without one.
      status: its exit status; None while it runs.
    """

    chief: str
    error: str | None = None
    status: int | None = None

    @classmethod
    def from_text(cls, text: str) -> Ending:
        """Reads what `text()` has written.

        Raises:
          ValueError: if the text is something else.
        """
        try:
            chief, error, status = json.loads(text)
        except (RecursionError, TypeError, ValueError) as cause:
            raise ValueError(f'{text[:40]!r} is no ending of a chief.') from cause

        has_types = isinstance(chief, str) and isinstance(error, (str, type(None)))
        if not has_types or not isinstance(status, (int, type(None))):
            raise ValueError(f'{text[:40]!r} is no ending of a chief.')
        return cls(chief, error, status)

    def text(self) -> str:
        """The ending as JSON, for a note or a file."""
        return json.dumps(self)

    def end_process(self, name: str) -> NoReturn:
        """Ends this process, which is another task, as the chief has ended.

        Args:
          name: of this task, for the log.
        """
        if self.error is not None:
            raise RuntimeError(f'The chief has failed: {self.error}')
        if self.status:
            tf.logging.warning(f'The chief has ended with {self.status}, and so does {name}.')
        raise SystemExit(self.status)


def write(model_dir: str, ending: Ending) -> None:
    """Writes the file of a chief that begins or ends.

    A chief that ends writes nothing if the file is another chief's, which has replaced it.
    """
    before = read(model_dir)
    if ending.status is not None and before is not None and before.chief != ending.chief:
        return

    # A file is renamed in one go, so that nobody reads half of it.
    tf.io.gfile.makedirs(model_dir)
    path = os.path.join(model_dir, FILE)
    with tf.io.gfile.GFile(f'{path}.{ending.chief}', 'w') as file:
        file.write(ending.text())
    tf.io.gfile.rename(f'{path}.{ending.chief}', path, overwrite=True)


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
