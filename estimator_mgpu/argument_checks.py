"""Checks of arguments that several public functions take; but a RunConfig is `replicate`'s."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsInt

import numpy as np
import tensorflow.compat.v1 as tf


def is_positive_integer(value: Any) -> bool:
    """Whether a value is a positive integer of Python's or NumPy's."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value > 0


def check_steps(name: str, steps: Any) -> None:
    """Raises TypeError if a number of steps is a text, say. Estimator checks that it's above 0.

    Args:
      name: the argument's.
      steps: what is given; None for all steps.
    """
    if steps is not None and not isinstance(steps, SupportsInt):
        raise TypeError(
            f'{name}={steps!r} is no number of steps. Give a positive integer, or leave it out to '
            'run to the end of the data.'
        )


def check_input_fn(input_fn: Any) -> None:
    """Raises TypeError if it's no function: a Dataset, say."""
    if not callable(input_fn):
        raise TypeError(
            f'input_fn={input_fn!r} is of {type(input_fn).__name__}. Give a function that makes '
            'the batches: lambda: dataset.'
        )


def list_of_hooks(hooks: Any) -> list[Any]:
    """Returns the hooks that are given, or none; raises TypeError if that's one hook, say."""
    if isinstance(hooks, tf.train.SessionRunHook):
        raise TypeError(f'hooks={hooks!r} is one hook. Give a list: hooks=[hook].')
    if hooks is not None and not isinstance(hooks, Iterable):
        raise TypeError(f'hooks={hooks!r} is no list of hooks. Give a list: hooks=[hook].')
    return list(hooks or [])


def check_named(unnamed: tuple[Any, ...], example: str) -> None:
    """Raises TypeError if devices or options were given without their names."""
    if unnamed:
        values = ', '.join(map(repr, unnamed))
        raise TypeError(
            f'{values} was given without a name. Devices and options are given by name: {example}.'
        )
