"""Which tensors of a tower have rows, and along which dimension, by the graph and by sizes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tensorflow.compat.v1 as tf

from estimator_mgpu import private, sharing
from estimator_mgpu.places import SEGMENT_SUMS, Places, is_literal
from estimator_mgpu.reshapes import Place, UnknownPlace
from estimator_mgpu.walks import walk

SUMS = frozenset(['Add', 'AddV2', 'AddN', 'Sub'])
# Ops through which a sum over rows stays one.
LINEAR = SUMS | frozenset(
    ['Identity', 'Neg', 'Cast', 'Reshape', 'Squeeze', 'ExpandDims', 'Transpose']
)
# Ops whose output has rows just where an input has.
ELEMENTWISE = LINEAR | frozenset(
    ['Mul', 'RealDiv', 'Div', 'DivNoNan', 'MulNoNan', 'Pack', 'ConcatV2', 'Abs', 'Square', 'Sqrt']
    + ['SquaredDifference', 'Exp', 'Log', 'Log1p', 'Pow', 'Maximum', 'Minimum', 'StopGradient']
    + ['Select', 'SelectV2', 'CheckNumerics', 'Reciprocal', 'Rsqrt', 'Relu', 'Softplus', 'Softmax']
    + ['Sigmoid', 'Tanh', 'Elu', 'Selu', 'Relu6', 'LeakyRelu', 'Erf', 'Expm1', 'Xlogy', 'Sign']
)
_REDUCTIONS = frozenset(['Sum', 'Mean', 'Max', 'Min', 'Prod', 'Any', 'All'])


class Rows(Places):
    """What is known of the rows of a tower's tensors.

    Args:
      given: where those have rows that it's known of.
      dependents: the names of the ops that depend on the shard.
      static: the rows of the shard where that's known.
      bounds: the names of the tensors that say where rows begin and end, in ragged ones.
      indices: the names of those that say which rows have something, in sparse ones.
      shapes: the names of the shapes of sparse ones.
    """

    def __init__(
        self,
        given: Sequence[tuple[tf.Tensor, Place]],
        dependents: set[str],
        static: int | None,
        bounds: Collection[str] = (),
        indices: Collection[str] = (),
        shapes: Collection[str] = (),
    ):
        super().__init__(given, dependents, static, bounds, indices, shapes)
        self.graph = given[0][0].graph if given else tf.get_default_graph()
        reshapes = [op for op in self.graph.get_operations() if op.type == 'Reshape']
        self._reshapes = [
            op for op in reshapes if self.has(op.inputs[0]) and self.has(op.outputs[0])
        ]

    def sums_into_rows(self, op: tf.Operation) -> bool:
        """Whether an op sums up segments that are taken for rows, by a constant that is as many."""
        if op.type not in SEGMENT_SUMS or self.static is None:
            return False
        return self.has(op.outputs[0]) and is_literal(op.inputs[2])

    def is_plain(self, tensor: tf.Tensor) -> bool:
        """Whether it follows from what ops do, rather than from sizes, where the rows are."""
        return tensor.name in self._places and self._places[tensor.name].plain

    def adds_up(self, groups: tf.Tensor) -> bool:
        """Whether entries of groups are sums of their rows, so that all of them are a sum, too."""

        def onward(op: tf.Operation) -> list[tf.Operation]:
            given = [t.op for t in op.inputs if self.has(t)]
            linear = op.type in LINEAR - SUMS or op.type in SUMS and len(given) == len(op.inputs)
            if op.type == 'Cast':
                linear = op.outputs[0].dtype.is_floating or op.inputs[0].dtype.is_integer
            of_entry = op.type == 'Sum' and self.has(op.outputs[0])
            scaled = op.type in ('Mul', 'MatMul') and len(given) == 1
            return given if linear or of_entry or scaled else []

        ends = (op for op in walk([groups.op], onward) if not onward(op))
        return all(op.type.endswith('SegmentSum') for op in ends)

    def is_last_axis(self, tensor: tf.Tensor) -> bool:
        """Whether the rows of a tensor are along its last dimension."""
        return tensor.shape.rank is not None and self.axis(tensor) == tensor.shape.rank - 1

    def may_have(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor has a dimension that, to go by its size, may hold rows."""
        return tensor.shape.rank is None or any(map(self._may_hold, tensor.shape.as_list()))

    def reductions(self, tensor: tf.Tensor) -> list[tf.Operation]:
        """Lists the reductions over rows that a tensor without rows comes from."""

        def reduces(op: tf.Operation) -> bool:
            return op.type == 'Mean' and self.has(op.inputs[0]) or self.sums(op)

        def onward(op: tf.Operation) -> list[tf.Operation]:
            # tf.losses sum up a sum.
            passing = not reduces(op) and (op.type in ELEMENTWISE or op.type == 'Sum')
            return [t.op for t in self.dependent_inputs(op)] if passing else []

        return [op for op in walk([tensor.op], onward) if reduces(op)]

    def assumed(self, tensor: tf.Tensor) -> list[tf.Operation]:
        """Lists Python functions whose results are taken to have rows, of which no shape is known.

        Args:
          tensor: what comes from them directly, or by a reduction.
        """

        def onward(op: tf.Operation) -> list[tf.Operation]:
            passing = op.type in ELEMENTWISE | _REDUCTIONS
            return [t.op for t in self.dependent_inputs(op)] if passing else []

        found = [op for op in walk([tensor.op], onward) if op.type in sharing.PYTHON_FUNCTIONS]
        return [op for op in found if any(t.shape.rank is None for t in op.outputs if self.has(t))]

    def reshaped_to(self, size: int) -> list[tf.Operation]:
        """Lists the ops that give rows a shape in which a constant says how many there are.

        Args:
          size: how many there would be, that aren't as many as the shard has.
        """
        return [op for op in self._reshapes if self._is_cut(op, size)]

    def _is_cut(self, op: tf.Operation, size: int) -> bool:
        # What was computed from shapes, as gradients do, may be the rows' and another dimension's.
        source = op.inputs[1].op
        literal = source.type == 'Const' and not source.name.rpartition('/')[2].startswith('Shape')
        told, axis = private.constant_value(op.inputs[1]), self.axis(op.outputs[0])
        return literal and told is not None and axis is not None and told.flat[axis] == size

    def sums(self, op: tf.Operation) -> bool:
        """Whether an op's output is a sum over rows."""
        if any(self.has(t) for t in op.outputs):
            return False
        if op.type in ('Sum', 'Size', 'L2Loss'):
            return self.has(op.inputs[0])
        given = [t for t in op.inputs if self.has(t)]
        return bool(given) and all(self._is_summed(op, t) for t in given)

    def across(self) -> Places:
        """Returns where tensors have rows along a second dimension, as pairs of rows do."""
        given = []
        for op in self.graph.get_operations():
            own = [i for i, t in enumerate(op.inputs) if self.has(t)]
            if len(own) > 1 and self.depends(op):
                found = [(output, i) for output in op.outputs if self.has(output) for i in own]
                given += [(output, self._second(op, output, i)) for output, i in found]
        seconds = [(output, place) for output, place in given if place is not None]
        return Places(seconds, self.dependents, self.static)

    def _second(self, op: tf.Operation, output: tf.Tensor, index: int) -> Place | None:
        """Returns where an output has the rows of one input, if those of another are elsewhere."""
        try:
            place = self._place_of(op, output, index)
        except UnknownPlace:
            return None
        return None if place is None or place.axis == self.axis(output) else place
