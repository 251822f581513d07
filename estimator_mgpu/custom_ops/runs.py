"""Sessions for several towers, and whether two runs gave the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf


@contextlib.contextmanager
def session_of(towers: int) -> Iterator[tf.Session]:
    """A session with a device for each tower, in which variables and tables are initialized."""
    config = tf.ConfigProto(device_count={'CPU': towers, 'GPU': 0})  # GPUs round differently.
    # This optimizer loses outputs of fused batch normalization that are fetched.
    config.graph_options.rewrite_options.disable_meta_optimizer = True

    with tf.Session(config=config) as session:
        # Most ops have no variables, and a run of nothing takes time, too.
        if tf.global_variables() or tf.local_variables():
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        if tf.get_collection(tf.GraphKeys.TABLE_INITIALIZERS):
            session.run(tf.tables_initializer())
        yield session


def as_array(value: Any) -> Any:
    """What a session gives for a tensor, as an array: it gives a scalar string as bytes."""
    return np.array(value, object) if isinstance(value, bytes) else value


def assert_all_same(values: Sequence[Any], expected: Sequence[Any]) -> None:
    """Fails if one of several arrays differs from the expected one."""
    for value, expected_value in zip(values, expected):
        assert_same(value, expected_value)


def assert_same(value: Any, expected: Any, compare_numbers: bool = True) -> None:
    """Fails if arrays differ in shape or dtype, or in numbers by more than rounding.

    Args:
      value: an array, or what a session gives for a tensor.
      expected: what it has to be.
      compare_numbers: if False, only shapes and dtypes are compared.
    """
    value = as_array(value)
    expected = as_array(expected)
    np.testing.assert_equal((value.dtype, value.shape), (expected.dtype, expected.shape))
    if not compare_numbers:
        return

    if expected.dtype.kind not in 'fc':
        np.testing.assert_array_equal(value, expected)
        return
    magnitudes = np.abs(expected[np.isfinite(expected)]).astype(np.float64)
    scale = max(np.median(magnitudes), 1) if magnitudes.size else 1
    rounding = 4 * np.finfo(expected.dtype).eps * scale
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=rounding)
