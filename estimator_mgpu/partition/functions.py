"""Loops and branches: the same rules inside of the functions that they call.

Inside, nothing can be summed, gathered or sliced: if an op asks for that, or has side effects, the
loop runs once. Sizes are each tower's own there, as its tensors say them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.partition import lists
from estimator_mgpu.partition.placements import (
    KEPT,
    REPLICATE,
    Partial,
    Placement,
    Shard,
    ShardList,
)
from estimator_mgpu.partition.plan import (
    OWN,
    WHOLE,
    First,
    FunctionPlan,
    Local,
    Need,
    Numbers,
    OpPlan,
    Own,
    Slice,
    Whole,
)
from estimator_mgpu.partition.propagation import Caller, Pass
from estimator_mgpu.partition.rules.linear import linear
from estimator_mgpu.partition.sizes import SIZE_OPS, Entry, Size, Sizes, per_row

_SUM = Partial('sum')
_READS = ('ReadVariableOp', 'ResourceGather', 'ResourceGatherNd')


class _Whole(Exception):
    """A function asks for something that towers can't do by themselves."""


class _Inside(Pass):
    """A pass over a function's ops.

    Args:
      outer: the pass that the function's caller is in.
      graph: the function's.
      wanted: of which arguments, constants and fills rows are asked for, by the op's name; more
        are added.
      strict: whether nothing may be asked for any more that the function hasn't; while it isn't
        known yet what a loop's variables are, that's taken to be there.
    """

    def __init__(self, outer: Pass, graph: Any, strict: bool, wanted: dict[str, Slice]):
        sizes = Sizes(f'{graph.name}/')
        super().__init__(outer.rows, outer.table, outer.callers, sizes, set(), set())
        self.graph = graph
        self.strict = strict
        self.wanted = wanted
        self.given: dict[tuple[str, int], Need] = {}

    def run(self) -> list[Placement]:
        """Returns the placements of what the function returns."""
        arguments = {t.op.name for t in self.graph.inputs}
        for op in self.graph.get_operations():
            if op.name not in arguments:
                self.visit(op)
        return [self.seen(t) for t in self.graph.outputs]

    def plan(self) -> FunctionPlan:
        """What the towers' copies of the function have otherwise."""
        attrs = {name: planned.attrs for name, planned in self.ops.items() if planned.attrs}
        calls = {name: planned for name, planned in self.ops.items() if planned.functions}
        return FunctionPlan(self.given, attrs, calls)

    def visit(self, op: tf.Operation) -> None:
        if op.type == 'NoOp':
            return
        if op.name in self.wanted:
            self._made(op, self.wanted[op.name])
            return
        definition = private.op_def(op.type)
        calls = op.type in self.callers
        if definition is None or (definition.is_stateful and op.type not in _READS and not calls):
            raise _Whole(f'{op.type} has effects, or draws numbers')
        placements = [self.seen(t) for t in op.inputs]
        if op.type in SIZE_OPS:
            if any(p != REPLICATE for p in placements) and any(
                self.sizes.entries(t) is None for t in op.outputs
            ):
                raise _Whole(f'sizes of {op.name}')
            return
        if all(p == REPLICATE for p in placements):
            if not any(map(self.differs, op.inputs)):
                if calls:
                    raise _Whole(f'a {op.type} that is the same on all towers')
                return  # The same on all towers.
            if op.type == 'BroadcastGradientArgs' or all(map(self._is_known, op.outputs)):
                return  # Sizes, of which each tower computes its own.
        if any(isinstance(p, Partial) for p in placements):
            made = linear(op, placements)
            if made is None and not self.strict:
                made = linear(op, [_SUM if p == REPLICATE else p for p in placements])
            if made is None:
                raise _Whole(f'{op.type} needs a sum')
            needs = tuple(OWN if p == made or not self.strict else WHOLE for p in placements)
            self._divided(op, OpPlan(needs, {}), [made], [None])
            return
        self.by_rule(op, placements)

    def differs(self, tensor: tf.Tensor) -> bool:
        """Whether towers have their own versions of a size."""
        if tensor.dtype.base_dtype not in (tf.int32, tf.int64):
            return False
        entries = self.sizes.entries(tensor)
        return entries is not None and any(e.rows for e in entries)

    def _may_be_made(self, tensor: tf.Tensor) -> bool:
        """Whether each tower can have its rows of a tensor: an argument, or of known size."""
        if any(tensor is argument for argument in self.graph.inputs):
            return True
        if not self.rows.static:
            return False
        if tensor.op.type != 'Fill':
            return tensor.op.type == 'Const'
        return self.sizes.numbers(tensor.op.inputs[0]) is not None

    def _made(self, op: tf.Operation, need: Slice) -> None:
        """Lets each tower make its rows of a constant or a fill."""
        output = op.outputs[0]
        dims = [Size(d) for d in output.shape.as_list()]
        own = per_row(dims[need.axis], self.rows)
        if own is None:
            raise _Whole(f'the size of {output.name}')
        needs: tuple[Need, ...] = ()
        if op.type == 'Fill':
            needs = (Local(tuple(dims), need.axis, own), WHOLE)
        else:
            self.given[op.name, -1] = Slice(need.axis, own)
        dims[need.axis] = own * Size(1, (self.rows,))
        self._divided(op, OpPlan(needs, {}), [Shard(need.axis, self.rows)], [dims])

    def _is_known(self, tensor: tf.Tensor) -> bool:
        entries = self.sizes.entries(tensor)
        if entries is None:
            return False
        return not any(isinstance(s, Entry) for e in entries for s in e.symbols)

    def _fill(self, op: tf.Operation, placement: Shard) -> bool:
        return False  # Nobody waits for others inside.

    def own(self, given: Any) -> bool:
        """Lists are the function's own, if they're made empty."""
        return not self.strict or all(
            self.seen(t) != REPLICATE or t.op.type in lists.MAKERS
            for t, need in given
            if isinstance(need, Own) and t.dtype == tf.variant
        )

    def _whole(self, op: tf.Operation, placements: list[Placement], reason: str) -> None:
        raise _Whole(f'{op.name}: {reason} ({placements})')

    def _reduce(self, op: tf.Operation, placements: list[Placement]) -> list[Placement]:
        raise _Whole(f'{op.type} needs a sum')

    def _divided(
        self, op: tf.Operation, planned: OpPlan, made: Sequence[Placement], dims: Sequence[Any]
    ) -> None:
        for i, (tensor, need) in enumerate(zip(op.inputs, planned.needs)):
            self._check(op, i, tensor, need)
        super()._divided(op, planned, made, dims)
        if Partial('mean') in made:
            raise _Whole(f'{op.type} needs a mean')

    def _check(self, op: tf.Operation, position: int, tensor: tf.Tensor, need: Need) -> None:
        """Whether an op can be given what it needs, inside."""
        if isinstance(need, Whole):
            if self.seen(tensor) != REPLICATE or self.differs(tensor):
                raise _Whole(f'{op.type} needs all of {tensor.name}')
        elif isinstance(need, Slice) and self._may_be_made(tensor):
            self.wanted[tensor.op.name] = need
        elif isinstance(need, (Slice, First)):
            if self.strict:
                raise _Whole(f'{op.type} needs rows of {tensor.name}')
        elif isinstance(need, Numbers):
            self.given[op.name, position] = need
        elif isinstance(need, Local):
            others = [e for i, e in enumerate(need.entries) if i != need.position]
            if self.differs(tensor):
                if any(e.rows for e in others):
                    raise _Whole(f'{op.type} needs two sizes')
            elif all(e.static is not None for e in need.entries):
                self.given[op.name, position] = need
            else:
                raise _Whole(f'{op.type} needs a size')


