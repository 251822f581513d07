"""Finds gradients that nobody uses, so that towers don't compute them.

`tf.gradients` makes the gradients of all inputs of an op, also of those on which no variable
depends. Of `2 * x`, say, that of 2 isn't used:

    dy ---+---> dy * 2 -----------------> gradient of x, used
          |
          +---> dy * x ---> Sum --------> gradient of 2

In a transformer with dropout, these are a fifth of all ops that can be sharded. No step runs them,
but copies for each tower, and gathers of their results, would make the graph larger, and so
start-up longer. Who fetches one runs the user's op, on the global batch.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.tf_internals import graphs
from estimator_mgpu.tf_internals.private import is_made_by_gradients


def unused_gradients(
    ops: Sequence[tf.Operation],
    results: Container[tf.Operation],
    heavy: Container[str],
    unused: Container[str],
    order: Order,
) -> set[str]:
    """Names ops of gradients from which nothing follows.

    Args:
      ops: all of a graph, in the order in which they were made.
      results: ops of what a step is run for.
      heavy: types of ops, such as matrix products, whose copies are kept although nothing uses
        them: a hook may fetch their gradients, and the user's op would compute these on one device.
      unused: names of other ops that nobody uses.
      order: tells which ops touch state, and which are in v1 control flow.
    """
    found: set[str] = set()
    for op in reversed(ops):
        is_light = op.type not in heavy and not order.bits(op) and order.liveness.always_runs(op)
        if not is_light or op in results or not is_made_by_gradients(op):
            continue
        users = {user.name for user in graphs.consumers_of(op)}
        if all(name in found or name in unused for name in users):
            found.add(op.name)
    return found
