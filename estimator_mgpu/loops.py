"""Loops that run until all rows are finished run as often as for the whole batch.

A decoder's loop ends with the last of its rows, and gives one entry a round. Each tower's ends with
its shard. So it's followed by another loop of the same body, which goes on from where that ended,
for as many rounds as the tower with the longest row has taken more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu import counts, private
from estimator_mgpu.bodies import GOES_ON, Body, inside, is_of_shard
from estimator_mgpu.functions import Library, called
from estimator_mgpu.importing import absolute_scope
from estimator_mgpu.mixing import goes_by_rows
from estimator_mgpu.places import ARRAYS, LOOPS, Places
from estimator_mgpu.walks import inputs, walk

# What puts an entry into a list of tensors.
_LISTS = frozenset(['TensorListSetItem', 'TensorListPushBack'])
_COMPARES = frozenset(['Less', 'LessEqual', 'Greater', 'GreaterEqual'])


def until_all_finished(op: tf.Operation, rows: Places) -> bool:
    """Whether a v2 loop is one that ends with the last of its rows, and can be gone on with."""
    inner = list(inside(op, Body([op], rows))) if rows.depends(op) else []
    return _ends_with_all(inner) and _counts(inner[0])


def collecting(body: Body) -> list[tf.Operation]:
    """Lists the loops that rows of a shard end, and which collect an entry each round.

    Left out are those that are gone on with.
    """
    ends = [op for op in body.ops if op.type == 'LoopCond' and body.rows.depends(op)]
    arrays = [op for op in body.ops if ends and op.type in ARRAYS]
    collecting = {name for op in arrays for name in private.loops_of(op)}
    ends = [op for op in ends if collecting.intersection(private.loops_of(op))]
    found = [op for op in ends if is_of_shard(op.inputs[0], body.rows)]
    for op, inner in _loops_in(body):
        decision = inner[-1].condition if inner else None
        collects = any(other.type in _LISTS for part in inner for other in part.ops)
        by_rows = decision is not None and is_of_shard(decision, inner[-1].rows)
        if collects and by_rows and not _is_gone_on_with(op):
            found.append(op)
    return found


def ending_early(body: Body) -> list[tf.Operation]:
    """Lists the loops that go by rows being finished all at once, as rows may go on later.

    A shard's loop ends with its first such round. Left out are those that go by integers, such as
    lengths, and what is kept by `finished | ...`.
    """
    found = []
    for op, inner in _loops_in(body):
        decision = inner[1].condition if _ends_with_all(inner) else None
        if decision is not None:
            decided = walk([decision.op], inputs)
            flags = [end.inputs[0] for end in decided if end.type in ('Any', 'All')]
            if any(_may_go_on(t, inner[0], inner[1].rows) for t in flags):
                found.append(op)
    return found


def _loops_in(body: Body) -> list[tuple[tf.Operation, list[Body]]]:
    """Lists the v2 loops that depend on the shard, with their functions."""
    found = [op for op in body.ops if op.type in LOOPS and body.rows.depends(op)]
    return [(op, body.inner[op.name]) for op in found]


def _may_go_on(flags: tf.Tensor, body: Body, rows: Places) -> bool:
    """Whether rows that are finished by what a round has computed may go on in a later one."""
    carried = {t.op.name: after for t, after in zip(flags.graph.inputs, body.carried)}
    while flags.op.type in ('Identity', 'LogicalNot'):
        flags = flags.op.inputs[0]
    before = list(walk([flags.op], inputs))
    after = [carried[op.name] for op in before if op.name in carried]
    if not goes_by_rows(flags, rows) and not any(goes_by_rows(t, body.rows) for t in after):
        return False
    if flags.op.name not in carried:
        return True
    number = list(carried).index(flags.op.name)
    own = carried[flags.op.name].graph.inputs[number].op
    kept = ('Identity', 'LogicalNot', 'LogicalOr', 'LogicalAnd')
    start = carried[flags.op.name].op
    before = list(walk([start], lambda op: inputs(op) if op.type in kept else []))
    return own.name not in {op.name for op in before}


def _is_gone_on_with(op: tf.Operation) -> bool:
    users = [user for t in op.outputs for user in t.consumers() if user.type in LOOPS]
    return GOES_ON in op.node_def.attr or any(GOES_ON in u.node_def.attr for u in users)


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
    functions = _Copied(op.graph, graph_def)
    handles = [_handle_of(tensor) for tensor in op.inputs]
    body = functions.add(op.get_attr('body').name, handles)
    condition = functions.add_limit(op.get_attr('cond').name)
    node = graph_def.node.add()
    node.CopyFrom(op.node_def)
    node.name = 'on'
    node.attr.pop('_class', None)
    node.attr[GOES_ON].b = True
    node.attr['body'].func.name = body.signature.name
    node.attr['cond'].func.name = condition.signature.name
    del node.input[:]
    for i, tensor in enumerate(given):
        start = graph_def.node.add(name=f'given_{i}', op='Placeholder')
        start.attr['dtype'].type = tensor.dtype.as_datatype_enum
        node.input.append(start.name)
    with absolute_scope(op.graph):
        names = {f'given_{i}:0': tensor for i, tensor in enumerate(given)}
        [added] = tf.import_graph_def(graph_def, names, return_elements=['on'], name=op.name)
    return added


class _Copied:
    """Copies of functions, and of those that they call, under other names.

    A gradient adds what it needs to a loop's functions, so that no two loops can have the same.

    Args:
      graph: whose functions they are.
      graph_def: what the copies go to.
    """

    def __init__(self, graph: tf.Graph, graph_def: Any):
        self._library = Library(graph)
        self._copies = graph_def.library.function
        self._added: dict[str, Any] = {}

    def add(self, name: str, handles: Sequence[Any]) -> Any:
        """Returns a function's copy.

        Args:
          name: the function's.
          handles: for each input, what it's the handle of, or None.
        """
        if name in self._added:
            return self._added[name]
        copy = self._added[name] = self._copies.add()
        copy.CopyFrom(self._library.get(name))
        copy.signature.name += '_on'
        known = {}
        for arg, handle in zip(copy.signature.input_arg, handles):
            if handle is not None and not arg.handle_data:
                data = arg.handle_data.add(dtype=handle[0])
                data.shape.CopyFrom(handle[1])
            known[arg.name] = handle
        for node in copy.node_def:
            given = [known.get(name) for name in node.input if name[0] != '^']
            for function in called(node):
                original = self._library.get(function.name)
                if original is not None:  # A branch is given all inputs but the first.
                    first = len(given) - len(original.signature.input_arg)
                    function.name = self.add(function.name, given[first:]).signature.name
        return copy

    def add_limit(self, name: str) -> Any:
        """Returns what a loop goes by that is to run while its first input is less than its second.

        Args:
          name: that of what it went by.
        """
        limit = self._copies.add()
        limit.signature.CopyFrom(self._library.get(name).signature)
        limit.signature.name += '_on'
        del limit.signature.control_output[:]
        given = [arg.name for arg in limit.signature.input_arg[:2]]
        less = limit.node_def.add(name='less', op='Less', input=given)
        less.attr['T'].type = tf.int32.as_datatype_enum
        [output] = limit.signature.output_arg
        limit.ret[output.name] = 'less:z:0'
        return limit


def _handle_of(tensor: tf.Tensor) -> Any:
    """Returns the type and the shape of the variable that an input is the handle of, if it is."""
    if tensor.op.type != 'VarHandleOp':
        return None
    attributes = tensor.op.node_def.attr
    return attributes['dtype'].type, attributes['shape'].shape


def _ends_with_all(inner: list[Body]) -> bool:
    decision = inner[1].condition if len(inner) == 2 else None
    if decision is None:
        return False
    body, rows = inner[0], inner[1].rows
    return rows.depends(decision.op) and _until_all(decision, rows, True, body)


def _counts(body: Body) -> bool:
    """Whether a loop is as `tf.while_loop` makes it, with the number of the round first."""
    if len(body.carried) < 3:
        return False
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
    own = [t for t in op.inputs if not _is_alike(t, rows)]
    if _is_alike(value, rows):
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


def _is_alike(value: tf.Tensor, rows: Places) -> bool:
    """Whether all shards have the same value, such as the size of another dimension."""
    return not rows.depends(value.op) or (
        counts.is_count(value, rows) and counts.growth(value, rows) == 0
    )


def _reduces(value: tf.Tensor, kind: str, rows: Places) -> bool:
    return value.op.type == kind and rows.has(value.op.inputs[0]) and not rows.has(value)
