"""Each entry by itself: computed, chosen, or made, with or without broadcasting."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from .signature import Rule, Signature, rank
from .sizes import Sizes


def select(op: tf.Operation, sizes: Sizes) -> str:
    """The older `Select`: its condition is a scalar, as large as the rest, or one for each row."""
    return 'n nS nS -> nS' if rank(op.inputs[0], sizes) == 1 else 'S S S -> S'


def unseeded(text: str) -> Rule:
    """Random numbers without a seed: others are drawn once, all in the order of one device."""
    return lambda op, sizes: None if op.get_attr('seed') or op.get_attr('seed2') else text


def each(op: tf.Operation, sizes: Sizes) -> Signature | None:
    """`IdentityN`, of which custom gradients are made: whatever has rows keeps them."""
    if any(t.dtype.base_dtype in (tf.resource, tf.variant) for t in op.inputs):
        return None
    shapes = [sizes.dims(t) for t in op.inputs]
    rows = [[size.rows for size in shape or []] for shape in shapes]
    own = [tuple(r if r not in of[:i] else None for i, r in enumerate(of)) for of in rows]
    return Signature(own, own, dims=shapes)


_ENTRIES = """
    Abs Acos Acosh Add AddN AddV2 Angle ApproximateEqual AsString Asin Asinh Atan Atan2 Atanh
    BesselI0e BesselI1e Betainc BitwiseAnd BitwiseOr BitwiseXor Bucketize Cast Ceil CheckNumerics
    CheckNumericsV2 ClipByValue Complex ComplexAbs Conj Cos Cosh DecodeBase64 DeepCopy Digamma Div
    DivNoNan Elu EluGrad EncodeBase64 Equal Erf Erfc Erfinv Exp Expm1 FakeQuantWithMinMaxArgs
    FakeQuantWithMinMaxArgsGradient Floor FloorDiv FloorMod Greater GreaterEqual Identity Igamma
    IgammaGradA Igammac Imag Inv InvGrad Invert IsFinite IsInf IsNan LeakyRelu LeakyReluGrad
    LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod
    Mul MulNoNan Ndtri Neg NextAfter NotEqual OnesLike Polygamma PopulationCount Pow
    PreventGradient Real RealDiv Reciprocal ReciprocalGrad RegexFullMatch RegexReplace Relu Relu6
    Relu6Grad ReluGrad RightShift Rint Round Rsqrt RsqrtGrad SelectV2 Selu SeluGrad Sigmoid
    SigmoidGrad Sign Sin Sinh Snapshot Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad
    Square SquaredDifference StaticRegexFullMatch StaticRegexReplace StopGradient StringJoin
    StringLength StringLower StringStrip StringToHashBucket StringToHashBucketFast
    StringToHashBucketStrong StringToNumber StringUpper Sub Substr Tan Tanh TanhGrad TruncateDiv
    TruncateMod Xdivy Xlog1py Xlogy ZerosLike Zeta
"""
RULES: dict[str, Rule] = {
    _ENTRIES: 'S+ -> S',
    'Select': select,
    'IdentityN': each,
    'FakeQuantWithMinMaxVars': 'S * * -> S',
    'FakeQuantWithMinMaxVarsGradient': 'S S * * -> S * * (sum)',
    'Fill': '#S * -> S',
    'BroadcastTo': 'S #S -> S',
    'RandomStandardNormal RandomUniform TruncatedNormal': unseeded('#S -> S'),
}