def _begin(
    inside: _Inside,
    outer: Pass,
    arguments: Any,
    placed: list[Placement],
    own: Any,
    like: Any,
    factors: dict[int, Size],
) -> None:
    """Gives a function's arguments their placements, sizes and values.

    Args:
      inside: the pass over the function.
      outer: that over its caller.
      arguments: what it's called with.
      placed: what that is to towers.
      own: own(position) -> whether an argument is a size that stays what it is.
      like: tensors of the arguments' shapes, as a loop's condition has none.
      factors: how many entries a row has, of arguments that rows are asked for of.
    """
    for i, (given, argument) in enumerate(zip(arguments, inside.graph.inputs)):
        placement = placed[i]
        if isinstance(placement, Shard):
            factor = factors.get(i) or _factor(given, placement, outer)
            dims = inside.sizes.dims(like[i])
            if factor is None or dims is None:
                raise _Whole(f'the size of {given.name}')
            dims = list(dims)
            dims[placement.axis] = factor * Size(1, (outer.rows,))
            inside.sizes.know(argument, dims)
        if placement != REPLICATE:
            inside.placements[argument.name] = placement
        if own(i) and argument.shape.rank in (0, 1):
            entries = outer.sizes.entries(given)
            if entries is not None:
                inside.sizes.know_values(argument, entries)


