"""Small variables that towers read, and small gradients that they sum: packed in few messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.costs import bytes_of
from estimator_mgpu.partition.placements import Partial
from estimator_mgpu.partition.plan import FULL, Plan
from estimator_mgpu.partition.sizes import RowSpace
from estimator_mgpu.partition.towers.node_builder import NodeBuilder
from estimator_mgpu.tf_internals import graphs, op_types, private
from estimator_mgpu.tf_internals.effects import has_side_effect, upstream_side_effects
from estimator_mgpu.tf_internals.graphs import dependents

_NUMBERS = (tf.float32, tf.float64, tf.float16, tf.bfloat16)
_LARGEST = 1 << 16  # bytes of a tensor: copying a larger one costs more than its message


class Pack:
    """Tensors of one type, whose entries make a vector.

    Those that are alike but for their first dimension are reshaped together: fewer ops.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]):
        self.tensors = sorted(tensors, key=_inner)
        self.dtype = self.tensors[0].dtype
        self._alike = [list(same) for _, same in itertools.groupby(self.tensors, _inner)]

    def join(self, values: Sequence[str], nodes: NodeBuilder, device: str) -> str:
        """Makes the vector on a device, of values of the tensors in their order."""
        rest, vectors = iter(values), []
        for same in self._alike:
            rows = nodes.concat([next(rest) for _ in same], 0, self.dtype, device)
            vectors.append(nodes.add('Reshape', [rows, [-1]], device, T=self.dtype))
        return nodes.concat(vectors, 0, self.dtype, device)

    def split(self, vector: str, nodes: NodeBuilder, device: str) -> dict[str, str]:
        """Makes the tensors' values of the vector on a device, by the tensors' names."""
        found: dict[str, str] = {}
        sizes = [sum(t.shape.num_elements() for t in same) for same in self._alike]
        for same, part in zip(self._alike, nodes.split(vector, sizes, self.dtype, device)):
            rows = nodes.add('Reshape', [part, [-1, *_inner(same[0])]], device, T=self.dtype)
            counts = [t.shape.as_list()[0] for t in same]
            values = nodes.split(rows, counts, self.dtype, device)
            found.update(zip((t.name for t in same), values))
        return found


def find_packs(
    graph: tf.Graph,
    plan: Plan,
    calls: Sequence[Sequence[tf.Tensor]],
    home: Callable[[tf.Tensor], str],
) -> dict[str, Pack]:
    """Returns the pack of each tensor that is in one, by its name; `calls` are of optimizers.

    Of a pack, the same calls' gradients need all tensors, which need the same effects and what is
    fed: so whoever fetches one runs nothing else that counts. No tower's op is between two of them,
    so there are no cycles.
    """
    ops = graph.get_operations()
    if not calls or any(map(private.in_v1_control_flow, ops)):
        return {}
    needed = [graphs.ancestors([gradient.op for gradient in call]) for call in calls]
    variables = {op for call in needed for op in call if op.outputs and not op.inputs}
    late = set(dependents([gradient for call in calls for gradient in call], frozenset()))
    # What variables' values may follow from before others have one: other than gradients do.
    early = [op for op in ops if op not in late and has_side_effect(op)]
    written = {op: {t.op for t in op.inputs if t.dtype == tf.resource} for op in early}
    first = graphs.ancestors([op for op in early if written[op] & variables])
    effects = upstream_side_effects(ops, op_types.PLACEHOLDERS)
    found: dict[Hashable, list[tf.Tensor]] = {}
    for tensor, rows in {t.name: (t, rows) for t, rows in _candidates(plan)}.values():
        users = frozenset(i for i, call in enumerate(needed) if tensor.op in call)
        known = tensor.shape.rank and tensor.shape.is_fully_defined()
        if known and users and tensor.op not in first and 0 < bytes_of(tensor) <= _LARGEST:
            key = rows, users, effects[tensor.op], tensor.dtype, home(tensor)
            found.setdefault(key, []).append(tensor)
    made = [Pack(tensors) for tensors in found.values() if len(tensors) > 1]
    return {tensor.name: pack for pack in made for tensor in pack.tensors}


def _inner(tensor: tf.Tensor) -> list[int]:
    """All dimensions but the first: what a pack is sorted by."""
    return tensor.shape.as_list()[1:]


def _candidates(plan: Plan) -> Iterator[tuple[tf.Tensor, RowSpace | None]]:
    """What towers read that doesn't follow from rows; and sums over rows that no tower reads."""
    dependent, towers = set(plan.order), [op for op in plan.order if op.name in plan.ops]
    waited = graphs.ancestors([before for op in towers for before in graphs.direct_inputs(op)])
    for op in towers:
        for tensor, need in zip(op.inputs, plan.ops[op.name].needs):
            own = tensor.op in dependent or tensor.op.type == op_types.CONST
            if need == FULL and tensor.dtype in _NUMBERS and not own:
                yield tensor, None
        for tensor in op.outputs if op not in waited else ():
            placement = plan.placements.get(tensor.name)
            if isinstance(placement, Partial) and placement.reduce == 'sum':
                yield tensor, placement.rows
