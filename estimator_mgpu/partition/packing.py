"""Small variables that towers read, and small gradients that they sum: packed in few messages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from .homes import bytes_of
from .plan import WHOLE, Partial, Plan
from .rules import kinds
from .waits import effects_of

_NUMBERS = (tf.float32, tf.float64, tf.float16, tf.bfloat16)
_LARGEST = 1 << 16  # bytes of a tensor: copying a larger one costs more than its message


def packs(
    plan: Plan, calls: Sequence[Set[tf.Operation]], home: Callable[[tf.Tensor], str]
) -> dict[str, Sequence[tf.Tensor]]:
    """Returns the pack of each tensor that is in one, by its name.

    Tensors share a pack if the same optimizers' calls need them, of which `calls` has all ops: then
    they are made together anyway. As no tower's op is between two of a pack, packs make no cycles.
    """
    found: dict[Hashable, dict[str, tf.Tensor]] = {}
    for tensor, kind in (*_read(plan), *_summed(plan)):
        needed = frozenset(i for i, ops in enumerate(calls) if tensor.op in ops)
        if needed and tensor.shape.is_fully_defined() and bytes_of(tensor) <= _LARGEST:
            key = needed, kind, tensor.dtype, home(tensor)
            found.setdefault(key, {})[tensor.name] = tensor
    shared = [list(pack.values()) for pack in found.values() if len(pack) > 1]
    return {tensor.name: pack for pack in shared for tensor in pack}


def _read(plan: Plan) -> Iterator[tuple[tf.Tensor, Hashable]]:
    """What follows from variables, and towers need, and nothing has to happen before."""
    graph = plan.order[0].graph
    effects, dependent = effects_of(graph.get_operations()), set(plan.order)
    for op in plan.order:
        if op.name in plan.ops:
            for tensor, need in zip(op.inputs, plan.ops[op.name].needs):
                made, numbers = tensor.op, tensor.dtype in _NUMBERS
                free = numbers and made not in dependent and not private.in_control_flow(made)
                if free and need == WHOLE and made.type != kinds.CONST and not effects[made]:
                    yield tensor, None


def _summed(plan: Plan) -> Iterator[tuple[tf.Tensor, Hashable]]:
    """Sums over rows that no tower's op waits for."""
    towers = [op for op in plan.order if op.name in plan.ops]
    waited = private.backward([before for op in towers for before in private.waited(op)])
    for op in towers:
        for tensor in op.outputs if op not in waited else ():
            placement = plan.placements.get(tensor.name)
            if isinstance(placement, Partial) and placement.reduce == 'sum':
                yield tensor, placement.rows
