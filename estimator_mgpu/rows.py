"""Which tensors of a tower still have rows, to go by the graph and by sizes."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu import private

# Ops through which a sum over rows stays one.
LINEAR = frozenset(
    ['Identity', 'Add', 'AddV2', 'AddN', 'Sub', 'Neg', 'Cast', 'Reshape', 'Squeeze', 'ExpandDims']
)
# Ops whose output has rows just where an input has.
_ELEMENTWISE = LINEAR | frozenset(
    ['Mul', 'RealDiv', 'Div', 'DivNoNan', 'MulNoNan', 'Pack', 'ConcatV2', 'Abs', 'Square', 'Sqrt']
    + ['SquaredDifference', 'Exp', 'Log', 'Log1p', 'Pow', 'Maximum', 'Minimum', 'StopGradient']
    + ['Select', 'SelectV2', 'CheckNumerics', 'Reciprocal', 'Rsqrt', 'Relu', 'Softplus']
)


class Rows:
    """What is known of the rows of a tower's tensors.

    Args:
      dependents: the names of the ops that depend on the shard.
      static: the rows of the shard where that's known.
    """

    def __init__(self, dependents: set[str], static: int | None):
        self.dependents = dependents
        self.static = static
        self._with_rows: dict[str, bool] = {}

    def has(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor still has an entry, or several, for each row."""
        if tensor.name not in self._with_rows:
            self._with_rows[tensor.name] = self._find_rows(tensor)
        return self._with_rows[tensor.name]

    def _find_rows(self, tensor: tf.Tensor) -> bool:
        if tensor.op.name not in self.dependents or tensor.shape.num_elements() == 1:
            return False
        if tensor.shape.rank is not None and self.axis(tensor) is None:
            return False
        op = tensor.op
        if op.type in _ELEMENTWISE:
            return any(map(self.has, self.dependent_inputs(op)))
        if op.type in ('Sum', 'Mean') and op.inputs[0].shape.rank is not None:
            return self.axis(op.inputs[0]) not in self._axes(op)
        return op.type != 'Shape'

    def axis(self, tensor: tf.Tensor) -> int | None:
        """Which dimension may hold the rows, to go by its size; the first if several may."""
        for axis, size in enumerate(tensor.shape.as_list()):
            if size is None or self._may_hold_rows(size):
                return axis
        return None

    def _may_hold_rows(self, size: int) -> bool:
        rows = self.static
        return rows is not None and (size == rows or (rows > 1 and size % rows == 0))

    def _axes(self, op: tf.Operation) -> set[int]:
        """Which dimensions a `Sum` or `Mean` reduces."""
        rank = op.inputs[0].shape.rank
        value = private.constant_value(op.inputs[1])
        if rank is None or value is None:
            return {0}
        return {int(axis) % rank for axis in value.flat} if rank else set()

    def reductions(self, tensor: tf.Tensor) -> list[tf.Operation]:
        """Lists the reductions over rows that a tensor without rows comes from."""
        found, waiting, seen = [], [tensor.op], set()
        while waiting:
            op = waiting.pop()
            if op.name in seen:
                continue
            seen.add(op.name)
            if op.type in ('Sum', 'Mean') and self.has(op.inputs[0]):
                found.append(op)
            elif op.type in _ELEMENTWISE:
                waiting += [t.op for t in self.dependent_inputs(op)]
        return found

    def dependent_inputs(self, op: tf.Operation) -> list[tf.Tensor]:
        return [t for t in op.inputs if t.op.name in self.dependents]
