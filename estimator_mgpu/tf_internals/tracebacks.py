"""Tracebacks: where the program made an op, as errors, tfdbg and the profiler show it.

In: ops that are added to a graph, and the user's ops that they serve. Out: the same ops, with the
tracebacks of the user's. For example, a tower's copy of a `tf.matmul` in line 5 of a model_fn is
said to be made there, too.

These tracebacks have no lines of TensorFlow itself, which would tell nothing of an added op.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.tf_internals import private

_NONE: Mapping[str, Any] = MappingProxyType({})


class Tracebacks:
    """Tracebacks to give to ops. Ops that were made by the same lines share one.

    One may have fifty lines, and take 10 kB: too much for each of a model's ops.
    """

    def __init__(self) -> None:
        self._known = defaultdict[Hashable, list[Any]](list)

    def of(self, op: tf.Operation | None) -> Any:
        """The traceback for an op that serves this one; the present one if this one has none.

        An imported op has none.
        """
        own = None if op is None else op.traceback
        traceback = private.own_traceback() if own is None else own
        lines = traceback.get_user_frames()
        if len(lines) == 0:
            lines = traceback

        last = lines[-1]
        similar = self._known[last.filename, last.lineno, len(lines)]
        for known in similar:
            if known == lines:
                return known
        # Of a slice, all lines are the user's. Of the user's lines, none are, strangely.
        similar.append(lines[:])
        return similar[-1]


@contextlib.contextmanager
def made_for(served: tf.Operation, functions: Mapping[str, Any] = _NONE) -> Iterator[None]:
    """A context in which ops are made that serve another one: they get its traceback.

    Args:
      served: the op.
      functions: the graphs of functions of which copies are made, by the scopes of these copies.
        They get the tracebacks of the functions' ops.
    """
    ops = private.operations(served.graph)
    count = len(ops)
    yield
    give(served, ops[count:], functions)


def give(served: tf.Operation, ops: Sequence[tf.Operation], functions: Mapping[str, Any]) -> None:
    """Gives ops the traceback of the one that they serve. The functions are as of `made_for`."""
    traceback = Tracebacks().of(served)
    for op in ops:
        private.set_traceback(op, traceback)
    for scope, function in functions.items():
        _copy_those_of_function(function, served.graph, scope)


def _copy_those_of_function(function: Any, graph: tf.Graph, scope: str) -> None:
    """Gives the copies of a function's ops the tracebacks that these have; loaded ones have none.

    Args:
      function: the function's graph.
      graph: the graph with the copies of all ops but arguments.
      scope: what the copies' names begin with.
    """
    tracebacks = Tracebacks()
    arguments = {tensor.op.name for tensor in function.inputs}
    for op in function.get_operations():
        if op.name not in arguments and op.traceback is not None:
            copy = graph.get_operation_by_name(f'{scope}/{op.name}')
            private.set_traceback(copy, tracebacks.of(op))
