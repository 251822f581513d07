"""Loops whose examples decide how many steps they take become loops of TensorFlow 1.

A decoder goes on until all examples are finished:

    tf.while_loop(lambda i, state, finished: ~tf.reduce_all(finished), ...)

So all towers have to make each step together, and combine what each says. A `While` can't do so: it
calls functions, and each tower would call its own. The ops of a v1 loop can, as they are in the
graph, in one frame. TensorFlow itself makes such ops of each `While` when a session begins. Here it
is done before that:

    start --> While(condition, body) --> result      =>

    start --> Enter --> Merge --> Switch --> Exit --> result
                          ^        ^  |
                          |        |  +--> ops of the body --> NextIteration --+
                          |        |                                           |
                          |     LoopCond <-- ops of the condition <-- Merge    |
                          +----------------------------------------------------+
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.tf_internals import function_calls, graphs, op_types, tracebacks
from estimator_mgpu.tf_internals.effects import has_side_effect
from estimator_mgpu.tf_internals.node_defs import node_def


def take_apart_loops(division: Division) -> None:
    """Replaces the outputs of loops that depend on the batch by those of equal v1 loops.

    The loops stay in the graph, for whoever fetches them.
    """
    of_batch = graphs.dependents(division.inputs, division.existing_ops)
    candidates = [op for op in of_batch if op.type in op_types.LOOPS]
    while candidates:
        loop = candidates.pop()
        if _examples_decide(loop):
            with tracebacks.made_for(loop):
                results, inner_loops = _replace_loop(loop)
            for name, function in zip(('condition', 'body'), function_calls.function_graphs(loop)):
                scope = f'{loop.name}/apart/{name}'
                tracebacks.copy_those_of_function(function, loop.graph, scope)
            for before, result in zip(loop.outputs, results):
                division.replaced[before.name] = result
            candidates += inner_loops


def _examples_decide(loop: tf.Operation) -> bool:
    """Whether a loop's condition depends on a reduction, and nothing in the loop has effects."""
    functions = function_calls.function_graphs(loop)
    if not functions or any(map(_has_effects, functions)):
        return False
    condition, body = functions

    visited: set[tf.Operation] = set()
    needed = {condition.outputs[0].op}
    while needed:
        # A check that is waited for may reduce, but decides nothing.
        ops = graphs.ancestors(list(needed), by_control=False) - visited
        if any(op.type in op_types.REDUCTIONS for op in ops):
            return True
        visited |= ops
        # What a variable is in the next step, the body computes in this one.
        needed = set()
        for in_condition, in_body, output in zip(condition.inputs, body.inputs, body.outputs):
            is_used = in_condition.op in ops or in_body.op in ops
            if is_used and output.op not in visited:
                needed.add(output.op)
    return False


def _has_effects(function: Any) -> bool:
    """Whether an op of a function has side effects, or one of a function that it calls.

    Checks don't count.
    """
    for op in function.get_operations():
        if op.type in op_types.FUNCTION_CALLERS:
            called = function_calls.function_graphs(op)
            if not called or any(map(_has_effects, called)):
                return True
        elif has_side_effect(op) and op.type not in op_types.CHECKS:
            return True
    return False


def _replace_loop(loop: tf.Operation) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Adds a v1 loop that does the same as a `While`, and takes its place.

    Args:
      loop: the `While`.

    Returns:
      The results, and the inner loops, each a `While`.
    """
    scope = f'{loop.name}/apart'
    nodes = _LoopNodes(loop, scope)
    nodes.add_all()

    starts = {f'start_{index}:0': tensor for index, tensor in enumerate(loop.inputs)}
    with tf.control_dependencies(None), tf.device(loop.device), tf.name_scope(None):
        exits = tf.import_graph_def(
            nodes.graph_def,
            starts,
            return_elements=[f'exit_{index}:0' for index in nodes.variables],
            name=scope,
        )
        with tf.control_dependencies([*loop.control_inputs, *exits]):
            last = tf.no_op(f'{loop.name}/done')

    if loop.control_inputs:
        for index in range(len(loop.inputs)):
            enter = loop.graph.get_operation_by_name(f'{scope}/enter_{index}')
            function_calls.let_wait(enter, loop.control_inputs)

    results = [_after(loop, tensor) for tensor in loop.inputs]  # Constants are results, too.
    for index, exit in zip(nodes.variables, exits):
        results[index] = exit
    graphs.redirect_consumers(loop, dict(enumerate(results)), last)

    inner_loops = [node.name for node in nodes.graph_def.node if node.op in op_types.LOOPS]
    return results, [loop.graph.get_operation_by_name(f'{scope}/{name}') for name in inner_loops]


def _after(loop: tf.Operation, constant: tf.Tensor) -> tf.Tensor:
    """A constant of a loop as its result, which runs what the loop waited for."""
    if not loop.control_inputs or constant.dtype in (tf.resource, tf.variant):
        return constant
    with tf.control_dependencies(None), tf.control_dependencies(loop.control_inputs):
        return tf.identity(constant, f'{loop.name}/output')


def _indices_of_arguments(function: Any) -> dict[str, int]:
    """By the name of a function's argument, which one it is."""
    return {argument.op.name: index for index, argument in enumerate(function.inputs)}


