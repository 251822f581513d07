"""Finds gradients that nobody uses, so that towers don't compute them.

`tf.gradients` makes the gradients of all inputs of an op, also of those on which no variable
depends. Of `2 * x`, say, that of 2 isn't used:

    dy ---+---> dy * 2 -----------------> gradient of x, used
          |
          +---> dy * x ---> Sum --------> gradient of 2

No step runs them. So `explain` doesn't count them among what runs once, and towers have no copies
of them, which would make a graph up to a tenth larger (measured on 40 models; start-up was the
same, to some percent). Who fetches one runs the user's op, on the global batch.
"""

from __future__ import annotations

from estimator_mgpu.partition.division import Division
from estimator_mgpu.tf_internals import graphs
from estimator_mgpu.tf_internals.private import is_made_by_gradients


def find_unused_gradients(division: Division) -> None:
    """Finds the ops of gradients from which nothing follows.

    Copies of heavy ops, such as matrix products, are kept although nothing uses them: a hook may
    fetch their gradients, and the user's op would compute these on one device.
    """
    for op in reversed(division.graph.get_operations()):
        may_be_unused = division.is_light(op) and division.order.liveness.always_runs(op)
        if op in division.results or not may_be_unused:
            continue
        users = graphs.consumers_of(op)
        if is_made_by_gradients(op) and all(user.name in division.unused for user in users):
            division.unused.add(op.name)
