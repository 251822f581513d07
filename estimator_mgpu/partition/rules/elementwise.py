"""Ops that go entry by entry, with or without broadcasting."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from estimator_mgpu.partition.rules.signature import WHOLE, Rule, Signature, labels, rank
from estimator_mgpu.partition.sizes import ONE, Sizes


def broadcasting(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """Dimensions are matched from the last; one of size 1 is repeated, so it's never divided."""
    inputs = []
    for tensor in op.inputs:
        n = rank(tensor, sizes)
        dims = sizes.dims(tensor) or []
        inputs.append(tuple(None if dims[i] == ONE else n - i for i in range(n)))
    n = max(map(len, inputs))
    return Signature(inputs, [tuple(range(n, 0, -1))] * len(op.outputs))


def alike(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """All inputs and outputs have one shape; an input that is a scalar is used for all entries."""
    n = max(rank(t, sizes) for t in op.inputs)
    inputs = [tuple(range(rank(t, sizes))) if rank(t, sizes) else WHOLE for t in op.inputs]
    if any(len(i) not in (0, n) for i in inputs):
        return None
    return Signature(inputs, [tuple(range(n))] * len(op.outputs))


def first(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """The first input entry by entry; the others are whole."""
    own = labels(op.inputs[0], sizes)
    return Signature([own] + [WHOLE] * (len(op.inputs) - 1), [own] * len(op.outputs))


def select(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """The older `Select`: its condition is a scalar, as large as the rest, or one for each row."""
    condition, one, two = op.inputs
    return Signature(
        [labels(condition, sizes), labels(one, sizes), labels(two, sizes)],
        [labels(one, sizes)] if rank(one, sizes) else [()],
    )


_BROADCASTING = """
    Add AddV2 ApproximateEqual Atan2 Betainc BitwiseAnd BitwiseOr BitwiseXor Complex Div DivNoNan
    Equal FloorDiv FloorMod Greater GreaterEqual Igamma Igammac IgammaGradA LeftShift Less LessEqual
    LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan NextAfter NotEqual Polygamma Pow RealDiv
    RightShift SelectV2 SquaredDifference Sub TruncateDiv TruncateMod Xdivy Xlog1py Xlogy
    Zeta
"""
_ALIKE = """
    Abs Acos Acosh AddN AsString Asin Asinh Atan Atanh BesselI0e BesselI1e Cast Ceil
    CheckNumerics CheckNumericsV2 ClipByValue Conj Cos Cosh DeepCopy Digamma Elu
    EluGrad Erf Erfc Erfinv Exp Expm1 Floor Identity Imag Invert InvGrad Inv IsFinite IsInf IsNan
    LeakyRelu LeakyReluGrad Lgamma Log Log1p LogicalNot Ndtri Neg OnesLike PreventGradient Real
    Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad Selu
    SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Snapshot Softplus SoftplusGrad Softsign SoftsignGrad
    Sqrt SqrtGrad Square StopGradient Tan Tanh TanhGrad ZerosLike
    Bucketize EncodeBase64 DecodeBase64 RegexFullMatch RegexReplace StaticRegexFullMatch
    StaticRegexReplace StringJoin StringLength StringLower StringStrip StringToHashBucket
    StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper
"""
RULES: dict[str, Rule] = {
    **dict.fromkeys(_BROADCASTING.split(), broadcasting),
    **dict.fromkeys(_ALIKE.split(), alike),
    'FakeQuantWithMinMaxArgs': first,
    'FakeQuantWithMinMaxVars': first,
    'Select': select,
}
