"""Why several devices may give other numbers than one: what a graph shows of it."""

from __future__ import annotations

import re

import tensorflow.compat.v1 as tf

from estimator_mgpu.findings import find
from estimator_mgpu.functions import Library
from estimator_mgpu.races import unordered
from estimator_mgpu.towers import Towers, is_own
from estimator_mgpu.walks import walk

_RANDOM = re.compile(r'Random|Multinomial|TruncatedNormal|StatefulUniform|StatefulStandard|RngRead')


def likely_causes(
    graph: tf.Graph,
    roots: list[tf.Operation],
    updates: list[tf.Operation],
    towers: Towers | None,
    warnings: list[str],
) -> list[str]:
    """Returns a sentence for each thing in a model that may differ between devices.

    Args:
      graph: the graph of the model.
      roots: the ops whose values were compared; what they depend on is looked at.
      updates: the ops that were run with them.
      towers: the towers, if the model was replicated.
      warnings: what was warned of while it was built. They come first, and what they name isn't
        named again.
    """
    copies = set() if towers is None else towers.copies.names()
    reduced = set() if towers is None else {t.op.name for t in towers.reduced}

    def needed(ends: list[tf.Operation], without: set[str] = copies) -> set[str]:
        return {op.name for op in walk(ends, without=without)}

    def own(names: set[str]) -> list[tf.Operation]:
        """Lists the user's, the earliest first."""
        return [op for op in graph.get_operations() if op.name in names and not is_own(op)]

    # Updates also write what isn't by gradients, such as averages.
    ops = [op for op in own(needed(roots) | needed(updates, copies | reduced)) if op.outputs]
    causes = [*warnings]
    said = ' '.join(warnings)
    drawn = _first_random(ops, Library(graph), set() if towers is None else towers.dependents())
    if drawn is not None:
        causes.append(
            f'Random numbers, such as those of dropout, are others on each device: {drawn}. '
            'Compare without them.'
        )
    if towers is None:
        return causes
    found = find(ops, towers.rows())
    meeting = {**found.values, **found.norms}
    values = [op for op, value in meeting.items() if op not in said and repr(value) not in said]
    others, python = ([op for op in of if op not in said] for of in (found.others, found.python))
    if values:
        causes.append(
            f'Rows are combined with a value of all rows of a shard, as batch normalization does: '
            f'{values[0]}. Each device has its own shard.'
        )
    if others:
        causes.append(
            'Rows are combined with other rows of their shard, or put in their place, by '
            f'{", ".join(others[:3])}. Each device has its own shard.'
        )
    if python:
        causes.append(
            f'Python functions are called with the rows of one shard each: {", ".join(python[:3])}.'
        )
    races = unordered(graph, own(needed([*roots, *updates])))
    if races:
        causes.append(
            'A step both reads and writes variables in no order, so that chance decides which '
            f'value it reads, on one device, too: {", ".join(races[:3])}. Order them by '
            'tf.control_dependencies.'
        )
    halves = [op for op in ops if any(t.dtype in (tf.float16, tf.bfloat16) for t in op.outputs)]
    if halves:
        causes.append(
            f'Some of it is computed in {halves[0].outputs[0].dtype.name}, whose rounding errors '
            f'are far above those of float32: {halves[0].name!r} ({halves[0].type}), for one. '
            'Compare in float32, or with a tolerance of 0.01.'
        )
    return causes


def _first_random(ops: list[tf.Operation], library: Library, dependents: set[str]) -> str | None:
    for op in ops:
        stateless = op.type.startswith('Stateless')  # the same for all, but of a shard's size
        if _RANDOM.search(op.type) and (op.name in dependents or not stateless):
            return f'{op.name!r} ({op.type})'
        for inner in library.nodes(op.node_def):
            if _RANDOM.search(inner.op) and not inner.op.startswith('Stateless'):
                return f'{inner.name!r} ({inner.op}) in {op.name!r}'
    return None
