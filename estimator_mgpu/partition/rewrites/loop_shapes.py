"""The shapes in v1 loops that are imported: TensorFlow leaves them unknown.

It infers an op's shape from those of its inputs, but not so where a loop's variable begins, at
`Enter` and `Merge`, as it may have another shape in each step. While a loop is made, Python sets
these shapes; an import doesn't:

    start --> Enter --> Merge --> ops of a step --> NextIteration --+
                          ^                                         |
                          +-----------------------------------------+

Here a variable is assumed to have its first shape in each step. Where a step changes that, the
dimension, or the rank, stays unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Union

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.division import Division
from estimator_mgpu.tf_internals.graphs import begins_steps, is_way_back

Variable = Union[str, int]
"""A loop's variable, by the name of its `Merge` or by its position."""
Shapes = dict[Variable, tf.TensorShape]
"""Shapes of those variables of loops that don't keep the shape that they start with."""


def changed_shapes(
    infer: Callable[[Shapes], Iterable[tuple[Variable, tf.TensorShape, tf.TensorShape]]],
) -> Shapes:
    """Finds the shapes of the variables that don't keep the shape that they start with.

    Args:
      infer: given such shapes, gives for each variable the shape that it's then assumed to have in
        each step, and the shape that the start or a step gives it. A variable may come several
        times.
    """
    changed: Shapes = {}
    while True:  # Each round makes a dimension or a rank unknown that was known, or is the last.
        found: Shapes = {}
        for variable, assumed, shape in infer(changed):
            common = found.get(variable, assumed).most_specific_compatible_shape(shape)
            if _dims(common) != _dims(assumed):
                found[variable] = common
        if not found:
            return changed
        changed.update(found)


def infer_loop_shapes(division: Division) -> None:
    """Sets the shapes of what is in v1 loops and follows from them, as far as they can be known."""
    graph = division.graph
    merges = [op for op in graph.get_operations() if begins_steps(op)]
    if all(merge.outputs[0].shape.rank is not None for merge in merges):
        return

    copy = tf.Graph()

    def infer(changed: Shapes) -> Iterable[tuple[Variable, tf.TensorShape, tf.TensorShape]]:
        """Lets TensorFlow infer all shapes, in a copy in which loops have no way back."""
        nonlocal copy
        with tf.Graph().as_default() as copy:
            tf.import_graph_def(_without_ways_back(graph, merges, changed), name='')
        for merge in merges:
            assumed = copy.get_tensor_by_name(f'{merge.name}:0').shape
            for tensor in merge.inputs:
                source = tensor.op.inputs[0] if is_way_back(tensor) else tensor
                yield merge.name, assumed, copy.get_tensor_by_name(source.name).shape

    changed_shapes(infer)
    for op in graph.get_operations():
        inferred = copy.get_operation_by_name(op.name)
        for tensor, copied in zip(op.outputs, inferred.outputs):
            tensor.set_shape(copied.shape)


def _without_ways_back(
    graph: tf.Graph, merges: Sequence[tf.Operation], shapes: Shapes
) -> tf.GraphDef:
    """The graph's definition, in which each variable has only the value that it starts with."""
    definition = graph.as_graph_def(add_shapes=True)
    nodes = {node.name: node for node in definition.node}

    for merge in merges:
        [enter] = [tensor.op for tensor in merge.inputs if not is_way_back(tensor)]
        nodes[enter.name].attr['is_constant'].b = True  # It passes the shape of a constant on.
        start = enter.name
        node = nodes[merge.name]
        for changed in (nodes[enter.name], node):
            changed.attr.pop('_output_shapes', None)
        if merge.name in shapes:
            start = _add_of_shape(definition, start, merge, shapes[merge.name])
        node.ClearField('input')
        node.input.append(start)
        node.attr['N'].i = 1
    return definition


def _add_of_shape(
    definition: tf.GraphDef, start: str, merge: tf.Operation, shape: tf.TensorShape
) -> str:
    """Adds an op that passes on a value of which only a shape is known; returns its name."""
    node = definition.node.add(
        op='PlaceholderWithDefault', name=f'{merge.name}/of_shape', input=[start]
    )
    node.attr['dtype'].type = merge.outputs[0].dtype.as_datatype_enum
    node.attr['shape'].shape.CopyFrom(shape.as_proto())
    return node.name


def _dims(shape: tf.TensorShape) -> Any:
    """The dimensions as a list; None if the rank is unknown."""
    return None if shape.rank is None else shape.as_list()
