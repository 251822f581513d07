"""Which line of the user's program made an op, and at which lines it is now.

In: an op, be it the user's or one that was added for it. Out: the frame of its traceback that is in
the model_fn, or in what that calls: the deepest that isn't in an installed package, nor in Python's
own library.
"""

from __future__ import annotations

import itertools
import os
import re
import site
import sys
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

_LIBRARY = os.path.dirname(os.__file__)  # Python's, whose functools calls packages, say
_OWN = os.path.dirname(os.path.dirname(__file__))
# In a traceback, what comes below its frames is of a replicated model_fn.
_REPLICATE = os.path.join(_OWN, 'replicate.py')
# Packages that make ops for the user, wherever they are installed: `pip install --target` and
# PYTHONPATH may put them anywhere, also beside the user's program.
_MAKE_OPS = ('tensorflow', 'tensorflow_estimator', 'keras', 'tf_keras', 'tf_slim')


def frame_of(op: tf.Operation) -> Any:
    """The frame of the program that made an op, with `filename`, `lineno` and `name`; or None."""
    packages = _directories_of_packages()
    frames = reversed(list(op.traceback or ()))  # An imported op has none.
    inside = itertools.takewhile(lambda frame: frame.filename != _REPLICATE, frames)
    for frame in inside:
        if not frame.filename.startswith(packages):
            return frame
    return None


def is_of_model_fn(op: tf.Operation) -> bool:
    """Whether the model_fn made an op, or made the one that an added op serves."""
    return any(frame.filename == _REPLICATE for frame in op.traceback or ())


def last_of(traceback: Sequence[str]) -> str:
    """The deepest place in a traceback that is in the user's program; '' if there is none.

    Args:
      traceback: the lines that Python prints.

    Returns:
      A text such as 'File "train.py", line 12, in parse'.
    """
    packages = _directories_of_packages()
    for line in reversed(traceback):
        match = re.fullmatch(r'\s*(File "(.+)", line \d+, in .+)', line)
        if match is not None and not match[2].startswith(packages):
            return match[1]
    return ''


def running() -> list[str]:
    """Where the threads of this process are in the user's program, the main thread first.

    Returns:
      Texts such as '/home/me/train.py:12 in input_fn'.
    """
    packages = _directories_of_packages()
    frames = sys._current_frames()
    main = threading.main_thread().ident
    lines = []
    for thread in sorted(frames, key=lambda thread: thread != main):
        frame: Any = frames[thread]
        while frame is not None and frame.f_code.co_filename.startswith(packages):
            frame = frame.f_back
        if frame is not None:
            lines.append(f'{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}')
    return list(dict.fromkeys(lines))


def _directories_of_packages() -> tuple[str, ...]:
    """The directories whose files aren't the user's program, each with a slash at its end."""
    directories = [*site.getsitepackages(), site.getusersitepackages(), _LIBRARY, _OWN]
    for name in _MAKE_OPS:
        # Keras is imported only when it's used.
        module = sys.modules.get(name)
        if module is not None:
            directories += module.__path__
    return tuple(os.path.join(directory, '') for directory in directories)
