"""The ops of functions become ops of the graph that calls these functions.

    f(a):  b = Square(a)        =>        scope/b = Square(operand)

In: an op that calls functions. Out: their ops under a scope, which take the place of that op. The
op stays in the graph, for whoever fetches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.tf_internals import graphs, op_types


class AddedOps(NamedTuple):
    """The ops of a function that were added to a graph.

    Attributes:
      ops: all of them; arguments have none.
      outputs: what the function returns.
      effects: the ops that the function runs in any case, such as checks.
    """

    ops: Sequence[tf.Operation]
    outputs: Sequence[tf.Tensor]
    effects: Sequence[tf.Operation]


def add_ops(function: Any, operands: Sequence[tf.Tensor], scope: str) -> AddedOps:
    """Adds a function's ops to the default graph, which has all functions that these call.

    An op that names no device gets the present one.

    Args:
      function: its graph.
      operands: what takes the place of its arguments.
      scope: what the names of the ops begin with.
    """
    tensors: dict[str, tf.Tensor] = {}  # by name, in the place of arguments
    controls: dict[str, tf.Tensor] = {}  # in the place of arguments that ops wait for
    for argument, operand in zip(function.inputs, operands):
        tensors[argument.name] = operand
        controls[f'^{argument.op.name}'] = operand

    definition = function.as_graph_def()
    nodes = [node for node in definition.node if f'^{node.name}' not in controls]
    for node in nodes:
        node.attr.pop('_class', None)  # It may name an argument.
        if node.op in op_types.ENTER:
            # If the function is added twice, its v1 loops are two.
            frame = f'{scope}/{node.attr["frame_name"].s.decode()}'
            node.attr['frame_name'].s = frame.encode()
    used = {name for node in nodes for name in node.input}
    used |= {f'{name}:0' for name in used}

    computed = [tensor.name for tensor in function.outputs if tensor.name not in tensors]
    effects = [effect.name for effect in function.control_outputs]
    elements = tf.import_graph_def(
        tf.GraphDef(node=nodes, versions=definition.versions),
        {name: tensor for name, tensor in {**tensors, **controls}.items() if name in used},
        return_elements=computed + effects,
        name=scope,
    )
    tensors.update(zip(computed, elements))
    graph = tf.get_default_graph()
    ops = [graph.get_operation_by_name(f'{scope}/{node.name}') for node in nodes]
    for op in ops:
        if op.type.startswith(op_types.LIST_PREFIXES):
            # The op alone doesn't tell which shape an element has.
            original = function.get_operation_by_name(op.name.removeprefix(f'{scope}/'))
            for output, known in zip(op.outputs, original.outputs):
                output.set_shape(known.shape)
    return AddedOps(
        ops=ops,
        outputs=[tensors[tensor.name] for tensor in function.outputs],
        effects=elements[len(computed) :],
    )


def after(before: Sequence[tf.Operation], output: tf.Tensor, name: str) -> tf.Tensor:
    """An output that is there when other ops have run, whatever it's computed from.

    So who waits for an output waits for the functions' side effects, too. What only computes
    doesn't: `identities` bypasses what this adds.
    """
    if not before or output.dtype in (tf.resource, tf.variant):
        return output
    with tf.control_dependencies(before):
        return tf.identity(output, name)


def take_place_of(
    op: tf.Operation,
    outputs: Sequence[tf.Tensor | None],
    before: Sequence[tf.Operation],
    division: Division,
) -> None:
    """Lets whoever uses an op, or waits for it, use and wait for others.

    Args:
      op: one that calls functions.
      outputs: what is used in place of its outputs, or None of one that nobody uses. There may be
        more of them: a function may have got further outputs since it was called.
      before: the ops that are waited for in its place, besides those for which it waits.
      division: notes what is used in place of what.
    """
    with tf.control_dependencies([*op.control_inputs, *before]):
        last = tf.no_op(f'{op.name}/done')
    pairs = [(output, new) for output, new in zip(op.outputs, outputs) if new is not None]
    graphs.redirect_consumers(op, {output.value_index: new for output, new in pairs}, last)
    division.replaced.update((output.name, new) for output, new in pairs)
