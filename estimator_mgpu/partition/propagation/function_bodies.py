"""Propagation inside a function that every tower calls: a loop's body, say, or a branch.

Towers call the function at different times, so nothing in it can be gathered or reduced. If an op
asks for that, draws random numbers, or has a side effect other than to fail, the op that calls the
function runs once: `NotSharded` is raised. There are exceptions:

- In a joint loop, whose steps all towers make together, partial results can be reduced.
- What each tower has in full, it can slice by itself, if it knows which examples it has: in a v1
  loop, or if the size of the batch is static.

Sizes are in terms of the global batch, which stands for the tower's examples in a function. Where
an op needs those of the global batch itself, it's given them as `FullSizes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.placements import REPLICATE, Partial, Placement, Shard
from estimator_mgpu.partition.plan import (
    FULL,
    FULL_ON_FIRST,
    LOCAL,
    Constant,
    Decision,
    FullSizes,
    LocalShape,
    Need,
    OpPlan,
    RaggedRows,
    Reduced,
    Slice,
    SparseRows,
)
from estimator_mgpu.partition.propagation.decisions import decide
from estimator_mgpu.partition.propagation.partial_results import decide_kept_partial
from estimator_mgpu.partition.propagation.reasons import default_reason
from estimator_mgpu.partition.propagation.scope import Scope
from estimator_mgpu.partition.rules.notation import NotSharded
from estimator_mgpu.partition.rules.zeros import is_zero
from estimator_mgpu.partition.sizes import Entry
from estimator_mgpu.tf_internals import function_calls, op_types
from estimator_mgpu.tf_internals.effects import can_be_repeated, is_assertion
from estimator_mgpu.tf_internals.v1_loops import LoopBody, OpOrLoop, passed_on

Requests = dict[tf.Operation, Slice]
"""Shards that ops in a function need of what is replicated there, by the op that makes it.

