"""Packs: small tensors that are sent between devices as one vector, rather than one by one.

Towers read many small variables, and sum many small gradients. A message costs about the same
whether it has 10 bytes or 10,000, so tensors of a pack share one.

A pack makes its tensors depend on each other: whoever fetches one computes all of them. So packs
are safe only if that is not noticed. Tensors share a pack if all of these are the same for them:

- *The optimizer calls whose gradients need them*: a step of one optimizer doesn't compute another
  one's gradients.
- *The side effects and placeholders that they depend on*: to fetch one tensor never counts a
  counter, draws a random number, or asks for a value to be fed, that it wouldn't without the pack.
  This includes effects that a tensor waits for only because the user's graph has that order, though
  a rewrite has removed the edges: `waits` adds them to the copies later.
- *Their row space, dtype and device*: the entries of a vector have one type and live on one device,
  and are reduced together.

Moreover, no tower's op may lie between two tensors of a pack, since the graph would then have a
cycle. Therefore only two kinds of tensors are packed (`_candidates`): values that depend on no
example, such as those of variables; and partial sums on which no tower's op depends. Tensors that
the first value of a variable may depend on are left out (`_first_writes`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.byte_counts import bytes_of
from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.nodes.node_builder import NodeBuilder
from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.partition.placements import Partial
from estimator_mgpu.partition.plan import FULL, Plan, Sharded
from estimator_mgpu.partition.sizes import RowSpace, UniqueRows
from estimator_mgpu.tf_internals import graphs, op_types
from estimator_mgpu.tf_internals.graphs import Inputs, dependents
from estimator_mgpu.tf_internals.liveness import Liveness
from estimator_mgpu.tf_internals.upstream import upstream_bits

_PACKED_TYPES = (tf.float32, tf.float64, tf.float16, tf.bfloat16)
_LARGEST = 1 << 16  # bytes of a tensor: copying a larger one costs more than its message


class Pack:
    """Tensors of one type whose entries make a vector.

    Tensors with the same shape but for dimension 0 are concatenated first, and reshaped together:
    that takes fewer ops.
    """

    def __init__(self, tensors: Sequence[tf.Tensor]):
        self.tensors = sorted(tensors, key=_inner_shape)
        self._groups = [list(group) for _, group in itertools.groupby(self.tensors, _inner_shape)]

    def join(self, values: Sequence[str], nodes: NodeBuilder, device: str) -> str:
        """Makes the vector on a device, from values of `tensors`, in their order."""
        remaining = iter(values)
        vectors = []
        for group in self._groups:
            values_of_group = [next(remaining) for _ in group]
            rows = nodes.concat(values_of_group, 0, device)
            vectors.append(nodes.add('Reshape', [rows, [-1]], device))
        return nodes.concat(vectors, 0, device)

    def split(self, vector: str, nodes: NodeBuilder, device: str) -> dict[str, str]:
        """Splits the vector on a device; returns the tensors' values, by the tensors' names."""
        sizes = [sum(t.shape.num_elements() for t in group) for group in self._groups]
        parts = nodes.split(vector, sizes, device)

        values_by_name: dict[str, str] = {}
        for group, part in zip(self._groups, parts):
            shape = [-1, *_inner_shape(group[0])]
            rows = nodes.add('Reshape', [part, shape], device)
            row_counts = [tensor.shape.as_list()[0] for tensor in group]
            values = nodes.split(rows, row_counts, device)
            values_by_name.update(zip([tensor.name for tensor in group], values))
        return values_by_name


def find_packs(
    division: Division,
    ops: Mapping[tf.Operation, Inputs],
    sharded: Sharded,
    device_of_full: Callable[[tf.Tensor], str],
) -> dict[str, Pack]:
    """Returns the pack of each tensor that is in one, by its name.

    Args:
      division: the graph, its plan, and the order in which it touches state.
      ops: the user's, as `topological_order` gives them.
      sharded: its ops that run on every tower.
      device_of_full: gives the device of a tensor's value for the global batch.
    """
    order = division.order
    calls = [
        [division.replacements(gradient)[-1] for gradient in call]
        for call in division.gradient_calls
    ]
    if not calls:
        return {}

    def ancestors(of: Iterable[tf.Operation]) -> set[tf.Operation]:
        return graphs.ancestors(of, ops.__getitem__)

    ops_of_calls = [ancestors(gradient.op for gradient in call) for call in calls]
    needed = set().union(*ops_of_calls)
    before_first_values = ancestors(_first_writes(calls, needed, order))
    placeholders = graphs.ops_of_types(division.graph, op_types.PLACEHOLDERS)
    noticed = enumerate([*order.ops_with_effects(), *placeholders])
    effects = upstream_bits(
        {op: befores for op, befores in ops.items() if op in needed},
        {op: 1 << index for index, op in noticed},
    )

    candidates = {
        tensor.name: (tensor, rows) for tensor, rows in _candidates(division.plan, sharded)
    }
    groups: dict[Hashable, list[tf.Tensor]] = {}
    for tensor, rows in candidates.values():
        users = frozenset(i for i, call in enumerate(ops_of_calls) if tensor.op in call)
        is_free = is_always_there(tensor, order.liveness)
        if users and is_free and tensor.op not in before_first_values and _is_small(tensor):
            device = device_of_full(tensor)
            effects_before = effects[tensor.op], order.upstream(tensor.op) & order.effects
            key = (rows, users, effects_before, tensor.dtype, device)
            groups.setdefault(key, []).append(tensor)

    packs = [Pack(tensors) for tensors in groups.values() if len(tensors) > 1]
    return {tensor.name: pack for pack in packs for tensor in pack.tensors}


def is_always_there(tensor: tf.Tensor, liveness: Liveness) -> bool:
    """Whether a tensor is in no v1 loop, and never dead: else all of its pack would be dead."""
    return not (liveness.output_frame(tensor.op) or liveness.output_may_be_dead(tensor))


def _is_small(tensor: tf.Tensor) -> bool:
    """Whether a tensor has floats, a dimension to pack it by, a known shape, and few bytes."""
    is_vector_or_more = tensor.shape.rank and tensor.shape.is_fully_defined()
    if tensor.dtype not in _PACKED_TYPES or not is_vector_or_more:
        return False
    return 0 < bytes_of(tensor) <= _LARGEST


def _first_writes(
    calls: Sequence[Sequence[tf.Tensor]], needed: Set[tf.Operation], order: Order
) -> list[tf.Operation]:
    """The writes that may be the first of a variable: before them, some have no value yet.

    An initial value may be computed from the batch and from another variable. A pack of what it
    needs would read variables that aren't initialized. So each write to a variable counts, unless
    it depends on gradients. Writes to variables that no gradient needs, such as moving averages,
    don't count: otherwise nothing before these could be packed.

    Args:
      calls: the gradients of each call of an optimizer.
      needed: the ops that these need.
    """
    after_gradients = set(dependents([g for call in calls for g in call], frozenset()))

    first_writes = []
    for op in order.ops_with_effects():
        if op not in after_gradients:
            written = [operand.op for operand in op.inputs if graphs.is_handle(operand)]
            if any(maker in needed and not maker.inputs for maker in written):
                first_writes.append(op)
    return first_writes


def _inner_shape(tensor: tf.Tensor) -> list[int]:
    """All dimensions but the first."""
    return tensor.shape.as_list()[1:]


def values_read(plan: Plan, sharded: Sharded) -> Iterator[tuple[tf.Operation, tf.Tensor]]:
    """The sharded ops that read a value in full that depends on no example, each with the value.

    Of a constant, each tower has its own.
    """
    of_batch = set(plan.order)
    for op in plan.order:
        if op in sharded:
            for tensor, need in zip(op.inputs, sharded[op].needs):
                if need == FULL and tensor.op not in of_batch and tensor.op.type != op_types.CONST:
                    yield op, tensor


def _candidates(plan: Plan, sharded: Sharded) -> Iterator[tuple[tf.Tensor, RowSpace | None]]:
    """Tensors that may be packed: with their row space if they are summed over towers, or None.

    These are values that towers read; and partial sums, if no tower's op depends on them, by data
    or control. If one does, and gives another partial sum, a pack of both would wait for itself.
    """
    in_order = dict.fromkeys(op for op in plan.order if op in sharded)
    dead_ends: set[tf.Operation] = set()

    def is_needed_by_towers(op: tf.Operation) -> bool:
        users = graphs.consumers_of(op)
        return any(graphs.path_to(in_order, user, dead_ends) for user in users)

    for _, tensor in values_read(plan, sharded):
        yield tensor, None
    for op in in_order:
        for tensor in op.outputs:
            placement = plan.placements.get(tensor.name)
            if not isinstance(placement, Partial) or isinstance(placement.rows, UniqueRows):
                continue
            if placement.reduce == 'sum' and not is_needed_by_towers(op):
                yield tensor, placement.rows
