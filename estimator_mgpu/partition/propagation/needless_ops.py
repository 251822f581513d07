"""Sharded ops that give what they are given are bypassed, so that towers have no copies of them.

The gradients of broadcasts sum over the dimensions that were broadcast, and restore the shape. As
the number of examples may not be known when they are made, they do so also if nothing was:

    gradient --> Sum over no dimension --> Reshape to the same shape --> user

        =>

    gradient --> user

Of a transformer with dropout, these are 6% of the ops that can be sharded, and 24% if the size of
the batch is dynamic. Each tower would run copies of them in each step: then the graph for two
devices would have 10% more nodes, and a step would take 3 to 6% more CPU time. Feature columns have
identities between their ops: without copies of these, a column adds 58 nodes rather than 62.

An optimizer puts rows of a sparse gradient with the same id together (`Unique`,
`UnsortedSegmentSum`). In the gradient of a lookup of different ids, each row has an id of its own,
so both are bypassed. So are zeros like zeros: `tf.where` has these as its gradient for others.

In: a plan, whose sizes tell which shapes are the same. Out: the plan without these ops. They stay
in the graph and have full values, for whoever fetches them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.partition.order.order import Order
from estimator_mgpu.partition.placements import Partial, Placement, PlacesOfIds, Shard
from estimator_mgpu.partition.plan import LOCAL, Constant, Plan, RaggedRows, SparseRows
from estimator_mgpu.tf_internals import graphs, op_types


def bypass_needless_ops(division: Division) -> None:
    """Lets the users of needless ops use what these are given, and wait for that.

    The ops themselves are given full values, as if they ran once, for whoever fetches them.
    """
    if not division.bypasses_needless_ops:
        return
    plan = division.plan
    order = division.order
    named_by_needs = {
        need.indices if isinstance(need, SparseRows) else need.splits
        for op_plan in plan.ops.values()
        for need in op_plan.needs
        if isinstance(need, (SparseRows, RaggedRows))
    }
    redirections = graphs.Redirections()
    replaced: dict[str, tf.Tensor] = {}
    bypassed: set[str] = set()
    for op in _candidates(division.graph):
        if op.name not in plan.ops or not _is_only_output_used(op, bypassed):
            continue
        source = _source_to_use_instead(op, plan, redirections)
        if source is not None and _may_be_bypassed(op, order, named_by_needs):
            output = op.outputs[0]
            redirections.add(output, source)
            redirections.add_wait(op, source.op)
            replaced[output.name] = source
            bypassed.add(op.name)
    redirections.make()

    ops = {name: op_plan for name, op_plan in plan.ops.items() if name not in bypassed}
    placements = {
        name: placement
        for name, placement in plan.placements.items()
        if name.partition(':')[0] not in bypassed
    }
    unused = plan.unused | bypassed
    division.plan = plan._replace(ops=ops, placements=placements, unused=unused)
    division.replaced.update(replaced)


def _candidates(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields the ops that may be needless; a `Unique` after those that use its places."""
    types = (
        *op_types.REDUCTIONS,
        *op_types.ZEROS_ONES_LIKE,
        op_types.IDENTITY,
        op_types.RESHAPE,
        op_types.UNSORTED_SEGMENT_SUM,
    )
    yield from graphs.ops_of_types(graph, types)
    yield from graphs.ops_of_types(graph, (op_types.UNIQUE,))


def _is_only_output_used(op: tf.Operation, bypassed: Set[str]) -> bool:
    """Whether no op but bypassed ones uses another output of an op than the first."""
    others = [user for output in op.outputs[1:] for user in output.consumers()]
    return all(user.name in bypassed for user in others)


def _may_be_bypassed(op: tf.Operation, order: Order, named_by_needs: Set[str]) -> bool:
    """Whether nothing but an op's value is asked of it: it may still compute something.

    It neither waits for others nor runs elsewhere, and no need names its output.
    """
    if op.control_inputs or op.device:
        return False
    if any(output.name in named_by_needs for output in op.outputs):
        return False
    return order.liveness.always_runs(op) and not order.bits(op)


def _source_to_use_instead(
    op: tf.Operation, plan: Plan, redirections: graphs.Redirections
) -> tf.Tensor | None:
    """What users can use in place of a needless op; None if it's needed.

    Args:
      op: one of `_candidates`, sharded.
      plan: its plan.
      redirections: what is going to be used in place of inputs of ops.
    """
    needs = plan.ops[op.name].needs
    if op.type in op_types.REDUCTIONS and needs[1] != Constant(()):
        return None
    if needs[0] != LOCAL:
        return None

    source = redirections.in_place_of(op.inputs[0])
    output = op.outputs[0]
    placement = plan.placements.get(source.name)
    if op.type == op_types.UNSORTED_SEGMENT_SUM and not _are_own_places(
        plan.placements, op.inputs[1]
    ):
        return None
    if op.type in op_types.ZEROS_ONES_LIKE and source.op.type != op.type:
        return None
    if not isinstance(placement, (Partial, Shard)) or placement != plan.placements.get(output.name):
        return None
    dims = plan.sizes.dims(source)
    has_same_shape = dims is not None and dims == plan.sizes.dims(output)
    return source if has_same_shape and _is_as_well_known(source, output) else None


def _are_own_places(placements: Mapping[str, Placement], places: tf.Tensor) -> bool:
    """Whether each of different ids has a place of its own, so that sums by these are the rows."""
    placement = placements.get(places.name)
    return isinstance(placement, PlacesOfIds) and placement.rows is placement.ids


def _is_as_well_known(source: tf.Tensor, output: tf.Tensor) -> bool:
    """Whether TensorFlow knows as much of a tensor's shape as of that of an op's output."""
    if output.shape.rank is None or source.shape.rank is None:
        return output.shape.rank is None
    sizes = zip(source.shape.as_list(), output.shape.as_list())
    return all(of_output in (None, of_source) for of_source, of_output in sizes)
