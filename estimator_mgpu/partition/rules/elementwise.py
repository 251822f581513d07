"""Ops that compute each entry of the output from the entries at its place, with broadcasting.

They can be sharded along every dimension.
"""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules.notation import (
    FAMILIES,
    NotSharded,
    Rule,
    Signature,
    rank,
    require,
    table,
)
from estimator_mgpu.partition.size_inference import Sizes
from estimator_mgpu.partition.sizes import RowSpace, Size
from estimator_mgpu.tf_internals import op_types

# Arithmetic, functions, activations, comparisons and bits, complex numbers, copies and types.
_EACH_ENTRY = """
    Add AddN AddV2 Ceil ClipByValue Div DivNoNan Floor FloorDiv FloorMod Maximum Minimum Mod Mul
    MulNoNan Neg NextAfter RealDiv Reciprocal ReciprocalGrad Rint Round Sign SquaredDifference Sub
    TruncateDiv TruncateMod Abs Inv InvGrad

    Acos Acosh Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e Betainc Cos Cosh Digamma Erf Erfc
    Erfinv Exp Expm1 Igamma IgammaGradA Igammac Lgamma Log Log1p Ndtri Polygamma Pow Rsqrt
    RsqrtGrad Sin Sinh Sqrt SqrtGrad Square Tan Xdivy Xlog1py Xlogy Zeta

    Elu EluGrad LeakyRelu LeakyReluGrad Relu Relu6 Relu6Grad ReluGrad Selu SeluGrad Sigmoid
    SigmoidGrad Softplus SoftplusGrad Softsign SoftsignGrad Tanh TanhGrad

    ApproximateEqual BitwiseAnd BitwiseOr BitwiseXor Equal Greater GreaterEqual Invert IsFinite
    IsInf IsNan LeftShift Less LessEqual LogicalAnd LogicalNot LogicalOr NotEqual PopulationCount
    RightShift SelectV2

    Angle Complex ComplexAbs Conj Imag Real

    Bucketize Cast CheckNumerics CheckNumericsV2 DeepCopy FakeQuantWithMinMaxArgs
    FakeQuantWithMinMaxArgsGradient Identity OnesLike PreventGradient Snapshot StopGradient
    ZerosLike
"""


def _select(op: tf.Operation, sizes: Sizes) -> str:
    """The older `Select`: a condition of one dimension has an entry for each row of the others."""
    if rank(op.inputs[0], sizes) == 1:
        return 'n nS nS -> nS'
    return 'S S S -> S'  # It's a scalar, or has the shape of the others.


def _ensure_shape(op: tf.Operation, sizes: Sizes) -> Signature:
    """`EnsureShape`: along dimensions for which its shape says nothing that isn't known.

    Towers check the other dimensions. For [batch, unknown] and the shape (None, 3), it's sharded by
    examples, and each tower checks that its shard has 3 columns. For the shape (8, 3), it runs
    once, as only the full value can tell whether there are 8 examples.
    """
    dims = require(sizes.dims(op.inputs[0]))
    shape = tf.TensorShape(op.get_attr('shape'))
    if shape.rank != len(dims):
        raise NotSharded

    labels: list[int | None] = []
    checked_by_towers: list[int | None] = []
    output_dims: list[Size] = []
    for axis, (length, size) in enumerate(zip(shape.as_list(), dims)):
        says_nothing = length is None or length == size.static
        labels.append(axis if says_nothing else None)
        checked_by_towers.append(None if says_nothing else length)
        output_dims.append(size if length is None or size.rows else Size(length))
    return Signature(
        [tuple(labels)],
        [tuple(labels)],
        dims=[output_dims],
        attrs={'shape': tf.TensorShape(checked_by_towers)},
    )


def _identity_n(op: tf.Operation, sizes: Sizes) -> Signature:
    """`IdentityN`, the op of custom gradients: each input by the dimension that has its rows.

    The inputs have nothing to do with each other, so the label is the row space: inputs that have
    the examples are sharded together, wherever they have them.
    """
    if any(tensor.dtype.base_dtype in (tf.resource, tf.variant) for tensor in op.inputs):
        raise NotSharded
    shapes = [sizes.dims(tensor) for tensor in op.inputs]
    labels = [_row_spaces(shape or []) for shape in shapes]
    return Signature(labels, labels, dims=shapes)


def _row_spaces(dims: list[Size]) -> tuple[RowSpace | None, ...]:
    """Of each dimension the row space; None also if an earlier one has it: [batch, batch]."""
    labels: list[RowSpace | None] = []
    for size in dims:
        labels.append(None if size.rows in labels else size.rows)
    return tuple(labels)


_RULES: dict[str, Rule] = {
    _EACH_ENTRY: FAMILIES['elementwise'],
    'FakeQuantWithMinMaxVars': 'S * * -> S',  # The minimum and the maximum are scalars.
    'FakeQuantWithMinMaxVarsGradient': 'S S * * -> S * * (sum)',
    'IdentityN': _identity_n,
    'Select': _select,
    op_types.ENSURE_SHAPE: _ensure_shape,
}
RULES = table(_RULES)
