"""`tf.get_variable` shares the variables of one name, as under `tf.AUTO_REUSE`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals.private import (
    VARIABLE_STORE_ATTRIBUTES,
    VariableStore,
    partitioned_variable,
    single_variable,
    variable_store,
    with_variable_store,
)


class _SharingStore(VariableStore):
    """Gives a variable that exists to whoever would make another one of its name.

    It works like `tf.AUTO_REUSE`, but underneath scopes and custom getters, which therefore show
    the user's own `reuse`. `reuse=True` still demands a variable that exists.
    """

    __slots__ = ()

    def __init__(self, store: Any):
        """Shares the variables of another store, which keeps those that are made here, too."""
        for name in VARIABLE_STORE_ATTRIBUTES:
            setattr(self, name, getattr(store, name))

    def _get_single_variable(self, *args: Any, reuse: Any = None, **kwargs: Any) -> Any:
        return single_variable(self, *args, reuse=reuse or tf.AUTO_REUSE, **kwargs)

    def _get_partitioned_variable(self, *args: Any, reuse: Any = None, **kwargs: Any) -> Any:
        return partitioned_variable(self, *args, reuse=reuse or tf.AUTO_REUSE, **kwargs)


@contextlib.contextmanager
def shared_variables() -> Iterator[None]:
    """Lets `tf.get_variable` share the variables of one name in the default graph."""
    store = variable_store()
    if not isinstance(store, VariableStore):
        yield  # That of `track_tf1_style_variables`, which shares them itself.
        return
    with with_variable_store(_SharingStore(store)):
        yield