def _factor(tensor: tf.Tensor, placement: Shard, outer: Pass) -> Size | None:
    """How many entries a row has in what a function is given."""
    dims = outer.sizes.dims(tensor)
    return None if dims is None else per_row(dims[placement.axis], outer.rows)


def loop(outer: Pass, op: tf.Operation, placements: list[Placement]) -> Any:
    """`While`: what each variable is to towers is a fixed point; the condition is the same on all.

    A variable that starts whole and becomes rows is sliced before the loop. One that adds up what
    rows come to starts at zero on all towers but the first.
    """
    if all(p == REPLICATE for p in placements):
        return None
    graphs = private.function_graphs(op, ('body', 'cond'))
    if len(graphs) != 2:
        return None
    for sizes_as_numbers in (False, True):
        try:
            return _loop(outer, op, placements, graphs[0], graphs[1], sizes_as_numbers)
        except _Whole:
            continue
    return None


def _loop(
    outer: Pass,
    op: tf.Operation,
    placements: list[Placement],
    body: Any,
    condition: Any,
    sizes_as_numbers: bool,
) -> Any:
    arguments = list(op.inputs)

    def keeps(i: int) -> bool:
        """Whether an argument is a size that the loop leaves as it is."""
        if body.outputs[i] is not body.inputs[i]:
            return False
        entries = outer.sizes.entries(arguments[i])
        return entries is not None and not (sizes_as_numbers and any(e.rows for e in entries))

    wanted: dict[str, Slice] = {}
    factors: dict[int, Size] = {}

    def run(graph: Any, placed: list[Placement], strict: bool) -> tuple[_Inside, list[Placement]]:
        inside = _Inside(outer, graph, strict, wanted)
        _begin(inside, outer, arguments, placed, keeps, body.inputs, factors)
        return inside, inside.run()

    placed = list(placements)
    while True:
        known = len(wanted)
        _, returned = run(body, placed, False)
        met = [_meet(a, b) for a, b in zip(placed, returned)]
        if met == placed and len(wanted) == known:
            break
        placed = met
        for i, argument in enumerate(body.inputs):
            need = wanted.get(argument.op.name)
            if need is not None and placed[i] == REPLICATE:
                placed[i] = Shard(need.axis, outer.rows)
            if need is not None and placements[i] == REPLICATE:
                factors[i] = need.factor
    inside, returned = run(body, placed, True)
    for i, (a, b) in enumerate(zip(placed, returned)):
        if a != b:
            raise _Whole(f'{body.outputs[i].name} is not what it was')
        if isinstance(a, Shard):
            before = inside.sizes.dims(body.inputs[i]) or []
            after = inside.sizes.dims(body.outputs[i]) or []
            if before[a.axis] != after[a.axis]:
                raise _Whole(f'{body.outputs[i].name} has another size')
        if a == REPLICATE and inside.differs(body.outputs[i]) and not keeps(i):
            raise _Whole(f'{body.outputs[i].name} is a size')
    if not any(isinstance(p, (Shard, ShardList)) for p in placed):
        return None
    wanted = {}
    asked, [decision] = run(condition, placed, True)
    if wanted:
        raise _Whole('its condition needs rows')
    if decision != REPLICATE or asked.differs(condition.outputs[0]):
        raise _Whole('it ends by rows')
    needs = []
    for i, tensor in enumerate(arguments):
        size = outer.sizes.entries(tensor) if keeps(i) else None
        needs.append(_need(outer, tensor, placements[i], placed[i], size, factors.get(i)))
    if not outer.own(zip(arguments, needs)):
        return None
    functions = {'body': inside.plan(), 'cond': asked.plan()}
    read = [(i, _only_read(i, body, condition)) for i in range(len(arguments))]
    # Within a function, it's the caller that would have to be given the value.
    values = {i: dtype for i, dtype in read if dtype and not isinstance(outer, _Inside)}
    dims = [
        _dims(outer, t, placed[i], arguments[i], factors.get(i)) for i, t in enumerate(op.outputs)
    ]
    # Nobody is given a variable by a loop, which has its value.
    made = [None if i in values else p for i, p in enumerate(placed)]
    return OpPlan(tuple(needs), {}, functions, values), made, dims


