"""The ops of functions become ops of the graph that calls these functions.

    f(a):  b = Square(a)        =>        scope/b = Square(operand)

In: an op that calls functions. Out: their ops under a scope, which take the place of that op. The
op stays in the graph, for whoever fetches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf

from estimator_mgpu.devices import device_spec
from estimator_mgpu.partition.division import Division
from estimator_mgpu.tf_internals import graphs, op_types, private


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
    body = Body(function, operands, scope)
    add_bodies([body])
    return body.with_operands(operands)


class Body:
    """A function whose ops are added to a graph by `add_bodies`, and then given operands.

    Args:
      function: its graph.
      operands: what its ops are added with, of the types and shapes of its arguments; later,
        `with_operands` gives them others.
      scope: what the names of the ops begin with.
      device: that of ops that say nothing else; '' for the present one.

    Attributes:
      nodes: of all ops but arguments, with the names that they get.
      operands: what the nodes use of these, by name.
    """

    def __init__(self, function: Any, operands: Sequence[tf.Tensor], scope: str, device: str = ''):
        self.function = function
        self.scope = scope
        self._device = device
        self._arguments = {
            argument.op.name: number for number, argument in enumerate(function.inputs)
        }
        # The nodes that use an argument, by name, with the input's position and the argument's.
        self._uses: list[tuple[str, int, int]] = []
        self._waits: list[tuple[str, int]] = []  # those that only wait for one
        self.operands: dict[str, tf.Tensor] = {}
        definition = function.as_graph_def()
        self.nodes = [node for node in definition.node if node.name not in self._arguments]
        for node in self.nodes:
            self._rename(node, operands)

    def _rename(self, node: Any, operands: Sequence[tf.Tensor]) -> None:
        node.name = self._name(node.name)
        node.device = _merged_device(self._device, node.device)
        node.attr.pop('_class', None)  # It may name an argument.
        if node.op in op_types.ENTER:
            # If the function is added twice, its v1 loops are two.
            node.attr['frame_name'].s = self._name(node.attr['frame_name'].s.decode()).encode()

        names = list(node.input)
        del node.input[:]
        for position, name in enumerate(names):
            is_waited_for = name.startswith('^')
            source = name.removeprefix('^')
            number = self._arguments.get(source.partition(':')[0])
            if number is None:
                node.input.append(f'{"^" * is_waited_for}{self._name(source)}')
            elif is_waited_for:
                self._waits.append((node.name, number))
            else:
                operand = operands[number]
                node.input.append(operand.name)
                self.operands[operand.name] = operand
                self._uses.append((node.name, position, number))

    def _name(self, name: str) -> str:
        return f'{self.scope}/{name}'

    def ops(self, graph: tf.Graph) -> list[tf.Operation]:
        """The ops that were added to the graph."""
        return [graph.get_operation_by_name(node.name) for node in self.nodes]

    def with_operands(self, operands: Sequence[tf.Tensor]) -> AddedOps:
        """The ops that were added to the default graph, with what they are to be given.

        Args:
          operands: what takes the place of the function's arguments.
        """
        graph = tf.get_default_graph()
        for name, position, number in self._uses:
            op = graph.get_operation_by_name(name)
            if op.inputs[position] is not operands[number]:
                private.set_input(op, position, operands[number])
        for name, number in self._waits:
            op = graph.get_operation_by_name(name)
            private.add_control_inputs(op, [operands[number].op])

        ops = self.ops(graph)
        self._tell_shapes_of_elements(ops)
        outputs = []
        for output in self.function.outputs:
            argument = self._arguments.get(output.op.name)
            if argument is None:
                outputs.append(graph.get_tensor_by_name(self._name(output.name)))
            else:
                outputs.append(operands[argument])
        effects = self.function.control_outputs
        return AddedOps(
            ops=ops,
            outputs=outputs,
            effects=[graph.get_operation_by_name(self._name(effect.name)) for effect in effects],
        )

    def _tell_shapes_of_elements(self, ops: Sequence[tf.Operation]) -> None:
        """Tells the graph the shapes of what comes from lists: the ops alone don't know them."""
        for op in ops:
            if op.type.startswith(op_types.LIST_PREFIXES):
                name = op.name.removeprefix(f'{self.scope}/')
                original = self.function.get_operation_by_name(name)
                for output, known in zip(op.outputs, original.outputs):
                    output.set_shape(known.shape)


def _merged_device(device: str, inner: str) -> str:
    """The device of an op that names one, or a part of one, within the scope of another."""
    if not (device and inner):
        return device or inner
    return device_spec(device).make_merged_spec(device_spec(inner)).to_string()


def add_bodies(bodies: Sequence[Body]) -> None:
    """Adds the ops of functions to the default graph, which has all functions that these call.

    They are added at once, as TensorFlow looks at all ops of a graph when it adds any.
    """
    nodes = tf.GraphDef(versions=tf.get_default_graph().graph_def_versions)
    operands: dict[str, tf.Tensor] = {}
    for body in bodies:
        nodes.node.extend(body.nodes)
        operands.update(body.operands)
    tf.import_graph_def(nodes, operands, name='')


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