def _waits_for_effects(function: Any, scope: str) -> list[str]:
    """Control inputs: the ops that a function runs for their effects, such as checks."""
    return [f'^{scope}/{op.name}' for op in function.control_outputs]


class _LoopNodes:
    """The nodes of a v1 loop that does the same as a `While`.

    Args:
      loop: the `While`. Its inputs are called `start_0:0`, `start_1:0` and so on.
      frame: the name of the frame.

    Attributes:
      graph_def: the nodes.
      variables: indices of the inputs that a step may change; others are constants of the loop.
    """

    def __init__(self, loop: tf.Operation, frame: str):
        self._loop = loop
        self._frame = frame
        self._condition, self._body = function_calls.function_graphs(loop)
        self._arguments = {
            'condition': _indices_of_arguments(self._condition),
            'body': _indices_of_arguments(self._body),
        }
        self.graph_def = tf.GraphDef(versions=self._condition.graph_def_versions)
        self.variables = [
            index
            for index, output in enumerate(self._body.outputs)
            if output is not self._body.inputs[index]
        ]

    def add_all(self) -> None:
        """Adds all nodes."""
        for index in range(len(self._loop.inputs)):
            self._add_enter(index)
        for index in self.variables:
            self._add_variable(index)

        self._add_function(self._condition, 'condition', 'merge')
        self._add_function(self._body, 'body', 'step')
        decision = self._name(self._condition.outputs[0].name, 'condition', 'merge')
        effects = _waits_for_effects(self._condition, 'condition')
        self._add('LoopCond', 'goes_on', self._with_variable([decision, *effects], 'merge'))

    def _add_enter(self, index: int) -> None:
        """Adds the `Enter` of a variable or a constant."""
        self._add(
            'Enter',
            f'enter_{index}',
            [f'start_{index}:0'],
            T=self._dtype(index),
            frame_name=self._frame,
            is_constant=index not in self.variables,
            parallel_iterations=self._loop.get_attr('parallel_iterations'),
        )

    def _add_variable(self, index: int) -> None:
        """Adds the circle of a variable, and its way out."""
        dtype = self._dtype(index)
        output = self._name(self._body.outputs[index].name, 'body', 'step')
        merge = self._add(
            'Merge', f'merge_{index}', [f'enter_{index}', f'next_{index}'], T=dtype, N=2
        )
        # Its shape can't be inferred, as the way back isn't there yet when it's imported.
        shape = self._body.inputs[index].shape
        for output_shape in (shape, tf.TensorShape([])):
            merge.attr['_output_shapes'].list.shape.add().CopyFrom(output_shape.as_proto())
        self._add('Switch', f'switch_{index}', [f'merge_{index}', 'goes_on'], T=dtype)
        self._add('Exit', f'exit_{index}', [f'switch_{index}'], T=dtype)
        self._add('Identity', f'step_{index}', [f'switch_{index}:1'], T=dtype)
        effects = _waits_for_effects(self._body, 'body')
        inputs = self._with_variable([output, *effects], 'step')
        self._add('NextIteration', f'next_{index}', inputs, T=dtype)

    def _add_function(self, function: Any, scope: str, values: str) -> None:
        """Adds the ops of the condition or of the body.

        Args:
          function: its graph.
          scope: what their names begin with.
          values: 'merge' or 'step', the ops that give the values of variables.
        """
        for definition in function.as_graph_def().node:
            if definition.name in self._arguments[scope]:
                continue
            node = self.graph_def.node.add()
            node.CopyFrom(definition)
            node.name = f'{scope}/{definition.name}'
            node.attr.pop('_class', None)
            inputs = [self._name(name, scope, values) for name in definition.input]
            node.input[:] = self._with_variable(inputs, values)

    def _name(self, name: str, scope: str, values: str) -> str:
        """What an input of a function's op, such as 'x:1' or '^x', is called in the loop."""
        control = '^' if name.startswith('^') else ''
        op, colon, position = name.removeprefix('^').partition(':')
        index = self._arguments[scope].get(op)
        if index is None:
            return f'{control}{scope}/{op}{colon}{position}'
        source = values if index in self.variables else 'enter'
        return f'{control}{source}_{index}'

    def _with_variable(self, inputs: Sequence[str], values: str) -> list[str]:
        """The inputs of an op that waits for a variable if it uses nothing but constants.

        So it's in the frame, it runs in each step on whatever device it's placed, and what the body
        makes is dead once the loop has ended. TensorFlow does so in the v1 loops that it makes.

        Args:
          inputs: of the op.
          values: 'merge' or 'step', the ops that give the values of variables.
        """
        if not all(map(self._is_constant, inputs)):
            return [*inputs]
        return [*inputs, f'^{values}_{self.variables[0]}']

    def _is_constant(self, name: str) -> bool:
        """Whether an input such as 'enter_1' or '^enter_1' is the same in all steps."""
        prefix, _, index = name.removeprefix('^').rpartition('_')
        return prefix == 'enter' and int(index) not in self.variables

    def _add(self, op: str, name: str, inputs: Sequence[str], **attrs: Any) -> Any:
        """Adds a node, and returns it."""
        node = self.graph_def.node.add()
        node.CopyFrom(node_def(op, **attrs))
        node.name = name
        node.input[:] = inputs
        return node

    def _dtype(self, index: int) -> tf.DType:
        return self._loop.inputs[index].dtype.base_dtype