def _meet(a: Placement, b: Placement) -> Placement:
    if a == b or b == REPLICATE:
        return a
    if a == REPLICATE and (b == _SUM or not isinstance(b, Partial)):
        return b
    raise _Whole(f'{a} becomes {b}')


def _need(
    outer: Pass,
    tensor: tf.Tensor,
    placement: Placement,
    placed: Placement,
    size: list[Size] | None,
    factor: Size | None,
) -> Need:
    """What a loop is given for a variable."""
    if placement == placed:
        rows = [i for i, e in enumerate(size or []) if e.rows] if placed == REPLICATE else []
        if len(rows) > 1:
            raise _Whole(f'two sizes in {tensor.name}')
        if not rows or size is None:
            return OWN if placed != REPLICATE else WHOLE
        factor = per_row(size[rows[0]], outer.rows)
        if factor is None:
            raise _Whole(f'the size of {tensor.name}')
        return Local(tuple(size), rows[0], factor)
    if isinstance(placed, Shard):
        factor = _factor(tensor, placed, outer) or factor
        if factor is None:
            raise _Whole(f'the size of {tensor.name}')
        return Slice(placed.axis, factor)
    return OWN if isinstance(placed, KEPT) else First()


def _only_read(position: int, *graphs: Any) -> tf.DType | None:
    """The type of a variable's value, if that is all that is asked for of an argument."""
    users = []
    for graph in graphs:
        argument = graph.inputs[position]
        if argument.dtype != tf.resource:
            return None
        users += argument.consumers()
    if not users or any(user.type != 'ReadVariableOp' for user in users):
        return None
    return users[0].get_attr('dtype')


def _dims(
    outer: Pass, tensor: tf.Tensor, placed: Placement, argument: tf.Tensor, factor: Size | None
) -> list[Size] | None:
    """The dimensions of what a loop comes to."""
    if not isinstance(placed, Shard) or tensor.shape.rank is None:
        return None
    dims = [
        outer.sizes.unknown(tensor, i) if d is None else Size(d)
        for i, d in enumerate(tensor.shape.as_list())
    ]
    factor = factor or _factor(argument, placed, outer)
    if factor is None:
        raise _Whole(f'the size of {tensor.name}')
    dims[placed.axis] = factor * Size(1, (outer.rows,))
    return dims


CALLERS: dict[str, Caller] = {'While': loop, 'StatelessWhile': loop}
"""What divides ops that call functions, by their type."""
