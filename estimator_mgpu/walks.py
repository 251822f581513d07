"""Walks through a graph, from ops to those before them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import tensorflow.compat.v1 as tf


def inputs(op: tf.Operation) -> list[tf.Operation]:
    """Lists the ops that an op takes its inputs from."""
    return [t.op for t in op.inputs]


def before(op: tf.Operation) -> list[tf.Operation]:
    """Lists the ops that an op directly waits for."""
    return inputs(op) + list(op.control_inputs)


def walk(
    start: Iterable[tf.Operation],
    onward: Callable[[tf.Operation], Iterable[tf.Operation]] = before,
    without: Collection[str] = (),
) -> Iterator[tf.Operation]:
    """Lists all ops that can be reached, once each, those that it starts from included.

    Or all tensors, if it starts from some and is told how to go on.

    Args:
      start: where to start from.
      onward: onward(op) -> the ops to go on with. By default the walk is back, to all that ops wait
        for.
      without: the names of ops not to go to.
    """
    waiting = list(start)
    seen = set(without)
    while waiting:
        op = waiting.pop()
        if op.name not in seen:
            seen.add(op.name)
            yield op
            waiting += onward(op)


class Order:
    """Which ops run before some others, found in one walk for all of these.

    Args:
      graph: the graph.
      ends: the others.
    """

    def __init__(self, graph: tf.Graph, ends: Sequence[tf.Operation]):
        # For each op, a bit for each of the ends that it comes before.
        self._bits = {op.name: 1 << i for i, op in enumerate(ends)}
        self._ends = dict(self._bits)
        ops = graph.get_operations() if ends else []
        places = {op.name: i for i, op in enumerate(ops)}
        again = True
        while again:  # Once, but for what was made to wait for later ops, as in v1 loops.
            again = False
            for op in reversed(ops):
                bits = self._bits.get(op.name, 0)
                for other in before(op) if bits else []:
                    known = self._bits.get(other.name, 0)
                    self._bits[other.name] = known | bits
                    again |= known | bits != known and places[other.name] > places[op.name]

    def is_before(self, op: tf.Operation, end: tf.Operation) -> bool:
        """Whether an op runs before one of the ends, or is that."""
        return bool(self._bits.get(op.name, 0) & self._ends[end.name])