An argument is sliced before the call instead. A constant or a fill is made as a shard by each
tower.
"""


class FunctionBody:
    """A pass over the ops of a function.

    Args:
      scope: what is known of the function. In a joint loop, names are added to its `reduced`.
      graph: the function's graph.
      requests: what ops in the function ask for is added to these.
    """

    def __init__(self, scope: Scope, graph: Any, requests: Requests):
        self.scope = scope
        self.graph = graph
        self._requests = requests
        self._in_v1_loop = isinstance(graph, LoopBody)

    def visit_all(self) -> None:
        """Visits all ops but the arguments."""
        arguments = {tensor.op for tensor in self.graph.inputs}
        for op in self.graph.get_operations():
            if op not in arguments:
                self._visit(op)

    def returned(self) -> list[Placement]:
        """The placements of the function's outputs."""
        return [self.scope.placement_of(tensor) for tensor in self.graph.outputs]

    def differs(self, tensor: tf.Tensor) -> bool:
        """Whether it's a size that is another one on each tower."""
        entries = self.scope.sizes.entries(tensor) or []
        return any(self.scope.batch in size.symbols for size in entries)

    def form_of_value(self, tensor: tf.Tensor) -> Need:
        """The form of what is replicated in the function, or what each tower has of its own."""
        if self.scope.is_reduced(tensor):
            partial = self.scope.placements[tensor.name]
            assert isinstance(partial, Partial)
            return Reduced(partial.reduce, partial.rows)
        return LOCAL

    def _visit(self, op: OpOrLoop) -> None:
        if op in self._requests:
            self._make_shard(op, self._requests[op])
            return
        if op.type in op_types.NEW_HANDLES:
            return  # Each tower makes its own list.

        calls = op.type in op_types.FUNCTION_CALLERS
        uses_lists = op.type == op_types.V1_LOOP or op.type.startswith(op_types.HANDLE_PREFIXES)
        if not (calls or uses_lists):
            self._check_effects(op)

        placements = self.scope.placements_of_inputs(op)
        uses_towers = any(placement != REPLICATE for placement in placements)
        if op.type in op_types.SHAPE_QUERIES:
            # It gives the sizes of a tower's own tensor, which have to be known.
            if uses_towers and any(self.scope.sizes.entries(size) is None for size in op.outputs):
                raise NotSharded(f'the sizes of {op.name} are unknown')
            return
        if uses_lists or uses_towers:
            self._decide(op, placements)
            return

        # All inputs are the same on all towers, but for sizes.
        if not any(self.differs(tensor) for tensor in op.inputs):
            if calls:
                self._check_effects(op)
                plan = plan_of_repeated(op)
                self.scope.ops[op.name] = plan._replace(needs=self._forms_of_inputs(op))
            return
        computes_sizes = op.type == op_types.BROADCAST_GRADIENT_ARGS or all(
            self._is_known_size(tensor) for tensor in op.outputs
        )
        if not computes_sizes:  # Otherwise each tower computes its own.
            self._decide_of_sizes(op, placements, calls)

    def _forms_of_inputs(self, op: OpOrLoop) -> tuple[Need, ...]:
        """The forms of an op's inputs as they are on each tower."""
        return tuple(self.form_of_value(tensor) for tensor in op.inputs)

    def _decide_of_sizes(self, op: OpOrLoop, placements: Sequence[Placement], calls: bool) -> None:
        """Decides on an op whose inputs are the same on all towers, but for sizes.

        If it can't be sharded by these, it's given the sizes for the global batch, and then its
        outputs are the same on all towers.
        """
        try:
            self._decide(op, placements)
        except NotSharded:
            if calls or any(self.differs(output) for output in op.outputs):
                raise
            needs = [
                self._full_sizes(op, tensor) if self.differs(tensor) else self.form_of_value(tensor)
                for tensor in op.inputs
            ]
            self.scope.ops[op.name] = OpPlan(tuple(needs))

    def _check_effects(self, op: tf.Operation) -> None:
        if not can_be_repeated(op):
            raise NotSharded(f'in it, {op.type} has side effects or draws random numbers')

    def _is_known_size(self, tensor: tf.Tensor) -> bool:
        """Whether its entries are sizes that are known, but for dimensions and examples."""
        entries = self.scope.sizes.entries(tensor)
        if entries is None:
            return False
        symbols = [symbol for size in entries for symbol in size.symbols]
        return not any(isinstance(symbol, Entry) for symbol in symbols)

    def _decide(self, op: OpOrLoop, placements: Sequence[Placement]) -> None:
        """Lets an op run on every tower, or raises NotSharded."""
        if op.type == op_types.ASSERT and self._can_be_asserted(placements[0]):
            # An error shows what the tower has of the tensors.
            self.scope.ops[op.name] = OpPlan(self._forms_of_inputs(op))
            return
        has_partial = any(isinstance(placement, Partial) for placement in placements)
        if has_partial and not (is_assertion(op) and self._can_be_asserted(placements[0])):
            self._visit_with_partial(op, placements)
            return

        try:
            decision = decide(self.scope, op, placements)
        except NotSharded as error:
            reason = str(error) or default_reason(self.scope, op, placements)
            raise NotSharded(f'in it, {op.name}: {reason}') from error
        self._record(op, decision)

    def _visit_with_partial(self, op: OpOrLoop, placements: Sequence[Placement]) -> None:
        """Lets an op run on every tower that is given partial results, or raises NotSharded."""
        kept = decide_kept_partial(op, placements)
        if kept is None and self.scope.assumes:
            # What is replicated now may turn out to be a partial sum as well. The last visit, which
            # assumes nothing, finds out if it doesn't.
            partial_sum = Partial('sum', self.scope.batch)
            kept = decide_kept_partial(
                op, [partial_sum if one == REPLICATE else one for one in placements]
            )
        if kept is not None:
            self._record(op, kept)
            return
        if not self.scope.is_joint:
            raise NotSharded(f'in it, {op.name} needs a sum over all examples')
        for tensor, placement in zip(op.inputs, placements):
            if isinstance(placement, Partial):
                self.scope.reduced.add(tensor.name)
        self._visit(op)

    def _can_be_asserted(self, condition: Placement) -> bool:
        """Whether each tower can assert a condition without the others.

        It's the same on all towers, or it's one that holds for all examples if it holds for those
        of each tower.
        """
        return condition in (REPLICATE, Partial('all', self.scope.batch))

    def _record(self, op: OpOrLoop, decision: Decision) -> None:
        """Notes that an op runs on every tower, if its inputs can be had in the forms it needs."""
        needs = tuple(
            self._form_inside(op, tensor, need)
            for tensor, need in zip(op.inputs, decision.plan.needs)
        )
        plan = decision.plan._replace(needs=needs)
        self.scope.record(op, decision._replace(plan=plan))

    def _form_inside(self, op: OpOrLoop, tensor: tf.Tensor, need: Need) -> Need:
        """The form of an input inside the function; raises NotSharded if it can't be had there."""
        differs = self.differs(tensor)
        if need in (FULL, LOCAL) and self.scope.is_reduced(tensor):
            return self.form_of_value(tensor)
        if need == FULL:
            if self.scope.placement_of(tensor) != REPLICATE:
                raise NotSharded(f'in it, {op.name} needs all examples')
            return self._full_sizes(op, tensor) if differs else LOCAL

        source = passed_on(tensor)
        if isinstance(need, Slice) and self.can_make_shard(source, need.in_blocks):
            self._requests[source.op] = need
            return LOCAL
        if need == FULL_ON_FIRST and is_zero(tensor):
            return LOCAL  # Zeros on each tower add nothing to a sum.
        if isinstance(need, Slice) or need == FULL_ON_FIRST:
            return LOCAL if self.scope.assumes else self._part_inside(op, tensor, need)

        if isinstance(need, (SparseRows, RaggedRows)):
            raise NotSharded(f'in it, {op.type} needs rows of a sparse or ragged tensor')
        if isinstance(need, LocalShape):
            self._check_local_shape(op, need, differs)
            return LOCAL if differs else need
        return need if isinstance(need, Constant) else LOCAL

    def _part_inside(self, op: OpOrLoop, tensor: tf.Tensor, need: Need) -> Need:
        """A slice of what each tower has in full, or that on the first tower, and zeros on others.

        In a function that isn't a v1 loop, nothing is known of how many examples there are.
        """
        is_reduced = self.scope.is_reduced(tensor)
        in_blocks = isinstance(need, Slice) and need.in_blocks
        is_sizes_known = self._in_v1_loop or self.scope.batch.static
        if is_reduced or in_blocks or self.differs(tensor) or not is_sizes_known:
            raise NotSharded(f'in it, {op.type} needs a slice of {tensor.name}')
        return need

    def _full_sizes(self, op: OpOrLoop, tensor: tf.Tensor) -> Need:
        """Sizes for the global batch, where each tower has its own."""
        entries = self.scope.sizes.entries(tensor) or []
        numbers = [size.static for size in entries]
        if all(number is not None for number in numbers):
            is_scalar = tensor.shape.rank == 0
            return Constant(tuple(number for number in numbers if number is not None), is_scalar)
        symbols = {symbol for size in entries for symbol in size.symbols}
        if not self._in_v1_loop or symbols != {self.scope.batch}:
            raise NotSharded(f'in it, {op.name} needs all examples')
        return FullSizes(tuple(entries))

    def _check_local_shape(self, op: tf.Operation, need: LocalShape, differs: bool) -> None:
        """A shape can be the tower's own if all of its entries can be known inside the function.

        If it's computed from the tower's own sizes, one entry depends on the number of examples,
        and the tower has that already. Otherwise all entries have to be numbers.
        """
        if differs:
            unknown = [size for size in need.entries if self.scope.batch in size.symbols]
            allowed = 1
        else:
            unknown = [size for size in need.entries if size.static is None]
            allowed = 0
        if len(unknown) > allowed:
            raise NotSharded(f'in it, {op.type} needs other sizes')

    def can_make_shard(self, tensor: tf.Tensor, in_blocks: bool) -> bool:
        """Whether each tower can have its shard of a tensor: see `Requests`."""
        if any(tensor is argument for argument in self.graph.inputs):
            return self.scope.placement_of(tensor) == REPLICATE
        if not self.scope.batch.static:
            return False
        if in_blocks and not is_zero(tensor):
            return False  # The entries would have to be in another order than those of a slice.
        if tensor.op.type == op_types.FILL:
            return self.scope.sizes.numbers(tensor.op.inputs[0]) is not None
        return tensor.op.type == op_types.CONST

    def _make_shard(self, op: tf.Operation, request: Slice) -> None:
        """Lets each tower make its shard of a constant or a fill."""
        dims = list(self.scope.sizes.dims(op.outputs[0]) or [])
        needs: tuple[Need, ...] = (Slice(request.axis, self.scope.batch, request.factor),)
        if op.type == op_types.FILL:
            needs = (LocalShape(tuple(dims), request.axis, self.scope.batch), LOCAL)
        dims[request.axis] = request.factor * self.scope.batch.size
        shard = Shard(request.axis, self.scope.batch, request.in_blocks)
        self.scope.record(op, Decision(OpPlan(needs), [shard], [dims]))


def plan_of_repeated(op: tf.Operation) -> OpPlan:
    """The plan of a call in which all is the same on all towers.

    It has plans of the calls in the called functions, too: by these, towers get copies of those
    functions.
    """
    functions: list[dict[str, OpPlan]] = []
    for function in function_calls.function_graphs(op):
        plans = {}
        for inner in function.get_operations():
            if inner.type in op_types.FUNCTION_CALLERS:
                plans[inner.name] = plan_of_repeated(inner)
        functions.append(plans)
    return OpPlan(functions=functions)
