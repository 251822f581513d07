"""Loops that run until all rows are finished run as often as for the whole batch.

A decoder's loop ends with the last of its rows, and gives one entry a round. Each tower's ends with
its shard. So it's followed by another loop of the same body, which goes on from where that ended,
for as many rounds as the tower with the longest row has taken more.
"""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import private
from estimator_mgpu.bodies import GOES_ON, Body, inside
from estimator_mgpu.functions import Library
from estimator_mgpu.importing import absolute_scope
from estimator_mgpu.places import ARRAYS, LOOPS, Places

# What puts an entry into a list of tensors.
_LISTS = frozenset(['TensorListSetItem', 'TensorListPushBack'])
_COMPARES = frozenset(['Less', 'LessEqual', 'Greater', 'GreaterEqual'])


def until_all_finished(op: tf.Operation, rows: Places) -> bool:
    """Whether a v2 loop is one that ends with the last of its rows, and can be gone on with."""
    inner = list(inside(op, Body([op], rows))) if op.type in LOOPS and rows.depends(op) else []
    return _ends_with_all(inner) and _counts(inner[0])


def collecting(body: Body) -> list[tf.Operation]:
    """Lists the loops that end with the last row of a shard, and collect an entry each round.

    Those are v1 loops, and loops inside of functions, for which there is no going on.
    """
    ends = [op for op in body.ops if op.type == 'LoopCond' and body.rows.depends(op)]
    arrays = [op for op in body.ops if ends and op.type in ARRAYS]
    collecting = {name for op in arrays for name in private.loops_of(op)}
    ends = [op for op in ends if collecting.intersection(private.loops_of(op))]
    found = [op for op in ends if _until_all(op.inputs[0], body.rows, True, None)]
    for op in body.ops if body.where else ():
        inner = list(inside(op, body)) if op.type in LOOPS and body.rows.depends(op) else []
        if _ends_with_all(inner) and any(other.type in _LISTS for other in inner[0].ops):
            found.append(op)
    return found


def go_on(op: tf.Operation, more: tf.Tensor) -> tf.Operation:
    """Adds a loop that goes on from where another ended, to be used instead of that.

    Args:
      op: the loop, as `tf.while_loop` makes it: the first that a round is given is its number, the
        second is the greatest number of rounds, and then come the user's.
      more: scalar of type int32; how many rounds.

    Returns:
      The new loop. Its outputs are as those of the first one.
    """
    graph_def = tf.GraphDef()
    graph_def.versions.CopyFrom(op.graph.graph_def_versions)
    with absolute_scope(op.graph, 'replicate'), tf.device(op.device):
        given = [tf.constant(0), more, *op.outputs[2:]]
    library = Library(op.graph)
    body, condition = (library.get(op.get_attr(name).name) for name in ('body', 'cond'))
    for function, add in ((body, _same), (condition, _up_to_the_second)):
        # Of its own, for a gradient adds what it needs to a loop's functions.
        own = graph_def.library.function.add()
        own.signature.CopyFrom(function.signature)
        own.signature.name += '_on'
        add(own, function)
    node = graph_def.node.add()
    node.CopyFrom(op.node_def)
    node.name = 'on'
    node.attr.pop('_class', None)
    node.attr[GOES_ON].b = True
    node.attr['body'].func.name += '_on'
    node.attr['cond'].func.name += '_on'
    del node.input[:]
    for i, tensor in enumerate(given):
        start = graph_def.node.add(name=f'given_{i}', op='Placeholder')
        start.attr['dtype'].type = tensor.dtype.as_datatype_enum
        node.input.append(start.name)
    with absolute_scope(op.graph):
        names = {f'given_{i}:0': tensor for i, tensor in enumerate(given)}
        [added] = tf.import_graph_def(graph_def, names, return_elements=['on'], name=op.name)
    return added


def _same(own: Any, function: Any) -> None:
    signature = own.signature.name
    own.CopyFrom(function)
    own.signature.name = signature


def _up_to_the_second(own: Any, function: Any) -> None:
    """Lets a loop run as long as the first that it's given is less than the second."""
    number, limit = (arg.name for arg in own.signature.input_arg[:2])
    less = own.node_def.add(name='less', op='Less', input=[number, limit])
    less.attr['T'].type = tf.int32.as_datatype_enum
    [output] = own.signature.output_arg
    own.ret[output.name] = 'less:z:0'


def _ends_with_all(inner: list[Body]) -> bool:
    decision = inner[1].condition if len(inner) == 2 else None
    if decision is None:
        return False
    body, rows = inner[0], inner[1].rows
    return rows.depends(decision.op) and _until_all(decision, rows, True, body)


def _counts(body: Body) -> bool:
    """Whether a loop is as `tf.while_loop` makes it, with the number of the round first."""
    number, limit = body.carried[:2]
    start, most = number.graph.inputs[:2]
    added = number.op.type == 'AddV2' and number.op.inputs[0] is start
    one = private.constant_value(number.op.inputs[1]) if added else None
    return one is not None and one == 1 and number.dtype == tf.int32 and limit is most


def _until_all(value: tf.Tensor, rows: Places, some: bool, body: Body | None) -> bool:
    """Whether what decides on another round is true of a batch if it's true of one of its parts.

    Args:
      value: the decision, a scalar.
      rows: what is known of the rows where it's made.
      some: False for what has to be true of all of the parts, as what is negated.
      body: what a round does, for what it has decided itself.
    """
    op = value.op
    own = rows.dependent_inputs(op)
    if not rows.depends(op):
        return True
    if op.type == 'Identity':
        return _until_all(own[0], rows, some, body)
    if op.type == 'LogicalNot':
        return _until_all(own[0], rows, not some, body)
    if op.type in ('LogicalAnd', 'LogicalOr'):
        alone = len(own) == 1 or (op.type == 'LogicalOr') == some
        return alone and all(_until_all(t, rows, some, body) for t in own)
    if op.type in _COMPARES and len(own) == 1:
        place = 1 if op.type.startswith('Less') else 0
        greater = own[0].name == op.inputs[place].name
        extreme = 'Max' if greater == some else 'Min'
        return own[0].dtype.is_integer and _reduces(own[0], extreme, rows)
    if op.type == 'Placeholder' and body is not None:
        place = [t.op.name for t in value.graph.inputs].index(op.name)
        return _until_all(body.carried[place], body.rows, some, None)
    return _reduces(value, 'Any' if some else 'All', rows)


def _reduces(value: tf.Tensor, kind: str, rows: Places) -> bool:
    return value.op.type == kind and rows.has(value.op.inputs[0]) and not rows.has(value)
