"""The functions that loops, branches and calls are made of, as parts of a model like any other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.places import CALLS, FLOW, LOOPS, SIZES, Places
from estimator_mgpu.reshapes import Place
from estimator_mgpu.rows import Rows
from estimator_mgpu.walks import inputs, walk

# An attribute of loops that go on with another's body.
GOES_ON = '_goes_on'
# Lists of tensors, which have a place where what is added may have one or not.
_LISTS = re.compile('Tensor(List|Array)')


class Body(NamedTuple):
    """Ops of a tower's graph, or of a function that one of these calls.

    Attributes:
      ops: the ops.
      rows: which of their tensors depend on the shard, and which have rows.
      where: what is added to an op's name to find it.
      loops: whether they run once a round.
      carried: what a round hands on to the next one, in a function.
      condition: whether there is another round, if that's what it's about.
      inner: the functions that its ops call, by the names of these; as `inside` yields them.
    """

    ops: list[tf.Operation]
    rows: Places
    where: str = ''
    loops: bool = False
    carried: list[tf.Tensor] = []
    condition: tf.Tensor | None = None
    inner: dict[str, list[Body]] = {}

    def describe(self, op: tf.Operation) -> str:
        return f'{op.name!r} ({op.type}){self.where}'


def bodies(ops: Iterable[tf.Operation], rows: Places) -> Iterator[Body]:
    """Yields ops of a tower, and those of the functions that they call with rows."""
    waiting = [Body(list(ops), rows)]
    while waiting:
        body = waiting.pop()
        inner = {op.name: list(inside(op, body)) for op in body.ops if op.type in CALLS}
        yield body._replace(inner=inner)
        waiting += [called for found in inner.values() for called in found]


def _functions(
    op: tf.Operation, rows: Places
) -> Iterator[tuple[tf.Graph, list[Place | None], list[tuple[tf.Tensor, Place]], list[tf.Tensor]]]:
    """Yields the functions that an op calls with rows.

    With each come where its inputs have rows, of all and of those that have, and what is given to
    these inputs.
    """
    for graph, given in rows.functions(op):
        places = [(t, place) for t, place in zip(graph.inputs, given) if place is not None]
        if places:
            yield graph, given, places, list(op.inputs[len(op.inputs) - len(graph.inputs) :])


def inside(op: tf.Operation, body: Body) -> Iterator[Body]:
    """Yields the functions that an op of a body calls; after that of a loop comes its condition."""
    for graph, given, places, outer in _functions(op, body.rows):
        start = {t.op.name for t, _ in places}
        start |= {t.op.name for t, o in zip(graph.inputs, outer) if is_of_shard(o, body.rows)}
        loops = op.type in LOOPS
        dependents = _after(start, graph, loops)
        where = f' in {op.name!r}{body.where}'
        yield Body(
            list(walk([t.op for t in graph.outputs], inputs)),
            Places(places, dependents, body.rows.static, indices=body.rows.numbers(op, graph)),
            where,
            loops or body.loops,
            list(graph.outputs) if loops else [],
        )
        for condition in private.function_graphs(op, ['cond']) if loops else ():
            places = [(t, place) for t, place in zip(condition.inputs, given) if place is not None]
            same = zip(condition.inputs, graph.inputs)
            start = {t.op.name for t, other in same if other.op.name in dependents}
            rows = Places(places, _after(start, condition, False), body.rows.static)
            yield Body([], rows, where, condition=condition.outputs[0])


def called(op: tf.Operation, rows: Places) -> Iterator[tuple[tf.Graph, Rows]]:
    """Yields the functions of a branch or a call, and what is known of the rows there.

    All of what a function is given that depends on the shard is told apart from what doesn't.
    """
    for graph, _, places, outer in _functions(op, rows) if op.type not in LOOPS else ():
        start = {t.op.name for t, o in zip(graph.inputs, outer) if rows.depends(o.op)}
        dependents = _after(start, graph, False)
        yield graph, Rows(places, dependents, rows.static, indices=rows.numbers(op, graph))


def is_of_shard(value: tf.Tensor, rows: Places) -> bool:
    """Whether something is computed from rows, rather than from how many they are.

    What they only choose, such as how often a loop runs, is not.
    """

    def onward(op: tf.Operation) -> list[tf.Operation]:
        given = op.inputs[:1] if op.type == 'Switch' else op.inputs
        return [] if op.type in SIZES else [t.op for t in given if rows.depends(t.op)]

    if rows.has(value):
        return True
    for op in walk([value.op] if rows.depends(value.op) else [], onward):
        # An argument of a function that depends on the shard is known to do so.
        if op.type == 'Placeholder' or op.type not in SIZES and any(map(rows.has, op.inputs)):
            return True
    return False


def _after(start: set[str], graph: tf.Graph, loops: bool) -> set[str]:
    """Returns the names of the ops of a function that depend on some of its arguments."""
    found = set(start)
    again = True
    while again:
        for op in graph.get_operations():
            if any(t.op.name in found for t in op.inputs):
                found.add(op.name)
        rounds = zip(graph.inputs, graph.outputs) if loops else ()
        more = {given.op.name for given, result in rounds if result.op.name in found}
        again = not more <= found
        found |= more
    return found


def passes_on(op: tf.Operation) -> bool:
    """Whether an op combines nothing itself."""
    if op.type in CALLS:
        return bool(private.function_graphs(op)) or GOES_ON in op.node_def.attr
    return op.type in FLOW or op.type == 'IdentityN' or _LISTS.match(op.type) is not None
