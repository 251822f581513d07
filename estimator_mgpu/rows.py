"""Which tensors of a tower have rows, and along which dimension, by the graph and by sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable

import tensorflow.compat.v1 as tf

from estimator_mgpu import private, sharing
from estimator_mgpu.walks import walk

# Ops through which a sum over rows stays one.
LINEAR = frozenset(
    ['Identity', 'Add', 'AddV2', 'AddN', 'Sub', 'Neg', 'Cast', 'Reshape', 'Squeeze', 'ExpandDims']
    + ['Transpose']
)
# Ops whose output has rows just where an input has.
ELEMENTWISE = LINEAR | frozenset(
    ['Mul', 'RealDiv', 'Div', 'DivNoNan', 'MulNoNan', 'Pack', 'ConcatV2', 'Abs', 'Square', 'Sqrt']
    + ['SquaredDifference', 'Exp', 'Log', 'Log1p', 'Pow', 'Maximum', 'Minimum', 'StopGradient']
    + ['Select', 'SelectV2', 'CheckNumerics', 'Reciprocal', 'Rsqrt', 'Relu', 'Softplus', 'Softmax']
)
_REDUCTIONS = frozenset(['Sum', 'Mean', 'Max', 'Min', 'Prod', 'Any', 'All'])
# Sums of what goes to one place; the third input says how many places there are.
_SEGMENT_SUMS = frozenset(['UnsortedSegmentSum', 'ScatterNd'])
_COUNTS = frozenset(['Bincount', 'DenseBincount'])
# Ops that make a tensor of a shape that is their first, or their second, input.
_MAKES = re.compile(
    r'(Fill|Random(?:StandardNormal|Uniform|UniformInt)|TruncatedNormal|Stateless(?:Random|Trunc).*)'
    r'|(BroadcastTo|StatefulStandardNormalV2|StatefulUniform)'
)
# Their outputs but the first are statistics of the batch.
BATCH_NORMS = frozenset(['FusedBatchNorm', 'FusedBatchNormV2', 'FusedBatchNormV3'])
# v1 loops and branches, and what a TensorArray's `flow` goes through in them.
_ARRAYS = frozenset(['TensorArrayWriteV3', 'TensorArrayScatterV3', 'TensorArraySplitV3'])
_FLOW = _ARRAYS | frozenset(['Enter', 'Exit', 'Merge', 'Switch', 'NextIteration'])


class Rows:
    """What is known of the rows of a tower's tensors.

    Args:
      sources: the shard's tensors, with rows along dimension 0 where they have any.
      dependents: the names of the ops that depend on the shard.
      static: the rows of the shard where that's known.
    """

    def __init__(self, sources: Iterable[tf.Tensor], dependents: set[str], static: int | None):
        self.dependents = dependents
        self.static = static
        self._axes: dict[str, int] = {}  # by the name of a tensor with rows
        self._certain: set[str] = set()  # of these, where ops alone say so
        waiting = []
        graph = tf.get_default_graph()
        for tensor in sources:
            graph = tensor.graph
            if tensor.shape.rank != 0:
                self._axes[tensor.name] = 0
                self._certain.add(tensor.name)
                waiting.append(tensor)
        while waiting:
            while waiting:
                tensor = waiting.pop()
                for op in tensor.consumers():
                    if op.name in dependents or op.type in _FLOW:
                        waiting += self._follow(op, tensor)
            waiting = self._arrays_of_rows(graph) + self._made_for_rows(graph)

    def has(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor has an entry, or several, for each row."""
        return tensor.name in self._axes

    def axis(self, tensor: tf.Tensor) -> int | None:
        """Which dimension holds the rows, if any does."""
        return self._axes.get(tensor.name)

    def is_certain(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor's rows are known to be along their axis by more than sizes."""
        return tensor.name in self._certain

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

    def sums(self, op: tf.Operation) -> bool:
        """Whether an op's output is a sum over rows."""
        if any(self.has(t) for t in op.outputs):
            return False
        if op.type in ('Sum', 'Size', 'L2Loss'):
            return self.has(op.inputs[0])
        given = [t for t in op.inputs if self.has(t)]
        return bool(given) and all(self._is_summed(op, t) for t in given)

    def dependent_inputs(self, op: tf.Operation) -> list[tf.Tensor]:
        """Lists the inputs of an op that depend on the shard."""
        return [t for t in op.inputs if t.op.name in self.dependents]

    def product_axis(self, op: tf.Operation, place: int) -> int | None:
        """Which dimension of a product has an input's rows; None where they're summed over."""
        axis, rank = self._axes[op.inputs[place].name], op.inputs[place].shape.rank
        first = place == 0
        if op.type == 'Einsum':
            terms, _, output = op.get_attr('equation').decode().partition('->')
            label = terms.split(',')[place][axis]
            return output.index(label) if label in output else None
        if axis < rank - 2:
            return axis + op.outputs[0].shape.rank - rank
        names = ('transpose_a', 'transpose_b') if op.type == 'MatMul' else ('adj_x', 'adj_y')
        summed = rank - 1 if first != op.get_attr(names[not first]) else rank - 2
        return None if axis == summed else op.outputs[0].shape.rank - (2 if first else 1)

    def _follow(self, op: tf.Operation, given: tf.Tensor) -> list[tf.Tensor]:
        """Returns the outputs of an op that have rows because one of its inputs has."""
        if op.type in ('Shape', 'ShapeN', 'Size', 'Rank'):
            return []
        found = []
        for output in op.outputs:
            certain = given.name in self._certain and _keeps_axes(op, output, given)
            if output.name in self._axes and (not certain or output.name in self._certain):
                continue
            axis = self._axis_of(op, output, given)
            if axis is not None and self._axes.setdefault(output.name, axis) == axis:
                if certain:
                    self._certain.add(output.name)
                found.append(output)
        return found

    def _arrays_of_rows(self, graph: tf.Graph) -> list[tf.Tensor]:
        """Finds v1 TensorArrays that are made for one entry a row, whatever is written to them."""
        arrays = [op for op in graph.get_operations() if op.type == 'TensorArrayV3']
        flows = [op.outputs[1] for op in arrays if self._is_row_count(op.inputs[0])]
        new = [flow for flow in flows if flow.name not in self._axes]
        self._axes.update((flow.name, 0) for flow in new)
        return new

    def _made_for_rows(self, graph: tf.Graph) -> list[tf.Tensor]:
        """Finds tensors made with an entry a row, such as noise, that depend on it by size only."""
        found = []
        for op in graph.get_operations():
            made = _MAKES.match(op.type)
            if made and op.name in self.dependents and op.outputs[0].name not in self._axes:
                axis = self._axis_of_shape(op.inputs[0 if made[1] else 1].op)
                if axis is not None:
                    self._axes[op.outputs[0].name] = axis
                    found.append(op.outputs[0])
        return found

    def _axis_of_shape(self, shape: tf.Operation) -> int | None:
        """Which entry of a shape is the number of rows."""
        if shape.type == 'Shape':
            return self.axis(shape.inputs[0])
        if shape.type != 'Pack':
            return None
        return next((i for i, size in enumerate(shape.inputs) if self._is_row_count(size)), None)

    def _is_row_count(self, size: tf.Tensor) -> bool:
        op = size.op
        while op.type in ('Identity', 'Cast'):
            op = op.inputs[0].op
        if op.type != 'StridedSlice' or op.inputs[0].op.type != 'Shape':
            value = private.constant_value(size)
            return self.static is not None and value is not None and int(value) == self.static
        index = private.constant_value(op.inputs[1])
        axis = self.axis(op.inputs[0].op.inputs[0])
        return axis is not None and index is not None and index.tolist() == [axis]

    def _axis_of(self, op: tf.Operation, output: tf.Tensor, given: tf.Tensor) -> int | None:
        if output.dtype in (tf.variant, tf.resource):
            return 0  # Lists of rows, say; what's in them isn't known.
        if op.type in _FLOW and given.shape.rank == 0:
            return 0  # A scalar that stands for a v1 TensorArray of rows.
        if output.shape.num_elements() == 1:
            return 0 if op.type in _ARRAYS else None
        if output.shape.rank is None:
            return 0
        axis = self._axes[given.name]
        if op.type in BATCH_NORMS and output is not op.outputs[0]:
            return None
        if self._is_summed(op, given):
            return None
        if is_product(op, given):
            return self.product_axis(op, _place(op, given))
        if op.type in _REDUCTIONS and given.shape.rank:
            reduced = dimensions(op.inputs[1], given)
            if axis in reduced:
                return None
            if not op.get_attr('keep_dims'):
                axis -= sum(other < axis for other in reduced)
        elif op.type == 'Transpose':
            order = private.constant_value(op.inputs[1])
            if order is not None and axis in list(order):
                axis = list(order).index(axis)
        sizes = output.shape.as_list()
        if axis < len(sizes) and self._may_hold(sizes[axis]):
            return axis
        return next((i for i, size in enumerate(sizes) if self._may_hold(size)), None)

    def _is_summed(self, op: tf.Operation, given: tf.Tensor) -> bool:
        """Whether a product of matrices, or a sum of segments, sums over an input's rows."""
        if is_product(op, given):
            return self.product_axis(op, _place(op, given)) is None
        if op.type in _COUNTS and self._axes[given.name] == 0 and op.inputs[0].shape.rank == 1:
            return True
        if op.type in _SEGMENT_SUMS and self._axes[given.name] == 0:
            sizes = op.outputs[0].shape.as_list() if op.outputs[0].shape.rank else [None]
            return op.inputs[2].op.name not in self.dependents and not self._may_hold(sizes[0])
        return False

    def _may_hold(self, size: int | None) -> bool:
        if size is None:
            return True
        return self.static is not None and size % self.static == 0


def _keeps_axes(op: tf.Operation, output: tf.Tensor, given: tf.Tensor) -> bool:
    """Whether it doesn't take sizes to tell where an input's rows are in an output."""
    if is_product(op, given) or op.type in _REDUCTIONS or op.type == 'Transpose':
        return True
    known = output.shape.is_fully_defined() and given.shape.is_fully_defined()
    return known and output.shape.as_list() == given.shape.as_list()


def dimensions(axes: tf.Tensor, given: tf.Tensor) -> set[int]:
    """Which dimensions of what an op is given its input `axes` says."""
    value = private.constant_value(axes)
    if value is None:
        return {0}
    return {int(axis) % given.shape.rank for axis in value.flat}


def _place(op: tf.Operation, given: tf.Tensor) -> int:
    return [t.name for t in op.inputs].index(given.name)


def is_product(op: tf.Operation, given: tf.Tensor) -> bool:
    """Whether an op is a product of matrices whose dimensions are known one by one."""
    if given.shape.rank is None or op.outputs[0].shape.rank is None:
        return False
    if op.type == 'Einsum':
        return b'.' not in op.get_attr('equation')
    return op.type in ('MatMul', 'BatchMatMulV2', 'BatchMatMulV3')
