"""Small variables that towers read, and small gradients that they sum: packed in few messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from typing import TYPE_CHECKING

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from .homes import bytes_of
from .plan import WHOLE, Partial, Plan
from .rules import kinds
from .waits import effects_of

if TYPE_CHECKING:
    from .sharding import Sharding

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
    for tensor, kind in (*_read(plan), *_summed(plan)) if calls else ():
        needed = frozenset(i for i, ops in enumerate(calls) if tensor.op in ops)
        known = tensor.shape.rank and tensor.shape.is_fully_defined()
        if needed and known and 0 < bytes_of(tensor) <= _LARGEST:
            key = needed, kind, tensor.dtype, home(tensor)
            found.setdefault(key, {})[tensor.name] = tensor
    shared = [sorted(pack.values(), key=_inner) for pack in found.values() if len(pack) > 1]
    return {tensor.name: pack for pack in shared for tensor in pack}


def _inner(tensor: tf.Tensor) -> list[int]:
    """All dimensions but the first: what a pack is sorted by."""
    return tensor.shape.as_list()[1:]


def _read(plan: Plan) -> Iterator[tuple[tf.Tensor, Hashable]]:
    """What follows from variables, and towers need, and nothing has to happen before."""
    dependent, towers = set(plan.order), [op for op in plan.order if op.name in plan.ops]
    whole = [
        tensor
        for op in towers
        for tensor, need in zip(op.inputs, plan.ops[op.name].needs)
        if need == WHOLE and tensor.dtype in _NUMBERS and tensor.op not in dependent
    ]
    effects = effects_of(list(private.backward([tensor.op for tensor in whole])))
    for tensor in whole:
        made = tensor.op
        if not (made.type == kinds.CONST or effects[made] or private.in_control_flow(made)):
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


def joined(
    sharding: Sharding, values: Sequence[str], pack: Sequence[tf.Tensor], device: str
) -> str:
    """The entries of a pack's tensors, which are referred to by `values`, as one vector.

    Those that are alike but for their first dimension are reshaped together: fewer ops.
    """
    dtype, found = pack[0].dtype.base_dtype, []
    for _, pairs in itertools.groupby(zip(values, pack), lambda pair: _inner(pair[1])):
        rows = _concatenated(sharding, [value for value, _ in pairs], dtype, device)
        found.append(_reshaped(sharding, rows, dtype, [-1], device))
    return _concatenated(sharding, found, dtype, device)


def split(
    sharding: Sharding, vector: str, pack: Sequence[tf.Tensor], device: str
) -> dict[str, str]:
    """Of a vector of a pack's entries, each tensor in its shape, by its name."""
    dtype, found = pack[0].dtype.base_dtype, {}
    alike = [list(tensors) for _, tensors in itertools.groupby(pack, _inner)]
    sizes = [sum(t.shape.num_elements() for t in tensors) for tensors in alike]
    for tensors, part in zip(alike, _parts(sharding, vector, dtype, sizes, device)):
        rows = _reshaped(sharding, part, dtype, [-1, *_inner(tensors[0])], device)
        sizes = [t.shape.as_list()[0] for t in tensors]
        values = _parts(sharding, rows, dtype, sizes, device)
        found.update({tensor.name: value for tensor, value in zip(tensors, values)})
    return found


def _concatenated(sharding: Sharding, values: Sequence[str], dtype: tf.DType, device: str) -> str:
    if len(values) == 1:
        return values[0]
    attrs = {'T': dtype, 'N': len(values), 'Tidx': tf.int32}
    return sharding.nodes.add('ConcatV2', [*values, sharding.tensor(0)], device, **attrs)


def _parts(
    sharding: Sharding, value: str, dtype: tf.DType, sizes: list[int], device: str
) -> list[str]:
    """A tensor's parts, of these sizes along dimension 0."""
    if len(sizes) == 1:
        return [value]
    given = [value, sharding.tensor(sizes), sharding.tensor(0)]
    attrs = {'T': dtype, 'Tlen': tf.int32, 'num_split': len(sizes)}
    made = sharding.nodes.add('SplitV', given, device, **attrs).removesuffix(':0')
    return [f'{made}:{i}' for i in range(len(sizes))]


def _reshaped(
    sharding: Sharding, value: str, dtype: tf.DType, shape: list[int], device: str
) -> str:
    given = [value, sharding.tensor(shape)]
    return sharding.nodes.add('Reshape', given, device, T=dtype, Tshape=tf.int32)
